// RUN: topo-opt %s --pass-pipeline='builtin.module(topo-exchange-parts{topology=h200-x2})' --split-input-file | filecheck %s
// RUN: topo-opt %s --pass-pipeline='builtin.module(topo-exchange-parts)' --split-input-file | filecheck %s --check-prefix=NOWHERE
// RUN: topo-opt %s --pass-pipeline='builtin.module(topo-exchange-parts{topology=h200-x2},topo-choose-tiles{topology=h200-x2},topo-mark-dependent-launch{topology=h200-x2},topo-pack-siblings{topology=h200-x2})' --split-input-file | filecheck %s --check-prefix=ALONE

// A kernel that waits for others is no part of a launch that does something else.
// ALONE-COUNT-4: call @k_move
// ALONE-NOT: k_pack

// Kernels move the parts of tensors between two devices that reach each other's memory; equal collectives share one.
// Without a machine nothing is known of how devices reach each other.
// NOWHERE-COUNT-6: call @collective

// CHECK-LABEL: func.func @main
// CHECK-NEXT:    call @[[HEADS:k_move_[0-9a-f]+]](%arg0)
// CHECK-NEXT:    call @[[HEADS]](%arg1)
// CHECK-NEXT:    call @[[WHOLE:k_move_[0-9a-f]+]]
// CHECK-NEXT:    call @[[SUMS:k_move_[0-9a-f]+]]
// CHECK-NOT:   topo.collective
// CHECK-DAG:   func.func private @[[HEADS]]({{.*}}topo.kernel = {exchange = {axes = ["x"], memory = "peers", ranks = 2 : i64}, family = "move"}
// CHECK-DAG:   shard.all_to_all %arg0 on @mesh grid_axes = [0] split_axis = 1 concat_axis = 2 : tensor<1x4x8x16xbf16> -> tensor<1x2x16x16xbf16>
// CHECK-DAG:   func.func private @[[WHOLE]](
// CHECK-DAG:   shard.all_gather %arg0 on @mesh grid_axes = [0] gather_axis = 1
// CHECK-DAG:   func.func private @[[SUMS]](
// CHECK-DAG:   shard.reduce_scatter %arg0 on @mesh grid_axes = [0] {{.*}}scatter_dim = 0
module {
  shard.grid @mesh(shape = 2) {topo.axes = ["x"], topo.devices = ["gpu0", "gpu1"]}
  func.func @main(%q: tensor<1x4x8x16xbf16>, %k: tensor<1x4x8x16xbf16>, %a: tensor<8x32xf32>, %b: tensor<8x32xbf16>) -> (tensor<1x2x16x16xbf16>, tensor<1x2x16x16xbf16>, tensor<8x64xf32>, tensor<4x32xbf16>) attributes {topo.function = "main"} {
    %0 = call @collective.all_to_all.0(%q) : (tensor<1x4x8x16xbf16>) -> tensor<1x2x16x16xbf16>
    %1 = call @collective.all_to_all.0(%k) : (tensor<1x4x8x16xbf16>) -> tensor<1x2x16x16xbf16>
    %2 = call @collective.all_gather.1(%a) : (tensor<8x32xf32>) -> tensor<8x64xf32>
    %3 = call @collective.reduce_scatter.2(%b) : (tensor<8x32xbf16>) -> tensor<4x32xbf16>
    return %0, %1, %2, %3 : tensor<1x2x16x16xbf16>, tensor<1x2x16x16xbf16>, tensor<8x64xf32>, tensor<4x32xbf16>
  }
  func.func private @collective.all_to_all.0(tensor<1x4x8x16xbf16>) -> tensor<1x2x16x16xbf16> attributes {topo.collective = {axes = ["x"], combiner = "add", dim = 1 : i64, kind = "all_to_all", source = 2 : i64}}
  func.func private @collective.all_gather.1(tensor<8x32xf32>) -> tensor<8x64xf32> attributes {topo.collective = {axes = ["x"], combiner = "add", dim = 1 : i64, kind = "all_gather", source = 0 : i64}}
  func.func private @collective.reduce_scatter.2(tensor<8x32xbf16>) -> tensor<4x32xbf16> attributes {topo.collective = {axes = ["x"], combiner = "add", dim = 0 : i64, kind = "reduce_scatter", source = 0 : i64}}
}

// -----

// Truth values can't tell that they have come, the largest of parts is no sum, and sums that stay whole are another pass's.
// CHECK-LABEL: func.func @left
// CHECK-NEXT:    call @collective.all_gather.0
// CHECK-NEXT:    call @collective.all_reduce.1
module {
  shard.grid @mesh(shape = 2) {topo.axes = ["x"], topo.devices = ["gpu0", "gpu1"]}
  func.func @left(%m: tensor<4x8xi1>, %b: tensor<8x32xbf16>) -> (tensor<8x8xi1>, tensor<8x32xbf16>) attributes {topo.function = "main"} {
    %0 = call @collective.all_gather.0(%m) : (tensor<4x8xi1>) -> tensor<8x8xi1>
    %1 = call @collective.all_reduce.1(%b) : (tensor<8x32xbf16>) -> tensor<8x32xbf16>
    return %0, %1 : tensor<8x8xi1>, tensor<8x32xbf16>
  }
  func.func private @collective.all_gather.0(tensor<4x8xi1>) -> tensor<8x8xi1> attributes {topo.collective = {axes = ["x"], combiner = "add", dim = 0 : i64, kind = "all_gather", source = 0 : i64}}
  func.func private @collective.all_reduce.1(tensor<8x32xbf16>) -> tensor<8x32xbf16> attributes {topo.collective = {axes = ["x"], combiner = "add", dim = 0 : i64, kind = "all_reduce", source = 0 : i64}}
}
