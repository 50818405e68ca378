// RUN: topo-opt %s | topo-opt | filecheck %s

// CHECK-LABEL: func.func @grouped
// CHECK: "topo.attention"(%{{.*}}) {causal = true, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>, scale = 2.500000e-01 : f64}
func.func @grouped(%q: tensor<1x4x3x8xbf16>, %k: tensor<1x2x5x8xbf16>, %v: tensor<1x2x5x6xbf16>) -> tensor<1x4x3x6xbf16> {
  %0 = "topo.attention"(%q, %k, %v) {scale = 2.5e-1 : f64, causal = true, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<1x4x3x8xbf16>, tensor<1x2x5x8xbf16>, tensor<1x2x5x6xbf16>) -> tensor<1x4x3x6xbf16>
  return %0 : tensor<1x4x3x6xbf16>
}

// CHECK-LABEL: func.func @masked
// CHECK: operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>
func.func @masked(%q: tensor<1x4x3x8xf32>, %k: tensor<1x4x5x8xf32>, %m: tensor<1x1x3x5xi1>) -> tensor<1x4x3x8xf32> {
  %0 = "topo.attention"(%q, %k, %k, %m) {scale = 1.0 : f64, causal = false, operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>} : (tensor<1x4x3x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x1x3x5xi1>) -> tensor<1x4x3x8xf32>
  return %0 : tensor<1x4x3x8xf32>
}

// CHECK-LABEL: func.func @ranges
// CHECK: {causal = false, high = #[[MAP:.*]], operandSegmentSizes = array<i32: 1, 1, 1, 0, 1>, scale = 1.000000e+00 : f64, softcap = 5.000000e+01 : f64}
func.func @ranges(%q: tensor<2x4x3x8xf32>, %k: tensor<2x4x5x8xf32>, %p: tensor<2x1xi64>) -> tensor<2x4x3x8xf32> {
  %0 = "topo.attention"(%q, %k, %k, %p) {scale = 1.0 : f64, causal = false, high = affine_map<(m, p) -> (m + p + 1)>, softcap = 5.0e1 : f64, operandSegmentSizes = array<i32: 1, 1, 1, 0, 1>} : (tensor<2x4x3x8xf32>, tensor<2x4x5x8xf32>, tensor<2x4x5x8xf32>, tensor<2x1xi64>) -> tensor<2x4x3x8xf32>
  return %0 : tensor<2x4x3x8xf32>
}
