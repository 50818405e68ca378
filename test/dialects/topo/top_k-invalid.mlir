// RUN: topo-opt %s --split-input-file --verify-diagnostics

func.func @dynamic(%x: tensor<?x5xf32>) -> (tensor<3x2xf32>, tensor<3x2xi64>) {
  // expected-error @+1 {{works on a tensor of static shape and rank 1 or more}}
  %v, %i = "topo.top_k"(%x) {k = 2 : i64, largest = true} : (tensor<?x5xf32>) -> (tensor<3x2xf32>, tensor<3x2xi64>)
  return %v, %i : tensor<3x2xf32>, tensor<3x2xi64>
}

// -----

func.func @flag(%x: tensor<3x5xf32>) -> (tensor<3x2xf32>, tensor<3x2xi64>) {
  // expected-error @+1 {{takes a boolean 'largest'}}
  %v, %i = "topo.top_k"(%x) {k = 2 : i64, largest = 1 : i64} : (tensor<3x5xf32>) -> (tensor<3x2xf32>, tensor<3x2xi64>)
  return %v, %i : tensor<3x2xf32>, tensor<3x2xi64>
}

// -----

func.func @too_many(%x: tensor<3x5xf32>) -> (tensor<3x6xf32>, tensor<3x6xi64>) {
  // expected-error @+1 {{has 'k' in [1, 5], got 6}}
  %v, %i = "topo.top_k"(%x) {k = 6 : i64, largest = true} : (tensor<3x5xf32>) -> (tensor<3x6xf32>, tensor<3x6xi64>)
  return %v, %i : tensor<3x6xf32>, tensor<3x6xi64>
}

// -----

func.func @values(%x: tensor<3x5xf32>) -> (tensor<3x2xf16>, tensor<3x2xi64>) {
  // expected-error @+1 {{has values of type tensor<3x2xf32>}}
  %v, %i = "topo.top_k"(%x) {k = 2 : i64, largest = true} : (tensor<3x5xf32>) -> (tensor<3x2xf16>, tensor<3x2xi64>)
  return %v, %i : tensor<3x2xf16>, tensor<3x2xi64>
}

// -----

func.func @indices(%x: tensor<3x5xf32>) -> (tensor<3x2xf32>, tensor<3x2xi32>) {
  // expected-error @+1 {{has indices of type tensor<3x2xi64>}}
  %v, %i = "topo.top_k"(%x) {k = 2 : i64, largest = true} : (tensor<3x5xf32>) -> (tensor<3x2xf32>, tensor<3x2xi32>)
  return %v, %i : tensor<3x2xf32>, tensor<3x2xi32>
}
