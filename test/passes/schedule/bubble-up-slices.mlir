// What only slices of the same elements read is computed for these elements; where a slice has to stop it stays.

// RUN: topo-opt %s -p 'topo-bubble-up-slices' --verify-each=numeric --split-input-file | filecheck %s

#id = affine_map<(b, m, n) -> (b, m, n)>
#row = affine_map<(b, m, n) -> (b, m, 0)>
#col = affine_map<(b, m, n) -> (n)>
#left = affine_map<(b, m, n, k) -> (b, m, k)>
#right = affine_map<(b, m, n, k) -> (n, k)>
#out = affine_map<(b, m, n, k) -> (b, m, n)>

// A residual stream: a statistic, a norm and a product, all read at the last row in the end. The weight stays whole.

// CHECK-LABEL: func.func @residual
// CHECK:         %[[X:.*]] = tensor.extract_slice %arg0[0, 5, 0] [2, 1, 4] [1, 1, 1]
// CHECK:         %[[E:.*]] = linalg.generic {{.*}} ins(%[[X]] : tensor<2x1x4xf32>)
// CHECK:         %[[S:.*]] = linalg.generic {{.*}}"reduction"{{.*}} ins(%[[E]] : tensor<2x1x4xf32>) outs({{.*}} : tensor<2x1x1xf32>)
// CHECK:         %[[N:.*]] = linalg.generic {{.*}} ins(%[[E]], %[[S]], %arg1 : tensor<2x1x4xf32>, tensor<2x1x1xf32>, tensor<4xf32>)
// CHECK:         %[[C:.*]] = linalg.contract {{.*}} ins(%[[N]], %arg2 : tensor<2x1x4xf32>, tensor<4x4xf32>) outs({{.*}} : tensor<2x1x4xf32>)
// CHECK:         %[[R:.*]] = linalg.generic {{.*}} ins(%[[E]], %[[C]] : tensor<2x1x4xf32>, tensor<2x1x4xf32>)
// CHECK-NOT:     extract_slice
// CHECK:         return %[[R]]
func.func @residual(%x: tensor<2x6x4xf32>, %w: tensor<4xf32>, %p: tensor<4x4xf32>) -> tensor<2x1x4xf32> {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<2x6x4xf32>
  %er = tensor.empty() : tensor<2x6x1xf32>
  %h = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%x : tensor<2x6x4xf32>) outs(%e : tensor<2x6x4xf32>) {
  ^bb0(%i: f32, %o: f32):
    %r = math.exp %i : f32
    linalg.yield %r : f32
  } -> tensor<2x6x4xf32>
  %zr = linalg.fill ins(%zero : f32) outs(%er : tensor<2x6x1xf32>) -> tensor<2x6x1xf32>
  %s = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%h : tensor<2x6x4xf32>) outs(%zr : tensor<2x6x1xf32>) {
  ^bb0(%i: f32, %o: f32):
    %r = arith.addf %i, %o : f32
    linalg.yield %r : f32
  } -> tensor<2x6x1xf32>
  %n = linalg.generic {indexing_maps = [#id, #row, #col, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%h, %s, %w : tensor<2x6x4xf32>, tensor<2x6x1xf32>, tensor<4xf32>) outs(%e : tensor<2x6x4xf32>) {
  ^bb0(%i: f32, %j: f32, %k: f32, %o: f32):
    %q = arith.divf %i, %j : f32
    %r = arith.mulf %q, %k : f32
    linalg.yield %r : f32
  } -> tensor<2x6x4xf32>
  %z = linalg.fill ins(%zero : f32) outs(%e : tensor<2x6x4xf32>) -> tensor<2x6x4xf32>
  %c = linalg.contract indexing_maps = [#left, #right, #out]
      ins(%n, %p : tensor<2x6x4xf32>, tensor<4x4xf32>) outs(%z : tensor<2x6x4xf32>) -> tensor<2x6x4xf32>
  %a = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%h, %c : tensor<2x6x4xf32>, tensor<2x6x4xf32>) outs(%e : tensor<2x6x4xf32>) {
  ^bb0(%i: f32, %j: f32, %o: f32):
    %r = arith.addf %i, %j : f32
    linalg.yield %r : f32
  } -> tensor<2x6x4xf32>
  %l = tensor.extract_slice %a[0, 5, 0] [2, 1, 4] [1, 1, 1] : tensor<2x6x4xf32> to tensor<2x1x4xf32>
  return %l : tensor<2x1x4xf32>
}

