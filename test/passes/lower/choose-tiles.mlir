// RUN: topo-opt %s -p 'topo-form-kernels,topo-choose-tiles{topology=h200-x1}' | filecheck %s

// A row that fits in one block is read once; a tile that is already there stays.

// CHECK: func.func private @kept
// CHECK-SAME: tile = {r = 1 : i64, warps = 1 : i64, x = 2 : i64}
// CHECK: func.func private @k_loops_
// CHECK-SAME: tile = {r = 256 : i64, warps = 4 : i64, x = 4 : i64}
func.func @rows(%a: tensor<64x200xf32>, %b: tensor<4xf32>) -> (tensor<64xf32>, tensor<4xf32>) {
  %z = arith.constant 0.0 : f32
  %i = tensor.empty() : tensor<64xf32>
  %f = linalg.fill ins(%z : f32) outs(%i : tensor<64xf32>) -> tensor<64xf32>
  %r = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i)>], iterator_types = ["parallel", "reduction"]}
      ins(%a : tensor<64x200xf32>) outs(%f : tensor<64xf32>) {
  ^bb0(%x: f32, %o: f32):
    %m = arith.addf %x, %o : f32
    linalg.yield %m : f32
  } -> tensor<64xf32>
  %k = func.call @kept(%b) : (tensor<4xf32>) -> tensor<4xf32>
  return %r, %k : tensor<64xf32>, tensor<4xf32>
}
func.func private @kept(%b: tensor<4xf32>) -> tensor<4xf32> attributes {
    topo.kernel = {family = "loops", rows = array<i64: 4>, cols = array<i64>, full_shape = array<i64: 4>, full_map = affine_map<(i) -> (i)>,
                   tile = {x = 2 : i64, r = 1 : i64, warps = 1 : i64}}} {
  return %b : tensor<4xf32>
}
