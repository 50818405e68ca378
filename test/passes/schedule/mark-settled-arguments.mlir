// RUN: topo-opt %s -p topo-mark-settled-arguments --split-input-file | filecheck %s

// A mask that was made two launches back is complete once the product in front waits before it lets the attention start. What the
// product itself makes is not, and state that is rewritten never is.

// CHECK-LABEL: func.func private @k_mask
// CHECK-NOT:     late_trigger
// CHECK-LABEL: func.func private @k_product
// CHECK-SAME:    late_trigger = true
// CHECK-LABEL: func.func private @k_attention
// CHECK-SAME:    settled = array<i64: 3>
// CHECK-LABEL: func.func @decode
func.func private @k_mask(%p: tensor<1xi64>) -> tensor<1x1x1x8xi1>
    attributes {topo.kernel = {family = "loops", pdl = true, immutable = array<i64>}} {
  %0 = tensor.empty() : tensor<1x1x1x8xi1>
  return %0 : tensor<1x1x1x8xi1>
}
func.func private @k_product(%x: tensor<1x4x1x16xf32>) -> tensor<1x4x1x16xf32>
    attributes {topo.kernel = {family = "gemm", pdl = true, immutable = array<i64>}} { return %x : tensor<1x4x1x16xf32> }
func.func private @k_attention(%q: tensor<1x4x1x16xf32>, %k: tensor<1x4x8x16xf32>, %v: tensor<1x4x8x16xf32>, %m: tensor<1x1x1x8xi1>)
    -> (tensor<1x4x1x16xf32>, tensor<1x4x8x16xf32>)
    attributes {topo.inout = [[1, 1]], topo.kernel = {family = "attention", pdl = true, immutable = array<i64: 2>}} {
  return %q, %k : tensor<1x4x1x16xf32>, tensor<1x4x8x16xf32>
}
func.func @decode(%p: tensor<1xi64> {topo.kind = "input", topo.name = "p"}, %x: tensor<1x4x1x16xf32> {topo.kind = "input", topo.name = "x"},
                  %k: tensor<1x4x8x16xf32> {topo.kind = "buffer", topo.name = "k"}, %v: tensor<1x4x8x16xf32> {topo.kind = "param", topo.name = "v"})
    -> (tensor<1x4x8x16xf32> {topo.kind = "mutation", topo.name = "k"}, tensor<1x4x1x16xf32> {topo.kind = "output", topo.name = "0"}) {
  %m = call @k_mask(%p) : (tensor<1xi64>) -> tensor<1x1x1x8xi1>
  %q = call @k_product(%x) : (tensor<1x4x1x16xf32>) -> tensor<1x4x1x16xf32>
  %y:2 = call @k_attention(%q, %k, %v, %m)
      : (tensor<1x4x1x16xf32>, tensor<1x4x8x16xf32>, tensor<1x4x8x16xf32>, tensor<1x1x1x8xi1>) -> (tensor<1x4x1x16xf32>, tensor<1x4x8x16xf32>)
  return %y#1, %y#0 : tensor<1x4x8x16xf32>, tensor<1x4x1x16xf32>
}

// -----

// In front of the second call stands the kernel that makes its mask: nothing is settled at both calls, and nobody waits for it.

// CHECK-LABEL: func.func private @k_mask
// CHECK-NOT:     late_trigger
// CHECK-LABEL: func.func private @k_attention
// CHECK-NOT:     settled
// CHECK-LABEL: func.func @two
func.func private @k_mask(%p: tensor<1x4x1x16xf32>) -> tensor<1x4x1x16xf32>
    attributes {topo.kernel = {family = "loops", pdl = true, immutable = array<i64>}} { return %p : tensor<1x4x1x16xf32> }
func.func private @k_attention(%q: tensor<1x4x1x16xf32>) -> tensor<1x4x1x16xf32>
    attributes {topo.kernel = {family = "attention", pdl = true, immutable = array<i64>}} { return %q : tensor<1x4x1x16xf32> }
func.func @two(%p: tensor<1x4x1x16xf32> {topo.kind = "input", topo.name = "p"}) -> (tensor<1x4x1x16xf32>, tensor<1x4x1x16xf32>) {
  %a = call @k_mask(%p) : (tensor<1x4x1x16xf32>) -> tensor<1x4x1x16xf32>
  %b = call @k_mask(%a) : (tensor<1x4x1x16xf32>) -> tensor<1x4x1x16xf32>
  %y = call @k_attention(%a) : (tensor<1x4x1x16xf32>) -> tensor<1x4x1x16xf32>
  %c = call @k_mask(%b) : (tensor<1x4x1x16xf32>) -> tensor<1x4x1x16xf32>
  %z = call @k_attention(%c) : (tensor<1x4x1x16xf32>) -> tensor<1x4x1x16xf32>
  return %y, %z : tensor<1x4x1x16xf32>, tensor<1x4x1x16xf32>
}

