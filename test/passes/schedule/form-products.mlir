// RUN: topo-opt %s -p 'topo-form-kernels,topo-mark-inout' --split-input-file | filecheck %s

// Two products of one shape that meet element by element are one kernel.

#id = affine_map<(i, j) -> (i, j)>
#row = affine_map<(i, j) -> (i)>
#left = affine_map<(m, n, k) -> (m, k)>
#right = affine_map<(m, n, k) -> (n, k)>
#out = affine_map<(m, n, k) -> (m, n)>

// CHECK-LABEL: func.func @gate
// CHECK-NEXT:    %[[R:.*]] = call @k_gemm_
// CHECK-NEXT:    return %[[R]]
// CHECK:       func.func private @k_gemm_
// CHECK-COUNT-2:  linalg.contract
// CHECK-NOT:   func.func private
func.func @gate(%a: tensor<8x16xf32>, %u: tensor<12x16xf32>, %v: tensor<12x16xf32>) -> tensor<8x12xf32> {
  %zp = arith.constant 0.0 : f32
  %ep = tensor.empty() : tensor<8x12xf32>
  %fp = linalg.fill ins(%zp : f32) outs(%ep : tensor<8x12xf32>) -> tensor<8x12xf32>
  %p = linalg.contract indexing_maps = [#left, #right, #out] ins(%a, %u : tensor<8x16xf32>, tensor<12x16xf32>) outs(%fp : tensor<8x12xf32>) -> tensor<8x12xf32>
  %zq = arith.constant 0.0 : f32
  %eq = tensor.empty() : tensor<8x12xf32>
  %fq = linalg.fill ins(%zq : f32) outs(%eq : tensor<8x12xf32>) -> tensor<8x12xf32>
  %q = linalg.contract indexing_maps = [#left, #right, #out] ins(%a, %v : tensor<8x16xf32>, tensor<12x16xf32>) outs(%fq : tensor<8x12xf32>) -> tensor<8x12xf32>
  %tr = tensor.empty() : tensor<8x12xf32>
  %r = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]} ins(%p, %q : tensor<8x12xf32>, tensor<8x12xf32>) outs(%tr : tensor<8x12xf32>) {
  ^bb0(%i: f32, %j: f32, %o: f32):
    %v0 = arith.mulf %i, %j : f32
    linalg.yield %v0 : f32
  } -> tensor<8x12xf32>
  return %r : tensor<8x12xf32>
}

// -----

// Products that sum over different lengths have loops of their own.

#id = affine_map<(i, j) -> (i, j)>
#row = affine_map<(i, j) -> (i)>
#left = affine_map<(m, n, k) -> (m, k)>
#right = affine_map<(m, n, k) -> (n, k)>
#out = affine_map<(m, n, k) -> (m, n)>

// CHECK-LABEL: func.func @lengths_differ
// CHECK-NEXT:    %[[P:.*]] = call @k_gemm_
// CHECK-NEXT:    %[[R:.*]] = call @k_gemm_{{.*}}%[[P]]
// CHECK-NEXT:    return %[[R]]
func.func @lengths_differ(%a: tensor<8x16xf32>, %b: tensor<8x32xf32>, %u: tensor<12x16xf32>, %v: tensor<12x32xf32>) -> tensor<8x12xf32> {
  %zp = arith.constant 0.0 : f32
  %ep = tensor.empty() : tensor<8x12xf32>
  %fp = linalg.fill ins(%zp : f32) outs(%ep : tensor<8x12xf32>) -> tensor<8x12xf32>
  %p = linalg.contract indexing_maps = [#left, #right, #out] ins(%a, %u : tensor<8x16xf32>, tensor<12x16xf32>) outs(%fp : tensor<8x12xf32>) -> tensor<8x12xf32>
  %zq = arith.constant 0.0 : f32
  %eq = tensor.empty() : tensor<8x12xf32>
  %fq = linalg.fill ins(%zq : f32) outs(%eq : tensor<8x12xf32>) -> tensor<8x12xf32>
  %q = linalg.contract indexing_maps = [#left, #right, #out] ins(%b, %v : tensor<8x32xf32>, tensor<12x32xf32>) outs(%fq : tensor<8x12xf32>) -> tensor<8x12xf32>
  %tr = tensor.empty() : tensor<8x12xf32>
  %r = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]} ins(%p, %q : tensor<8x12xf32>, tensor<8x12xf32>) outs(%tr : tensor<8x12xf32>) {
  ^bb0(%i: f32, %j: f32, %o: f32):
    %v0 = arith.mulf %i, %j : f32
    linalg.yield %v0 : f32
  } -> tensor<8x12xf32>
  return %r : tensor<8x12xf32>
}

