// RUN: topo-opt %s --pass-pipeline='builtin.module(topo-exchange-sums{topology=h200-x2})' --split-input-file | filecheck %s
// RUN: topo-opt %s --pass-pipeline='builtin.module(topo-exchange-sums)' --split-input-file | filecheck %s --check-prefix=NOWHERE

// What reads a sum of two devices takes it from the other one's memory, and the product that makes a part gives it away.
// Without a machine nothing is known of how devices reach each other.
// NOWHERE-COUNT-8: call @collective.all_reduce

// CHECK-LABEL: func.func @main
// CHECK-NEXT:    %[[PART:.*]] = call @[[MAKER:k_gemm_[0-9a-f]+]](%arg0, %arg1)
// CHECK-NEXT:    %[[SUM:.*]] = call @[[READER:k_loops_[0-9a-f]+]](%arg2, %[[PART]])
// CHECK-NEXT:    return %[[SUM]]
// CHECK-NOT:   topo.collective
// CHECK-NOT:   @product
// CHECK:       func.func private @[[MAKER]]({{.*}}gives = {axes = ["x"], memory = "peers", ranks = 2 : i64, result = 0 : i64}
// CHECK:       func.func private @[[READER]]({{.*}}exchange = {argument = 1 : i64, axes = ["x"], given = true, memory = "peers", ranks = 2 : i64}

