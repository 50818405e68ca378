// RUN: topo-opt %s --split-input-file --verify-diagnostics

func.func @dynamic(%x: tensor<?x4xf32>) -> tensor<?x4xf32> {
  // expected-error @+1 {{works on a tensor of static shape}}
  %0 = "topo.rotate_half"(%x) {interleaved = false} : (tensor<?x4xf32>) -> tensor<?x4xf32>
  return %0 : tensor<?x4xf32>
}

// -----

func.func @type(%x: tensor<4xf32>) -> tensor<4xbf16> {
  // expected-error @+1 {{keeps the type}}
  %0 = "topo.rotate_half"(%x) {interleaved = false} : (tensor<4xf32>) -> tensor<4xbf16>
  return %0 : tensor<4xbf16>
}

// -----

func.func @integers(%x: tensor<4xi32>) -> tensor<4xi32> {
  // expected-error @+1 {{turns floats, got i32}}
  %0 = "topo.rotate_half"(%x) {interleaved = false} : (tensor<4xi32>) -> tensor<4xi32>
  return %0 : tensor<4xi32>
}

// -----

func.func @odd(%x: tensor<4x5xf32>) -> tensor<4x5xf32> {
  // expected-error @+1 {{takes a last dimension of even size}}
  %0 = "topo.rotate_half"(%x) {interleaved = false} : (tensor<4x5xf32>) -> tensor<4x5xf32>
  return %0 : tensor<4x5xf32>
}

// -----

func.func @flag(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @+1 {{takes a boolean 'interleaved'}}
  %0 = "topo.rotate_half"(%x) {interleaved = 1 : i64} : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