// -----

// A sum over the rows of the operand that the epilogue reads is gathered on the way.

#id = affine_map<(i, j) -> (i, j)>
#row = affine_map<(i, j) -> (i)>
#left = affine_map<(m, n, k) -> (m, k)>
#right = affine_map<(m, n, k) -> (n, k)>
#out = affine_map<(m, n, k) -> (m, n)>

// CHECK-LABEL: func.func @statistic
// CHECK-NEXT:    %[[R:.*]] = call @k_gemm_{{[0-9a-f]+}}(%arg{{[01]}}, %arg{{[01]}})
// CHECK-NEXT:    return %[[R]]
func.func @statistic(%a: tensor<4x16xf32>, %u: tensor<12x16xf32>) -> tensor<4x12xf32> {
  %zs = arith.constant 0.0 : f32
  %es = tensor.empty() : tensor<4xf32>
  %fs = linalg.fill ins(%zs : f32) outs(%es : tensor<4xf32>) -> tensor<4xf32>
  %s = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]} ins(%a : tensor<4x16xf32>) outs(%fs : tensor<4xf32>) {
  ^bb0(%i: f32, %o: f32):
    %v0 = arith.addf %i, %o : f32
    linalg.yield %v0 : f32
  } -> tensor<4xf32>
  %zp = arith.constant 0.0 : f32
  %ep = tensor.empty() : tensor<4x12xf32>
  %fp = linalg.fill ins(%zp : f32) outs(%ep : tensor<4x12xf32>) -> tensor<4x12xf32>
  %p = linalg.contract indexing_maps = [#left, #right, #out] ins(%a, %u : tensor<4x16xf32>, tensor<12x16xf32>) outs(%fp : tensor<4x12xf32>) -> tensor<4x12xf32>
  %tr = tensor.empty() : tensor<4x12xf32>
  %r = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]} ins(%p, %s : tensor<4x12xf32>, tensor<4xf32>) outs(%tr : tensor<4x12xf32>) {
  ^bb0(%i: f32, %j: f32, %o: f32):
    %v0 = arith.mulf %i, %j : f32
    linalg.yield %v0 : f32
  } -> tensor<4x12xf32>
  return %r : tensor<4x12xf32>
}

// -----

// Not when others want the sum too.

#id = affine_map<(i, j) -> (i, j)>
#row = affine_map<(i, j) -> (i)>
#left = affine_map<(m, n, k) -> (m, k)>
#right = affine_map<(m, n, k) -> (n, k)>
#out = affine_map<(m, n, k) -> (m, n)>

// CHECK-LABEL: func.func @shared_statistic
// CHECK-DAG:     %[[S:.*]] = call @k_loops_
// CHECK-DAG:     %[[R:.*]] = call @k_gemm_
// CHECK-NEXT:    return %[[R]], %[[S]]
func.func @shared_statistic(%a: tensor<4x16xf32>, %u: tensor<12x16xf32>) -> (tensor<4x12xf32>, tensor<4xf32>) {
  %zs = arith.constant 0.0 : f32
  %es = tensor.empty() : tensor<4xf32>
  %fs = linalg.fill ins(%zs : f32) outs(%es : tensor<4xf32>) -> tensor<4xf32>
  %s = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]} ins(%a : tensor<4x16xf32>) outs(%fs : tensor<4xf32>) {
  ^bb0(%i: f32, %o: f32):
    %v0 = arith.addf %i, %o : f32
    linalg.yield %v0 : f32
  } -> tensor<4xf32>
  %zp = arith.constant 0.0 : f32
  %ep = tensor.empty() : tensor<4x12xf32>
  %fp = linalg.fill ins(%zp : f32) outs(%ep : tensor<4x12xf32>) -> tensor<4x12xf32>
  %p = linalg.contract indexing_maps = [#left, #right, #out] ins(%a, %u : tensor<4x16xf32>, tensor<12x16xf32>) outs(%fp : tensor<4x12xf32>) -> tensor<4x12xf32>
  %tr = tensor.empty() : tensor<4x12xf32>
  %r = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]} ins(%p, %s : tensor<4x12xf32>, tensor<4xf32>) outs(%tr : tensor<4x12xf32>) {
  ^bb0(%i: f32, %j: f32, %o: f32):
    %v0 = arith.mulf %i, %j : f32
    linalg.yield %v0 : f32
  } -> tensor<4x12xf32>
  return %r, %s : tensor<4x12xf32>, tensor<4xf32>
}

