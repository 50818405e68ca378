// RUN: topo-opt %s -p topo-mark-dependent-launch --split-input-file | filecheck %s
// RUN: topo-opt %s -p 'topo-mark-dependent-launch{topology=cpu}' --split-input-file | filecheck %s --check-prefix=CPU

// Only machines with grids that depend on each other get marks.

// CPU-NOT: pdl
// CPU-NOT: immutable

// Parameters and constants may be loaded early, also through views that alias; inputs and results may not.

// CHECK-LABEL: func.func private @k_first
// CHECK-SAME:    immutable = array<i64: 1>, pdl = true
// CHECK-LABEL: func.func private @k_second
// CHECK-SAME:    immutable = array<i64: 1, 2>, pdl = true
// CHECK-LABEL: func.func private @k_unused
// CHECK-NOT:     pdl
// CHECK-LABEL: func.func @views
func.func private @k_first(%a: tensor<8xf32>, %w: tensor<8xf32>) -> tensor<8xf32>
    attributes {topo.kernel = {family = "loops"}} { return %a : tensor<8xf32> }
func.func private @k_second(%a: tensor<8xf32>, %w: tensor<4xf32>, %c: tensor<8xf32>) -> tensor<8xf32>
    attributes {topo.kernel = {family = "loops"}} { return %a : tensor<8xf32> }
func.func private @k_unused(%a: tensor<8xf32>) -> tensor<8xf32>
    attributes {topo.kernel = {family = "loops"}} { return %a : tensor<8xf32> }
func.func @views(%w: tensor<2x8xf32> {topo.kind = "param", topo.name = "w"},
                 %x: tensor<8xf32> {topo.kind = "input", topo.name = "x"}) -> tensor<8xf32> {
  %row = tensor.extract_slice %w[1, 0] [1, 8] [1, 1] : tensor<2x8xf32> to tensor<8xf32>
  %half = tensor.extract_slice %w[0, 4] [1, 4] [1, 1] : tensor<2x8xf32> to tensor<4xf32>
  %c = arith.constant dense<[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]> : tensor<8xf32>
  %0 = call @k_first(%x, %row) : (tensor<8xf32>, tensor<8xf32>) -> tensor<8xf32>
  %1 = call @k_second(%0, %half, %c) : (tensor<8xf32>, tensor<4xf32>, tensor<8xf32>) -> tensor<8xf32>
  return %1 : tensor<8xf32>
}

// -----

// A part of a parameter that is not contiguous is packed by a copy in every run: that copy is written.

// CHECK-LABEL: func.func private @k_packed
// CHECK-SAME:    immutable = array<i64>, pdl = true
func.func private @k_packed(%a: tensor<2x4xf32>) -> tensor<2x4xf32>
    attributes {topo.kernel = {family = "loops"}} { return %a : tensor<2x4xf32> }
func.func @copied(%w: tensor<2x8xf32> {topo.kind = "param", topo.name = "w"}) -> tensor<2x4xf32> {
  %part = tensor.extract_slice %w[0, 0] [2, 4] [1, 1] : tensor<2x8xf32> to tensor<2x4xf32>
  %0 = call @k_packed(%part) : (tensor<2x4xf32>) -> tensor<2x4xf32>
  return %0 : tensor<2x4xf32>
}

// -----

// A kernel that is called with a parameter here and with a result there may assume nothing.

// CHECK-LABEL: func.func private @k_twice
// CHECK-SAME:    immutable = array<i64: 0>, pdl = true
func.func private @k_twice(%w: tensor<8xf32>, %a: tensor<8xf32>) -> tensor<8xf32>
    attributes {topo.kernel = {family = "loops"}} { return %a : tensor<8xf32> }
func.func @both(%w: tensor<8xf32> {topo.kind = "param", topo.name = "w"},
                %v: tensor<8xf32> {topo.kind = "param", topo.name = "v"}) -> tensor<8xf32> {
  %0 = call @k_twice(%w, %v) : (tensor<8xf32>, tensor<8xf32>) -> tensor<8xf32>
  %1 = call @k_twice(%v, %0) : (tensor<8xf32>, tensor<8xf32>) -> tensor<8xf32>
  return %1 : tensor<8xf32>
}

// -----

// A parameter that another kernel rewrites, directly or through a view, is not immutable anywhere.

// CHECK-LABEL: func.func private @k_reader
// CHECK-SAME:    immutable = array<i64: 1>, pdl = true
// CHECK-LABEL: func.func private @k_writer
// CHECK-SAME:    immutable = array<i64: 1>, pdl = true
func.func private @k_reader(%w: tensor<2x4xf32>, %v: tensor<8xf32>) -> tensor<8xf32>
    attributes {topo.kernel = {family = "loops"}} { return %v : tensor<8xf32> }
func.func private @k_writer(%w: tensor<8xf32>, %v: tensor<8xf32>) -> tensor<8xf32>
    attributes {topo.kernel = {family = "update"}, topo.inout = [array<i64: 0, 0>]} { return %w : tensor<8xf32> }
func.func @rewritten(%w: tensor<2x4xf32> {topo.kind = "param", topo.name = "w"},
                     %v: tensor<8xf32> {topo.kind = "param", topo.name = "v"}) -> (tensor<8xf32>, tensor<8xf32>) {
  %flat = tensor.collapse_shape %w [[0, 1]] : tensor<2x4xf32> into tensor<8xf32>
  %0 = call @k_reader(%w, %v) : (tensor<2x4xf32>, tensor<8xf32>) -> tensor<8xf32>
  %1 = call @k_writer(%flat, %v) : (tensor<8xf32>, tensor<8xf32>) -> tensor<8xf32>
  return %0, %1 : tensor<8xf32>, tensor<8xf32>
}

// -----

// One function gives `scale` a new value, so the other one may not take it for fixed.

// CHECK-LABEL: func.func private @k_scaled
// CHECK-SAME:    immutable = array<i64>, pdl = true
func.func private @k_scaled(%a: tensor<8xf32>) -> tensor<8xf32>
    attributes {topo.kernel = {family = "loops"}} { return %a : tensor<8xf32> }
func.func @serve(%s: tensor<8xf32> {topo.kind = "param", topo.name = "scale"}) -> tensor<8xf32> {
  %0 = call @k_scaled(%s) : (tensor<8xf32>) -> tensor<8xf32>
  return %0 : tensor<8xf32>
}
func.func @calibrate(%s: tensor<8xf32> {topo.kind = "buffer", topo.name = "scale"},
                     %x: tensor<8xf32> {topo.kind = "input", topo.name = "x"})
    -> (tensor<8xf32> {topo.kind = "mutation", topo.name = "scale"}) {
  return %x : tensor<8xf32>
}
