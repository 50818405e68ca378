// RUN: topo-opt %s -p 'topo-count-recognised' | filecheck %s

// CHECK-LABEL: func.func @attention
// CHECK-SAME: topo.recognised = {attention = 1 : i64, attention.causal = 1 : i64, attention.grouped = 1 : i64, attention.padding = 1 : i64, attention.window = 1 : i64}
func.func @attention(%q: tensor<1x4x3x8xf32>, %k: tensor<1x2x5x8xf32>, %m: tensor<1x1x1x5xi1>) -> tensor<1x4x3x8xf32>
    attributes {topo.function = "attention"} {
  %0 = "topo.attention"(%q, %k, %k, %m) {scale = 1.0 : f64, causal = true, low = affine_map<(m, p) -> (m - 1)>, operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>} : (tensor<1x4x3x8xf32>, tensor<1x2x5x8xf32>, tensor<1x2x5x8xf32>, tensor<1x1x1x5xi1>) -> tensor<1x4x3x8xf32>
  return %0 : tensor<1x4x3x8xf32>
}

// CHECK-LABEL: func.func @rotary
// CHECK-SAME: topo.recognised = {rotary.half = 1 : i64, rotary.interleaved = 1 : i64, rotary.partial = 1 : i64}
func.func @rotary(%x: tensor<3x8xf32>) -> (tensor<3x8xf32>, tensor<3x4xf32>) attributes {topo.function = "rotary"} {
  %0 = "topo.rotate_half"(%x) {interleaved = true} : (tensor<3x8xf32>) -> tensor<3x8xf32>
  %1 = tensor.extract_slice %x[0, 0] [3, 4] [1, 1] : tensor<3x8xf32> to tensor<3x4xf32>
  %2 = "topo.rotate_half"(%1) {interleaved = false} : (tensor<3x4xf32>) -> tensor<3x4xf32>
  return %0, %2 : tensor<3x8xf32>, tensor<3x4xf32>
}

// CHECK-LABEL: func.func @nothing
// CHECK-SAME: topo.recognised = {}
func.func @nothing(%x: tensor<3xf32>) -> tensor<3xf32> attributes {topo.function = "nothing"} {
  return %x : tensor<3xf32>
}