// -----

// Nor with many rows, where every program of a row of tiles would sum again.

#id = affine_map<(i, j) -> (i, j)>
#row = affine_map<(i, j) -> (i)>
#left = affine_map<(m, n, k) -> (m, k)>
#right = affine_map<(m, n, k) -> (n, k)>
#out = affine_map<(m, n, k) -> (m, n)>

// CHECK-LABEL: func.func @many_rows
// CHECK-DAG:     %[[S:.*]] = call @k_loops_
// CHECK-DAG:     %[[R:.*]] = call @k_gemm_
// CHECK-NEXT:    return %[[R]]
func.func @many_rows(%a: tensor<80x16xf32>, %u: tensor<96x16xf32>) -> tensor<80x96xf32> {
  %zs = arith.constant 0.0 : f32
  %es = tensor.empty() : tensor<80xf32>
  %fs = linalg.fill ins(%zs : f32) outs(%es : tensor<80xf32>) -> tensor<80xf32>
  %s = linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]} ins(%a : tensor<80x16xf32>) outs(%fs : tensor<80xf32>) {
  ^bb0(%i: f32, %o: f32):
    %v0 = arith.addf %i, %o : f32
    linalg.yield %v0 : f32
  } -> tensor<80xf32>
  %zp = arith.constant 0.0 : f32
  %ep = tensor.empty() : tensor<80x96xf32>
  %fp = linalg.fill ins(%zp : f32) outs(%ep : tensor<80x96xf32>) -> tensor<80x96xf32>
  %p = linalg.contract indexing_maps = [#left, #right, #out] ins(%a, %u : tensor<80x16xf32>, tensor<96x16xf32>) outs(%fp : tensor<80x96xf32>) -> tensor<80x96xf32>
  %tr = tensor.empty() : tensor<80x96xf32>
  %r = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]} ins(%p, %s : tensor<80x96xf32>, tensor<80xf32>) outs(%tr : tensor<80x96xf32>) {
  ^bb0(%i: f32, %j: f32, %o: f32):
    %v0 = arith.mulf %i, %j : f32
    linalg.yield %v0 : f32
  } -> tensor<80x96xf32>
  return %r : tensor<80x96xf32>
}

// -----

// What computes the operand of few rows is computed where it is read.

#id = affine_map<(i, j) -> (i, j)>
#row = affine_map<(i, j) -> (i)>
#left = affine_map<(m, n, k) -> (m, k)>
#right = affine_map<(m, n, k) -> (n, k)>
#out = affine_map<(m, n, k) -> (m, n)>

// CHECK-LABEL: func.func @prologue
// CHECK-NEXT:    %[[R:.*]] = call @k_gemm_
// CHECK-NEXT:    return %[[R]]
func.func @prologue(%a: tensor<4x16xf32>, %b: tensor<4x16xf32>, %u: tensor<12x16xf32>) -> tensor<4x12xf32> {
  %tx = tensor.empty() : tensor<4x16xf32>
  %x = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]} ins(%a, %b : tensor<4x16xf32>, tensor<4x16xf32>) outs(%tx : tensor<4x16xf32>) {
  ^bb0(%i: f32, %j: f32, %o: f32):
    %v0 = arith.mulf %i, %j : f32
    linalg.yield %v0 : f32
  } -> tensor<4x16xf32>
  %zp = arith.constant 0.0 : f32
  %ep = tensor.empty() : tensor<4x12xf32>
  %fp = linalg.fill ins(%zp : f32) outs(%ep : tensor<4x12xf32>) -> tensor<4x12xf32>
  %p = linalg.contract indexing_maps = [#left, #right, #out] ins(%x, %u : tensor<4x16xf32>, tensor<12x16xf32>) outs(%fp : tensor<4x12xf32>) -> tensor<4x12xf32>
  return %p : tensor<4x12xf32>
}

// -----

// The operand of many rows is computed once.

#id = affine_map<(i, j) -> (i, j)>
#row = affine_map<(i, j) -> (i)>
#left = affine_map<(m, n, k) -> (m, k)>
#right = affine_map<(m, n, k) -> (n, k)>
#out = affine_map<(m, n, k) -> (m, n)>

