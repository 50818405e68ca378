// RUN: topo-opt %s -p topo-hand-over-norms --split-input-file | filecheck %s
// RUN: topo-opt %s -p 'topo-hand-over-norms{rows=7}' --split-input-file | filecheck %s --check-prefix=FEWER

// Two products take the norm of a third one's rows. The third leaves x * w and a sum of squares for every 32 columns; the
// others multiply x * w as it is, and add up two numbers a row. What they have in common is computed once.

// CHECK-LABEL: func.func @main
// CHECK-SAME:    %[[A:.*]]: tensor<8x16xbf16>, %[[W0:.*]]: tensor<64x16xbf16>, %[[W:.*]]: tensor<64xbf16>, %[[W1:.*]]: tensor<24x64xbf16>, %[[W2:.*]]: tensor<24x64xbf16>)
// CHECK:         %[[X:.*]]:3 = call @[[MAKER:k_gemm_[0-9a-f]+]](%[[A]], %[[W0]], %[[W]])
// CHECK-SAME:      -> (tensor<8x64xbf16>, tensor<8x64xbf16>, tensor<8x2xf32>)
// CHECK:         %[[Y:.*]] = call @[[READER:k_gemm_[0-9a-f]+]](%[[W1]], %[[X]]#1, %[[X]]#2)
// CHECK:         %[[Z:.*]] = call @[[READER]](%[[W2]], %[[X]]#1, %[[X]]#2)
// CHECK:         return %[[X]]#0, %[[Y]], %[[Z]]
// CHECK-NOT:   @first
// CHECK-NOT:   @second

// CHECK:       func.func private @[[MAKER]](
// CHECK:         %[[P:.*]] = linalg.contract
// CHECK:         %[[R:.*]] = "topo.demote"(%[[P]])
// CHECK:         tensor.expand_shape {{.*}} output_shape [8, 2, 32]
// CHECK:         linalg.generic {{.*}}iterator_types = ["parallel", "parallel", "reduction"]
// CHECK:           arith.mulf
// CHECK:           arith.addf
// CHECK:         return %[[R]]

// CHECK:       func.func private @[[READER]](%{{.*}}: tensor<24x64xbf16>, %[[XW:.*]]: tensor<8x64xbf16>, %[[PARTS:.*]]: tensor<8x2xf32>)
// CHECK:         linalg.generic {{.*}}iterator_types = ["parallel", "reduction"]{{.*}} ins(%[[PARTS]] : tensor<8x2xf32>)
// CHECK-NEXT:      ^bb0(%[[I:.*]]: f32, %[[O:.*]]: f32):
// CHECK-NEXT:      %[[S:.*]] = arith.addf %[[I]], %[[O]]
// CHECK-NEXT:      linalg.yield %[[S]]
// CHECK:         linalg.contract {{.*}} ins(%[[XW]],

// More rows than the option allows: nothing changes.

