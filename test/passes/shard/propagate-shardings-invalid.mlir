// RUN: topo-opt %s -p topo-propagate-shardings --split-input-file --verify-diagnostics

shard.grid @mesh(shape = 4) {topo.axes = ["model"]}
// expected-error@below {{tensor<6x8xf32> cannot be split as model,_: dimension 0 of [6, 8] does not divide into 4 parts}}
func.func @uneven(%x: tensor<6x8xf32>) -> tensor<6x8xf32> {
  %s = shard.sharding @mesh split_axes = [[0]] : !shard.sharding
  %y = shard.shard %x to %s : tensor<6x8xf32>
  return %y : tensor<6x8xf32>
}

