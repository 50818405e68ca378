// RUN: topo-opt %s -p topo-mark-written-rows --split-input-file | filecheck %s

// The pack in front writes one row of keys and of values, at an index that is an input: the attention is told which.

// CHECK-LABEL: func.func private @k_append
// CHECK-SAME:    late_trigger = true
// CHECK-LABEL: func.func private @k_pack
// CHECK-SAME:    late_trigger = true
// CHECK-LABEL: func.func private @k_attention
// CHECK-SAME:    %arg4: tensor<1x1xi64>
// CHECK-SAME:    settled = array<i64: 3, 4>
// CHECK-SAME:    written = [array<i64: 1, 4, 2>, array<i64: 2, 4, 2>]
// CHECK-LABEL: func.func @decode
// CHECK:         %[[C:.*]]:2 = call @k_pack
// CHECK:         call @k_attention(%arg1, %[[C]]#0, %[[C]]#1, %arg4, %arg0)
func.func private @k_append(%c: tensor<1x2x8x16xf32>, %x: tensor<1x2x1x16xf32>, %at: tensor<1x1xi64>) -> tensor<1x2x8x16xf32>
    attributes {topo.inout = [array<i64: 0, 0>], topo.kernel = {family = "update", pdl = true, immutable = array<i64>}} {
  %i = tensor.collapse_shape %at [[0, 1]] : tensor<1x1xi64> into tensor<1xi64>
  %0 = "topo.index_update"(%c, %x, %i) {dim = 2 : i64} : (tensor<1x2x8x16xf32>, tensor<1x2x1x16xf32>, tensor<1xi64>) -> tensor<1x2x8x16xf32>
  return %0 : tensor<1x2x8x16xf32>
}
func.func private @k_pack(%k: tensor<1x2x8x16xf32>, %x: tensor<1x2x1x16xf32>, %v: tensor<1x2x8x16xf32>, %at: tensor<1x1xi64>)
    -> (tensor<1x2x8x16xf32>, tensor<1x2x8x16xf32>)
    attributes {topo.inout = [array<i64: 0, 0>, array<i64: 1, 2>], topo.kernel = {family = "pack", pdl = true, immutable = array<i64>}} {
  %0 = call @k_append(%k, %x, %at) : (tensor<1x2x8x16xf32>, tensor<1x2x1x16xf32>, tensor<1x1xi64>) -> tensor<1x2x8x16xf32>
  %1 = call @k_append(%v, %x, %at) : (tensor<1x2x8x16xf32>, tensor<1x2x1x16xf32>, tensor<1x1xi64>) -> tensor<1x2x8x16xf32>
  return %0, %1 : tensor<1x2x8x16xf32>, tensor<1x2x8x16xf32>
}
func.func private @k_attention(%q: tensor<1x2x1x16xf32>, %k: tensor<1x2x8x16xf32>, %v: tensor<1x2x8x16xf32>, %m: tensor<1x1x1x8xi1>) -> tensor<1x2x1x16xf32>
    attributes {topo.kernel = {family = "attention", pdl = true, immutable = array<i64>, settled = array<i64: 3>}} { return %q : tensor<1x2x1x16xf32> }
