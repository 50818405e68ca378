// RUN: topo-opt %s | topo-opt | filecheck %s

// CHECK-LABEL: func.func @plain
// CHECK: "topo.grouped_product"
func.func @plain(%a0: tensor<6x8xbf16>, %a1: tensor<4x8x5xbf16>, %a2: tensor<6xi64>) -> tensor<6x5xf32> {
  %0 = "topo.grouped_product"(%a0, %a1, %a2) {operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<6x8xbf16>, tensor<4x8x5xbf16>, tensor<6xi64>) -> tensor<6x5xf32>
  return %0 : tensor<6x5xf32>
}

// CHECK-LABEL: func.func @sorted
// CHECK: "topo.grouped_product"
func.func @sorted(%a0: tensor<6x8xbf16>, %a1: tensor<4x8x5xbf16>, %a2: tensor<6xi64>, %a3: tensor<6xi32>, %a4: tensor<5xi32>) -> tensor<6x5xf32> {
  %0 = "topo.grouped_product"(%a0, %a1, %a2, %a3, %a4) {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1>} : (tensor<6x8xbf16>, tensor<4x8x5xbf16>, tensor<6xi64>, tensor<6xi32>, tensor<5xi32>) -> tensor<6x5xf32>
  return %0 : tensor<6x5xf32>
}

// CHECK-LABEL: func.func @single
// CHECK: "topo.grouped_product"
func.func @single(%a0: tensor<6x8xf32>, %a1: tensor<4x8x5xf32>, %a2: tensor<6xi64>) -> tensor<6x5xf32> {
  %0 = "topo.grouped_product"(%a0, %a1, %a2) {operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<6x8xf32>, tensor<4x8x5xf32>, tensor<6xi64>) -> tensor<6x5xf32>
  return %0 : tensor<6x5xf32>
}
