// RUN: topo-opt %s -p topo-propagate-shardings --split-input-file --verify-diagnostics

shard.grid @mesh(shape = 4) {topo.axes = ["model"]}
// expected-error@below {{tensor<3x8xf32> cannot be split as model,_: dimension 0 of [3, 8] has fewer elements than model has devices (4)}}
func.func @fewer_rows_than_devices(%x: tensor<3x8xf32>) -> tensor<3x8xf32> {
  %s = shard.sharding @mesh split_axes = [[0]] : !shard.sharding
  %y = shard.shard %x to %s : tensor<3x8xf32>
  return %y : tensor<3x8xf32>
}