// FEWER-LABEL: func.func @main
// FEWER:         call @first
// FEWER:         call @second
// FEWER:         call @second
func.func @main(%a: tensor<8x16xbf16>, %w0: tensor<64x16xbf16>, %w: tensor<64xbf16>, %w1: tensor<24x64xbf16>, %w2: tensor<24x64xbf16>) -> (tensor<8x64xbf16>, tensor<8x24xbf16>, tensor<8x24xbf16>) {
  %x = call @first(%a, %w0) : (tensor<8x16xbf16>, tensor<64x16xbf16>) -> tensor<8x64xbf16>
  %y = call @second(%x, %w, %w1) : (tensor<8x64xbf16>, tensor<64xbf16>, tensor<24x64xbf16>) -> tensor<8x24xbf16>
  %z = call @second(%x, %w, %w2) : (tensor<8x64xbf16>, tensor<64xbf16>, tensor<24x64xbf16>) -> tensor<8x24xbf16>
  return %x, %y, %z : tensor<8x64xbf16>, tensor<8x24xbf16>, tensor<8x24xbf16>
}
func.func private @first(%a: tensor<8x16xbf16>, %w: tensor<64x16xbf16>) -> tensor<8x64xbf16> attributes {topo.kernel = {family = "gemm"}} {
  %c = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<8x64xf32>
  %f = linalg.fill ins(%c : f32) outs(%e : tensor<8x64xf32>) -> tensor<8x64xf32>
  %p = linalg.contract indexing_maps = [affine_map<(m, n, k) -> (m, k)>, affine_map<(m, n, k) -> (n, k)>, affine_map<(m, n, k) -> (m, n)>]
    ins(%a, %w : tensor<8x16xbf16>, tensor<64x16xbf16>) outs(%f : tensor<8x64xf32>) -> tensor<8x64xf32>
  %r = "topo.demote"(%p) : (tensor<8x64xf32>) -> tensor<8x64xbf16>
  return %r : tensor<8x64xbf16>
}
func.func private @second(%x: tensor<8x64xbf16>, %w: tensor<64xbf16>, %v: tensor<24x64xbf16>) -> tensor<8x24xbf16> attributes {topo.kernel = {family = "gemm"}} {
  %c = arith.constant 0.0 : f32
  %er = tensor.empty() : tensor<8xf32>
  %fr = linalg.fill ins(%c : f32) outs(%er : tensor<8xf32>) -> tensor<8xf32>
  %s = linalg.generic {indexing_maps = [affine_map<(m, k) -> (m, k)>, affine_map<(m, k) -> (m)>], iterator_types = ["parallel", "reduction"]}
    ins(%x : tensor<8x64xbf16>) outs(%fr : tensor<8xf32>) {
  ^bb0(%i: bf16, %o: f32):
    %g = arith.extf %i : bf16 to f32
    %q = arith.mulf %g, %g : f32
    %t = arith.addf %q, %o : f32
    linalg.yield %t : f32
  } -> tensor<8xf32>
  %ex = tensor.empty() : tensor<8x64xf32>
  %m = linalg.generic {indexing_maps = [affine_map<(m, k) -> (m, k)>, affine_map<(m, k) -> (k)>, affine_map<(m, k) -> (m, k)>], iterator_types = ["parallel", "parallel"]}
    ins(%x, %w : tensor<8x64xbf16>, tensor<64xbf16>) outs(%ex : tensor<8x64xf32>) {
  ^bb0(%i: bf16, %j: bf16, %o: f32):
    %g = arith.extf %i : bf16 to f32
    %h = arith.extf %j : bf16 to f32
    %t = arith.mulf %g, %h : f32
    linalg.yield %t : f32
  } -> tensor<8x64xf32>
  %d = "topo.demote"(%m) : (tensor<8x64xf32>) -> tensor<8x64xbf16>
  %e = tensor.empty() : tensor<8x24xf32>
  %f = linalg.fill ins(%c : f32) outs(%e : tensor<8x24xf32>) -> tensor<8x24xf32>
  %p = linalg.contract indexing_maps = [affine_map<(m, n, k) -> (m, k)>, affine_map<(m, n, k) -> (n, k)>, affine_map<(m, n, k) -> (m, n)>]
    ins(%d, %v : tensor<8x64xbf16>, tensor<24x64xbf16>) outs(%f : tensor<8x24xf32>) -> tensor<8x24xf32>
  %y = linalg.generic {indexing_maps = [affine_map<(m, n) -> (m, n)>, affine_map<(m, n) -> (m)>, affine_map<(m, n) -> (m, n)>], iterator_types = ["parallel", "parallel"]}
    ins(%p, %s : tensor<8x24xf32>, tensor<8xf32>) outs(%e : tensor<8x24xf32>) {
  ^bb0(%i: f32, %j: f32, %o: f32):
    %g = math.rsqrt %j : f32
    %t = arith.mulf %i, %g : f32
    linalg.yield %t : f32
  } -> tensor<8x24xf32>
  %r = "topo.demote"(%y) : (tensor<8x24xf32>) -> tensor<8x24xbf16>
  return %r : tensor<8x24xbf16>
}

