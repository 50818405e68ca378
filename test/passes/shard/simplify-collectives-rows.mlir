// RUN: topo-opt %s -p 'topo-simplify-collectives{topology=h200-x2}' --split-input-file | filecheck %s
// RUN: topo-opt %s -p topo-simplify-collectives --split-input-file | filecheck %s --check-prefix=PLAIN

// Behind a large sum each device normalises its share of the rows, and what is gathered is the narrow result.

// CHECK-LABEL: func.func @layer
// CHECK:         %[[S:.*]] = shard.reduce_scatter %{{.*}} on @mesh grid_axes = [0] scatter_dim = 0 : tensor<4096x4096xf32> -> tensor<2048x4096xf32>
// CHECK:         linalg.generic {{.*}} ins(%[[S]], %{{.*}} : tensor<2048x4096xf32>, tensor<2048x4096xf32>)
// CHECK:         %[[N:.*]] = "topo.demote"(%{{.*}}) : (tensor<2048x4096xf32>) -> tensor<2048x4096xbf16>
// CHECK:         shard.all_gather %[[N]] on @mesh grid_axes = [0] gather_axis = 0 : tensor<2048x4096xbf16> -> tensor<4096x4096xbf16>
// PLAIN-LABEL: func.func @layer
// PLAIN:         shard.all_reduce
#mk = affine_map<(m, n, k) -> (m, k)>
#kn = affine_map<(m, n, k) -> (k, n)>
#mn = affine_map<(m, n, k) -> (m, n)>
#id = affine_map<(m, n) -> (m, n)>
#row = affine_map<(m, n) -> (m, 0)>
shard.grid @mesh(shape = 2) {topo.axes = ["model"], topo.devices = ["gpu0", "gpu1"]}
func.func @layer(%x: tensor<4096x512xf32>, %w: tensor<512x4096xf32>, %res: tensor<4096x4096xf32>, %v: tensor<4096x2048xf32>) -> (tensor<4096x2048xf32>, tensor<4096x4096xf32>) {
  %z = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<4096x4096xf32>
  %i = linalg.fill ins(%z : f32) outs(%e : tensor<4096x4096xf32>) -> tensor<4096x4096xf32>
  %p = linalg.contract indexing_maps = [#mk, #kn, #mn] ins(%x, %w : tensor<4096x512xf32>, tensor<512x4096xf32>) outs(%i : tensor<4096x4096xf32>) -> tensor<4096x4096xf32>
  %s = shard.all_reduce %p on @mesh grid_axes = [0] : tensor<4096x4096xf32> -> tensor<4096x4096xf32>
  %r = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]} ins(%s, %res : tensor<4096x4096xf32>, tensor<4096x4096xf32>) outs(%e : tensor<4096x4096xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %t = arith.addf %a, %b : f32
    linalg.yield %t : f32
  } -> tensor<4096x4096xf32>
  %e1 = tensor.empty() : tensor<4096x1xf32>
  %i1 = linalg.fill ins(%z : f32) outs(%e1 : tensor<4096x1xf32>) -> tensor<4096x1xf32>
  %q = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]} ins(%r : tensor<4096x4096xf32>) outs(%i1 : tensor<4096x1xf32>) {
  ^bb0(%a: f32, %o: f32):
    %t = arith.addf %a, %o : f32
    linalg.yield %t : f32
  } -> tensor<4096x1xf32>
  %n = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]} ins(%r, %q : tensor<4096x4096xf32>, tensor<4096x1xf32>) outs(%e : tensor<4096x4096xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %t = arith.divf %a, %b : f32
    linalg.yield %t : f32
  } -> tensor<4096x4096xf32>
  %n16 = "topo.demote"(%n) : (tensor<4096x4096xf32>) -> tensor<4096x4096xbf16>
  %v16 = "topo.demote"(%v) : (tensor<4096x2048xf32>) -> tensor<4096x2048xbf16>
  %e2 = tensor.empty() : tensor<4096x2048xf32>
  %i2 = linalg.fill ins(%z : f32) outs(%e2 : tensor<4096x2048xf32>) -> tensor<4096x2048xf32>
  %y = linalg.contract indexing_maps = [#mk, #kn, #mn] ins(%n16, %v16 : tensor<4096x4096xbf16>, tensor<4096x2048xbf16>) outs(%i2 : tensor<4096x2048xf32>) -> tensor<4096x2048xf32>
  return %y, %res : tensor<4096x2048xf32>, tensor<4096x4096xf32>
}

// -----

// A small one is not worth a second collective.

// CHECK-LABEL: func.func @small
// CHECK:         shard.all_reduce
// CHECK-NOT:     shard.all_gather
#mk = affine_map<(m, n, k) -> (m, k)>
#kn = affine_map<(m, n, k) -> (k, n)>
#mn = affine_map<(m, n, k) -> (m, n)>
#id = affine_map<(m, n) -> (m, n)>
#row = affine_map<(m, n) -> (m, 0)>
shard.grid @mesh(shape = 2) {topo.axes = ["model"], topo.devices = ["gpu0", "gpu1"]}
func.func @small(%x: tensor<8x512xf32>, %w: tensor<512x8xf32>, %res: tensor<8x8xf32>, %v: tensor<8x2048xf32>) -> (tensor<8x2048xf32>, tensor<8x8xf32>) {
  %z = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<8x8xf32>
  %i = linalg.fill ins(%z : f32) outs(%e : tensor<8x8xf32>) -> tensor<8x8xf32>
  %p = linalg.contract indexing_maps = [#mk, #kn, #mn] ins(%x, %w : tensor<8x512xf32>, tensor<512x8xf32>) outs(%i : tensor<8x8xf32>) -> tensor<8x8xf32>
  %s = shard.all_reduce %p on @mesh grid_axes = [0] : tensor<8x8xf32> -> tensor<8x8xf32>
  %r = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]} ins(%s, %res : tensor<8x8xf32>, tensor<8x8xf32>) outs(%e : tensor<8x8xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %t = arith.addf %a, %b : f32
    linalg.yield %t : f32
  } -> tensor<8x8xf32>
  %e1 = tensor.empty() : tensor<8x1xf32>
  %i1 = linalg.fill ins(%z : f32) outs(%e1 : tensor<8x1xf32>) -> tensor<8x1xf32>
  %q = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]} ins(%r : tensor<8x8xf32>) outs(%i1 : tensor<8x1xf32>) {
  ^bb0(%a: f32, %o: f32):
    %t = arith.addf %a, %o : f32
    linalg.yield %t : f32
  } -> tensor<8x1xf32>
  %n = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]} ins(%r, %q : tensor<8x8xf32>, tensor<8x1xf32>) outs(%e : tensor<8x8xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %t = arith.divf %a, %b : f32
    linalg.yield %t : f32
  } -> tensor<8x8xf32>
  %n16 = "topo.demote"(%n) : (tensor<8x8xf32>) -> tensor<8x8xbf16>
  %v16 = "topo.demote"(%v) : (tensor<8x2048xf32>) -> tensor<8x2048xbf16>
  %e2 = tensor.empty() : tensor<8x2048xf32>
  %i2 = linalg.fill ins(%z : f32) outs(%e2 : tensor<8x2048xf32>) -> tensor<8x2048xf32>
  %y = linalg.contract indexing_maps = [#mk, #kn, #mn] ins(%n16, %v16 : tensor<8x8xbf16>, tensor<8x2048xbf16>) outs(%i2 : tensor<8x2048xf32>) -> tensor<8x2048xf32>
  return %y, %res : tensor<8x2048xf32>, tensor<8x8xf32>
}
