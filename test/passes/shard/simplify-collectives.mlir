// RUN: topo-opt %s -p topo-simplify-collectives --split-input-file | filecheck %s

// A part of what was just put together is what was there before.

// CHECK-LABEL: func.func @slice_of_gather
// CHECK-NEXT:    return %arg0
shard.grid @mesh(shape = 2x4) {topo.axes = ["data", "model"]}
func.func @slice_of_gather(%x: tensor<2x8xf32>) -> tensor<2x8xf32> {
  %g = shard.all_gather %x on @mesh grid_axes = [1] gather_axis = 0 : tensor<2x8xf32> -> tensor<8x8xf32>
  %y = shard.all_slice %g on @mesh grid_axes = [1] slice_axis = 0 : tensor<8x8xf32> -> tensor<2x8xf32>
  return %y : tensor<2x8xf32>
}

// -----

// Along another dimension every rank gives each other one its part.

// CHECK-LABEL: func.func @slice_along_another
// CHECK-NEXT:    %[[Y:.*]] = shard.all_to_all %arg0 on @mesh grid_axes = [1] split_axis = 1 concat_axis = 0 : tensor<2x8xf32> -> tensor<8x2xf32>
// CHECK-NEXT:    return %[[Y]]
shard.grid @mesh(shape = 2x4) {topo.axes = ["data", "model"]}
func.func @slice_along_another(%x: tensor<2x8xf32>) -> tensor<8x2xf32> {
  %g = shard.all_gather %x on @mesh grid_axes = [1] gather_axis = 0 : tensor<2x8xf32> -> tensor<8x8xf32>
  %y = shard.all_slice %g on @mesh grid_axes = [1] slice_axis = 1 : tensor<8x8xf32> -> tensor<8x2xf32>
  return %y : tensor<8x2xf32>
}

// -----

// The part of another axis is not what was there.

// CHECK-LABEL: func.func @another_axis
// CHECK:         shard.all_gather
// CHECK:         shard.all_slice
shard.grid @mesh(shape = 4x4) {topo.axes = ["data", "model"]}
func.func @another_axis(%x: tensor<2x8xf32>) -> tensor<2x8xf32> {
  %g = shard.all_gather %x on @mesh grid_axes = [1] gather_axis = 0 : tensor<2x8xf32> -> tensor<8x8xf32>
  %y = shard.all_slice %g on @mesh grid_axes = [0] slice_axis = 0 : tensor<8x8xf32> -> tensor<2x8xf32>
  return %y : tensor<2x8xf32>
}

// -----

// A sum of which every rank wants a part is scattered; over the other axes it is made of the part.

// CHECK-LABEL: func.func @slice_of_sum
// CHECK-NEXT:    %[[P:.*]] = shard.reduce_scatter %arg0 on @mesh grid_axes = [1] scatter_dim = 1 : tensor<4x8xf32> -> tensor<4x2xf32>
// CHECK-NEXT:    %[[Y:.*]] = shard.all_reduce %[[P]] on @mesh grid_axes = [0] : tensor<4x2xf32> -> tensor<4x2xf32>
// CHECK-NEXT:    return %[[Y]], %[[Y]]
shard.grid @mesh(shape = 2x4) {topo.axes = ["data", "model"]}
func.func @slice_of_sum(%x: tensor<4x8xf32>) -> (tensor<4x2xf32>, tensor<4x2xf32>) {
  %s = shard.all_reduce %x on @mesh grid_axes = [0, 1] : tensor<4x8xf32> -> tensor<4x8xf32>
  %y = shard.all_slice %s on @mesh grid_axes = [1] slice_axis = 1 : tensor<4x8xf32> -> tensor<4x2xf32>
  %z = shard.all_slice %s on @mesh grid_axes = [1] slice_axis = 1 : tensor<4x8xf32> -> tensor<4x2xf32>
  return %y, %z : tensor<4x2xf32>, tensor<4x2xf32>
}

// -----

// A sum that is read whole as well stays one.

