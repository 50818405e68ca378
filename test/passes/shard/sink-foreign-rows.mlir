// RUN: topo-opt %s --pass-pipeline='builtin.module(topo-sink-foreign-rows)' | filecheck %s

// What comes between two products of the same groups needs no zeros in rows of other groups, and what is computed of the second one row by
// row comes before them.
// CHECK-LABEL: func.func @main
// CHECK:         %[[UP:.*]] = "topo.grouped_product"(%arg0, %arg1, %arg3)
// CHECK-NEXT:    %[[ROWS:.*]] = "topo.demote"(%[[UP]])
// CHECK:         %[[DOWN:.*]] = "topo.grouped_product"(%[[ROWS]], %arg2, %arg3)
// CHECK-NEXT:    %[[NARROW:.*]] = "topo.demote"(%[[DOWN]])
// CHECK:         %[[ZERO:.*]] = linalg.generic {{.*}} ins(%[[NARROW]], %arg3 : tensor<8x4xbf16>, tensor<8xi64>) {{.*}}{topo.owned = 2 : i64}
// CHECK:           arith.select
// CHECK:         tensor.expand_shape %[[ZERO]]

#whole = affine_map<(d0, d1) -> (d0, d1)>
#row = affine_map<(d0, d1) -> (d0)>
module {
  shard.grid @mesh(shape = 2) {topo.axes = ["x"], topo.devices = ["gpu0", "gpu1"]}
  func.func @main(%x: tensor<8x4xbf16>, %a: tensor<2x4x4xbf16>, %b: tensor<2x4x4xbf16>, %g: tensor<8xi64>) -> (tensor<4x2x4xbf16>, tensor<8x4xf32>) attributes {topo.function = "main"} {
    %zero = arith.constant 0.0 : f32
    %half = arith.constant 0.5 : f32
    %e = tensor.empty() : tensor<8x4xf32>
    %0 = "topo.grouped_product"(%x, %a, %g) {operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<8x4xbf16>, tensor<2x4x4xbf16>, tensor<8xi64>) -> tensor<8x4xf32>
    %1 = linalg.generic {indexing_maps = [#whole, #row, #whole], iterator_types = ["parallel", "parallel"]} ins(%0, %g : tensor<8x4xf32>, tensor<8xi64>) outs(%e : tensor<8x4xf32>) attrs = {topo.owned = 2 : i64} {
    ^bb0(%p: f32, %n: i64, %o: f32):
      %i = arith.index_cast %n : i64 to index
      %c0 = arith.constant 0 : index
      %low = arith.cmpi sge, %i, %c0 : index
      %c2 = arith.constant 2 : index
      %high = arith.cmpi slt, %i, %c2 : index
      %in = arith.andi %low, %high : i1
      %s = arith.select %in, %p, %zero : f32
      linalg.yield %s : f32
    } -> tensor<8x4xf32>
    %2 = "topo.demote"(%1) : (tensor<8x4xf32>) -> tensor<8x4xbf16>
    %3 = "topo.grouped_product"(%2, %b, %g) {operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<8x4xbf16>, tensor<2x4x4xbf16>, tensor<8xi64>) -> tensor<8x4xf32>
    %4 = linalg.generic {indexing_maps = [#whole, #row, #whole], iterator_types = ["parallel", "parallel"]} ins(%3, %g : tensor<8x4xf32>, tensor<8xi64>) outs(%e : tensor<8x4xf32>) attrs = {topo.owned = 2 : i64} {
    ^bb0(%p: f32, %n: i64, %o: f32):
      %i = arith.index_cast %n : i64 to index
      %c0 = arith.constant 0 : index
      %low = arith.cmpi sge, %i, %c0 : index
      %c2 = arith.constant 2 : index
      %high = arith.cmpi slt, %i, %c2 : index
      %in = arith.andi %low, %high : i1
      %s = arith.select %in, %p, %zero : f32
      linalg.yield %s : f32
    } -> tensor<8x4xf32>
    %5 = "topo.demote"(%4) : (tensor<8x4xf32>) -> tensor<8x4xbf16>
    %6 = tensor.expand_shape %5 [[0, 1], [2]] output_shape [4, 2, 4] : tensor<8x4xbf16> into tensor<4x2x4xbf16>
    %7 = "topo.grouped_product"(%x, %b, %g) {operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<8x4xbf16>, tensor<2x4x4xbf16>, tensor<8xi64>) -> tensor<8x4xf32>
    // What makes zeros something else keeps them in front.
    // CHECK:         %[[KEPT:.*]] = linalg.generic {{.*}}{topo.owned = 2 : i64}
    // CHECK:         linalg.generic {{.*}} ins(%[[KEPT]] :
    // CHECK:           arith.addf
    %8 = linalg.generic {indexing_maps = [#whole, #row, #whole], iterator_types = ["parallel", "parallel"]} ins(%7, %g : tensor<8x4xf32>, tensor<8xi64>) outs(%e : tensor<8x4xf32>) attrs = {topo.owned = 2 : i64} {
    ^bb0(%p: f32, %n: i64, %o: f32):
      %i = arith.index_cast %n : i64 to index
      %c0 = arith.constant 0 : index
      %low = arith.cmpi sge, %i, %c0 : index
      %c2 = arith.constant 2 : index
      %high = arith.cmpi slt, %i, %c2 : index
      %in = arith.andi %low, %high : i1
      %s = arith.select %in, %p, %zero : f32
      linalg.yield %s : f32
    } -> tensor<8x4xf32>
    %9 = linalg.generic {indexing_maps = [#whole, #whole], iterator_types = ["parallel", "parallel"]} ins(%8 : tensor<8x4xf32>) outs(%e : tensor<8x4xf32>) {
    ^bb0(%p: f32, %o: f32):
      %s = arith.addf %p, %half : f32
      linalg.yield %s : f32
    } -> tensor<8x4xf32>
    return %6, %9 : tensor<4x2x4xbf16>, tensor<8x4xf32>
  }
}