// -----

// The rows come from no product, so whoever needs their norm computes it.

// CHECK-LABEL: func.func @no_product
// CHECK-NEXT:    %[[X:.*]] = call @double
// CHECK-NEXT:    %[[Y:.*]] = call @second(%[[X]],
// CHECK-NEXT:    return %[[Y]]
func.func @no_product(%a: tensor<8x64xbf16>, %v: tensor<24x64xbf16>) -> tensor<8x24xbf16> {
  %x = call @double(%a) : (tensor<8x64xbf16>) -> tensor<8x64xbf16>
  %y = call @second(%x, %v) : (tensor<8x64xbf16>, tensor<24x64xbf16>) -> tensor<8x24xbf16>
  return %y : tensor<8x24xbf16>
}
func.func private @double(%a: tensor<8x64xbf16>) -> tensor<8x64xbf16> attributes {topo.kernel = {family = "loops", rows = array<i64: 8, 64>, cols = array<i64>, full_shape = array<i64: 8, 64>, full_map = affine_map<(d0, d1) -> (d0, d1)>}} {
  %e = tensor.empty() : tensor<8x64xbf16>
  %m = linalg.generic {indexing_maps = [affine_map<(m, k) -> (m, k)>, affine_map<(m, k) -> (m, k)>], iterator_types = ["parallel", "parallel"]}
    ins(%a : tensor<8x64xbf16>) outs(%e : tensor<8x64xbf16>) {
  ^bb0(%i: bf16, %o: bf16):
    %t = arith.addf %i, %i : bf16
    linalg.yield %t : bf16
  } -> tensor<8x64xbf16>
  return %m : tensor<8x64xbf16>
}
func.func private @second(%x: tensor<8x64xbf16>, %v: tensor<24x64xbf16>) -> tensor<8x24xbf16> attributes {topo.kernel = {family = "gemm"}} {
  %c = arith.constant 0.0 : f32
  %er = tensor.empty() : tensor<8xf32>
  %fr = linalg.fill ins(%c : f32) outs(%er : tensor<8xf32>) -> tensor<8xf32>
  %s = linalg.generic {indexing_maps = [affine_map<(m, k) -> (m, k)>, affine_map<(m, k) -> (m)>], iterator_types = ["parallel", "reduction"]}
    ins(%x : tensor<8x64xbf16>) outs(%fr : tensor<8xf32>) {
  ^bb0(%i: bf16, %o: f32):
    %g = arith.extf %i : bf16 to f32
    %q = arith.mulf %g, %g : f32
    %t = arith.addf %q, %o : f32
    linalg.yield %t : f32
  } -> tensor<8xf32>
  %e = tensor.empty() : tensor<8x24xf32>
  %f = linalg.fill ins(%c : f32) outs(%e : tensor<8x24xf32>) -> tensor<8x24xf32>
  %p = linalg.contract indexing_maps = [affine_map<(m, n, k) -> (m, k)>, affine_map<(m, n, k) -> (n, k)>, affine_map<(m, n, k) -> (m, n)>]
    ins(%x, %v : tensor<8x64xbf16>, tensor<24x64xbf16>) outs(%f : tensor<8x24xf32>) -> tensor<8x24xf32>
  %y = linalg.generic {indexing_maps = [affine_map<(m, n) -> (m, n)>, affine_map<(m, n) -> (m)>, affine_map<(m, n) -> (m, n)>], iterator_types = ["parallel", "parallel"]}
    ins(%p, %s : tensor<8x24xf32>, tensor<8xf32>) outs(%e : tensor<8x24xf32>) {
  ^bb0(%i: f32, %j: f32, %o: f32):
    %t = arith.mulf %i, %j : f32
    linalg.yield %t : f32
  } -> tensor<8x24xf32>
  %r = "topo.demote"(%y) : (tensor<8x24xf32>) -> tensor<8x24xbf16>
  return %r : tensor<8x24xbf16>
}
