// RUN: topo-opt %s -p topo-outline-collectives | filecheck %s

// Equal collectives are calls of one declaration.

// CHECK-LABEL: func.func @sums
// CHECK-NEXT:    %[[A:.*]] = call @collective.all_reduce.0(%arg0)
// CHECK-NEXT:    %[[B:.*]] = call @collective.all_reduce.0(%[[A]])
// CHECK-NEXT:    %[[C:.*]] = call @collective.all_gather.1(%[[B]])
// CHECK-NEXT:    return %[[C]]
// CHECK:       func.func private @collective.all_reduce.0(tensor<4xf32>) -> tensor<4xf32> attributes {topo.collective = {axes = ["model"], combiner = "max", dim = 0 : i64, kind = "all_reduce"
shard.grid @mesh(shape = 2) {topo.axes = ["model"]}
func.func @sums(%x: tensor<4xf32>) -> tensor<8xf32> {
  %a = shard.all_reduce %x on @mesh grid_axes = [0] reduction = max : tensor<4xf32> -> tensor<4xf32>
  %b = shard.all_reduce %a on @mesh grid_axes = [0] reduction = max : tensor<4xf32> -> tensor<4xf32>
  %c = shard.all_gather %b on @mesh grid_axes = [0] gather_axis = 0 : tensor<4xf32> -> tensor<8xf32>
  return %c : tensor<8xf32>
}
