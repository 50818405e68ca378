// RUN: topo-opt %s -p topo-propagate-shardings,topo-partition --split-input-file | filecheck %s
// RUN: topo-opt %s -p 'topo-propagate-shardings,topo-partition{sums=wide}' --split-input-file | filecheck %s --check-prefix=WIDE

// Terms of a product whose readers round it, here behind a bias, are summed in the narrow type.

#mk = affine_map<(m, n, k) -> (m, k)>
#nk = affine_map<(m, n, k) -> (n, k)>
#mn = affine_map<(m, n, k) -> (m, n)>
#id = affine_map<(m, n) -> (m, n)>
#n = affine_map<(m, n) -> (n)>

// CHECK-LABEL: func.func @row_parallel
// CHECK:         %[[P:.*]] = linalg.contract
// CHECK:         %[[T:.*]] = "topo.demote"(%[[P]]) : (tensor<4x8xf32>) -> tensor<4x8xbf16>
// CHECK:         %[[S:.*]] = shard.all_reduce %[[T]] {{.*}} : tensor<4x8xbf16> -> tensor<4x8xbf16>
// CHECK:         linalg.generic {{.*}} ins(%[[S]] : tensor<4x8xbf16>) outs(%{{.*}} : tensor<4x8xf32>)
// CHECK:           arith.extf
// WIDE-LABEL:  func.func @row_parallel
// WIDE:          shard.all_reduce {{.*}} : tensor<4x8xf32> -> tensor<4x8xf32>
shard.grid @mesh(shape = 2) {topo.axes = ["x"]}
func.func @row_parallel(%x: tensor<4x16xbf16>, %w: tensor<8x16xbf16>, %b: tensor<8xbf16>) -> tensor<4x8xbf16> {
  %s = shard.sharding @mesh split_axes = [[], [0]] : !shard.sharding
  %wa = shard.shard %w to %s : tensor<8x16xbf16>
  %z = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<4x8xf32>
  %i = linalg.fill ins(%z : f32) outs(%e : tensor<4x8xf32>) -> tensor<4x8xf32>
  %p = linalg.contract indexing_maps = [#mk, #nk, #mn] ins(%x, %wa : tensor<4x16xbf16>, tensor<8x16xbf16>) outs(%i : tensor<4x8xf32>) -> tensor<4x8xf32>
  %y = linalg.generic {indexing_maps = [#id, #n, #id], iterator_types = ["parallel", "parallel"]} ins(%p, %b : tensor<4x8xf32>, tensor<8xbf16>) outs(%e : tensor<4x8xf32>) {
  ^bb0(%a: f32, %c: bf16, %o: f32):
    %d = arith.extf %c : bf16 to f32
    %r = arith.addf %a, %d : f32
    linalg.yield %r : f32
  } -> tensor<4x8xf32>
  %n = "topo.demote"(%y) : (tensor<4x8xf32>) -> tensor<4x8xbf16>
  return %n : tensor<4x8xbf16>
}
