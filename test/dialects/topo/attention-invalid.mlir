// RUN: topo-opt %s --split-input-file --verify-diagnostics

func.func @rank(%q: tensor<4x3x8xf32>, %k: tensor<1x2x5x8xf32>, %v: tensor<1x2x5x8xf32>) -> tensor<4x3x8xf32> {
  // expected-error @+1 {{'topo.attention' op works on tensors of rank 4 and static shape}}
  %0 = "topo.attention"(%q, %k, %v) {scale = 1.0 : f64, causal = false, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<4x3x8xf32>, tensor<1x2x5x8xf32>, tensor<1x2x5x8xf32>) -> tensor<4x3x8xf32>
  return %0 : tensor<4x3x8xf32>
}

// -----

func.func @causal_not_boolean(%q: tensor<1x4x3x8xf32>, %k: tensor<1x2x5x8xf32>, %v: tensor<1x2x5x8xf32>) -> tensor<1x4x3x8xf32> {
  // expected-error @+1 {{takes a boolean 'causal', got 1 : i64}}
  %0 = "topo.attention"(%q, %k, %v) {scale = 1.0 : f64, causal = 1, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<1x4x3x8xf32>, tensor<1x2x5x8xf32>, tensor<1x2x5x8xf32>) -> tensor<1x4x3x8xf32>
  return %0 : tensor<1x4x3x8xf32>
}

// -----

func.func @key_width(%q: tensor<1x4x3x8xf32>, %k: tensor<1x2x5x7xf32>, %v: tensor<1x2x5x8xf32>) -> tensor<1x4x3x8xf32> {
  // expected-error @+1 {{takes 'k' of shape BxGxNxD with B = 1 and D = 8 of 'q'}}
  %0 = "topo.attention"(%q, %k, %v) {scale = 1.0 : f64, causal = false, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<1x4x3x8xf32>, tensor<1x2x5x7xf32>, tensor<1x2x5x8xf32>) -> tensor<1x4x3x8xf32>
  return %0 : tensor<1x4x3x8xf32>
}

// -----

func.func @value_length(%q: tensor<1x4x3x8xf32>, %k: tensor<1x2x5x8xf32>, %v: tensor<1x2x6x8xf32>) -> tensor<1x4x3x8xf32> {
  // expected-error @+1 {{takes 'v' of shape BxGxNxE with B, G, N = 1, 2, 5 of 'k'}}
  %0 = "topo.attention"(%q, %k, %v) {scale = 1.0 : f64, causal = false, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<1x4x3x8xf32>, tensor<1x2x5x8xf32>, tensor<1x2x6x8xf32>) -> tensor<1x4x3x8xf32>
  return %0 : tensor<1x4x3x8xf32>
}

// -----

func.func @heads(%q: tensor<1x4x3x8xf32>, %k: tensor<1x3x5x8xf32>, %v: tensor<1x3x5x8xf32>) -> tensor<1x4x3x8xf32> {
  // expected-error @+1 {{takes a multiple of the key heads as query heads, got 4 and 3}}
  %0 = "topo.attention"(%q, %k, %v) {scale = 1.0 : f64, causal = false, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<1x4x3x8xf32>, tensor<1x3x5x8xf32>, tensor<1x3x5x8xf32>) -> tensor<1x4x3x8xf32>
  return %0 : tensor<1x4x3x8xf32>
}

// -----

func.func @types(%q: tensor<1x4x3x8xf32>, %k: tensor<1x2x5x8xf32>, %v: tensor<1x2x5x8xf16>) -> tensor<1x4x3x8xf32> {
  // expected-error @+1 {{has one element type}}
  %0 = "topo.attention"(%q, %k, %v) {scale = 1.0 : f64, causal = false, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<1x4x3x8xf32>, tensor<1x2x5x8xf32>, tensor<1x2x5x8xf16>) -> tensor<1x4x3x8xf32>
  return %0 : tensor<1x4x3x8xf32>
}

// -----