// CHECK-LABEL: func.func @sum_read_whole
// CHECK:         shard.all_reduce
// CHECK:         shard.all_slice
shard.grid @mesh(shape = 4)
func.func @sum_read_whole(%x: tensor<4x8xf32>) -> (tensor<4x2xf32>, tensor<4x8xf32>) {
  %s = shard.all_reduce %x on @mesh grid_axes = [0] : tensor<4x8xf32> -> tensor<4x8xf32>
  %y = shard.all_slice %s on @mesh grid_axes = [0] slice_axis = 1 : tensor<4x8xf32> -> tensor<4x2xf32>
  return %y, %s : tensor<4x2xf32>, tensor<4x8xf32>
}

// -----

// What makes elements smaller comes before they travel.

// CHECK-LABEL: func.func @narrow
// CHECK-NEXT:    %[[N:.*]] = "topo.demote"(%arg0) : (tensor<2x8xf32>) -> tensor<2x8xbf16>
// CHECK-NEXT:    %[[Y:.*]] = shard.all_gather %[[N]] on @mesh grid_axes = [0] gather_axis = 0 : tensor<2x8xbf16> -> tensor<8x8xbf16>
// CHECK-NEXT:    return %[[Y]]
shard.grid @mesh(shape = 4)
func.func @narrow(%x: tensor<2x8xf32>) -> tensor<8x8xbf16> {
  %g = shard.all_gather %x on @mesh grid_axes = [0] gather_axis = 0 : tensor<2x8xf32> -> tensor<8x8xf32>
  %y = "topo.demote"(%g) : (tensor<8x8xf32>) -> tensor<8x8xbf16>
  return %y : tensor<8x8xbf16>
}

// -----

// Loop nests of one element at a time too; not what makes elements larger.

// CHECK-LABEL: func.func @elementwise
// CHECK:         linalg.generic {{.*}} ins(%arg0 : tensor<2x8xf32>)
// CHECK:         shard.all_gather %{{.*}} : tensor<2x8xf32> -> tensor<8x8xf32>
// CHECK:         return
// CHECK-LABEL: func.func @widening
// CHECK-NEXT:    shard.all_gather
#id = affine_map<(m, n) -> (m, n)>
shard.grid @mesh(shape = 4)
func.func @elementwise(%x: tensor<2x8xf32>) -> tensor<8x8xf32> {
  %g = shard.all_gather %x on @mesh grid_axes = [0] gather_axis = 0 : tensor<2x8xf32> -> tensor<8x8xf32>
  %e = tensor.empty() : tensor<8x8xf32>
  %y = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]} ins(%g : tensor<8x8xf32>) outs(%e : tensor<8x8xf32>) {
  ^bb0(%v: f32, %o: f32):
    %r = math.exp %v : f32
    linalg.yield %r : f32
  } -> tensor<8x8xf32>
  return %y : tensor<8x8xf32>
}
func.func @widening(%x: tensor<2x8xbf16>) -> tensor<8x8xf32> {
  %g = shard.all_gather %x on @mesh grid_axes = [0] gather_axis = 0 : tensor<2x8xbf16> -> tensor<8x8xbf16>
  %e = tensor.empty() : tensor<8x8xf32>
  %y = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]} ins(%g : tensor<8x8xbf16>) outs(%e : tensor<8x8xf32>) {
  ^bb0(%v: bf16, %o: f32):
    %r = arith.extf %v : bf16 to f32
    linalg.yield %r : f32
  } -> tensor<8x8xf32>
  return %y : tensor<8x8xf32>
}

// -----

// Small sums of one kind travel together, unless one needs the other.

