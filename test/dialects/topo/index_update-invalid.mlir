// RUN: topo-opt %s --split-input-file --verify-diagnostics

func.func @dynamic(%d: tensor<2x8x4xf32>, %s: tensor<2x?x4xf32>, %i: tensor<3xi64>) -> tensor<2x8x4xf32> {
  // expected-error @+1 {{works on tensors of static shape}}
  %0 = "topo.index_update"(%d, %s, %i) {dim = 1 : i64} : (tensor<2x8x4xf32>, tensor<2x?x4xf32>, tensor<3xi64>) -> tensor<2x8x4xf32>
  return %0 : tensor<2x8x4xf32>
}

// -----

func.func @result(%d: tensor<2x8x4xf32>, %s: tensor<2x3x4xf32>, %i: tensor<3xi64>) -> tensor<2x8x5xf32> {
  // expected-error @+1 {{has the type of 'dest' as its result}}
  %0 = "topo.index_update"(%d, %s, %i) {dim = 1 : i64} : (tensor<2x8x4xf32>, tensor<2x3x4xf32>, tensor<3xi64>) -> tensor<2x8x5xf32>
  return %0 : tensor<2x8x5xf32>
}

// -----

func.func @index_rank(%d: tensor<2x8x4xf32>, %s: tensor<2x3x4xf32>, %i: tensor<1x3xi64>) -> tensor<2x8x4xf32> {
  // expected-error @+1 {{takes a 1-D integer 'index'}}
  %0 = "topo.index_update"(%d, %s, %i) {dim = 1 : i64} : (tensor<2x8x4xf32>, tensor<2x3x4xf32>, tensor<1x3xi64>) -> tensor<2x8x4xf32>
  return %0 : tensor<2x8x4xf32>
}

// -----

func.func @index_type(%d: tensor<2x8x4xf32>, %s: tensor<2x3x4xf32>, %i: tensor<3xf32>) -> tensor<2x8x4xf32> {
  // expected-error @+1 {{takes a 1-D integer 'index'}}
  %0 = "topo.index_update"(%d, %s, %i) {dim = 1 : i64} : (tensor<2x8x4xf32>, tensor<2x3x4xf32>, tensor<3xf32>) -> tensor<2x8x4xf32>
  return %0 : tensor<2x8x4xf32>
}

// -----

func.func @dim(%d: tensor<2x8x4xf32>, %s: tensor<2x3x4xf32>, %i: tensor<3xi64>) -> tensor<2x8x4xf32> {
  // expected-error @+1 {{has 'dim' in [0, 3), got 3}}
  %0 = "topo.index_update"(%d, %s, %i) {dim = 3 : i64} : (tensor<2x8x4xf32>, tensor<2x3x4xf32>, tensor<3xi64>) -> tensor<2x8x4xf32>
  return %0 : tensor<2x8x4xf32>
}

// -----

func.func @source_shape(%d: tensor<2x8x4xf32>, %s: tensor<2x4x4xf32>, %i: tensor<3xi64>) -> tensor<2x8x4xf32> {
  // expected-error @+1 {{takes tensor<2x3x4xf32> as 'source'}}
  %0 = "topo.index_update"(%d, %s, %i) {dim = 1 : i64} : (tensor<2x8x4xf32>, tensor<2x4x4xf32>, tensor<3xi64>) -> tensor<2x8x4xf32>
  return %0 : tensor<2x8x4xf32>
}

// -----

func.func @source_type(%d: tensor<2x8x4xf32>, %s: tensor<2x3x4xf16>, %i: tensor<3xi64>) -> tensor<2x8x4xf32> {
  // expected-error @+1 {{takes tensor<2x3x4xf32> as 'source'}}
  %0 = "topo.index_update"(%d, %s, %i) {dim = 1 : i64} : (tensor<2x8x4xf32>, tensor<2x3x4xf16>, tensor<3xi64>) -> tensor<2x8x4xf32>
  return %0 : tensor<2x8x4xf32>
}