// -----

#left = affine_map<(m, n, k) -> (m, k)>
#right = affine_map<(m, n, k) -> (n, k)>
#out = affine_map<(m, n, k) -> (m, n)>

// A slice of columns is one of the weight's rows; the init is filled in the new shape, though its fill has other readers.

// CHECK-LABEL: func.func @columns
// CHECK-DAG:     %[[W:.*]] = tensor.extract_slice %arg1[2, 0] [2, 4] [1, 1] : tensor<8x4xf32> to tensor<2x4xf32>
// CHECK-DAG:     %[[I:.*]] = linalg.fill {{.*}} -> tensor<3x2xf32>
// CHECK:         %[[C:.*]] = linalg.contract {{.*}} ins(%arg0, %[[W]] : tensor<3x4xf32>, tensor<2x4xf32>) outs(%[[I]] :
// CHECK:         %[[D:.*]] = "topo.demote"(%[[C]]) : (tensor<3x2xf32>) -> tensor<3x2xbf16>
// CHECK:         linalg.contract {{.*}} -> tensor<3x8xf32>
// CHECK:         return %[[D]]
func.func @columns(%x: tensor<3x4xf32>, %w: tensor<8x4xf32>, %v: tensor<8x4xf32>) -> (tensor<3x2xbf16>, tensor<3x8xf32>) {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<3x8xf32>
  %z = linalg.fill ins(%zero : f32) outs(%e : tensor<3x8xf32>) -> tensor<3x8xf32>
  %c = linalg.contract indexing_maps = [#left, #right, #out]
      ins(%x, %w : tensor<3x4xf32>, tensor<8x4xf32>) outs(%z : tensor<3x8xf32>) -> tensor<3x8xf32>
  %d = "topo.demote"(%c) : (tensor<3x8xf32>) -> tensor<3x8xbf16>
  %s = tensor.extract_slice %d[0, 2] [3, 2] [1, 1] : tensor<3x8xbf16> to tensor<3x2xbf16>
  %f = linalg.contract indexing_maps = [#left, #right, #out]
      ins(%x, %v : tensor<3x4xf32>, tensor<8x4xf32>) outs(%z : tensor<3x8xf32>) -> tensor<3x8xf32>
  return %s, %f : tensor<3x2xbf16>, tensor<3x8xf32>
}

// -----

#id = affine_map<(m, n) -> (m, n)>

// Two slices of the same elements are one; a row that was dropped from the shape is dropped behind the ops.

// CHECK-LABEL: func.func @same_twice
// CHECK-NEXT:    %[[S:.*]] = tensor.extract_slice %arg0[3, 0] [1, 4] [1, 1]
// CHECK-NEXT:    tensor.empty() : tensor<1x4xf32>
// CHECK-NEXT:    %[[E:.*]] = linalg.generic {{.*}} ins(%[[S]]
// CHECK:         %[[C:.*]] = tensor.collapse_shape %[[E]]
// CHECK:         return %[[E]], %[[C]]
func.func @same_twice(%x: tensor<4x4xf32>) -> (tensor<1x4xf32>, tensor<4xf32>) {
  %e = tensor.empty() : tensor<4x4xf32>
  %h = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<4x4xf32>) outs(%e : tensor<4x4xf32>) {
  ^bb0(%i: f32, %o: f32):
    %r = math.exp %i : f32
    linalg.yield %r : f32
  } -> tensor<4x4xf32>
  %a = tensor.extract_slice %h[3, 0] [1, 4] [1, 1] : tensor<4x4xf32> to tensor<1x4xf32>
  %b = tensor.extract_slice %h[3, 0] [1, 4] [1, 1] : tensor<4x4xf32> to tensor<4xf32>
  return %a, %b : tensor<1x4xf32>, tensor<4xf32>
}

// Different rows, every other row, more than half of the rows, all of them besides: the op stays whole.

// CHECK-LABEL: func.func @stays
// CHECK-COUNT-4: linalg.generic {{.*}} outs({{.*}} : tensor<4x4xf32>)
// CHECK-NOT:     linalg.generic
// CHECK:         return
func.func @stays(%x: tensor<4x4xf32>)
    -> (tensor<1x4xf32>, tensor<1x4xf32>, tensor<2x4xf32>, tensor<3x4xf32>, tensor<1x4xf32>, tensor<4x4xf32>) {
  %e = tensor.empty() : tensor<4x4xf32>
  %h0 = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<4x4xf32>) outs(%e : tensor<4x4xf32>) {
  ^bb0(%i: f32, %o: f32):
    %r = math.exp %i : f32
    linalg.yield %r : f32
  } -> tensor<4x4xf32>
  %a = tensor.extract_slice %h0[3, 0] [1, 4] [1, 1] : tensor<4x4xf32> to tensor<1x4xf32>
  %b = tensor.extract_slice %h0[2, 0] [1, 4] [1, 1] : tensor<4x4xf32> to tensor<1x4xf32>
  %h1 = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<4x4xf32>) outs(%e : tensor<4x4xf32>) {
  ^bb0(%i: f32, %o: f32):
    %r = math.tanh %i : f32
    linalg.yield %r : f32
  } -> tensor<4x4xf32>
  %c = tensor.extract_slice %h1[0, 0] [2, 4] [2, 1] : tensor<4x4xf32> to tensor<2x4xf32>
  %h2 = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<4x4xf32>) outs(%e : tensor<4x4xf32>) {
  ^bb0(%i: f32, %o: f32):
    %r = math.sin %i : f32
    linalg.yield %r : f32
  } -> tensor<4x4xf32>
  %d = tensor.extract_slice %h2[1, 0] [3, 4] [1, 1] : tensor<4x4xf32> to tensor<3x4xf32>
  %h3 = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<4x4xf32>) outs(%e : tensor<4x4xf32>) {
  ^bb0(%i: f32, %o: f32):
    %r = math.cos %i : f32
    linalg.yield %r : f32
  } -> tensor<4x4xf32>
  %f = tensor.extract_slice %h3[1, 0] [1, 4] [1, 1] : tensor<4x4xf32> to tensor<1x4xf32>
  return %a, %b, %c, %d, %f, %h3 : tensor<1x4xf32>, tensor<1x4xf32>, tensor<2x4xf32>, tensor<3x4xf32>, tensor<1x4xf32>, tensor<4x4xf32>
}

