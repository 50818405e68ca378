// RUN: topo-opt %s -p 'topo-form-expert-kernels' --split-input-file | filecheck %s
// RUN: topo-opt %s -p 'topo-form-expert-kernels{fuse=none}' --split-input-file | filecheck %s --check-prefix=NONE

// A softmax before the picks, which nothing else reads, and their renormalisation are part of the kernel.

// CHECK-LABEL: func.func @route
// CHECK: %[[PICKED:.+]]:2 = call @k_top_k_{{.*}}(%arg0) : (tensor<4x16xf32>) -> (tensor<4x2xi64>, tensor<4x2xf32>)
// CHECK: return %[[PICKED]]#1, %[[PICKED]]#0
// CHECK: func.func private @k_top_k_{{.*}} attributes {topo.kernel = {family = "top_k"}}
// NONE-LABEL: func.func @route
// NONE: linalg.generic
// NONE: call @k_top_k_
// NONE: linalg.generic
#full = affine_map<(d0, d1) -> (d0, d1)>
#row = affine_map<(d0, d1) -> (d0)>
func.func @route(%x: tensor<4x16xf32>) -> (tensor<4x2xf32>, tensor<4x2xi64>) {
  %e = tensor.empty() : tensor<4x16xf32>
  %p = linalg.generic {indexing_maps = [#full, #full], iterator_types = ["parallel", "parallel"]} ins(%x : tensor<4x16xf32>) outs(%e : tensor<4x16xf32>) {
  ^bb0(%a: f32, %b: f32):
    %c = math.exp %a : f32
    linalg.yield %c : f32
  } -> tensor<4x16xf32>
  %v, %i = "topo.top_k"(%p) {k = 2 : i64, largest = true} : (tensor<4x16xf32>) -> (tensor<4x2xf32>, tensor<4x2xi64>)
  %zero = arith.constant 0.0 : f32
  %s = tensor.empty() : tensor<4xf32>
  %z = linalg.fill ins(%zero : f32) outs(%s : tensor<4xf32>) -> tensor<4xf32>
  %t = linalg.generic {indexing_maps = [#full, #row], iterator_types = ["parallel", "reduction"]} ins(%v : tensor<4x2xf32>) outs(%z : tensor<4xf32>) {
  ^bb0(%a: f32, %b: f32):
    %c = arith.addf %a, %b : f32
    linalg.yield %c : f32
  } -> tensor<4xf32>
  %o = tensor.empty() : tensor<4x2xf32>
  %n = linalg.generic {indexing_maps = [#full, #row, #full], iterator_types = ["parallel", "parallel"]} ins(%v, %t : tensor<4x2xf32>, tensor<4xf32>) outs(%o : tensor<4x2xf32>) {
  ^bb0(%a: f32, %b: f32, %d: f32):
    %c = arith.divf %a, %b : f32
    linalg.yield %c : f32
  } -> tensor<4x2xf32>
  return %n, %i : tensor<4x2xf32>, tensor<4x2xi64>
}

// -----

// Products of the same groups share one order; few rows among many matrices have none.

// CHECK-LABEL: func.func @products
// CHECK: %[[ORDER:.+]]:2 = call @k_group_rows_{{.*}}(%arg2) : (tensor<64xi64>) -> (tensor<64xi32>, tensor<9xi32>)
// CHECK: %[[H:.+]] = call @k_experts_{{.*}}(%arg0, %arg1, %arg2, %[[ORDER]]#0, %[[ORDER]]#1) : {{.*}} -> tensor<64x32xbf16>
// CHECK: call @k_experts_{{.*}}(%[[H]], %arg1, %arg2, %[[ORDER]]#0, %[[ORDER]]#1)
// CHECK: call @k_experts_{{.*}}(%{{.*}}, %arg1, %arg3)
// CHECK-NOT: topo.grouped_product
// CHECK: return
// NONE-LABEL: func.func @products
// NONE: call @k_experts_{{.*}} -> tensor<64x32xf32>
// NONE: topo.demote
func.func @products(%x: tensor<64x32xbf16>, %w: tensor<8x32x32xbf16>, %g: tensor<64xi64>, %one: tensor<1xi64>) -> (tensor<64x32xf32>, tensor<1x32xf32>) {
  %0 = "topo.grouped_product"(%x, %w, %g) {operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<64x32xbf16>, tensor<8x32x32xbf16>, tensor<64xi64>) -> tensor<64x32xf32>
  %1 = "topo.demote"(%0) : (tensor<64x32xf32>) -> tensor<64x32xbf16>
  %2 = "topo.grouped_product"(%1, %w, %g) {operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<64x32xbf16>, tensor<8x32x32xbf16>, tensor<64xi64>) -> tensor<64x32xf32>
  %s = tensor.extract_slice %x[3, 0] [1, 32] [1, 1] : tensor<64x32xbf16> to tensor<1x32xbf16>
  %3 = "topo.grouped_product"(%s, %w, %one) {operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<1x32xbf16>, tensor<8x32x32xbf16>, tensor<1xi64>) -> tensor<1x32xf32>
  return %2, %3 : tensor<64x32xf32>, tensor<1x32xf32>
}

// -----

// A reader of the picks that comes before their renormalisation still finds them.

// CHECK-LABEL: func.func @order
// CHECK: %[[PICKED:.+]]:2 = call @k_top_k_
// CHECK: arith.addi
// CHECK: return
func.func @order(%x: tensor<4x16xf32>) -> (tensor<4x2xi64>, tensor<4x2xf32>) {
  %v, %i = "topo.top_k"(%x) {k = 2 : i64, largest = true} : (tensor<4x16xf32>) -> (tensor<4x2xf32>, tensor<4x2xi64>)
  %e = tensor.empty() : tensor<2x4xi64>
  %m = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d1, d0)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%i : tensor<4x2xi64>) outs(%e : tensor<2x4xi64>) {
  ^bb0(%a: i64, %b: i64):
    %c = arith.addi %a, %a : i64
    linalg.yield %c : i64
  } -> tensor<2x4xi64>
  %q = tensor.expand_shape %m [[0, 1], [2]] output_shape [1, 2, 4] : tensor<2x4xi64> into tensor<1x2x4xi64>
  %o = tensor.empty() : tensor<4x2xf32>
  %n = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%v : tensor<4x2xf32>) outs(%o : tensor<4x2xf32>) {
  ^bb0(%a: f32, %b: f32):
    %c = math.exp %a : f32
    linalg.yield %c : f32
  } -> tensor<4x2xf32>
  %c = tensor.collapse_shape %q [[0, 1], [2]] : tensor<1x2x4xi64> into tensor<2x4xi64>
  %r = tensor.empty() : tensor<4x2xi64>
  %t = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d1, d0)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%c : tensor<2x4xi64>) outs(%r : tensor<4x2xi64>) {
  ^bb0(%a: i64, %b: i64):
    %d = arith.muli %a, %a : i64
    linalg.yield %d : i64
  } -> tensor<4x2xi64>
  return %t, %n : tensor<4x2xi64>, tensor<4x2xf32>
}