// CHECK-LABEL: func.func @merge
// CHECK:         %[[C:.*]] = tensor.concat dim(0) %{{.*}}, %arg1 : (tensor<8xf32>, tensor<4xf32>) -> tensor<12xf32>
// CHECK-NEXT:    %[[S:.*]] = shard.all_reduce %[[C]] on @mesh grid_axes = [0] : tensor<12xf32> -> tensor<12xf32>
// CHECK-NOT:     shard.
// CHECK:         return
// CHECK-LABEL: func.func @one_after_the_other
// CHECK:         shard.all_reduce %{{.*}} : tensor<4xf32>
// CHECK:         linalg.generic
// CHECK:         shard.all_reduce %{{.*}} : tensor<4xf32>
#id = affine_map<(m) -> (m)>
shard.grid @mesh(shape = 4)
func.func @merge(%x: tensor<2x4xf32>, %y: tensor<4xf32>) -> (tensor<2x4xf32>, tensor<4xf32>) {
  %a = shard.all_reduce %x on @mesh grid_axes = [0] : tensor<2x4xf32> -> tensor<2x4xf32>
  %b = shard.all_reduce %y on @mesh grid_axes = [0] : tensor<4xf32> -> tensor<4xf32>
  return %a, %b : tensor<2x4xf32>, tensor<4xf32>
}
func.func @one_after_the_other(%x: tensor<4xf32>) -> tensor<4xf32> {
  %a = shard.all_reduce %x on @mesh grid_axes = [0] : tensor<4xf32> -> tensor<4xf32>
  %e = tensor.empty() : tensor<4xf32>
  %y = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]} ins(%a : tensor<4xf32>) outs(%e : tensor<4xf32>) {
  ^bb0(%v: f32, %o: f32):
    %r = math.exp %v : f32
    linalg.yield %r : f32
  } -> tensor<4xf32>
  %b = shard.all_reduce %y on @mesh grid_axes = [0] : tensor<4xf32> -> tensor<4xf32>
  return %b : tensor<4xf32>
}

// -----

// A weight that every function gathers is loaded whole.

// CHECK-LABEL: func.func @hoist
// CHECK-SAME:    (%arg0: tensor<8x4xf32> {topo.kind = "param", topo.name = "w"})
// CHECK-NEXT:    return %arg0
shard.grid @mesh(shape = 4) {topo.axes = ["model"]}
func.func @hoist(%w: tensor<2x4xf32> {topo.kind = "param", topo.name = "w", topo.sharding = [["model"], []]}) -> tensor<8x4xf32> {
  %g = shard.all_gather %w on @mesh grid_axes = [0] gather_axis = 0 : tensor<2x4xf32> -> tensor<8x4xf32>
  return %g : tensor<8x4xf32>
}

// -----

// One that another function reads split stays so.

// CHECK-LABEL: func.func @gathers
// CHECK-NEXT:    shard.all_gather
shard.grid @mesh(shape = 4) {topo.axes = ["model"]}
func.func @gathers(%w: tensor<2x4xf32> {topo.kind = "param", topo.name = "w", topo.sharding = [["model"], []]}) -> tensor<8x4xf32> {
  %g = shard.all_gather %w on @mesh grid_axes = [0] gather_axis = 0 : tensor<2x4xf32> -> tensor<8x4xf32>
  return %g : tensor<8x4xf32>
}
func.func @reads(%w: tensor<2x4xf32> {topo.kind = "param", topo.name = "w", topo.sharding = [["model"], []]}) -> tensor<2x4xf32> {
  return %w : tensor<2x4xf32>
}

// -----

// A weight that nobody reads in parts is loaded whole, without the padding of its parts.

// CHECK-LABEL: func.func @padded_weight(
// CHECK-SAME:    %[[W:.*]]: tensor<3x2xf32> {topo.kind = "param", topo.name = "w"})
// CHECK-NEXT:    return %[[W]]
shard.grid @mesh(shape = 2) {topo.axes = ["x"]}
func.func @padded_weight(%w: tensor<2x2xf32> {topo.kind = "param", topo.name = "w", topo.sharding = [["x"], []], topo.whole = array<i64: 3, 2>})
    -> tensor<3x2xf32> {
  %g = shard.all_gather %w on @mesh grid_axes = [0] gather_axis = 0 : tensor<2x2xf32> -> tensor<4x2xf32>
  %s = tensor.extract_slice %g[0, 0] [3, 2] [1, 1] : tensor<4x2xf32> to tensor<3x2xf32>
  return %s : tensor<3x2xf32>
}