func.func @decode(%at: tensor<1x1xi64> {topo.kind = "input", topo.name = "at"}, %x: tensor<1x2x1x16xf32> {topo.kind = "input", topo.name = "x"},
                  %k: tensor<1x2x8x16xf32> {topo.kind = "buffer", topo.name = "k"}, %v: tensor<1x2x8x16xf32> {topo.kind = "buffer", topo.name = "v"},
                  %m: tensor<1x1x1x8xi1> {topo.kind = "input", topo.name = "m"})
    -> (tensor<1x2x8x16xf32> {topo.kind = "mutation", topo.name = "k"}, tensor<1x2x8x16xf32> {topo.kind = "mutation", topo.name = "v"}, tensor<1x2x1x16xf32>) {
  %c:2 = call @k_pack(%k, %x, %v, %at) : (tensor<1x2x8x16xf32>, tensor<1x2x1x16xf32>, tensor<1x2x8x16xf32>, tensor<1x1xi64>)
    -> (tensor<1x2x8x16xf32>, tensor<1x2x8x16xf32>)
  %y = call @k_attention(%x, %c#0, %c#1, %m)
    : (tensor<1x2x1x16xf32>, tensor<1x2x8x16xf32>, tensor<1x2x8x16xf32>, tensor<1x1x1x8xi1>) -> tensor<1x2x1x16xf32>
  return %c#0, %c#1, %y : tensor<1x2x8x16xf32>, tensor<1x2x8x16xf32>, tensor<1x2x1x16xf32>
}

// -----

// Two rows are written: which blocks of keys have none of them is not told.

// CHECK-LABEL: func.func private @k_append
// CHECK-NOT:     late_trigger
// CHECK-LABEL: func.func private @k_attention
// CHECK-NOT:     written
// CHECK-LABEL: func.func @two_rows
func.func private @k_append(%c: tensor<1x2x8x16xf32>, %x: tensor<1x2x2x16xf32>, %at: tensor<2xi64>) -> tensor<1x2x8x16xf32>
    attributes {topo.inout = [array<i64: 0, 0>], topo.kernel = {family = "update", pdl = true, immutable = array<i64>}} {
  %0 = "topo.index_update"(%c, %x, %at) {dim = 2 : i64} : (tensor<1x2x8x16xf32>, tensor<1x2x2x16xf32>, tensor<2xi64>) -> tensor<1x2x8x16xf32>
  return %0 : tensor<1x2x8x16xf32>
}
func.func private @k_attention(%q: tensor<1x2x2x16xf32>, %k: tensor<1x2x8x16xf32>) -> tensor<1x2x2x16xf32>
    attributes {topo.kernel = {family = "attention", pdl = true, immutable = array<i64>}} { return %q : tensor<1x2x2x16xf32> }
func.func @two_rows(%at: tensor<2xi64> {topo.kind = "input", topo.name = "at"}, %x: tensor<1x2x2x16xf32> {topo.kind = "input", topo.name = "x"},
                    %k: tensor<1x2x8x16xf32> {topo.kind = "buffer", topo.name = "k"})
    -> (tensor<1x2x8x16xf32> {topo.kind = "mutation", topo.name = "k"}, tensor<1x2x2x16xf32>) {
  %c = call @k_append(%k, %x, %at) : (tensor<1x2x8x16xf32>, tensor<1x2x2x16xf32>, tensor<2xi64>) -> tensor<1x2x8x16xf32>
  %y = call @k_attention(%x, %c) : (tensor<1x2x2x16xf32>, tensor<1x2x8x16xf32>) -> tensor<1x2x2x16xf32>
  return %c, %y : tensor<1x2x8x16xf32>, tensor<1x2x2x16xf32>
}

// -----

// The index is computed by the kernel that writes, and in the other function by what may still run: neither is known early.

// CHECK-LABEL: func.func private @k_next
// CHECK-LABEL: func.func private @k_attention
// CHECK-NOT:     written
// CHECK-LABEL: func.func private @k_append
// CHECK-NOT:     late_trigger
// CHECK-LABEL: func.func private @k_attention_too
// CHECK-NOT:     written
// CHECK-LABEL: func.func @indices
func.func private @k_next(%c: tensor<2x8x16xf32>, %x: tensor<2x1x16xf32>, %at: tensor<1xi64>) -> tensor<2x8x16xf32>
    attributes {topo.inout = [array<i64: 0, 0>], topo.kernel = {family = "update", pdl = true, immutable = array<i64>}} {
  %i = linalg.generic {indexing_maps = [affine_map<(d0) -> (d0)>], iterator_types = ["parallel"]} outs(%at : tensor<1xi64>) {
  ^bb0(%o: i64):
    %1 = arith.addi %o, %o : i64
    linalg.yield %1 : i64
  } -> tensor<1xi64>
  %0 = "topo.index_update"(%c, %x, %i) {dim = 1 : i64} : (tensor<2x8x16xf32>, tensor<2x1x16xf32>, tensor<1xi64>) -> tensor<2x8x16xf32>
  return %0 : tensor<2x8x16xf32>
}
func.func private @k_attention(%q: tensor<2x1x16xf32>, %k: tensor<2x8x16xf32>) -> tensor<2x1x16xf32>
    attributes {topo.kernel = {family = "attention", pdl = true, immutable = array<i64>}} { return %q : tensor<2x1x16xf32> }
func.func private @k_append(%c: tensor<2x8x16xf32>, %x: tensor<2x1x16xf32>, %at: tensor<1xi64>) -> (tensor<2x8x16xf32>, tensor<1xi64>)
    attributes {topo.inout = [array<i64: 0, 0>, array<i64: 1, 2>], topo.kernel = {family = "update", pdl = true, immutable = array<i64>}} {
  %0 = "topo.index_update"(%c, %x, %at) {dim = 1 : i64} : (tensor<2x8x16xf32>, tensor<2x1x16xf32>, tensor<1xi64>) -> tensor<2x8x16xf32>
  return %0, %at : tensor<2x8x16xf32>, tensor<1xi64>
}
func.func private @k_attention_too(%q: tensor<2x1x16xf32>, %k: tensor<2x8x16xf32>) -> tensor<2x1x16xf32>
    attributes {topo.kernel = {family = "attention", pdl = true, immutable = array<i64>}} { return %q : tensor<2x1x16xf32> }
func.func @indices(%at: tensor<1xi64> {topo.kind = "input", topo.name = "at"}, %x: tensor<2x1x16xf32> {topo.kind = "input", topo.name = "x"},
                   %k: tensor<2x8x16xf32> {topo.kind = "buffer", topo.name = "k"}, %l: tensor<2x8x16xf32> {topo.kind = "buffer", topo.name = "l"})
    -> (tensor<2x8x16xf32> {topo.kind = "mutation", topo.name = "k"}, tensor<2x8x16xf32> {topo.kind = "mutation", topo.name = "l"}, tensor<1xi64>, tensor<2x1x16xf32>) {
  %c = call @k_next(%k, %x, %at) : (tensor<2x8x16xf32>, tensor<2x1x16xf32>, tensor<1xi64>) -> tensor<2x8x16xf32>
  %y = call @k_attention(%x, %c) : (tensor<2x1x16xf32>, tensor<2x8x16xf32>) -> tensor<2x1x16xf32>
  %d:2 = call @k_append(%l, %y, %at) : (tensor<2x8x16xf32>, tensor<2x1x16xf32>, tensor<1xi64>) -> (tensor<2x8x16xf32>, tensor<1xi64>)
  %z = call @k_attention_too(%y, %d#0) : (tensor<2x1x16xf32>, tensor<2x8x16xf32>) -> tensor<2x1x16xf32>
  return %c, %d#0, %d#1, %z : tensor<2x8x16xf32>, tensor<2x8x16xf32>, tensor<1xi64>, tensor<2x1x16xf32>
}

// -----

// At one of two calls another kernel stands in front: for both, all rows have to wait.

// CHECK-LABEL: func.func private @k_append
// CHECK-NOT:     late_trigger
// CHECK-LABEL: func.func private @k_attention
// CHECK-NOT:     written
// CHECK-LABEL: func.func @elsewhere
// CHECK-COUNT-2: call @k_attention(%{{.*}}, %{{.*}}) :
func.func private @k_append(%c: tensor<2x8x16xf32>, %x: tensor<2x1x16xf32>, %at: tensor<1xi64>) -> tensor<2x8x16xf32>
    attributes {topo.inout = [array<i64: 0, 0>], topo.kernel = {family = "update", pdl = true, immutable = array<i64>}} {
  %0 = "topo.index_update"(%c, %x, %at) {dim = 1 : i64} : (tensor<2x8x16xf32>, tensor<2x1x16xf32>, tensor<1xi64>) -> tensor<2x8x16xf32>
  return %0 : tensor<2x8x16xf32>
}
func.func private @k_product(%x: tensor<2x1x16xf32>) -> tensor<2x1x16xf32>
    attributes {topo.kernel = {family = "gemm", pdl = true, immutable = array<i64>}} { return %x : tensor<2x1x16xf32> }
func.func private @k_attention(%q: tensor<2x1x16xf32>, %k: tensor<2x8x16xf32>) -> tensor<2x1x16xf32>
    attributes {topo.kernel = {family = "attention", pdl = true, immutable = array<i64>}} { return %q : tensor<2x1x16xf32> }
func.func @elsewhere(%at: tensor<1xi64> {topo.kind = "input", topo.name = "at"}, %x: tensor<2x1x16xf32> {topo.kind = "input", topo.name = "x"},
                     %k: tensor<2x8x16xf32> {topo.kind = "buffer", topo.name = "k"})
    -> (tensor<2x8x16xf32> {topo.kind = "mutation", topo.name = "k"}, tensor<2x1x16xf32>) {
  %c = call @k_append(%k, %x, %at) : (tensor<2x8x16xf32>, tensor<2x1x16xf32>, tensor<1xi64>) -> tensor<2x8x16xf32>
  %y = call @k_attention(%x, %c) : (tensor<2x1x16xf32>, tensor<2x8x16xf32>) -> tensor<2x1x16xf32>
  %q = call @k_product(%y) : (tensor<2x1x16xf32>) -> tensor<2x1x16xf32>
  %z = call @k_attention(%q, %c) : (tensor<2x1x16xf32>, tensor<2x8x16xf32>) -> tensor<2x1x16xf32>
  return %c, %z : tensor<2x8x16xf32>, tensor<2x1x16xf32>
}

// -----

// The kernel in front writes all of the keys.

// CHECK-LABEL: func.func private @k_all
// CHECK-NOT:     late_trigger
// CHECK-LABEL: func.func private @k_attention
// CHECK-NOT:     written
// CHECK-LABEL: func.func @all_rows
func.func private @k_all(%c: tensor<2x8x16xf32>, %at: tensor<1xi64>) -> tensor<2x8x16xf32>
    attributes {topo.inout = [array<i64: 0, 0>], topo.kernel = {family = "loops", pdl = true, immutable = array<i64>}} { return %c : tensor<2x8x16xf32> }
func.func private @k_attention(%q: tensor<2x1x16xf32>, %k: tensor<2x8x16xf32>) -> tensor<2x1x16xf32>
    attributes {topo.kernel = {family = "attention", pdl = true, immutable = array<i64>}} { return %q : tensor<2x1x16xf32> }
func.func @all_rows(%at: tensor<1xi64> {topo.kind = "input", topo.name = "at"}, %x: tensor<2x1x16xf32> {topo.kind = "input", topo.name = "x"},
                    %k: tensor<2x8x16xf32> {topo.kind = "buffer", topo.name = "k"})
    -> (tensor<2x8x16xf32> {topo.kind = "mutation", topo.name = "k"}, tensor<2x1x16xf32>) {
  %c = call @k_all(%k, %at) : (tensor<2x8x16xf32>, tensor<1xi64>) -> tensor<2x8x16xf32>
  %y = call @k_attention(%x, %c) : (tensor<2x1x16xf32>, tensor<2x8x16xf32>) -> tensor<2x1x16xf32>
  return %c, %y : tensor<2x8x16xf32>, tensor<2x1x16xf32>
}

// -----

// In front of the first attention the values are complete, in front of the second a row of them is written: one row at most at both.

// CHECK-LABEL: func.func private @k_attention
// CHECK-SAME:    written = [array<i64: 1, 3, 1>, array<i64: 2, 3, 1>]
// CHECK-LABEL: func.func @layers
// CHECK:         call @k_attention({{.*}}, %arg0)
// CHECK:         call @k_attention({{.*}}, %arg0)
func.func private @k_append(%c: tensor<2x8x16xf32>, %x: tensor<2x1x16xf32>, %at: tensor<1xi64>) -> tensor<2x8x16xf32>
    attributes {topo.inout = [array<i64: 0, 0>], topo.kernel = {family = "update", pdl = true, immutable = array<i64>}} {
  %0 = "topo.index_update"(%c, %x, %at) {dim = 1 : i64} : (tensor<2x8x16xf32>, tensor<2x1x16xf32>, tensor<1xi64>) -> tensor<2x8x16xf32>
  return %0 : tensor<2x8x16xf32>
}
func.func private @k_pack(%k: tensor<2x8x16xf32>, %x: tensor<2x1x16xf32>, %v: tensor<2x8x16xf32>, %at: tensor<1xi64>) -> (tensor<2x8x16xf32>, tensor<2x8x16xf32>)
    attributes {topo.inout = [array<i64: 0, 0>, array<i64: 1, 2>], topo.kernel = {family = "pack", pdl = true, immutable = array<i64>}} {
  %0 = call @k_append(%k, %x, %at) : (tensor<2x8x16xf32>, tensor<2x1x16xf32>, tensor<1xi64>) -> tensor<2x8x16xf32>
  %1 = call @k_append(%v, %x, %at) : (tensor<2x8x16xf32>, tensor<2x1x16xf32>, tensor<1xi64>) -> tensor<2x8x16xf32>
  return %0, %1 : tensor<2x8x16xf32>, tensor<2x8x16xf32>
}
func.func private @k_attention(%q: tensor<2x1x16xf32>, %k: tensor<2x8x16xf32>, %v: tensor<2x8x16xf32>) -> tensor<2x1x16xf32>
    attributes {topo.kernel = {family = "attention", pdl = true, immutable = array<i64>}} { return %q : tensor<2x1x16xf32> }
func.func @layers(%at: tensor<1xi64> {topo.kind = "input", topo.name = "at"}, %x: tensor<2x1x16xf32> {topo.kind = "input", topo.name = "x"},
                  %k: tensor<2x8x16xf32> {topo.kind = "buffer", topo.name = "k"}, %v: tensor<2x8x16xf32> {topo.kind = "buffer", topo.name = "v"},
                  %l: tensor<2x8x16xf32> {topo.kind = "buffer", topo.name = "l"}, %w: tensor<2x8x16xf32> {topo.kind = "buffer", topo.name = "w"})
    -> (tensor<2x8x16xf32> {topo.kind = "mutation", topo.name = "k"}, tensor<2x8x16xf32> {topo.kind = "mutation", topo.name = "v"},
        tensor<2x8x16xf32> {topo.kind = "mutation", topo.name = "l"}, tensor<2x8x16xf32> {topo.kind = "mutation", topo.name = "w"}, tensor<2x1x16xf32>) {
  %a = call @k_append(%v, %x, %at) : (tensor<2x8x16xf32>, tensor<2x1x16xf32>, tensor<1xi64>) -> tensor<2x8x16xf32>
  %b = call @k_append(%k, %x, %at) : (tensor<2x8x16xf32>, tensor<2x1x16xf32>, tensor<1xi64>) -> tensor<2x8x16xf32>
  %y = call @k_attention(%x, %b, %a) : (tensor<2x1x16xf32>, tensor<2x8x16xf32>, tensor<2x8x16xf32>) -> tensor<2x1x16xf32>
  %c:2 = call @k_pack(%l, %y, %w, %at) : (tensor<2x8x16xf32>, tensor<2x1x16xf32>, tensor<2x8x16xf32>, tensor<1xi64>) -> (tensor<2x8x16xf32>, tensor<2x8x16xf32>)
  %z = call @k_attention(%y, %c#0, %c#1) : (tensor<2x1x16xf32>, tensor<2x8x16xf32>, tensor<2x8x16xf32>) -> tensor<2x1x16xf32>
  return %b, %a, %c#0, %c#1, %z : tensor<2x8x16xf32>, tensor<2x8x16xf32>, tensor<2x8x16xf32>, tensor<2x8x16xf32>, tensor<2x1x16xf32>
}