// Nothing is computed above a slice of an argument, reshaped or not.

// CHECK-LABEL: func.func @of_arguments
// CHECK-NEXT:    %[[E:.*]] = tensor.expand_shape %arg0
// CHECK-NEXT:    %[[A:.*]] = tensor.extract_slice %[[E]]
// CHECK-NEXT:    %[[B:.*]] = tensor.extract_slice %arg0
// CHECK-NEXT:    return %[[A]], %[[B]]
func.func @of_arguments(%x: tensor<8x4xf32>) -> (tensor<1x4x4xf32>, tensor<2x4xf32>) {
  %e = tensor.expand_shape %x [[0, 1], [2]] output_shape [2, 4, 4] : tensor<8x4xf32> into tensor<2x4x4xf32>
  %a = tensor.extract_slice %e[1, 0, 0] [1, 4, 4] [1, 1, 1] : tensor<2x4x4xf32> to tensor<1x4x4xf32>
  %b = tensor.extract_slice %x[2, 0] [2, 4] [1, 1] : tensor<8x4xf32> to tensor<2x4xf32>
  return %a, %b : tensor<1x4x4xf32>, tensor<2x4xf32>
}

// -----

#id = affine_map<(m, n) -> (m, n)>
#turned = affine_map<(m, n) -> (n, m)>
#shifted = affine_map<(m, n, w) -> (m + w, n)>
#window = affine_map<(m, n, w) -> (w)>
#kept = affine_map<(m, n, w) -> (m, n)>
#first = affine_map<(m, n) -> (0, n)>
#flip = affine_map<(m, n) -> (5 - m, n)>