// CHECK-LABEL: func.func @operand_of_many_rows
// CHECK-NEXT:    %[[X:.*]] = call @k_loops_
// CHECK-NEXT:    %[[R:.*]] = call @k_gemm_{{.*}}(%[[X]], %arg2)
// CHECK-NEXT:    return %[[R]]
func.func @operand_of_many_rows(%a: tensor<80x16xf32>, %b: tensor<80x16xf32>, %u: tensor<32x16xf32>) -> tensor<80x32xf32> {
  %tx = tensor.empty() : tensor<80x16xf32>
  %x = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]} ins(%a, %b : tensor<80x16xf32>, tensor<80x16xf32>) outs(%tx : tensor<80x16xf32>) {
  ^bb0(%i: f32, %j: f32, %o: f32):
    %v0 = arith.mulf %i, %j : f32
    linalg.yield %v0 : f32
  } -> tensor<80x16xf32>
  %zp = arith.constant 0.0 : f32
  %ep = tensor.empty() : tensor<80x32xf32>
  %fp = linalg.fill ins(%zp : f32) outs(%ep : tensor<80x32xf32>) -> tensor<80x32xf32>
  %p = linalg.contract indexing_maps = [#left, #right, #out] ins(%x, %u : tensor<80x16xf32>, tensor<32x16xf32>) outs(%fp : tensor<80x32xf32>) -> tensor<80x32xf32>
  return %p : tensor<80x32xf32>
}

// -----

// Weights that grow when they are unpacked are unpacked in the product.

#id = affine_map<(i, j) -> (i, j)>
#row = affine_map<(i, j) -> (i)>
#left = affine_map<(m, n, k) -> (m, k)>
#right = affine_map<(m, n, k) -> (n, k)>
#out = affine_map<(m, n, k) -> (m, n)>

// CHECK-LABEL: func.func @unpacked_weights
// CHECK-NEXT:    %[[R:.*]] = call @k_gemm_{{[0-9a-f]+}}(%arg{{[01]}}, %arg{{[01]}})
// CHECK-NEXT:    return %[[R]]
func.func @unpacked_weights(%a: tensor<80x16xf32>, %u: tensor<32x16xi8>) -> tensor<80x32xf32> {
  %tw = tensor.empty() : tensor<32x16xf32>
  %w = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]} ins(%u : tensor<32x16xi8>) outs(%tw : tensor<32x16xf32>) {
  ^bb0(%i: i8, %o: f32):
    %v0 = arith.sitofp %i : i8 to f32
    linalg.yield %v0 : f32
  } -> tensor<32x16xf32>
  %zp = arith.constant 0.0 : f32
  %ep = tensor.empty() : tensor<80x32xf32>
  %fp = linalg.fill ins(%zp : f32) outs(%ep : tensor<80x32xf32>) -> tensor<80x32xf32>
  %p = linalg.contract indexing_maps = [#left, #right, #out] ins(%a, %w : tensor<80x16xf32>, tensor<32x16xf32>) outs(%fp : tensor<80x32xf32>) -> tensor<80x32xf32>
  return %p : tensor<80x32xf32>
}

// -----

// A product whose only reader is an update of a cache stores into the cache.

#id = affine_map<(i, j) -> (i, j)>
#row = affine_map<(i, j) -> (i)>
#left = affine_map<(m, n, k) -> (m, k)>
#right = affine_map<(m, n, k) -> (n, k)>
#out = affine_map<(m, n, k) -> (m, n)>

