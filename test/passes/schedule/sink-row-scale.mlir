// RUN: topo-opt %s -p topo-sink-row-scale --split-input-file | filecheck %s
// RUN: topo-opt %s -p 'topo-sink-row-scale{rows=1}' --split-input-file | filecheck %s --check-prefix=ONE

#full = affine_map<(m, k) -> (m, k)>
#row = affine_map<(m, k) -> (m, 0)>
#col = affine_map<(m, k) -> (k)>
#left = affine_map<(m, n, k) -> (m, k)>
#right = affine_map<(m, n, k) -> (n, k)>
#out = affine_map<(m, n, k) -> (m, n)>

// Two products read one norm: each gets its own statistic behind it and `x * w` as operand. Rounding in between goes.

// CHECK-LABEL: func.func @two_readers
// CHECK:         %[[S0:.*]] = linalg.generic {{.*}}"reduction"
// CHECK:         %[[P0:.*]] = linalg.generic {{.*}} ins(%arg1, %arg0 : tensor<8xbf16>, tensor<2x8xbf16>)
// CHECK-NOT:     truncf
// CHECK:         %[[D0:.*]] = "topo.demote"(%[[P0]])
// CHECK:         %[[C0:.*]] = linalg.contract {{.*}} ins(%[[D0]], %arg2
// CHECK:         linalg.generic {{.*}} ins(%[[C0]], %[[S0]]
// CHECK:         arith.mulf
// CHECK:         %[[S1:.*]] = linalg.generic {{.*}}"reduction"
// CHECK:         %[[P1:.*]] = linalg.generic {{.*}} ins(%arg1, %arg0
// CHECK:         %[[D1:.*]] = "topo.demote"(%[[P1]])
// CHECK:         %[[C1:.*]] = linalg.contract {{.*}} ins(%[[D1]], %arg3
// CHECK:         linalg.generic {{.*}} ins(%[[C1]], %[[S1]]
// CHECK-NOT:     linalg.generic
// CHECK:         return

// Too many rows for the option: nothing changes.

