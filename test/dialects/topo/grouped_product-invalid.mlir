// RUN: topo-opt %s --split-input-file --verify-diagnostics

func.func @dynamic(%a0: tensor<?x8xbf16>, %a1: tensor<4x8x5xbf16>, %a2: tensor<6xi64>) -> tensor<6x5xf32> {
  // expected-error @+1 {{works on tensors of static shape}}
  %0 = "topo.grouped_product"(%a0, %a1, %a2) {operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<?x8xbf16>, tensor<4x8x5xbf16>, tensor<6xi64>) -> tensor<6x5xf32>
  return %0 : tensor<6x5xf32>
}

// -----

func.func @rank(%a0: tensor<6x8xbf16>, %a1: tensor<4x8x5xbf16>, %a2: tensor<2x3xi64>) -> tensor<6x5xf32> {
  // expected-error @+1 {{takes tensors of rank 2, 3 and 1}}
  %0 = "topo.grouped_product"(%a0, %a1, %a2) {operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<6x8xbf16>, tensor<4x8x5xbf16>, tensor<2x3xi64>) -> tensor<6x5xf32>
  return %0 : tensor<6x5xf32>
}

// -----

func.func @weights(%a0: tensor<6x8xbf16>, %a1: tensor<4x7x5xbf16>, %a2: tensor<6xi64>) -> tensor<6x5xf32> {
  // expected-error @+1 {{takes 'weights' of shape Gx8xN and of the type of 'x'}}
  %0 = "topo.grouped_product"(%a0, %a1, %a2) {operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<6x8xbf16>, tensor<4x7x5xbf16>, tensor<6xi64>) -> tensor<6x5xf32>
  return %0 : tensor<6x5xf32>
}

// -----

func.func @weights_type(%a0: tensor<6x8xbf16>, %a1: tensor<4x8x5xf16>, %a2: tensor<6xi64>) -> tensor<6x5xf32> {
  // expected-error @+1 {{takes 'weights' of shape Gx8xN and of the type of 'x'}}
  %0 = "topo.grouped_product"(%a0, %a1, %a2) {operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<6x8xbf16>, tensor<4x8x5xf16>, tensor<6xi64>) -> tensor<6x5xf32>
  return %0 : tensor<6x5xf32>
}

// -----

func.func @group(%a0: tensor<6x8xbf16>, %a1: tensor<4x8x5xbf16>, %a2: tensor<5xi64>) -> tensor<6x5xf32> {
  // expected-error @+1 {{takes an integer 'group' of 6 rows}}
  %0 = "topo.grouped_product"(%a0, %a1, %a2) {operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<6x8xbf16>, tensor<4x8x5xbf16>, tensor<5xi64>) -> tensor<6x5xf32>
  return %0 : tensor<6x5xf32>
}

// -----

func.func @result(%a0: tensor<6x8xbf16>, %a1: tensor<4x8x5xbf16>, %a2: tensor<6xi64>) -> tensor<6x5xbf16> {
  // expected-error @+1 {{has a result of type tensor<6x5xf32>}}
  %0 = "topo.grouped_product"(%a0, %a1, %a2) {operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<6x8xbf16>, tensor<4x8x5xbf16>, tensor<6xi64>) -> tensor<6x5xbf16>
  return %0 : tensor<6x5xbf16>
}

// -----

func.func @one_of_two(%a0: tensor<6x8xbf16>, %a1: tensor<4x8x5xbf16>, %a2: tensor<6xi64>, %a3: tensor<6xi32>) -> tensor<6x5xf32> {
  // expected-error @+1 {{takes 'order' and 'offsets' together}}
  %0 = "topo.grouped_product"(%a0, %a1, %a2, %a3) {operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>} : (tensor<6x8xbf16>, tensor<4x8x5xbf16>, tensor<6xi64>, tensor<6xi32>) -> tensor<6x5xf32>
  return %0 : tensor<6x5xf32>
}

// -----

func.func @offsets(%a0: tensor<6x8xbf16>, %a1: tensor<4x8x5xbf16>, %a2: tensor<6xi64>, %a3: tensor<6xi32>, %a4: tensor<4xi32>) -> tensor<6x5xf32> {
  // expected-error @+1 {{takes 'order' of 6 and 'offsets' of 5 i32}}
  %0 = "topo.grouped_product"(%a0, %a1, %a2, %a3, %a4) {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1>} : (tensor<6x8xbf16>, tensor<4x8x5xbf16>, tensor<6xi64>, tensor<6xi32>, tensor<4xi32>) -> tensor<6x5xf32>
  return %0 : tensor<6x5xf32>
}
