// A cheap transposed tensor is made by each of its readers; what costs more, or lies as it was, is shared.

// RUN: topo-opt %s -p topo-repeat-reads --verify-each=numeric | filecheck %s

#id = affine_map<(a, b, c) -> (a, b, c)>
#channels = affine_map<(a, b, c) -> (c)>
#moved = affine_map<(a, b, c) -> (a, c, b)>
#row = affine_map<(a, b, c) -> (a, b)>

// CHECK-LABEL: func.func @biased
// CHECK: %[[ONE:.*]] = linalg.generic {{.*}} ins(%arg0, %arg1
// CHECK: %[[MOVED:.*]] = linalg.generic {{.*}} ins(%[[ONE]]
// CHECK: %[[SUM:.*]] = linalg.generic {{.*}}"reduction"{{.*}} ins(%[[MOVED]]
// CHECK: %[[TWO:.*]] = linalg.generic {{.*}} ins(%arg0, %arg1
// CHECK: %[[AGAIN:.*]] = linalg.generic {{.*}} ins(%[[TWO]]
// CHECK: linalg.generic {{.*}} ins(%[[AGAIN]], %[[SUM]]
func.func @biased(%x: tensor<2x50x32xf32>, %b: tensor<32xf32>) -> tensor<2x32x50xf32> {
  %e = tensor.empty() : tensor<2x50x32xf32>
  %y = linalg.generic {indexing_maps = [#id, #channels, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%x, %b : tensor<2x50x32xf32>, tensor<32xf32>) outs(%e : tensor<2x50x32xf32>) {
  ^bb0(%i: f32, %j: f32, %o: f32):
    %s = arith.addf %i, %j : f32
    linalg.yield %s : f32
  } -> tensor<2x50x32xf32>
  %te = tensor.empty() : tensor<2x32x50xf32>
  %t = linalg.generic {indexing_maps = [#moved, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%y : tensor<2x50x32xf32>) outs(%te : tensor<2x32x50xf32>) {
  ^bb0(%i: f32, %o: f32):
    linalg.yield %i : f32
  } -> tensor<2x32x50xf32>
  %se = tensor.empty() : tensor<2x32xf32>
  %zero = arith.constant 0.0 : f32
  %f = linalg.fill ins(%zero : f32) outs(%se : tensor<2x32xf32>) -> tensor<2x32xf32>
  %sum = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%t : tensor<2x32x50xf32>) outs(%f : tensor<2x32xf32>) {
  ^bb0(%i: f32, %o: f32):
    %s = arith.addf %i, %o : f32
    linalg.yield %s : f32
  } -> tensor<2x32xf32>
  %r = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%t, %sum : tensor<2x32x50xf32>, tensor<2x32xf32>) outs(%te : tensor<2x32x50xf32>) {
  ^bb0(%i: f32, %j: f32, %o: f32):
    %s = arith.subf %i, %j : f32
    linalg.yield %s : f32
  } -> tensor<2x32x50xf32>
  return %r : tensor<2x32x50xf32>
}

// Two large operands are more to read than their sum; a transcendental function is more to compute.
// CHECK-LABEL: func.func @shared
// CHECK-COUNT-6: linalg.generic
// CHECK-NOT: linalg.generic
// CHECK: return
func.func @shared(%x: tensor<2x50x32xf32>, %y: tensor<2x50x32xf32>) -> (tensor<2x32x50xf32>, tensor<2x32x50xf32>, tensor<2x32x50xf32>, tensor<2x32x50xf32>) {
  %e = tensor.empty() : tensor<2x32x50xf32>
  %t = linalg.generic {indexing_maps = [#moved, #moved, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%x, %y : tensor<2x50x32xf32>, tensor<2x50x32xf32>) outs(%e : tensor<2x32x50xf32>) {
  ^bb0(%i: f32, %j: f32, %o: f32):
    %s = arith.addf %i, %j : f32
    linalg.yield %s : f32
  } -> tensor<2x32x50xf32>
  %u = linalg.generic {indexing_maps = [#moved, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%x : tensor<2x50x32xf32>) outs(%e : tensor<2x32x50xf32>) {
  ^bb0(%i: f32, %o: f32):
    %s = math.exp %i : f32
    linalg.yield %s : f32
  } -> tensor<2x32x50xf32>
  %a = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%t : tensor<2x32x50xf32>) outs(%e : tensor<2x32x50xf32>) {
  ^bb0(%i: f32, %o: f32):
    %s = arith.negf %i : f32
    linalg.yield %s : f32
  } -> tensor<2x32x50xf32>
  %b = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%t : tensor<2x32x50xf32>) outs(%e : tensor<2x32x50xf32>) {
  ^bb0(%i: f32, %o: f32):
    %s = math.absf %i : f32
    linalg.yield %s : f32
  } -> tensor<2x32x50xf32>
  %c = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%u : tensor<2x32x50xf32>) outs(%e : tensor<2x32x50xf32>) {
  ^bb0(%i: f32, %o: f32):
    %s = arith.negf %i : f32
    linalg.yield %s : f32
  } -> tensor<2x32x50xf32>
  %d = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%u : tensor<2x32x50xf32>) outs(%e : tensor<2x32x50xf32>) {
  ^bb0(%i: f32, %o: f32):
    %s = math.absf %i : f32
    linalg.yield %s : f32
  } -> tensor<2x32x50xf32>
  return %a, %b, %c, %d : tensor<2x32x50xf32>, tensor<2x32x50xf32>, tensor<2x32x50xf32>, tensor<2x32x50xf32>
}
