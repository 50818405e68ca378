// RUN: topo-opt %s -p 'topo-form-kernels,topo-choose-tiles,topo-pack-siblings' | filecheck %s

// Two kernels of many full waves each gain nothing from one launch.

// CHECK-LABEL: func.func @large
// CHECK-COUNT-2: call @k_loops
// CHECK-NOT:     k_pack
#sq = affine_map<(i, j) -> (i, j)>
func.func @large(%a: tensor<4096x4224xf32>, %b: tensor<4096x4224xbf16>) -> (tensor<4096x4224xf32>, tensor<4096x4224xbf16>) {
  %e = tensor.empty() : tensor<4096x4224xf32>
  %0 = linalg.generic {indexing_maps = [#sq, #sq], iterator_types = ["parallel", "parallel"]}
      ins(%a : tensor<4096x4224xf32>) outs(%e : tensor<4096x4224xf32>) {
  ^bb0(%p: f32, %o: f32):
    %s = arith.negf %p : f32
    linalg.yield %s : f32
  } -> tensor<4096x4224xf32>
  %f = tensor.empty() : tensor<4096x4224xbf16>
  %1 = linalg.generic {indexing_maps = [#sq, #sq], iterator_types = ["parallel", "parallel"]}
      ins(%b : tensor<4096x4224xbf16>) outs(%f : tensor<4096x4224xbf16>) {
  ^bb0(%p: bf16, %o: bf16):
    %s = arith.negf %p : bf16
    linalg.yield %s : bf16
  } -> tensor<4096x4224xbf16>
  return %0, %1 : tensor<4096x4224xf32>, tensor<4096x4224xbf16>
}
