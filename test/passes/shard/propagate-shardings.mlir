// RUN: topo-opt %s -p topo-propagate-shardings --split-input-file | filecheck %s
// RUN: topo-opt %s -p topo-propagate-shardings,topo-partition --split-input-file | filecheck %s --check-prefix=RANK

// Two products of which the first is split along its columns and the second along its rows, with rows of x on another axis, and
// nothing said of the result: one sum, of the local size.

#mk = affine_map<(m, n, k) -> (m, k)>
#kn = affine_map<(m, n, k) -> (k, n)>
#mn = affine_map<(m, n, k) -> (m, n)>
#id = affine_map<(m, n) -> (m, n)>

// CHECK-LABEL: func.func @mlp
// CHECK:         shard.shard %{{.*}} to %{{.*}} : tensor<16x256xf32>
// RANK-LABEL:  func.func @mlp
// RANK-SAME:     (%[[X:.*]]: tensor<8x64xf32> {topo.sharding = {{\[\[}}"data"], []]}, %{{.*}}: tensor<64x64xf32> {topo.sharding = {{\[}}[], ["model"]]}
// RANK-SAME:     -> (tensor<8x64xf32> {topo.sharding = {{\[\[}}"data"], []]})
// RANK:          linalg.contract {{.*}} outs(%{{.*}} : tensor<8x64xf32>)
// RANK-NOT:      shard.
// RANK:          %[[P:.*]] = linalg.contract {{.*}} outs(%{{.*}} : tensor<8x64xf32>)
// RANK-NEXT:     %[[Y:.*]] = shard.all_reduce %[[P]] on @mesh grid_axes = [1] : tensor<8x64xf32> -> tensor<8x64xf32>
// RANK-NEXT:     return %[[Y]]
shard.grid @mesh(shape = 2x4) {topo.axes = ["data", "model"]}
func.func @mlp(%x: tensor<16x64xf32>, %w1: tensor<64x256xf32>, %w2: tensor<256x64xf32>) -> tensor<16x64xf32> {
  %sx = shard.sharding @mesh split_axes = [[0]] : !shard.sharding
  %s1 = shard.sharding @mesh split_axes = [[], [1]] : !shard.sharding
  %s2 = shard.sharding @mesh split_axes = [[1]] : !shard.sharding
  %xa = shard.shard %x to %sx : tensor<16x64xf32>
  %w1a = shard.shard %w1 to %s1 : tensor<64x256xf32>
  %w2a = shard.shard %w2 to %s2 : tensor<256x64xf32>
  %z = arith.constant 0.0 : f32
  %e1 = tensor.empty() : tensor<16x256xf32>
  %i1 = linalg.fill ins(%z : f32) outs(%e1 : tensor<16x256xf32>) -> tensor<16x256xf32>
  %h = linalg.contract indexing_maps = [#mk, #kn, #mn] ins(%xa, %w1a : tensor<16x64xf32>, tensor<64x256xf32>) outs(%i1 : tensor<16x256xf32>) -> tensor<16x256xf32>
  %a = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]} ins(%h : tensor<16x256xf32>) outs(%e1 : tensor<16x256xf32>) {
  ^bb0(%v: f32, %o: f32):
    %r = arith.maximumf %v, %z : f32
    linalg.yield %r : f32
  } -> tensor<16x256xf32>
  %e2 = tensor.empty() : tensor<16x64xf32>
  %i2 = linalg.fill ins(%z : f32) outs(%e2 : tensor<16x64xf32>) -> tensor<16x64xf32>
  %y = linalg.contract indexing_maps = [#mk, #kn, #mn] ins(%a, %w2a : tensor<16x256xf32>, tensor<256x64xf32>) outs(%i2 : tensor<16x64xf32>) -> tensor<16x64xf32>
  return %y : tensor<16x64xf32>
}

// -----

// What is known of a result travels back to a weight, and state lies as its new value does.

// CHECK-LABEL: func.func @back
// CHECK:         %[[S:.*]] = shard.sharding @mesh split_axes = {{\[}}[], [0]]
// CHECK:         shard.shard %arg0 to %[[S]] : tensor<4x8xf32>
// RANK-LABEL:  func.func @back
// RANK-SAME:     tensor<4x4xf32> {topo.kind = "buffer", topo.name = "cache", topo.sharding = {{\[}}[], ["0"]]}, %arg1: tensor<2x4xf32>
#id = affine_map<(m, n) -> (m, n)>
shard.grid @mesh(shape = 2)
func.func @back(%cache: tensor<4x8xf32> {topo.kind = "buffer", topo.name = "cache"}, %new: tensor<2x8xf32>, %at: tensor<2xi64>)
    -> (tensor<4x8xf32> {topo.kind = "mutation", topo.name = "cache"}) {
  %s = shard.sharding @mesh split_axes = [[], [0]] : !shard.sharding
  %n = shard.shard %new to %s : tensor<2x8xf32>
  %r = "topo.index_update"(%cache, %n, %at) {dim = 0 : i64} : (tensor<4x8xf32>, tensor<2x8xf32>, tensor<2xi64>) -> tensor<4x8xf32>
  return %r : tensor<4x8xf32>
}

// -----

// Without a grid there is nothing to do.

// CHECK-LABEL: func.func @alone
// CHECK-NEXT:    return
func.func @alone(%x: tensor<4xf32>) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}
