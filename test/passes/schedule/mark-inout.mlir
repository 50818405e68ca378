// RUN: topo-opt %s -p 'topo-form-kernels,topo-mark-inout' --split-input-file | filecheck %s

// The destination of an indexed update is an argument of the kernel, and its result is that buffer.

// CHECK-LABEL: func.func @append
// CHECK-NEXT:    call @k_update_
// CHECK:       func.func private @k_update_
// CHECK-SAME:    topo.inout = {{\[}}array<i64: 0, 0>], topo.kernel = {family = "update"
func.func @append(%cache: tensor<2x8x4xf32>, %new: tensor<2x1x4xf32>, %at: tensor<1xi64>) -> tensor<2x8x4xf32> {
  %r = "topo.index_update"(%cache, %new, %at) {dim = 1 : i64} : (tensor<2x8x4xf32>, tensor<2x1x4xf32>, tensor<1xi64>) -> tensor<2x8x4xf32>
  return %r : tensor<2x8x4xf32>
}

// -----

// Kernels of other families rewrite nothing.

// CHECK-LABEL: func.func @negate
// CHECK-NOT:     topo.inout
func.func @negate(%a: tensor<4xf32>) -> tensor<4xf32> {
  %e = tensor.empty() : tensor<4xf32>
  %r = linalg.generic {indexing_maps = [affine_map<(i) -> (i)>, affine_map<(i) -> (i)>], iterator_types = ["parallel"]}
      ins(%a : tensor<4xf32>) outs(%e : tensor<4xf32>) {
  ^bb0(%x: f32, %o: f32):
    %m = arith.negf %x : f32
    linalg.yield %m : f32
  } -> tensor<4xf32>
  return %r : tensor<4xf32>
}