// CHECK-LABEL: func.func @append
// CHECK-NEXT:    %[[R:.*]] = call @k_gemm_
// CHECK-NEXT:    return %[[R]]
// CHECK:       func.func private @k_gemm_
// CHECK-SAME:    topo.inout = {{\[}}array<i64: 0, 2>]
// CHECK:         topo.index_update
func.func @append(%c: tensor<8x4xf32>, %a: tensor<2x16xf32>, %u: tensor<4x16xf32>, %at: tensor<2xi64>) -> tensor<8x4xf32> {
  %zp = arith.constant 0.0 : f32
  %ep = tensor.empty() : tensor<2x4xf32>
  %fp = linalg.fill ins(%zp : f32) outs(%ep : tensor<2x4xf32>) -> tensor<2x4xf32>
  %p = linalg.contract indexing_maps = [#left, #right, #out] ins(%a, %u : tensor<2x16xf32>, tensor<4x16xf32>) outs(%fp : tensor<2x4xf32>) -> tensor<2x4xf32>
  %r = "topo.index_update"(%c, %p, %at) {dim = 0 : i64} : (tensor<8x4xf32>, tensor<2x4xf32>, tensor<2xi64>) -> tensor<8x4xf32>
  return %r : tensor<8x4xf32>
}

// -----

// A rotation of the columns finds both its halves in one tile.

#id = affine_map<(i, j) -> (i, j)>
#row = affine_map<(i, j) -> (i)>
#left = affine_map<(m, n, k) -> (m, k)>
#right = affine_map<(m, n, k) -> (n, k)>
#out = affine_map<(m, n, k) -> (m, n)>

// CHECK-LABEL: func.func @rotated
// CHECK-NEXT:    %[[R:.*]] = call @k_gemm_
// CHECK-NEXT:    return %[[R]]
// CHECK:       func.func private @k_gemm_
// CHECK-SAME:    parts = 2 : i64, period = 4 : i64
// CHECK:         topo.rotate_half
func.func @rotated(%a: tensor<2x16xf32>, %u: tensor<8x16xf32>, %c: tensor<2x8xf32>) -> tensor<2x8xf32> {
  %zp = arith.constant 0.0 : f32
  %ep = tensor.empty() : tensor<2x8xf32>
  %fp = linalg.fill ins(%zp : f32) outs(%ep : tensor<2x8xf32>) -> tensor<2x8xf32>
  %p = linalg.contract indexing_maps = [#left, #right, #out] ins(%a, %u : tensor<2x16xf32>, tensor<8x16xf32>) outs(%fp : tensor<2x8xf32>) -> tensor<2x8xf32>
  %h = "topo.rotate_half"(%p) {interleaved = false} : (tensor<2x8xf32>) -> tensor<2x8xf32>
  %tx = tensor.empty() : tensor<2x8xf32>
  %x = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]} ins(%h, %c : tensor<2x8xf32>, tensor<2x8xf32>) outs(%tx : tensor<2x8xf32>) {
  ^bb0(%i: f32, %j: f32, %o: f32):
    %v0 = arith.mulf %i, %j : f32
    linalg.yield %v0 : f32
  } -> tensor<2x8xf32>
  %tr = tensor.empty() : tensor<2x8xf32>
  %r = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]} ins(%p, %x : tensor<2x8xf32>, tensor<2x8xf32>) outs(%tr : tensor<2x8xf32>) {
  ^bb0(%i: f32, %j: f32, %o: f32):
    %v0 = arith.addf %i, %j : f32
    linalg.yield %v0 : f32
  } -> tensor<2x8xf32>
  return %r : tensor<2x8xf32>
}

// -----

// Windows that overlap are read where they are: a convolution is one kernel, and nothing holds its windows.

// CHECK-LABEL: func.func @windows
// CHECK-NEXT:    %[[R:.*]] = call @k_gemm_{{.*}}(%arg0, %arg1)
// CHECK-NEXT:    return %[[R]]
// CHECK:       func.func private @k_gemm_
// CHECK-SAME:    tensor<2x3x9xf32>
// CHECK:         linalg.generic
// CHECK:         linalg.contract
// CHECK-NOT:   func.func private
func.func @windows(%x: tensor<2x3x9xf32>, %w: tensor<20x12xf32>) -> tensor<2x20x6xf32> {
  %e = tensor.empty() : tensor<2x6x3x4xf32>
  %u = linalg.generic {indexing_maps = [affine_map<(n, p, c, k) -> (n, c, p + k)>, affine_map<(n, p, c, k) -> (n, p, c, k)>], iterator_types = ["parallel", "parallel", "parallel", "parallel"]} ins(%x : tensor<2x3x9xf32>) outs(%e : tensor<2x6x3x4xf32>) {
  ^bb0(%i: f32, %o: f32):
    linalg.yield %i : f32
  } -> tensor<2x6x3x4xf32>
  %rows = tensor.collapse_shape %u [[0], [1], [2, 3]] : tensor<2x6x3x4xf32> into tensor<2x6x12xf32>
  %z = arith.constant 0.0 : f32
  %t = tensor.empty() : tensor<2x20x6xf32>
  %f = linalg.fill ins(%z : f32) outs(%t : tensor<2x20x6xf32>) -> tensor<2x20x6xf32>
  %r = linalg.contract indexing_maps = [affine_map<(n, p, o, k) -> (n, p, k)>, affine_map<(n, p, o, k) -> (o, k)>, affine_map<(n, p, o, k) -> (n, o, p)>] ins(%rows, %w : tensor<2x6x12xf32>, tensor<20x12xf32>) outs(%f : tensor<2x20x6xf32>) -> tensor<2x20x6xf32>
  return %r : tensor<2x20x6xf32>
}