func.func @result(%q: tensor<1x4x3x8xf32>, %k: tensor<1x2x5x8xf32>, %v: tensor<1x2x5x8xf32>) -> tensor<1x4x3x7xf32> {
  // expected-error @+1 {{has a result of shape 1x4x3x8}}
  %0 = "topo.attention"(%q, %k, %v) {scale = 1.0 : f64, causal = false, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<1x4x3x8xf32>, tensor<1x2x5x8xf32>, tensor<1x2x5x8xf32>) -> tensor<1x4x3x7xf32>
  return %0 : tensor<1x4x3x7xf32>
}

// -----

func.func @mask_shape(%q: tensor<1x4x3x8xf32>, %k: tensor<1x2x5x8xf32>, %v: tensor<1x2x5x8xf32>, %m: tensor<1x2x3x5xi1>) -> tensor<1x4x3x8xf32> {
  // expected-error @+1 {{takes a 'mask' that broadcasts to 1x4x3x5}}
  %0 = "topo.attention"(%q, %k, %v, %m) {scale = 1.0 : f64, causal = false, operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>} : (tensor<1x4x3x8xf32>, tensor<1x2x5x8xf32>, tensor<1x2x5x8xf32>, tensor<1x2x3x5xi1>) -> tensor<1x4x3x8xf32>
  return %0 : tensor<1x4x3x8xf32>
}

// -----

func.func @mask_type(%q: tensor<1x4x3x8xf32>, %k: tensor<1x2x5x8xf32>, %v: tensor<1x2x5x8xf32>, %m: tensor<1x1x3x5xi32>) -> tensor<1x4x3x8xf32> {
  // expected-error @+1 {{takes a boolean or float 'mask'}}
  %0 = "topo.attention"(%q, %k, %v, %m) {scale = 1.0 : f64, causal = false, operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>} : (tensor<1x4x3x8xf32>, tensor<1x2x5x8xf32>, tensor<1x2x5x8xf32>, tensor<1x1x3x5xi32>) -> tensor<1x4x3x8xf32>
  return %0 : tensor<1x4x3x8xf32>
}

// -----

func.func @bound_of_three(%q: tensor<1x4x3x8xf32>, %k: tensor<1x4x5x8xf32>) -> tensor<1x4x3x8xf32> {
  // expected-error @+1 {{takes a map 'high' from a row and its position}}
  %0 = "topo.attention"(%q, %k, %k) {scale = 1.0 : f64, causal = false, high = affine_map<(a, b, c) -> (a)>, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<1x4x3x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>) -> tensor<1x4x3x8xf32>
  return %0 : tensor<1x4x3x8xf32>
}

// -----

func.func @positions_shape(%q: tensor<1x4x3x8xf32>, %k: tensor<1x4x5x8xf32>, %p: tensor<2x3xi64>) -> tensor<1x4x3x8xf32> {
  // expected-error @+1 {{takes 'positions' that broadcast to 1x3, got}}
  %0 = "topo.attention"(%q, %k, %k, %p) {scale = 1.0 : f64, causal = false, operandSegmentSizes = array<i32: 1, 1, 1, 0, 1>} : (tensor<1x4x3x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<2x3xi64>) -> tensor<1x4x3x8xf32>
  return %0 : tensor<1x4x3x8xf32>
}

// -----

func.func @positions_type(%q: tensor<1x4x3x8xf32>, %k: tensor<1x4x5x8xf32>, %p: tensor<1x3xi32>) -> tensor<1x4x3x8xf32> {
  // expected-error @+1 {{takes 'positions' of i64, got}}
  %0 = "topo.attention"(%q, %k, %k, %p) {scale = 1.0 : f64, causal = false, operandSegmentSizes = array<i32: 1, 1, 1, 0, 1>} : (tensor<1x4x3x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x3xi32>) -> tensor<1x4x3x8xf32>
  return %0 : tensor<1x4x3x8xf32>
}

// -----

func.func @softcap(%q: tensor<1x4x3x8xf32>, %k: tensor<1x4x5x8xf32>) -> tensor<1x4x3x8xf32> {
  // expected-error @+1 {{takes a float 'softcap', got 1 : i64}}
  %0 = "topo.attention"(%q, %k, %k) {scale = 1.0 : f64, causal = false, softcap = 1, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<1x4x3x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>) -> tensor<1x4x3x8xf32>
  return %0 : tensor<1x4x3x8xf32>
}
