// RUN: topo-opt %s | topo-opt | filecheck %s
// RUN: topo-opt %s --pass-pipeline='builtin.module(func.func(cse))' | filecheck %s --check-prefix=CSE

// The op has no effects, so that equal ones are one.
// CHECK-LABEL: func.func @twice
// CHECK-COUNT-2: "topo.index_update"(%{{.*}}) {dim = 1 : i64}
// CSE-LABEL: func.func @twice
// CSE: "topo.index_update"
// CSE-NOT: "topo.index_update"
// CSE: return
func.func @twice(%d: tensor<2x8x4xf32>, %s: tensor<2x3x4xf32>, %i: tensor<3xi64>) -> (tensor<2x8x4xf32>, tensor<2x8x4xf32>) {
  %0 = "topo.index_update"(%d, %s, %i) {dim = 1 : i64} : (tensor<2x8x4xf32>, tensor<2x3x4xf32>, tensor<3xi64>) -> tensor<2x8x4xf32>
  %1 = "topo.index_update"(%d, %s, %i) {dim = 1 : i64} : (tensor<2x8x4xf32>, tensor<2x3x4xf32>, tensor<3xi64>) -> tensor<2x8x4xf32>
  return %0, %1 : tensor<2x8x4xf32>, tensor<2x8x4xf32>
}