// ONE-LABEL:   func.func @two_readers
// ONE:           arith.truncf
// ONE:           linalg.contract
// ONE-NOT:       linalg.generic
// ONE:           linalg.contract
// ONE-NEXT:      return
func.func @two_readers(%x: tensor<2x8xbf16>, %w: tensor<8xbf16>, %a: tensor<4x8xbf16>, %b: tensor<4x8xbf16>) -> (tensor<2x4xf32>, tensor<2x4xf32>) {
  %z = arith.constant 0.0 : f32
  %er = tensor.empty() : tensor<2x1xf32>
  %zr = linalg.fill ins(%z : f32) outs(%er : tensor<2x1xf32>) -> tensor<2x1xf32>
  %s = linalg.generic {indexing_maps = [#full, #row], iterator_types = ["parallel", "reduction"]} ins(%x : tensor<2x8xbf16>) outs(%zr : tensor<2x1xf32>) {
  ^bb0(%i: bf16, %o: f32):
    %f = arith.extf %i : bf16 to f32
    %q = arith.mulf %f, %f : f32
    %r = arith.addf %q, %o : f32
    linalg.yield %r : f32
  } -> tensor<2x1xf32>
  %e = tensor.empty() : tensor<2x8xbf16>
  %n = linalg.generic {indexing_maps = [#full, #row, #full], iterator_types = ["parallel", "parallel"]} ins(%x, %s : tensor<2x8xbf16>, tensor<2x1xf32>) outs(%e : tensor<2x8xbf16>) {
  ^bb0(%i: bf16, %t: f32, %o: bf16):
    %f = arith.extf %i : bf16 to f32
    %m = arith.mulf %f, %t : f32
    %c = arith.truncf %m : f32 to bf16
    linalg.yield %c : bf16
  } -> tensor<2x8xbf16>
  %ew = tensor.empty() : tensor<2x8xf32>
  %nw = linalg.generic {indexing_maps = [#full, #col, #full], iterator_types = ["parallel", "parallel"]} ins(%n, %w : tensor<2x8xbf16>, tensor<8xbf16>) outs(%ew : tensor<2x8xf32>) {
  ^bb0(%i: bf16, %j: bf16, %o: f32):
    %f = arith.extf %i : bf16 to f32
    %g = arith.extf %j : bf16 to f32
    %m = arith.mulf %g, %f : f32
    linalg.yield %m : f32
  } -> tensor<2x8xf32>
  %d = "topo.demote"(%nw) : (tensor<2x8xf32>) -> tensor<2x8xbf16>
  %eo = tensor.empty() : tensor<2x4xf32>
  %zo = linalg.fill ins(%z : f32) outs(%eo : tensor<2x4xf32>) -> tensor<2x4xf32>
  %p = linalg.contract indexing_maps = [#left, #right, #out] ins(%d, %a : tensor<2x8xbf16>, tensor<4x8xbf16>) outs(%zo : tensor<2x4xf32>) -> tensor<2x4xf32>
  %r = linalg.contract indexing_maps = [#left, #right, #out] ins(%d, %b : tensor<2x8xbf16>, tensor<4x8xbf16>) outs(%zo : tensor<2x4xf32>) -> tensor<2x4xf32>
  return %p, %r : tensor<2x4xf32>, tensor<2x4xf32>
}

// -----

// The normalised value is wanted as such: it has to be made anyway.

#full = affine_map<(m, k) -> (m, k)>
#row = affine_map<(m, k) -> (m, 0)>
#left = affine_map<(m, n, k) -> (m, k)>
#right = affine_map<(m, n, k) -> (n, k)>
#out = affine_map<(m, n, k) -> (m, n)>

// CHECK-LABEL: func.func @other_reader
// CHECK:         %[[N:.*]] = linalg.generic {{.*}}ins(%arg0, %{{.*}} : tensor<2x8xf32>, tensor<2x1xf32>)
// CHECK:         %[[C:.*]] = linalg.contract {{.*}}ins(%[[N]], %arg1
// CHECK-NEXT:    return %[[C]], %[[N]]
func.func @other_reader(%x: tensor<2x8xf32>, %a: tensor<4x8xf32>) -> (tensor<2x4xf32>, tensor<2x8xf32>) {
  %z = arith.constant 0.0 : f32
  %er = tensor.empty() : tensor<2x1xf32>
  %zr = linalg.fill ins(%z : f32) outs(%er : tensor<2x1xf32>) -> tensor<2x1xf32>
  %s = linalg.generic {indexing_maps = [#full, #row], iterator_types = ["parallel", "reduction"]} ins(%x : tensor<2x8xf32>) outs(%zr : tensor<2x1xf32>) {
  ^bb0(%i: f32, %o: f32):
    %r = arith.addf %i, %o : f32
    linalg.yield %r : f32
  } -> tensor<2x1xf32>
  %e = tensor.empty() : tensor<2x8xf32>
  %n = linalg.generic {indexing_maps = [#full, #row, #full], iterator_types = ["parallel", "parallel"]} ins(%x, %s : tensor<2x8xf32>, tensor<2x1xf32>) outs(%e : tensor<2x8xf32>) {
  ^bb0(%i: f32, %t: f32, %o: f32):
    %m = arith.divf %i, %t : f32
    linalg.yield %m : f32
  } -> tensor<2x8xf32>
  %eo = tensor.empty() : tensor<2x4xf32>
  %zo = linalg.fill ins(%z : f32) outs(%eo : tensor<2x4xf32>) -> tensor<2x4xf32>
  %p = linalg.contract indexing_maps = [#left, #right, #out] ins(%n, %a : tensor<2x8xf32>, tensor<4x8xf32>) outs(%zo : tensor<2x4xf32>) -> tensor<2x4xf32>
  return %p, %n : tensor<2x4xf32>, tensor<2x8xf32>
}

// -----

// A division sinks as a division, through the reshape before the product; without weights the operand is `x` itself.

#full = affine_map<(b, s, k) -> (b, s, k)>
#row = affine_map<(b, s, k) -> (b, s, 0)>
#left = affine_map<(m, n, k) -> (m, k)>
#right = affine_map<(m, n, k) -> (n, k)>
#out = affine_map<(m, n, k) -> (m, n)>

// CHECK-LABEL: func.func @divides
// CHECK:         %[[S:.*]] = linalg.generic {{.*}}"reduction"
// CHECK:         %[[C:.*]] = linalg.contract
// CHECK:         linalg.generic {{.*}}ins(%[[C]], %[[S]] : tensor<4x9xf32>, tensor<2x2x1xf32>)
// CHECK:         arith.divf
func.func @divides(%x: tensor<2x2x8xf32>, %a: tensor<9x8xf32>) -> tensor<4x9xf32> {
  %z = arith.constant 0.0 : f32
  %er = tensor.empty() : tensor<2x2x1xf32>
  %zr = linalg.fill ins(%z : f32) outs(%er : tensor<2x2x1xf32>) -> tensor<2x2x1xf32>
  %s = linalg.generic {indexing_maps = [#full, #row], iterator_types = ["parallel", "parallel", "reduction"]} ins(%x : tensor<2x2x8xf32>) outs(%zr : tensor<2x2x1xf32>) {
  ^bb0(%i: f32, %o: f32):
    %r = arith.addf %i, %o : f32
    linalg.yield %r : f32
  } -> tensor<2x2x1xf32>
  %e = tensor.empty() : tensor<2x2x8xf32>
  %n = linalg.generic {indexing_maps = [#full, #row, #full], iterator_types = ["parallel", "parallel", "parallel"]} ins(%x, %s : tensor<2x2x8xf32>, tensor<2x2x1xf32>) outs(%e : tensor<2x2x8xf32>) {
  ^bb0(%i: f32, %t: f32, %o: f32):
    %m = arith.divf %i, %t : f32
    linalg.yield %m : f32
  } -> tensor<2x2x8xf32>
  %c = tensor.collapse_shape %n [[0, 1], [2]] : tensor<2x2x8xf32> into tensor<4x8xf32>
  %eo = tensor.empty() : tensor<4x9xf32>
  %zo = linalg.fill ins(%z : f32) outs(%eo : tensor<4x9xf32>) -> tensor<4x9xf32>
  %p = linalg.contract indexing_maps = [#left, #right, #out] ins(%c, %a : tensor<4x8xf32>, tensor<9x8xf32>) outs(%zo : tensor<4x9xf32>) -> tensor<4x9xf32>
  return %p : tensor<4x9xf32>
}

// -----

// In f16 `x * w` may leave the range of the type where the normalised product does not.

#full = affine_map<(m, k) -> (m, k)>
#row = affine_map<(m, k) -> (m, 0)>
#col = affine_map<(m, k) -> (k)>
#left = affine_map<(m, n, k) -> (m, k)>
#right = affine_map<(m, n, k) -> (n, k)>
#out = affine_map<(m, n, k) -> (m, n)>

// CHECK-LABEL: func.func @half
// CHECK:         %[[C:.*]] = linalg.contract
// CHECK-NEXT:    return %[[C]]
func.func @half(%x: tensor<2x8xf16>, %s: tensor<2x1xf32>, %w: tensor<8xf16>, %a: tensor<4x8xf16>) -> tensor<2x4xf32> {
  %z = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<2x8xf16>
  %n = linalg.generic {indexing_maps = [#full, #row, #col, #full], iterator_types = ["parallel", "parallel"]} ins(%x, %s, %w : tensor<2x8xf16>, tensor<2x1xf32>, tensor<8xf16>) outs(%e : tensor<2x8xf16>) {
  ^bb0(%i: f16, %t: f32, %j: f16, %o: f16):
    %f = arith.extf %i : f16 to f32
    %g = arith.extf %j : f16 to f32
    %m = arith.mulf %f, %t : f32
    %q = arith.mulf %m, %g : f32
    %c = arith.truncf %q : f32 to f16
    linalg.yield %c : f16
  } -> tensor<2x8xf16>
  %eo = tensor.empty() : tensor<2x4xf32>
  %zo = linalg.fill ins(%z : f32) outs(%eo : tensor<2x4xf32>) -> tensor<2x4xf32>
  %p = linalg.contract indexing_maps = [#left, #right, #out] ins(%n, %a : tensor<2x8xf16>, tensor<4x8xf16>) outs(%zo : tensor<2x4xf32>) -> tensor<2x4xf32>
  return %p : tensor<2x4xf32>
}