// -----

// The members of a pack in front wait too.

// CHECK-LABEL: func.func private @k_member
// CHECK-SAME:    late_trigger = true
// CHECK-LABEL: func.func private @k_pack
// CHECK-SAME:    late_trigger = true
// CHECK-LABEL: func.func private @k_attention
// CHECK-SAME:    settled = array<i64: 1>
func.func private @k_member(%x: tensor<1x4x1x16xf32>) -> tensor<1x4x1x16xf32>
    attributes {topo.kernel = {family = "gemm", pdl = true, immutable = array<i64>}} { return %x : tensor<1x4x1x16xf32> }
func.func private @k_pack(%x: tensor<1x4x1x16xf32>) -> (tensor<1x4x1x16xf32>, tensor<1x4x1x16xf32>)
    attributes {topo.kernel = {family = "pack", pdl = true, immutable = array<i64>}} {
  %0 = call @k_member(%x) : (tensor<1x4x1x16xf32>) -> tensor<1x4x1x16xf32>
  %1 = call @k_member(%x) : (tensor<1x4x1x16xf32>) -> tensor<1x4x1x16xf32>
  return %0, %1 : tensor<1x4x1x16xf32>, tensor<1x4x1x16xf32>
}
func.func private @k_attention(%q: tensor<1x4x1x16xf32>, %m: tensor<1x1x1x8xi1>) -> tensor<1x4x1x16xf32>
    attributes {topo.kernel = {family = "attention", pdl = true, immutable = array<i64>}} { return %q : tensor<1x4x1x16xf32> }
func.func @packed(%m: tensor<1x1x1x8xi1> {topo.kind = "input", topo.name = "m"}, %x: tensor<1x4x1x16xf32> {topo.kind = "input", topo.name = "x"})
    -> (tensor<1x4x1x16xf32>, tensor<1x4x1x16xf32>) {
  %0:2 = call @k_pack(%x) : (tensor<1x4x1x16xf32>) -> (tensor<1x4x1x16xf32>, tensor<1x4x1x16xf32>)
  %1 = call @k_attention(%0#0, %m) : (tensor<1x4x1x16xf32>, tensor<1x1x1x8xi1>) -> tensor<1x4x1x16xf32>
  return %1, %0#1 : tensor<1x4x1x16xf32>, tensor<1x4x1x16xf32>
}

// -----

// A kernel of empty results is never launched: in front of this attention runs what makes its argument.

// CHECK-LABEL: func.func private @k_mask
// CHECK-NOT:     late_trigger
// CHECK-LABEL: func.func private @k_nothing
// CHECK-NOT:     late_trigger
// CHECK-LABEL: func.func private @k_attention
// CHECK-NOT:     settled
// CHECK-LABEL: func.func @empty
func.func private @k_mask(%p: tensor<8xf32>) -> tensor<8xf32>
    attributes {topo.kernel = {family = "loops", pdl = true, immutable = array<i64>}} { return %p : tensor<8xf32> }
func.func private @k_nothing(%p: tensor<0xf32>) -> tensor<0xf32>
    attributes {topo.kernel = {family = "loops", pdl = true, immutable = array<i64>}} { return %p : tensor<0xf32> }
func.func private @k_attention(%m: tensor<8xf32>) -> tensor<8xf32>
    attributes {topo.kernel = {family = "attention", pdl = true, immutable = array<i64>}} { return %m : tensor<8xf32> }
func.func @empty(%p: tensor<8xf32> {topo.kind = "input", topo.name = "p"}, %n: tensor<0xf32> {topo.kind = "input", topo.name = "n"})
    -> (tensor<8xf32>, tensor<0xf32>) {
  %m = call @k_mask(%p) : (tensor<8xf32>) -> tensor<8xf32>
  %z = call @k_nothing(%n) : (tensor<0xf32>) -> tensor<0xf32>
  %y = call @k_attention(%m) : (tensor<8xf32>) -> tensor<8xf32>
  return %y, %z : tensor<8xf32>, tensor<0xf32>
}
