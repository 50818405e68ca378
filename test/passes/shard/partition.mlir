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

// -----

// Ten over four devices are three each, with two elements of padding in all. What is added up skips it: the weight is loaded with zeros,
// the exponential of zero is none. The result, of which each device has a part, says what it is a part of.

#mk = affine_map<(m, n, k) -> (m, k)>
#nk = affine_map<(m, n, k) -> (n, k)>
#mn = affine_map<(m, n, k) -> (m, n)>
#id = affine_map<(m, n) -> (m, n)>

// CHECK-LABEL: func.func @padded
// CHECK-SAME:    (%[[X:.*]]: tensor<4x3xf32> {topo.kind = "input", topo.sharding = {{\[\[}}], ["x"]], topo.whole = array<i64: 4, 10>}
// CHECK-SAME:    %[[W:.*]]: tensor<5x3xf32> {topo.kind = "param", topo.sharding = {{\[\[}}], ["x"]], topo.whole = array<i64: 5, 10>}
// CHECK-SAME:    -> (tensor<4x2xf32> {topo.sharding = {{\[\[}}], ["x"]], topo.whole = array<i64: 4, 5>}, tensor<4x3xf32> {topo.sharding = {{\[\[}}], ["x"]], topo.whole = array<i64: 4, 10>})
// CHECK:         %[[E:.*]] = linalg.generic {{.*}} ins(%[[X]]
// CHECK:         %[[M:.*]] = linalg.generic {{.*}} ins(%[[E]] : tensor<4x3xf32>)
// CHECK:           %[[I:.*]] = arith.cmpi slt
// CHECK:           arith.select %[[I]], %{{.*}}, %{{.*}} : f32
// CHECK:         %[[P:.*]] = linalg.contract {{.*}} ins(%[[M]], %[[W]] : tensor<4x3xf32>, tensor<5x3xf32>)
// CHECK:         %[[R:.*]] = linalg.generic {{.*}} outs(%{{.*}} : tensor<4x8xf32>)
// CHECK:         shard.reduce_scatter %[[R]]
shard.grid @mesh(shape = 4) {topo.axes = ["x"]}
func.func @padded(%x: tensor<4x10xf32> {topo.kind = "input"}, %w: tensor<5x10xf32> {topo.kind = "param"}) -> (tensor<4x5xf32>, tensor<4x10xf32>) {
  %s = shard.sharding @mesh split_axes = [[], [0]] : !shard.sharding
  %wa = shard.shard %w to %s : tensor<5x10xf32>
  %z = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<4x10xf32>
  %a = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]} ins(%x : tensor<4x10xf32>) outs(%e : tensor<4x10xf32>) {
  ^bb0(%v: f32, %o: f32):
    %r = math.exp %v : f32
    linalg.yield %r : f32
  } -> tensor<4x10xf32>
  %f = tensor.empty() : tensor<4x5xf32>
  %i = linalg.fill ins(%z : f32) outs(%f : tensor<4x5xf32>) -> tensor<4x5xf32>
  %p = linalg.contract indexing_maps = [#mk, #nk, #mn] ins(%a, %wa : tensor<4x10xf32>, tensor<5x10xf32>) outs(%i : tensor<4x5xf32>) -> tensor<4x5xf32>
  %y = shard.shard %p to %s annotate_for_users : tensor<4x5xf32>
  return %y, %a : tensor<4x5xf32>, tensor<4x10xf32>
}
