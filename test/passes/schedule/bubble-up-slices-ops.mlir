// Attention for some of its rows and heads, and the other ops that can be computed for a box of their result.

// RUN: topo-opt %s -p 'topo-bubble-up-slices' --verify-each=numeric --split-input-file | filecheck %s

// The last row of causal attention sees every key: no bound is left. Keys and values stay whole.

// CHECK-LABEL: func.func @last_row
// CHECK:         %[[Q:.*]] = tensor.extract_slice %arg0[0, 0, 5, 0] [1, 4, 1, 8] [1, 1, 1, 1]
// CHECK-NEXT:    %[[A:.*]] = "topo.attention"(%[[Q]], %arg1, %arg1) {causal = false, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>, scale = 1.000000e+00 : f64}
// CHECK-NEXT:    return %[[A]] : tensor<1x4x1x8xf32>
func.func @last_row(%q: tensor<1x4x6x8xf32>, %k: tensor<1x2x6x8xf32>) -> tensor<1x4x1x8xf32> {
  %a = "topo.attention"(%q, %k, %k) {scale = 1.0 : f64, causal = true, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<1x4x6x8xf32>, tensor<1x2x6x8xf32>, tensor<1x2x6x8xf32>) -> tensor<1x4x6x8xf32>
  %s = tensor.extract_slice %a[0, 0, 5, 0] [1, 4, 1, 8] [1, 1, 1, 1] : tensor<1x4x6x8xf32> to tensor<1x4x1x8xf32>
  return %s : tensor<1x4x1x8xf32>
}

// -----

// The first rows keep their order; rows in the middle see what stands before them as a bound.

// CHECK: #[[MIDDLE:.*]] = affine_map<(d0, d1) -> (d0 + 4)>
// CHECK-LABEL: func.func @other_rows
// CHECK:         "topo.attention"(%{{.*}}) {causal = true, operandSegmentSizes
// CHECK:         "topo.attention"(%{{.*}}) {causal = false, high = #[[MIDDLE]], operandSegmentSizes
func.func @other_rows(%q: tensor<1x4x6x8xf32>, %k: tensor<1x2x6x8xf32>) -> (tensor<1x4x2x8xf32>, tensor<1x4x2x8xf32>) {
  %a = "topo.attention"(%q, %k, %k) {scale = 1.0 : f64, causal = true, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<1x4x6x8xf32>, tensor<1x2x6x8xf32>, tensor<1x2x6x8xf32>) -> tensor<1x4x6x8xf32>
  %s = tensor.extract_slice %a[0, 0, 0, 0] [1, 4, 2, 8] [1, 1, 1, 1] : tensor<1x4x6x8xf32> to tensor<1x4x2x8xf32>
  %b = "topo.attention"(%q, %k, %k) {scale = 2.0 : f64, causal = true, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<1x4x6x8xf32>, tensor<1x2x6x8xf32>, tensor<1x2x6x8xf32>) -> tensor<1x4x6x8xf32>
  %t = tensor.extract_slice %b[0, 0, 3, 0] [1, 4, 2, 8] [1, 1, 1, 1] : tensor<1x4x6x8xf32> to tensor<1x4x2x8xf32>
  return %s, %t : tensor<1x4x2x8xf32>, tensor<1x4x2x8xf32>
}

// -----

// Positions and masks are cut with the rows; a window's bound that no key is beyond goes.

