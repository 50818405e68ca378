// RUN: topo-opt %s --pass-pipeline='builtin.module(topo-exchange-sums{topology=h200-x2})' | filecheck %s

// What reads a sum of two devices takes it from the other one's memory, and the product that makes a part gives it away.
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
