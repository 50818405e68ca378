// RUN: topo-opt %s -p 'topo-form-kernels,topo-choose-tiles{topology=h200-x1}' | filecheck %s

// Where an operand's neighbours lie along another dimension than the result's, a block has both.

// CHECK: func.func private @k_loops_
// CHECK-SAME: -> tensor<256x14x14x32xf32>
// CHECK-SAME: tile = {across = 2 : i64, inner = 1 : i64, r = 1 : i64, warps = 8 : i64, x = 32 : i64, y = 128 : i64}
func.func @to_channels_last(%x: tensor<256x32x14x14xf32>, %b: tensor<32xf32>) -> tensor<256x14x14x32xf32> {
  %e = tensor.empty() : tensor<256x14x14x32xf32>
  %0 = linalg.generic {indexing_maps = [affine_map<(n, h, w, c) -> (n, c, h, w)>, affine_map<(n, h, w, c) -> (c)>, affine_map<(n, h, w, c) -> (n, h, w, c)>],
                       iterator_types = ["parallel", "parallel", "parallel", "parallel"]}
      ins(%x, %b : tensor<256x32x14x14xf32>, tensor<32xf32>) outs(%e : tensor<256x14x14x32xf32>) {
  ^bb0(%a: f32, %s: f32, %o: f32):
    %m = arith.mulf %a, %s : f32
    linalg.yield %m : f32
  } -> tensor<256x14x14x32xf32>
  return %0 : tensor<256x14x14x32xf32>
}