// -----

// In order, a kernel visits the rows that have a group: what makes the others zero comes behind it. A bias looked up by group does not matter for them.

// CHECK-LABEL: func.func @rows_of_others
// CHECK: %[[P:.+]] = call @k_experts_{{.*}} -> tensor<64x32xf32>
// CHECK: linalg.generic {{.*}} ins(%[[P]], %arg2 : tensor<64x32xf32>, tensor<64xi64>)
// CHECK: arith.select
// CHECK: return
func.func @rows_of_others(%x: tensor<64x32xbf16>, %w: tensor<8x32x32xbf16>, %g: tensor<64xi64>, %b: tensor<8x32xf32>) -> tensor<64x32xf32> {
  %0 = "topo.grouped_product"(%x, %w, %g) {operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<64x32xbf16>, tensor<8x32x32xbf16>, tensor<64xi64>) -> tensor<64x32xf32>
  %e = tensor.empty() : tensor<64x32xf32>
  %1 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0, %g : tensor<64x32xf32>, tensor<64xi64>) outs(%e : tensor<64x32xf32>) {
  ^bb0(%v: f32, %n: i64, %o: f32):
    %i = arith.index_cast %n : i64 to index
    %j = linalg.index 1 : index
    %a = tensor.extract %b[%i, %j] : tensor<8x32xf32>
    %r = arith.addf %v, %a : f32
    linalg.yield %r : f32
  } -> tensor<64x32xf32>
  %2 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%1, %g : tensor<64x32xf32>, tensor<64xi64>) outs(%e : tensor<64x32xf32>) {
  ^bb0(%v: f32, %n: i64, %o: f32):
    %i = arith.index_cast %n : i64 to index
    %c8 = arith.constant 8 : index
    %z = arith.constant 0.0 : f32
    %inside = arith.cmpi slt, %i, %c8 : index
    %r = arith.select %inside, %v, %z : f32
    linalg.yield %r : f32
  } -> tensor<64x32xf32>
  return %2 : tensor<64x32xf32>
}