// CHECK-DAG: #[[LOW:.*]] = affine_map<(d0, d1) -> (3)>
// CHECK-DAG: #[[HIGH:.*]] = affine_map<(d0, d1) -> (d1 + 1)>
// CHECK-LABEL: func.func @bounds
// CHECK-DAG:     %[[M:.*]] = tensor.extract_slice %arg2[1, 0, 5, 0] [1, 1, 1, 6] [1, 1, 1, 1]
// CHECK-DAG:     %[[P:.*]] = tensor.extract_slice %arg3[0, 5] [1, 1] [1, 1]
// CHECK:         "topo.attention"(%{{.*}}, %{{.*}}, %{{.*}}, %[[M]], %[[P]]) {causal = false, high = #[[HIGH]], low = #[[LOW]], operandSegmentSizes = array<i32: 1, 1, 1, 1, 1>
// CHECK-SAME:      (tensor<1x4x1x8xf32>, tensor<1x2x6x8xf32>, tensor<1x2x6x8xf32>, tensor<1x1x1x6xf32>, tensor<1x1xi64>) -> tensor<1x4x1x8xf32>
#window = affine_map<(m, p) -> (m - 2)>
#before = affine_map<(m, p) -> (m + 1, p + 1)>
func.func @bounds(%q: tensor<2x4x6x8xf32>, %k: tensor<2x2x6x8xf32>, %mask: tensor<2x1x6x6xf32>, %places: tensor<1x6xi64>) -> tensor<1x4x1x8xf32> {
  %a = "topo.attention"(%q, %k, %k, %mask, %places) {scale = 1.0 : f64, causal = false, low = #window, high = #before, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1>} : (tensor<2x4x6x8xf32>, tensor<2x2x6x8xf32>, tensor<2x2x6x8xf32>, tensor<2x1x6x6xf32>, tensor<1x6xi64>) -> tensor<2x4x6x8xf32>
  %s = tensor.extract_slice %a[1, 0, 5, 0] [1, 4, 1, 8] [1, 1, 1, 1] : tensor<2x4x6x8xf32> to tensor<1x4x1x8xf32>
  return %s : tensor<1x4x1x8xf32>
}

// -----

// Heads by whole groups or within one; heads of two groups that are not whole, and parts of a head, stay.

// CHECK-LABEL: func.func @heads
// CHECK:         (tensor<1x2x3x8xf32>, tensor<1x1x3x8xf32>, tensor<1x1x3x8xf32>) -> tensor<1x2x3x8xf32>
// CHECK:         (tensor<1x1x3x8xf32>, tensor<1x1x3x8xf32>, tensor<1x1x3x8xf32>) -> tensor<1x1x3x8xf32>
// CHECK:         -> tensor<1x4x3x8xf32>
// CHECK:         -> tensor<1x4x3x8xf32>
// CHECK:         return
func.func @heads(%q: tensor<1x4x3x8xf32>, %k: tensor<1x2x3x8xf32>) -> (tensor<1x2x3x8xf32>, tensor<1x1x3x8xf32>, tensor<1x2x3x8xf32>, tensor<1x4x3x4xf32>) {
  %a = "topo.attention"(%q, %k, %k) {scale = 1.0 : f64, causal = false, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<1x4x3x8xf32>, tensor<1x2x3x8xf32>, tensor<1x2x3x8xf32>) -> tensor<1x4x3x8xf32>
  %s = tensor.extract_slice %a[0, 2, 0, 0] [1, 2, 3, 8] [1, 1, 1, 1] : tensor<1x4x3x8xf32> to tensor<1x2x3x8xf32>
  %b = "topo.attention"(%q, %k, %k) {scale = 2.0 : f64, causal = false, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<1x4x3x8xf32>, tensor<1x2x3x8xf32>, tensor<1x2x3x8xf32>) -> tensor<1x4x3x8xf32>
  %t = tensor.extract_slice %b[0, 3, 0, 0] [1, 1, 3, 8] [1, 1, 1, 1] : tensor<1x4x3x8xf32> to tensor<1x1x3x8xf32>
  %c = "topo.attention"(%q, %k, %k) {scale = 3.0 : f64, causal = false, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<1x4x3x8xf32>, tensor<1x2x3x8xf32>, tensor<1x2x3x8xf32>) -> tensor<1x4x3x8xf32>
  %u = tensor.extract_slice %c[0, 1, 0, 0] [1, 2, 3, 8] [1, 1, 1, 1] : tensor<1x4x3x8xf32> to tensor<1x2x3x8xf32>
  %d = "topo.attention"(%q, %k, %k) {scale = 4.0 : f64, causal = false, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<1x4x3x8xf32>, tensor<1x2x3x8xf32>, tensor<1x2x3x8xf32>) -> tensor<1x4x3x8xf32>
  %v = tensor.extract_slice %d[0, 0, 0, 0] [1, 4, 3, 4] [1, 1, 1, 1] : tensor<1x4x3x8xf32> to tensor<1x4x3x4xf32>
  return %s, %t, %u, %v : tensor<1x2x3x8xf32>, tensor<1x1x3x8xf32>, tensor<1x2x3x8xf32>, tensor<1x4x3x4xf32>
}

// -----

// Reshapes are passed where the elements are a box on the other side too: heads of a row are columns of it.

// CHECK-LABEL: func.func @reshapes
// CHECK:         %[[D:.*]] = "topo.demote"(%{{.*}}) : (tensor<1x4xf32>) -> tensor<1x4xbf16>
// CHECK-NEXT:    %[[E:.*]] = tensor.expand_shape %[[D]] {{\[\[}}0], [1, 2]] output_shape [1, 1, 4]
// CHECK-NEXT:    return %[[E]]
func.func @reshapes(%x: tensor<3x8xf32>) -> tensor<1x1x4xbf16> {
  %d = "topo.demote"(%x) : (tensor<3x8xf32>) -> tensor<3x8xbf16>
  %e = tensor.expand_shape %d [[0], [1, 2]] output_shape [3, 2, 4] : tensor<3x8xbf16> into tensor<3x2x4xbf16>
  %s = tensor.extract_slice %e[2, 1, 0] [1, 1, 4] [1, 1, 1] : tensor<3x2x4xbf16> to tensor<1x1x4xbf16>
  return %s : tensor<1x1x4xbf16>
}

// CHECK-LABEL: func.func @flattened
// CHECK:         %[[D:.*]] = "topo.demote"(%{{.*}}) : (tensor<1x2x4xf32>) -> tensor<1x2x4xbf16>
// CHECK-NEXT:    %[[C:.*]] = tensor.collapse_shape %[[D]]
// CHECK-NEXT:    return %[[C]] : tensor<2x4xbf16>
func.func @flattened(%x: tensor<3x4x4xf32>) -> tensor<2x4xbf16> {
  %d = "topo.demote"(%x) : (tensor<3x4x4xf32>) -> tensor<3x4x4xbf16>
  %c = tensor.collapse_shape %d [[0, 1], [2]] : tensor<3x4x4xbf16> into tensor<12x4xbf16>
  %s = tensor.extract_slice %c[5, 0] [2, 4] [1, 1] : tensor<12x4xbf16> to tensor<2x4xbf16>
  return %s : tensor<2x4xbf16>
}

// CHECK-LABEL: func.func @across
// CHECK:         "topo.demote"(%{{.*}}) : (tensor<3x4x4xf32>)
// CHECK:         tensor.collapse_shape
// CHECK:         tensor.extract_slice
func.func @across(%x: tensor<3x4x4xf32>) -> tensor<2x4xbf16> {
  %d = "topo.demote"(%x) : (tensor<3x4x4xf32>) -> tensor<3x4x4xbf16>
  %c = tensor.collapse_shape %d [[0, 1], [2]] : tensor<3x4x4xbf16> into tensor<12x4xbf16>
  %s = tensor.extract_slice %c[3, 0] [2, 4] [1, 1] : tensor<12x4xbf16> to tensor<2x4xbf16>
  return %s : tensor<2x4xbf16>
}

// -----

// Of parts that are put together only those remain that are read; a slice of a slice is one.

// CHECK-LABEL: func.func @parts
// CHECK:         %[[A:.*]] = "topo.demote"(%{{.*}}) : (tensor<1x4xf32>)
// CHECK:         %[[B:.*]] = "topo.demote"(%{{.*}}) : (tensor<1x4xf32>)
// CHECK:         %[[C:.*]] = tensor.concat dim(0) %[[A]], %[[B]] : (tensor<1x4xbf16>, tensor<1x4xbf16>) -> tensor<2x4xbf16>
// CHECK:         return %[[C]], %[[B]]
func.func @parts(%x: tensor<2x4xf32>, %y: tensor<1x4xf32>, %z: tensor<3x4xf32>) -> (tensor<2x4xbf16>, tensor<1x4xbf16>) {
  %a = "topo.demote"(%x) : (tensor<2x4xf32>) -> tensor<2x4xbf16>
  %b = "topo.demote"(%y) : (tensor<1x4xf32>) -> tensor<1x4xbf16>
  %c = "topo.demote"(%z) : (tensor<3x4xf32>) -> tensor<3x4xbf16>
  %s = tensor.concat dim(0) %a, %b, %c : (tensor<2x4xbf16>, tensor<1x4xbf16>, tensor<3x4xbf16>) -> tensor<6x4xbf16>
  %t = tensor.extract_slice %s[0, 0] [3, 4] [1, 1] : tensor<6x4xbf16> to tensor<3x4xbf16>
  %u = tensor.extract_slice %t[1, 0] [2, 4] [1, 1] : tensor<3x4xbf16> to tensor<2x4xbf16>
  %v = tensor.concat dim(0) %b, %c : (tensor<1x4xbf16>, tensor<3x4xbf16>) -> tensor<4x4xbf16>
  %w = tensor.extract_slice %v[0, 0] [1, 4] [1, 1] : tensor<4x4xbf16> to tensor<1x4xbf16>
  return %u, %w : tensor<2x4xbf16>, tensor<1x4xbf16>
}

// CHECK-LABEL: func.func @inserted
// CHECK-DAG:     %[[D:.*]] = tensor.extract_slice %arg0[1, 0] [2, 4] [1, 1]
// CHECK-DAG:     %[[S:.*]] = tensor.extract_slice %arg1[0, 0] [1, 2] [1, 1]
// CHECK:         %[[I:.*]] = tensor.insert_slice %[[S]] into %[[D]][1, 1] [1, 2] [1, 1] : tensor<1x2xf32> into tensor<2x4xf32>
// CHECK-NOT:     insert_slice
// CHECK:         %[[O:.*]] = tensor.extract_slice %arg0[0, 0] [1, 4] [1, 1]
// CHECK-NOT:     insert_slice
// CHECK:         %[[N:.*]] = tensor.extract_slice %arg1[1, 0] [1, 1] [1, 1]
// CHECK:         return %[[I]], %[[O]], %[[N]]
func.func @inserted(%x: tensor<5x4xf32>, %y: tensor<2x2xf32>) -> (tensor<2x4xf32>, tensor<1x4xf32>, tensor<1x1xf32>) {
  %i = tensor.insert_slice %y into %x[2, 1] [2, 2] [1, 1] : tensor<2x2xf32> into tensor<5x4xf32>
  %s = tensor.extract_slice %i[1, 0] [2, 4] [1, 1] : tensor<5x4xf32> to tensor<2x4xf32>
  %j = tensor.insert_slice %y into %x[2, 1] [2, 2] [1, 1] : tensor<2x2xf32> into tensor<5x4xf32>
  %t = tensor.extract_slice %j[0, 0] [1, 4] [1, 1] : tensor<5x4xf32> to tensor<1x4xf32>
  %k = tensor.insert_slice %y into %x[2, 1] [2, 2] [1, 1] : tensor<2x2xf32> into tensor<5x4xf32>
  %u = tensor.extract_slice %k[3, 1] [1, 1] [1, 1] : tensor<5x4xf32> to tensor<1x1xf32>
  return %s, %t, %u : tensor<2x4xf32>, tensor<1x4xf32>, tensor<1x1xf32>
}

// CHECK-LABEL: func.func @padded
// CHECK:         %[[S:.*]] = tensor.extract_slice %arg0[0, 1] [1, 3] [1, 1]
// CHECK:         tensor.pad %[[S]] low[1, 0] high[0, 1]
// CHECK:         } : tensor<1x3xf32> to tensor<2x4xf32>
// CHECK:         %[[T:.*]] = tensor.extract_slice %arg0[1, 0] [1, 4] [1, 1]
// CHECK:         return %{{.*}}, %[[T]]
func.func @padded(%x: tensor<4x4xf32>) -> (tensor<2x4xf32>, tensor<1x4xf32>) {
  %c = arith.constant 1.0 : f32
  %p = tensor.pad %x low[1, 0] high[2, 3] {
  ^bb0(%i: index, %j: index):
    tensor.yield %c : f32
  } : tensor<4x4xf32> to tensor<7x7xf32>
  %s = tensor.extract_slice %p[0, 1] [2, 4] [1, 1] : tensor<7x7xf32> to tensor<2x4xf32>
  %q = tensor.pad %x low[1, 0] high[2, 3] {
  ^bb0(%i: index, %j: index):
    tensor.yield %c : f32
  } : tensor<4x4xf32> to tensor<7x7xf32>
  %t = tensor.extract_slice %q[2, 0] [1, 4] [1, 1] : tensor<7x7xf32> to tensor<1x4xf32>
  return %s, %t : tensor<2x4xf32>, tensor<1x4xf32>
}

// -----

// A rotation needs whole pairs, picks need whole rows, an update all its rows.

// CHECK-LABEL: func.func @whole_rows
// CHECK:         "topo.rotate_half"(%{{.*}}) {interleaved = false} : (tensor<1x8xf32>) -> tensor<1x8xf32>
// CHECK:         "topo.rotate_half"(%{{.*}}) {interleaved = false} : (tensor<4x8xf32>) -> tensor<4x8xf32>
// CHECK:         "topo.top_k"(%{{.*}}) {{.*}} : (tensor<1x8xf32>) -> (tensor<1x4xf32>, tensor<1x4xi64>)
// CHECK:         "topo.top_k"(%{{.*}}) {{.*}} : (tensor<4x8xf32>) -> (tensor<4x4xf32>, tensor<4x4xi64>)
// CHECK:         return
func.func @whole_rows(%x: tensor<4x8xf32>) -> (tensor<1x8xf32>, tensor<4x4xf32>, tensor<1x4xf32>, tensor<1x4xi64>, tensor<4x2xf32>) {
  %r = "topo.rotate_half"(%x) {interleaved = false} : (tensor<4x8xf32>) -> tensor<4x8xf32>
  %a = tensor.extract_slice %r[3, 0] [1, 8] [1, 1] : tensor<4x8xf32> to tensor<1x8xf32>
  %t = "topo.rotate_half"(%x) {interleaved = false} : (tensor<4x8xf32>) -> tensor<4x8xf32>
  %b = tensor.extract_slice %t[0, 0] [4, 4] [1, 1] : tensor<4x8xf32> to tensor<4x4xf32>
  %v, %i = "topo.top_k"(%x) {k = 4 : i64, largest = true} : (tensor<4x8xf32>) -> (tensor<4x4xf32>, tensor<4x4xi64>)
  %c = tensor.extract_slice %v[2, 0] [1, 4] [1, 1] : tensor<4x4xf32> to tensor<1x4xf32>
  %d = tensor.extract_slice %i[2, 0] [1, 4] [1, 1] : tensor<4x4xi64> to tensor<1x4xi64>
  %w, %j = "topo.top_k"(%x) {k = 4 : i64, largest = false} : (tensor<4x8xf32>) -> (tensor<4x4xf32>, tensor<4x4xi64>)
  %e = tensor.extract_slice %w[0, 0] [4, 2] [1, 1] : tensor<4x4xf32> to tensor<4x2xf32>
  return %a, %b, %c, %d, %e : tensor<1x8xf32>, tensor<4x4xf32>, tensor<1x4xf32>, tensor<1x4xi64>, tensor<4x2xf32>
}

// CHECK-LABEL: func.func @update
// CHECK:         "topo.index_update"(%{{.*}}) {dim = 1 : i64} : (tensor<1x4x3xf32>, tensor<1x1x3xf32>, tensor<1xi64>) -> tensor<1x4x3xf32>
// CHECK:         "topo.index_update"(%{{.*}}) {dim = 1 : i64} : (tensor<2x4x3xf32>, tensor<2x1x3xf32>, tensor<1xi64>) -> tensor<2x4x3xf32>
// CHECK:         "topo.index_update"(%{{.*}}) {dim = 1 : i64} : (tensor<2x4x3xf32>, tensor<2x1x3xf32>, tensor<1xi64>) -> tensor<2x4x3xf32>
// CHECK:         return
func.func @update(%x: tensor<2x4x3xf32>, %y: tensor<2x1x3xf32>) -> (tensor<1x4x3xf32>, tensor<2x1x3xf32>, tensor<2x1x3xf32>, tensor<2x4x3xf32>) {
  %at = arith.constant dense<2> : tensor<1xi64>
  %u = "topo.index_update"(%x, %y, %at) {dim = 1 : i64} : (tensor<2x4x3xf32>, tensor<2x1x3xf32>, tensor<1xi64>) -> tensor<2x4x3xf32>
  %a = tensor.extract_slice %u[1, 0, 0] [1, 4, 3] [1, 1, 1] : tensor<2x4x3xf32> to tensor<1x4x3xf32>
  %v = "topo.index_update"(%x, %y, %at) {dim = 1 : i64} : (tensor<2x4x3xf32>, tensor<2x1x3xf32>, tensor<1xi64>) -> tensor<2x4x3xf32>
  %b = tensor.extract_slice %v[0, 2, 0] [2, 1, 3] [1, 1, 1] : tensor<2x4x3xf32> to tensor<2x1x3xf32>
  %w = "topo.index_update"(%x, %y, %at) {dim = 1 : i64} : (tensor<2x4x3xf32>, tensor<2x1x3xf32>, tensor<1xi64>) -> tensor<2x4x3xf32>
  %c = tensor.extract_slice %w[0, 2, 0] [2, 1, 3] [1, 1, 1] : tensor<2x4x3xf32> to tensor<2x1x3xf32>
  return %a, %b, %c, %w : tensor<1x4x3xf32>, tensor<2x1x3xf32>, tensor<2x1x3xf32>, tensor<2x4x3xf32>
}

// CHECK-LABEL: func.func @experts
// CHECK-DAG:     %[[X:.*]] = tensor.extract_slice %arg0[4, 0] [2, 8] [1, 1]
// CHECK-DAG:     %[[G:.*]] = tensor.extract_slice %{{.*}}[4] [2] [1]
// CHECK:         "topo.grouped_product"(%[[X]], %arg1, %[[G]]) {{.*}} -> tensor<2x5xf32>
func.func @experts(%x: tensor<6x8xf32>, %w: tensor<4x8x5xf32>) -> tensor<2x5xf32> {
  %g = arith.constant dense<[0, 1, 2, 3, 0, 1]> : tensor<6xi64>
  %y = "topo.grouped_product"(%x, %w, %g) {operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<6x8xf32>, tensor<4x8x5xf32>, tensor<6xi64>) -> tensor<6x5xf32>
  %s = tensor.extract_slice %y[4, 0] [2, 5] [1, 1] : tensor<6x5xf32> to tensor<2x5xf32>
  return %s : tensor<2x5xf32>
}
