// RUN: topo-opt %s --split-input-file --verify-diagnostics

func.func @dynamic(%x: tensor<?xf32>) -> tensor<?xbf16> {
  // expected-error @+1 {{works on tensors of static shape}}
  %0 = "topo.demote"(%x) : (tensor<?xf32>) -> tensor<?xbf16>
  return %0 : tensor<?xbf16>
}

// -----

func.func @shape(%x: tensor<4xf32>) -> tensor<5xbf16> {
  // expected-error @+1 {{keeps the shape}}
  %0 = "topo.demote"(%x) : (tensor<4xf32>) -> tensor<5xbf16>
  return %0 : tensor<5xbf16>
}

// -----

func.func @from(%x: tensor<4xf64>) -> tensor<4xbf16> {
  // expected-error @+1 {{narrows f32, got f64}}
  %0 = "topo.demote"(%x) : (tensor<4xf64>) -> tensor<4xbf16>
  return %0 : tensor<4xbf16>
}

// -----

func.func @to(%x: tensor<4xf32>) -> tensor<4xi16> {
  // expected-error @+1 {{narrows to f16 or bf16, got i16}}
  %0 = "topo.demote"(%x) : (tensor<4xf32>) -> tensor<4xi16>
  return %0 : tensor<4xi16>
}
