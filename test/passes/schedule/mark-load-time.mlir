// Kernels that see nothing but weights run when the program is loaded, those that depend on an input or make much of little don't.

// RUN: topo-opt %s -p topo-mark-load-time | filecheck %s

func.func private @k_copy(%a: tensor<4x8xf32>) -> tensor<4x8xf32> attributes {topo.kernel = {family = "loops", cols = array<i64>, rows = array<i64: 4, 8>}} {
  return %a : tensor<4x8xf32>
}
func.func private @k_wide(%a: tensor<4x8xi8>) -> tensor<4x8xf32> attributes {topo.kernel = {family = "loops", cols = array<i64>, rows = array<i64: 4, 8>}} {
  %e = tensor.empty() : tensor<4x8xf32>
  return %e : tensor<4x8xf32>
}
func.func private @k_append(%a: tensor<4x8xf32>) -> tensor<4x8xf32> attributes {topo.kernel = {family = "update"}, topo.inout = [[0, 0]]} {
  return %a : tensor<4x8xf32>
}

// The same of the same weight has the same digest in every function, through views too.
// CHECK-LABEL: func.func @weights
// CHECK: %[[V:.*]] = tensor.collapse_shape %arg0
// CHECK: %[[E:.*]] = tensor.expand_shape %[[V]]
// CHECK: %[[A:.*]] = call @k_copy(%[[E]]) {topo.at_load = "[[FIRST:[0-9a-f]+]]"}
// CHECK: call @k_copy(%[[A]]) {topo.at_load = "
// CHECK: call @k_copy(%arg1) : (
// CHECK: call @k_wide(%arg2) : (
// CHECK: call @k_copy(%arg3) : (
func.func @weights(%w: tensor<4x8xf32> {topo.kind = "param", topo.name = "w"}, %x: tensor<4x8xf32> {topo.kind = "input", topo.name = "x"},
                   %q: tensor<4x8xi8> {topo.kind = "param", topo.name = "q"}, %s: tensor<4x8xf32> {topo.kind = "constant", topo.name = "s"})
    -> (tensor<4x8xf32>, tensor<4x8xf32>, tensor<4x8xf32>, tensor<4x8xf32>) attributes {topo.function = "weights"} {
  %v = tensor.collapse_shape %w [[0, 1]] : tensor<4x8xf32> into tensor<32xf32>
  %e = tensor.expand_shape %v [[0, 1]] output_shape [4, 8] : tensor<32xf32> into tensor<4x8xf32>
  %a = call @k_copy(%e) : (tensor<4x8xf32>) -> tensor<4x8xf32>
  %b = call @k_copy(%a) : (tensor<4x8xf32>) -> tensor<4x8xf32>
  %c = call @k_copy(%x) : (tensor<4x8xf32>) -> tensor<4x8xf32>
  %d = call @k_wide(%q) : (tensor<4x8xi8>) -> tensor<4x8xf32>
  %f = call @k_copy(%s) : (tensor<4x8xf32>) -> tensor<4x8xf32>
  return %b, %c, %d, %f : tensor<4x8xf32>, tensor<4x8xf32>, tensor<4x8xf32>, tensor<4x8xf32>
}

// CHECK-LABEL: func.func @again
// CHECK: call @k_copy(%{{.*}}) {topo.at_load = "[[FIRST]]"}
func.func @again(%w: tensor<4x8xf32> {topo.kind = "param", topo.name = "w"}) -> tensor<4x8xf32> attributes {topo.function = "again"} {
  %v = tensor.collapse_shape %w [[0, 1]] : tensor<4x8xf32> into tensor<32xf32>
  %e = tensor.expand_shape %v [[0, 1]] output_shape [4, 8] : tensor<32xf32> into tensor<4x8xf32>
  %a = call @k_copy(%e) : (tensor<4x8xf32>) -> tensor<4x8xf32>
  return %a : tensor<4x8xf32>
}

// A tensor that one function gives a new value is not the same at every call of another.
// CHECK-LABEL: func.func @rewrites
// CHECK: call @k_append(%arg0) : (
func.func @rewrites(%s: tensor<4x8xf32> {topo.kind = "constant", topo.name = "s"}) -> (tensor<4x8xf32> {topo.kind = "mutation", topo.name = "s"})
    attributes {topo.function = "rewrites"} {
  %a = call @k_append(%s) : (tensor<4x8xf32>) -> tensor<4x8xf32>
  return %a : tensor<4x8xf32>
}
