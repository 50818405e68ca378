// RUN: topo-opt %s -p 'topo-plan-shardings{topology=hgx-h100-x8 mesh="t=2" pin="down=t,_"}' | filecheck %s

// What is pinned lies as the pin says, on the mesh that is given.

#a = affine_map<(m, n, k) -> (m, k)>
#b = affine_map<(m, n, k) -> (n, k)>
#c = affine_map<(m, n, k) -> (m, n)>

// CHECK:       shard.grid @mesh(shape = 2) {topo.axes = ["t"], topo.devices = ["gpu0", "gpu1"]}
// CHECK-LABEL: func.func @mlp
// CHECK-DAG:     %[[PINNED:.*]] = shard.sharding @mesh split_axes = {{\[\[}}0], []]
// CHECK-DAG:     shard.shard %arg2 to %[[PINNED]] : tensor<8192x16384xbf16>
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
