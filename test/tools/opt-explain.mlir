// RUN: topo-opt %s -p 'topo-plan-shardings{topology=hgx-h100-x8 mesh="x=8" results=whole}' --explain=sharding | filecheck %s
// RUN: topo-opt %s -p 'topo-plan-shardings{topology=hgx-h100-x8 mesh="x=8" results=whole}' --explain=sharding-json | filecheck %s --check-prefix=JSON
// RUN: not topo-opt %s -p canonicalize --explain=sharding 2>&1 | filecheck %s --check-prefix=NOTHING

// CHECK:      main: x=8 of gpu0 gpu1 gpu2 gpu3 gpu4 gpu5 gpu6 gpu7: {{.*}} ms a call, {{.*}} ms of it communication
// CHECK:      Meshes
// CHECK:      x=8 {{.*}} fits
// CHECK:      Collectives
// CHECK:      all_reduce {{.*}} x {{.*}} [1, 8192] of linalg.contract {{.*}} nvlink
// CHECK:      Tensors
// CHECK-DAG:  up {{.*}} 16384x8192 {{.*}} [x, _]
// CHECK-DAG:  down {{.*}} 8192x16384 {{.*}} [_, x]
// CHECK-DAG:  odd {{.*}} 1x3 {{.*}} 3 does not divide into 8 parts
// CHECK-NOT:  func.func
// JSON:       "communication_seconds"
// JSON:       "candidates"
// JSON:       "runner_up"
// NOTHING:    error: nothing was planned that could be explained (put topo-plan-shardings into the pipeline)

#a = affine_map<(m, n, k) -> (m, k)>
#b = affine_map<(m, n, k) -> (n, k)>
#c = affine_map<(m, n, k) -> (m, n)>
#id = affine_map<(i, j) -> (i, j)>
func.func @main(%x: tensor<1x8192xbf16> {topo.kind = "input", topo.name = "x"},
                %up: tensor<16384x8192xbf16> {topo.kind = "param", topo.name = "up"},
                %down: tensor<8192x16384xbf16> {topo.kind = "param", topo.name = "down"},
                %odd: tensor<1x3xf32> {topo.kind = "input", topo.name = "odd"}) -> (tensor<1x8192xf32>, tensor<1x3xf32>) {
  %z = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<1x16384xf32>
  %f = linalg.fill ins(%z : f32) outs(%e : tensor<1x16384xf32>) -> tensor<1x16384xf32>
  %h = linalg.contract indexing_maps = [#a, #b, #c] ins(%x, %up : tensor<1x8192xbf16>, tensor<16384x8192xbf16>) outs(%f : tensor<1x16384xf32>) -> tensor<1x16384xf32>
  %n = "topo.demote"(%h) : (tensor<1x16384xf32>) -> tensor<1x16384xbf16>
  %e2 = tensor.empty() : tensor<1x8192xf32>
  %f2 = linalg.fill ins(%z : f32) outs(%e2 : tensor<1x8192xf32>) -> tensor<1x8192xf32>
  %y = linalg.contract indexing_maps = [#a, #b, #c] ins(%n, %down : tensor<1x16384xbf16>, tensor<8192x16384xbf16>) outs(%f2 : tensor<1x8192xf32>) -> tensor<1x8192xf32>
  %e3 = tensor.empty() : tensor<1x3xf32>
  %o = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]} ins(%odd : tensor<1x3xf32>) outs(%e3 : tensor<1x3xf32>) {
  ^bb0(%s: f32, %t: f32):
    %r = math.exp %s : f32
    linalg.yield %r : f32
  } -> tensor<1x3xf32>
  return %y, %o : tensor<1x8192xf32>, tensor<1x3xf32>
}