// Permutations, flips, windows, broadcasts and places: each operand is cut where the loops read it.

// CHECK-DAG: #[[FLIP:.*]] = affine_map<(d0, d1) -> (-d0 + 1, d1)>
// CHECK-LABEL: func.func @maps
// CHECK:         %[[T:.*]] = tensor.extract_slice %arg0[0, 0] [4, 4] [1, 1] : tensor<4x8xf32> to tensor<4x4xf32>
// CHECK:         %[[A:.*]] = linalg.generic {{.*}} ins(%[[T]] : tensor<4x4xf32>) outs({{.*}} : tensor<4x4xf32>)
// CHECK:         %[[W:.*]] = linalg.generic {{.*}}"reduction"{{.*}} ins(%[[A]], %arg1 : tensor<4x4xf32>, tensor<3xf32>) outs({{.*}} : tensor<2x4xf32>)
// CHECK:         %[[F:.*]] = linalg.generic {indexing_maps = [#[[FLIP]], {{.*}} ins(%[[W]] : tensor<2x4xf32>) outs({{.*}} : tensor<2x4xf32>)
// CHECK:         %[[P:.*]] = linalg.generic {{.*}} ins(%[[F]], %arg2 : tensor<2x4xf32>, tensor<1x4xf32>)
// CHECK:           %[[I:.*]] = linalg.index 0
// CHECK-NEXT:      %[[C:.*]] = arith.constant 4 : index
// CHECK-NEXT:      %[[J:.*]] = arith.addi %[[I]], %[[C]] : index
// CHECK-NEXT:      arith.index_cast %[[J]]
// CHECK:         return %[[P]]
func.func @maps(%x: tensor<4x8xf32>, %w: tensor<3xf32>, %b: tensor<1x4xf32>) -> tensor<2x4xf32> {
  %zero = arith.constant 0.0 : f32
  %e8 = tensor.empty() : tensor<8x4xf32>
  %e6 = tensor.empty() : tensor<6x4xf32>
  %t = linalg.generic {indexing_maps = [#turned, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<4x8xf32>) outs(%e8 : tensor<8x4xf32>) {
  ^bb0(%i: f32, %o: f32):
    %r = math.sin %i : f32
    linalg.yield %r : f32
  } -> tensor<8x4xf32>
  %z = linalg.fill ins(%zero : f32) outs(%e6 : tensor<6x4xf32>) -> tensor<6x4xf32>
  %c = linalg.generic {indexing_maps = [#shifted, #window, #kept], iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%t, %w : tensor<8x4xf32>, tensor<3xf32>) outs(%z : tensor<6x4xf32>) {
  ^bb0(%i: f32, %j: f32, %o: f32):
    %m = arith.mulf %i, %j : f32
    %r = arith.addf %m, %o : f32
    linalg.yield %r : f32
  } -> tensor<6x4xf32>
  %f = linalg.generic {indexing_maps = [#flip, #id], iterator_types = ["parallel", "parallel"]}
      ins(%c : tensor<6x4xf32>) outs(%e6 : tensor<6x4xf32>) {
  ^bb0(%i: f32, %o: f32):
    linalg.yield %i : f32
  } -> tensor<6x4xf32>
  %p = linalg.generic {indexing_maps = [#id, #first, #id], iterator_types = ["parallel", "parallel"]}
      ins(%f, %b : tensor<6x4xf32>, tensor<1x4xf32>) outs(%e6 : tensor<6x4xf32>) {
  ^bb0(%i: f32, %j: f32, %o: f32):
    %n = linalg.index 0 : index
    %ni = arith.index_cast %n : index to i64
    %nf = arith.sitofp %ni : i64 to f32
    %s = arith.addf %i, %j : f32
    %r = arith.mulf %s, %nf : f32
    linalg.yield %r : f32
  } -> tensor<6x4xf32>
  %l = tensor.extract_slice %p[4, 0] [2, 4] [1, 1] : tensor<6x4xf32> to tensor<2x4xf32>
  return %l : tensor<2x4xf32>
}

// -----

#id = affine_map<(m, n) -> (m, n)>

// An element that must not be read is still noticed in all rows: nests that check something stay whole.

// CHECK-LABEL: func.func @checked
// CHECK:         %[[G:.*]] = linalg.generic {{.*}} outs({{.*}} : tensor<4x4xf32>)
// CHECK:         tensor.extract_slice %[[G]]
func.func @checked(%x: tensor<4x4xf32>) -> tensor<1x4xf32> {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<4x4xf32>
  %g = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<4x4xf32>) outs(%e : tensor<4x4xf32>) {
  ^bb0(%i: f32, %o: f32):
    %ok = arith.cmpf oge, %zero, %zero : f32
    cf.assert %ok, "not zero"
    %r = math.exp %i : f32
    linalg.yield %r : f32
  } -> tensor<4x4xf32>
  %l = tensor.extract_slice %g[3, 0] [1, 4] [1, 1] : tensor<4x4xf32> to tensor<1x4xf32>
  return %l : tensor<1x4xf32>
}

// Two results read at one row, and two that are read at different rows.

// CHECK-LABEL: func.func @two_results
// CHECK:         linalg.generic {{.*}} outs({{.*}} : tensor<1x4xf32>, tensor<1x4xf32>)
// CHECK:         linalg.generic {{.*}} outs({{.*}} : tensor<4x4xf32>, tensor<4x4xf32>)
// CHECK:         return
func.func @two_results(%x: tensor<4x4xf32>) -> (tensor<1x4xf32>, tensor<1x4xf32>, tensor<1x4xf32>, tensor<1x4xf32>) {
  %e = tensor.empty() : tensor<4x4xf32>
  %a:2 = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<4x4xf32>) outs(%e, %e : tensor<4x4xf32>, tensor<4x4xf32>) {
  ^bb0(%i: f32, %o: f32, %p: f32):
    %r = math.exp %i : f32
    %s = math.sin %i : f32
    linalg.yield %r, %s : f32, f32
  } -> (tensor<4x4xf32>, tensor<4x4xf32>)
  %b:2 = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<4x4xf32>) outs(%e, %e : tensor<4x4xf32>, tensor<4x4xf32>) {
  ^bb0(%i: f32, %o: f32, %p: f32):
    %r = math.tanh %i : f32
    %s = math.cos %i : f32
    linalg.yield %r, %s : f32, f32
  } -> (tensor<4x4xf32>, tensor<4x4xf32>)
  %a0 = tensor.extract_slice %a#0[3, 0] [1, 4] [1, 1] : tensor<4x4xf32> to tensor<1x4xf32>
  %a1 = tensor.extract_slice %a#1[3, 0] [1, 4] [1, 1] : tensor<4x4xf32> to tensor<1x4xf32>
  %b0 = tensor.extract_slice %b#0[3, 0] [1, 4] [1, 1] : tensor<4x4xf32> to tensor<1x4xf32>
  %b1 = tensor.extract_slice %b#1[0, 0] [1, 4] [1, 1] : tensor<4x4xf32> to tensor<1x4xf32>
  return %a0, %a1, %b0, %b1 : tensor<1x4xf32>, tensor<1x4xf32>, tensor<1x4xf32>, tensor<1x4xf32>
}
