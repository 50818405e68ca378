// A mask computed from positions becomes bounds; what is left of it keeps only the dimensions it needs.

// RUN: topo-opt %s -p 'topo-raise-masks' --verify-each=numeric | filecheck %s

#full = affine_map<(b, h, m, n) -> (b, h, m, n)>

// CHECK-DAG: #[[CACHE:.*]] = affine_map<(d0, d1) -> (d0 + d1 + 1)>
// CHECK-LABEL: func.func @cache
// CHECK: %[[S:.*]] = tensor.collapse_shape %arg2
// CHECK: %[[P:.*]] = tensor.expand_shape %[[S]]
// CHECK: "topo.attention"(%arg0, %arg1, %arg1, %[[P]]) {causal = false, high = #[[CACHE]], operandSegmentSizes = array<i32: 1, 1, 1, 0, 1>
func.func @cache(%q: tensor<1x2x3x8xf32>, %k: tensor<1x2x5x8xf32>, %start: tensor<1xi64>) -> tensor<1x2x3x8xf32> {
  %c0 = arith.constant 0 : index
  %e = tensor.empty() : tensor<1x1x3x5xi1>
  %mask = linalg.generic {indexing_maps = [#full], iterator_types = ["parallel", "parallel", "parallel", "parallel"]}
      outs(%e : tensor<1x1x3x5xi1>) {
  ^bb0(%o: i1):
    %m = linalg.index 2 : index
    %n = linalg.index 3 : index
    %mi = arith.index_cast %m : index to i64
    %ni = arith.index_cast %n : index to i64
    %s = tensor.extract %start[%c0] : tensor<1xi64>
    %p = arith.addi %mi, %s : i64
    %c = arith.cmpi sle, %ni, %p : i64
    linalg.yield %c : i1
  } -> tensor<1x1x3x5xi1>
  %0 = "topo.attention"(%q, %k, %k, %mask) {scale = 1.0 : f64, causal = false, operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>} : (tensor<1x2x3x8xf32>, tensor<1x2x5x8xf32>, tensor<1x2x5x8xf32>, tensor<1x1x3x5xi1>) -> tensor<1x2x3x8xf32>
  return %0 : tensor<1x2x3x8xf32>
}

// CHECK-LABEL: func.func @causal_and_padding
// CHECK: %[[M:.*]] = linalg.generic
// CHECK: -> tensor<2x1x1x3xi1>
// CHECK: "topo.attention"(%arg0, %arg0, %arg0, %[[M]]) {causal = true, operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>
func.func @causal_and_padding(%q: tensor<2x2x3x8xf32>, %keep: tensor<2x3xi1>) -> tensor<2x2x3x8xf32> {
  %e = tensor.empty() : tensor<2x1x3x3xi1>
  %mask = linalg.generic {indexing_maps = [#full], iterator_types = ["parallel", "parallel", "parallel", "parallel"]}
      outs(%e : tensor<2x1x3x3xi1>) {
  ^bb0(%o: i1):
    %b = linalg.index 0 : index
    %m = linalg.index 2 : index
    %n = linalg.index 3 : index
    %mi = arith.index_cast %m : index to i64
    %ni = arith.index_cast %n : index to i64
    %order = arith.cmpi sge, %mi, %ni : i64
    %k = tensor.extract %keep[%b, %n] : tensor<2x3xi1>
    %c = arith.andi %order, %k : i1
    linalg.yield %c : i1
  } -> tensor<2x1x3x3xi1>
  %0 = "topo.attention"(%q, %q, %q, %mask) {scale = 1.0 : f64, causal = false, operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>} : (tensor<2x2x3x8xf32>, tensor<2x2x3x8xf32>, tensor<2x2x3x8xf32>, tensor<2x1x3x3xi1>) -> tensor<2x2x3x8xf32>
  return %0 : tensor<2x2x3x8xf32>
}

// A table is data: it stays.
// CHECK-LABEL: func.func @table
// CHECK: "topo.attention"(%arg0, %arg0, %arg0, %arg1) {causal = false, operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>
func.func @table(%q: tensor<1x2x3x8xf32>, %mask: tensor<1x1x3x3xi1>) -> tensor<1x2x3x8xf32> {
  %0 = "topo.attention"(%q, %q, %q, %mask) {scale = 1.0 : f64, causal = false, operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>} : (tensor<1x2x3x8xf32>, tensor<1x2x3x8xf32>, tensor<1x2x3x8xf32>, tensor<1x1x3x3xi1>) -> tensor<1x2x3x8xf32>
  return %0 : tensor<1x2x3x8xf32>
}
