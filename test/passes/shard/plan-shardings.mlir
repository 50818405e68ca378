// RUN: topo-opt %s -p 'topo-plan-shardings{topology=hgx-h100-x8 results=whole}' --split-input-file | filecheck %s
// RUN: topo-opt %s -p 'topo-plan-shardings{topology=hgx-h100-x8 results=whole},topo-propagate-shardings,topo-partition' --split-input-file | filecheck %s --check-prefix=RANK

// One row through two products: columns, then rows, and one sum.

#a = affine_map<(m, n, k) -> (m, k)>
#b = affine_map<(m, n, k) -> (n, k)>
#c = affine_map<(m, n, k) -> (m, n)>

// CHECK:       shard.grid @mesh(shape = 8) {topo.axes = ["x"], topo.devices = ["gpu0", {{.*}}"gpu7"]}
// CHECK-LABEL: func.func @mlp
// CHECK-DAG:     %[[COLUMNS:.*]] = shard.sharding @mesh split_axes = {{\[\[}}0], []]
// CHECK-DAG:     %[[ROWS:.*]] = shard.sharding @mesh split_axes = {{\[\[}}], [0]]
// CHECK-DAG:     shard.shard %arg1 to %[[COLUMNS]] : tensor<16384x8192xbf16>
// CHECK-DAG:     shard.shard %arg2 to %[[ROWS]] : tensor<8192x16384xbf16>
// RANK-LABEL:  func.func @mlp
// RANK:          linalg.contract {{.*}} -> tensor<1x2048xf32>
// RANK-NOT:      shard.
// RANK:          %[[TERM:.*]] = linalg.contract {{.*}} -> tensor<1x8192xf32>
// RANK-NEXT:     %[[SUM:.*]] = shard.all_reduce %[[TERM]] on @mesh grid_axes = [0] : tensor<1x8192xf32> -> tensor<1x8192xf32>
// RANK-NEXT:     return %[[SUM]]
func.func @mlp(%x: tensor<1x8192xbf16> {topo.kind = "input", topo.name = "x"},
               %up: tensor<16384x8192xbf16> {topo.kind = "param", topo.name = "up"},
               %down: tensor<8192x16384xbf16> {topo.kind = "param", topo.name = "down"})
    -> (tensor<1x8192xf32> {topo.kind = "output", topo.name = "0"}) {
  %z = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<1x16384xf32>
  %f = linalg.fill ins(%z : f32) outs(%e : tensor<1x16384xf32>) -> tensor<1x16384xf32>
  %h = linalg.contract indexing_maps = [#a, #b, #c] ins(%x, %up : tensor<1x8192xbf16>, tensor<16384x8192xbf16>) outs(%f : tensor<1x16384xf32>) -> tensor<1x16384xf32>
  %n = "topo.demote"(%h) : (tensor<1x16384xf32>) -> tensor<1x16384xbf16>
  %e2 = tensor.empty() : tensor<1x8192xf32>
  %f2 = linalg.fill ins(%z : f32) outs(%e2 : tensor<1x8192xf32>) -> tensor<1x8192xf32>
  %y = linalg.contract indexing_maps = [#a, #b, #c] ins(%n, %down : tensor<1x16384xbf16>, tensor<8192x16384xbf16>) outs(%f2 : tensor<1x8192xf32>) -> tensor<1x8192xf32>
  return %y : tensor<1x8192xf32>
}

// -----

// A grid that is there stays; its places are the first devices of the machine.

#id = affine_map<(i, j) -> (i, j)>

// CHECK:       shard.grid @given(shape = 2x2) {topo.axes = ["0", "1"], topo.devices = ["gpu0", "gpu1", "gpu2", "gpu3"]}
// CHECK-LABEL: func.func @rows
// RANK-LABEL:  func.func @rows
shard.grid @given(shape = 2x2)
func.func @rows(%x: tensor<65536x1024xf32> {topo.kind = "input", topo.name = "x"}) -> tensor<65536x1024xf32> {
  %e = tensor.empty() : tensor<65536x1024xf32>
  %y = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]} ins(%x : tensor<65536x1024xf32>) outs(%e : tensor<65536x1024xf32>) {
  ^bb0(%a: f32, %o: f32):
    %r = math.exp %a : f32
    linalg.yield %r : f32
  } -> tensor<65536x1024xf32>
  return %y : tensor<65536x1024xf32>
}