#map = affine_map<(d0, d1) -> (d0, d1)>
module {
  shard.grid @mesh(shape = 2) {topo.axes = ["x"], topo.devices = ["gpu0", "gpu1"]}
  func.func @main(%x: tensor<1x64xbf16>, %w: tensor<64x64xbf16>, %r: tensor<1x64xbf16>) -> tensor<1x64xbf16> attributes {topo.function = "main"} {
    %0 = call @product(%x, %w) : (tensor<1x64xbf16>, tensor<64x64xbf16>) -> tensor<1x64xbf16>
    %1 = call @collective.all_reduce.0(%0) : (tensor<1x64xbf16>) -> tensor<1x64xbf16>
    %2 = call @add(%r, %1) : (tensor<1x64xbf16>, tensor<1x64xbf16>) -> tensor<1x64xbf16>
    return %2 : tensor<1x64xbf16>
  }
  func.func private @collective.all_reduce.0(tensor<1x64xbf16>) -> tensor<1x64xbf16> attributes {topo.collective = {axes = ["x"], combiner = "add", dim = 0 : i64, kind = "all_reduce", source = 0 : i64}}
  func.func private @product(%x: tensor<1x64xbf16>, %w: tensor<64x64xbf16>) -> tensor<1x64xbf16> attributes {topo.kernel = {family = "gemm"}} {
    %z = arith.constant 0.0 : f32
    %e = tensor.empty() : tensor<1x64xf32>
    %f = linalg.fill ins(%z : f32) outs(%e : tensor<1x64xf32>) -> tensor<1x64xf32>
    %p = linalg.contract indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d2)>, affine_map<(d0, d1, d2) -> (d1, d2)>, affine_map<(d0, d1, d2) -> (d0, d1)>] ins(%x, %w : tensor<1x64xbf16>, tensor<64x64xbf16>) outs(%f : tensor<1x64xf32>) -> tensor<1x64xf32>
    %d = "topo.demote"(%p) : (tensor<1x64xf32>) -> tensor<1x64xbf16>
    return %d : tensor<1x64xbf16>
  }
  func.func private @add(%a: tensor<1x64xbf16>, %b: tensor<1x64xbf16>) -> tensor<1x64xbf16> attributes {topo.kernel = {family = "loops", rows = array<i64: 1, 64>, cols = array<i64>, full_shape = array<i64: 1, 64>, full_map = #map}} {
    %e = tensor.empty() : tensor<1x64xbf16>
    %s = linalg.generic {indexing_maps = [#map, #map, #map], iterator_types = ["parallel", "parallel"]} ins(%a, %b : tensor<1x64xbf16>, tensor<1x64xbf16>) outs(%e : tensor<1x64xbf16>) {
    ^bb0(%x: bf16, %y: bf16, %o: bf16):
      %t = arith.addf %x, %y : bf16
      linalg.yield %t : bf16
    } -> tensor<1x64xbf16>
    return %s : tensor<1x64xbf16>
  }
}

// -----

// Of few rows the product adds up itself, and does what the reader did.
// CHECK-LABEL: func.func @few_rows
// CHECK-NEXT:    %[[SUM:.*]] = call @[[BOTH:k_gemm_[0-9a-f]+]](%arg0, %arg1, %arg2)
// CHECK-NEXT:    return %[[SUM]]
// CHECK-NOT:   topo.collective
// CHECK:       func.func private @[[BOTH]]({{.*}}exchange = {axes = ["x"], memory = "peers", ranks = 2 : i64}
// CHECK:         "topo.demote"(%{{.*}}) {topo.summed}
// CHECK:         arith.addf

#map = affine_map<(d0, d1) -> (d0, d1)>
module {
  shard.grid @mesh(shape = 2) {topo.axes = ["x"], topo.devices = ["gpu0", "gpu1"]}
  func.func @few_rows(%x: tensor<8x64xbf16>, %w: tensor<64x64xbf16>, %r: tensor<8x64xbf16>) -> tensor<8x64xbf16> attributes {topo.function = "main"} {
    %0 = call @product(%x, %w) : (tensor<8x64xbf16>, tensor<64x64xbf16>) -> tensor<8x64xbf16>
    %1 = call @collective.all_reduce.0(%0) : (tensor<8x64xbf16>) -> tensor<8x64xbf16>
    %2 = call @add(%r, %1) : (tensor<8x64xbf16>, tensor<8x64xbf16>) -> tensor<8x64xbf16>
    return %2 : tensor<8x64xbf16>
  }
  func.func private @collective.all_reduce.0(tensor<8x64xbf16>) -> tensor<8x64xbf16> attributes {topo.collective = {axes = ["x"], combiner = "add", dim = 0 : i64, kind = "all_reduce", source = 0 : i64}}
  func.func private @product(%x: tensor<8x64xbf16>, %w: tensor<64x64xbf16>) -> tensor<8x64xbf16> attributes {topo.kernel = {family = "gemm"}} {
    %z = arith.constant 0.0 : f32
    %e = tensor.empty() : tensor<8x64xf32>
    %f = linalg.fill ins(%z : f32) outs(%e : tensor<8x64xf32>) -> tensor<8x64xf32>
    %p = linalg.contract indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d2)>, affine_map<(d0, d1, d2) -> (d1, d2)>, affine_map<(d0, d1, d2) -> (d0, d1)>] ins(%x, %w : tensor<8x64xbf16>, tensor<64x64xbf16>) outs(%f : tensor<8x64xf32>) -> tensor<8x64xf32>
    %d = "topo.demote"(%p) : (tensor<8x64xf32>) -> tensor<8x64xbf16>
    return %d : tensor<8x64xbf16>
  }
  func.func private @add(%a: tensor<8x64xbf16>, %b: tensor<8x64xbf16>) -> tensor<8x64xbf16> attributes {topo.kernel = {family = "loops", rows = array<i64: 8, 64>, cols = array<i64>, full_shape = array<i64: 8, 64>, full_map = #map}} {
    %e = tensor.empty() : tensor<8x64xbf16>
    %s = linalg.generic {indexing_maps = [#map, #map, #map], iterator_types = ["parallel", "parallel"]} ins(%a, %b : tensor<8x64xbf16>, tensor<8x64xbf16>) outs(%e : tensor<8x64xbf16>) {
    ^bb0(%x: bf16, %y: bf16, %o: bf16):
      %t = arith.addf %x, %y : bf16
      linalg.yield %t : bf16
    } -> tensor<8x64xbf16>
    return %s : tensor<8x64xbf16>
  }
}

// -----

// A sum with two readers is stored by a kernel of its own. Two sums on their way at once might meet in one box: the second part is given
// where it is read, behind the first sum.
// CHECK-LABEL: func.func @two_at_once
// CHECK-NEXT:    %[[A:.*]] = call @[[GIVES:k_gemm_[0-9a-f]+]](%arg0, %arg1)
// CHECK-NEXT:    %[[B:.*]] = call @product(%arg2, %arg1)
// CHECK-NEXT:    %[[SUM:.*]] = call @[[STORES:k_loops_[0-9a-f]+]](%[[A]])
// CHECK-NEXT:    %[[ADDED:.*]] = call @[[ADDS:k_loops_[0-9a-f]+]](%[[SUM]], %[[B]])
// CHECK-NEXT:    return %[[SUM]], %[[ADDED]]
// CHECK-DAG:   func.func private @[[STORES]]({{.*}}exchange = {argument = 0 : i64, axes = ["x"], given = true
// CHECK-DAG:   func.func private @[[ADDS]]({{.*}}exchange = {argument = 1 : i64, axes = ["x"], given = false

#map = affine_map<(d0, d1) -> (d0, d1)>
module {
  shard.grid @mesh(shape = 2) {topo.axes = ["x"], topo.devices = ["gpu0", "gpu1"]}
  func.func @two_at_once(%x: tensor<1x64xbf16>, %w: tensor<64x64xbf16>, %y: tensor<1x64xbf16>) -> (tensor<1x64xbf16>, tensor<1x64xbf16>) attributes {topo.function = "main"} {
    %0 = call @product(%x, %w) : (tensor<1x64xbf16>, tensor<64x64xbf16>) -> tensor<1x64xbf16>
    %1 = call @product(%y, %w) : (tensor<1x64xbf16>, tensor<64x64xbf16>) -> tensor<1x64xbf16>
    %2 = call @collective.all_reduce.0(%0) : (tensor<1x64xbf16>) -> tensor<1x64xbf16>
    %3 = call @collective.all_reduce.0(%1) : (tensor<1x64xbf16>) -> tensor<1x64xbf16>
    %4 = call @add(%2, %3) : (tensor<1x64xbf16>, tensor<1x64xbf16>) -> tensor<1x64xbf16>
    return %2, %4 : tensor<1x64xbf16>, tensor<1x64xbf16>
  }
  func.func private @collective.all_reduce.0(tensor<1x64xbf16>) -> tensor<1x64xbf16> attributes {topo.collective = {axes = ["x"], combiner = "add", dim = 0 : i64, kind = "all_reduce", source = 0 : i64}}
  func.func private @product(%x: tensor<1x64xbf16>, %w: tensor<64x64xbf16>) -> tensor<1x64xbf16> attributes {topo.kernel = {family = "gemm"}} {
    %z = arith.constant 0.0 : f32
    %e = tensor.empty() : tensor<1x64xf32>
    %f = linalg.fill ins(%z : f32) outs(%e : tensor<1x64xf32>) -> tensor<1x64xf32>
    %p = linalg.contract indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d2)>, affine_map<(d0, d1, d2) -> (d1, d2)>, affine_map<(d0, d1, d2) -> (d0, d1)>] ins(%x, %w : tensor<1x64xbf16>, tensor<64x64xbf16>) outs(%f : tensor<1x64xf32>) -> tensor<1x64xf32>
    %d = "topo.demote"(%p) : (tensor<1x64xf32>) -> tensor<1x64xbf16>
    return %d : tensor<1x64xbf16>
  }
  func.func private @add(%a: tensor<1x64xbf16>, %b: tensor<1x64xbf16>) -> tensor<1x64xbf16> attributes {topo.kernel = {family = "loops", rows = array<i64: 1, 64>, cols = array<i64>, full_shape = array<i64: 1, 64>, full_map = #map}} {
    %e = tensor.empty() : tensor<1x64xbf16>
    %s = linalg.generic {indexing_maps = [#map, #map, #map], iterator_types = ["parallel", "parallel"]} ins(%a, %b : tensor<1x64xbf16>, tensor<1x64xbf16>) outs(%e : tensor<1x64xbf16>) {
    ^bb0(%x: bf16, %y: bf16, %o: bf16):
      %t = arith.addf %x, %y : bf16
      linalg.yield %t : bf16
    } -> tensor<1x64xbf16>
    return %s : tensor<1x64xbf16>
  }
}

// -----

// Integers have no number that stands for one that has not arrived; what is not near is left to the library.
// CHECK-LABEL: func.func @integers
// CHECK-NEXT:    call @collective.all_reduce.0(%arg0)

#map = affine_map<(d0, d1) -> (d0, d1)>
module {
  shard.grid @mesh(shape = 2) {topo.axes = ["x"], topo.devices = ["gpu0", "gpu1"]}
  func.func @integers(%x: tensor<1x64xi32>, %r: tensor<1x64xi32>) -> tensor<1x64xi32> attributes {topo.function = "main"} {
    %1 = call @collective.all_reduce.0(%x) : (tensor<1x64xi32>) -> tensor<1x64xi32>
    %2 = call @add(%r, %1) : (tensor<1x64xi32>, tensor<1x64xi32>) -> tensor<1x64xi32>
    return %2 : tensor<1x64xi32>
  }
  func.func private @collective.all_reduce.0(tensor<1x64xi32>) -> tensor<1x64xi32> attributes {topo.collective = {axes = ["x"], combiner = "add", dim = 0 : i64, kind = "all_reduce", source = 0 : i64}}
  func.func private @add(%a: tensor<1x64xi32>, %b: tensor<1x64xi32>) -> tensor<1x64xi32> attributes {topo.kernel = {family = "loops", rows = array<i64: 1, 64>, cols = array<i64>, full_shape = array<i64: 1, 64>, full_map = #map}} {
    %e = tensor.empty() : tensor<1x64xi32>
    %s = linalg.generic {indexing_maps = [#map, #map, #map], iterator_types = ["parallel", "parallel"]} ins(%a, %b : tensor<1x64xi32>, tensor<1x64xi32>) outs(%e : tensor<1x64xi32>) {
    ^bb0(%x: i32, %y: i32, %o: i32):
      %t = arith.addi %x, %y : i32
      linalg.yield %t : i32
    } -> tensor<1x64xi32>
    return %s : tensor<1x64xi32>
  }
}

// -----

// Two sums, of which the second one's part is made after the first one was taken: both products give.
// CHECK-LABEL: func.func @one_after_the_other
// CHECK-NEXT:    %[[A:.*]] = call @[[GIVING:k_gemm_[0-9a-f]+]](%arg0, %arg1)
// CHECK-NEXT:    %[[X:.*]] = call @[[TAKES:k_loops_[0-9a-f]+]](%arg0, %[[A]])
// CHECK-NEXT:    %[[B:.*]] = call @[[GIVING]](%[[X]], %arg1)
// CHECK-NEXT:    %[[Y:.*]] = call @[[TAKES]](%[[X]], %[[B]])
// CHECK-NEXT:    return %[[Y]]

#map = affine_map<(d0, d1) -> (d0, d1)>
module {
  shard.grid @mesh(shape = 2) {topo.axes = ["x"], topo.devices = ["gpu0", "gpu1"]}
  func.func @one_after_the_other(%x: tensor<1x64xbf16>, %w: tensor<64x64xbf16>) -> tensor<1x64xbf16> attributes {topo.function = "main"} {
    %0 = call @product(%x, %w) : (tensor<1x64xbf16>, tensor<64x64xbf16>) -> tensor<1x64xbf16>
    %1 = call @collective.all_reduce.0(%0) : (tensor<1x64xbf16>) -> tensor<1x64xbf16>
    %2 = call @add(%x, %1) : (tensor<1x64xbf16>, tensor<1x64xbf16>) -> tensor<1x64xbf16>
    %3 = call @product(%2, %w) : (tensor<1x64xbf16>, tensor<64x64xbf16>) -> tensor<1x64xbf16>
    %4 = call @collective.all_reduce.0(%3) : (tensor<1x64xbf16>) -> tensor<1x64xbf16>
    %5 = call @add(%2, %4) : (tensor<1x64xbf16>, tensor<1x64xbf16>) -> tensor<1x64xbf16>
    return %5 : tensor<1x64xbf16>
  }
  func.func private @collective.all_reduce.0(tensor<1x64xbf16>) -> tensor<1x64xbf16> attributes {topo.collective = {axes = ["x"], combiner = "add", dim = 0 : i64, kind = "all_reduce", source = 0 : i64}}
  func.func private @product(%x: tensor<1x64xbf16>, %w: tensor<64x64xbf16>) -> tensor<1x64xbf16> attributes {topo.kernel = {family = "gemm"}} {
    %z = arith.constant 0.0 : f32
    %e = tensor.empty() : tensor<1x64xf32>
    %f = linalg.fill ins(%z : f32) outs(%e : tensor<1x64xf32>) -> tensor<1x64xf32>
    %p = linalg.contract indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d2)>, affine_map<(d0, d1, d2) -> (d1, d2)>, affine_map<(d0, d1, d2) -> (d0, d1)>] ins(%x, %w : tensor<1x64xbf16>, tensor<64x64xbf16>) outs(%f : tensor<1x64xf32>) -> tensor<1x64xf32>
    %d = "topo.demote"(%p) : (tensor<1x64xf32>) -> tensor<1x64xbf16>
    return %d : tensor<1x64xbf16>
  }
  func.func private @add(%a: tensor<1x64xbf16>, %b: tensor<1x64xbf16>) -> tensor<1x64xbf16> attributes {topo.kernel = {family = "loops", rows = array<i64: 1, 64>, cols = array<i64>, full_shape = array<i64: 1, 64>, full_map = #map}} {
    %e = tensor.empty() : tensor<1x64xbf16>
    %s = linalg.generic {indexing_maps = [#map, #map, #map], iterator_types = ["parallel", "parallel"]} ins(%a, %b : tensor<1x64xbf16>, tensor<1x64xbf16>) outs(%e : tensor<1x64xbf16>) {
    ^bb0(%x: bf16, %y: bf16, %o: bf16):
      %t = arith.addf %x, %y : bf16
      linalg.yield %t : bf16
    } -> tensor<1x64xbf16>
    return %s : tensor<1x64xbf16>
  }
}

// -----

// A sum of one number.
// CHECK-LABEL: func.func @scalar
// CHECK-NEXT:    call @{{k_loops_[0-9a-f]+}}(%arg0)

module {
  shard.grid @mesh(shape = 2) {topo.axes = ["x"], topo.devices = ["gpu0", "gpu1"]}
  func.func @scalar(%x: tensor<f32>) -> tensor<f32> attributes {topo.function = "main"} {
    %1 = call @collective.all_reduce.0(%x) : (tensor<f32>) -> tensor<f32>
    return %1 : tensor<f32>
  }
  func.func private @collective.all_reduce.0(tensor<f32>) -> tensor<f32> attributes {topo.collective = {axes = ["x"], combiner = "add", dim = 0 : i64, kind = "all_reduce", source = 0 : i64}}
}
