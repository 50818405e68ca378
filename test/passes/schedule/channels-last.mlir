// Convolutions get tensors with their channels last; what stands between and behind them works in that order.

// RUN: topo-opt %s -p topo-channels-last --verify-each=numeric | filecheck %s

#id = affine_map<(a, b, c, d) -> (a, b, c, d)>
#id3 = affine_map<(a, b, c) -> (a, b, c)>

func.func private @aten.0(tensor<2x8x6x5xf32>, tensor<4x8x3x3xf32>) -> tensor<2x4x6x5xf32> attributes {topo.aten = "aten.convolution.default", topo.call = "{\22args\22: [{\22operand\22: 0}, {\22operand\22: 1}, null, [1, 1], [1, 1], [1, 1], false, [0, 0], 1], \22kwargs\22: {}}", topo.dtypes = ["float32", "float32", "float32"], topo.reason = "convolutions go to cuDNN"}
func.func private @aten.1(tensor<2x4x6x5xf32>, tensor<8x4x3x3xf32>) -> tensor<2x8x6x5xf32> attributes {topo.aten = "aten.convolution.default", topo.call = "{\22args\22: [{\22operand\22: 0}, {\22operand\22: 1}, null, [1, 1], [1, 1], [1, 1], false, [0, 0], 1], \22kwargs\22: {}}", topo.dtypes = ["float32", "float32", "float32"], topo.reason = "convolutions go to cuDNN"}
func.func private @aten.2(tensor<2x8x9xf32>, tensor<8x4x3xf32>) -> tensor<2x4x18xf32> attributes {topo.aten = "aten.convolution.default", topo.call = "{\22args\22: [{\22operand\22: 0}, {\22operand\22: 1}, null, [2], [1], [1], true, [1], 1], \22kwargs\22: {}}", topo.dtypes = ["float32", "float32", "float32"], topo.reason = "convolutions go to cuDNN"}
func.func private @aten.3(tensor<2x8x6x5xf32>, tensor<4x4x3x3xf32>) -> tensor<2x4x4x3xf32> attributes {topo.aten = "aten.convolution.default", topo.call = "{\22args\22: [{\22operand\22: 0}, {\22operand\22: 1}, null, [1, 1], [0, 0], [1, 1], false, [0, 0], 2], \22kwargs\22: {}}", topo.dtypes = ["float32", "float32", "float32"], topo.reason = "convolutions go to cuDNN"}

// CHECK-DAG: #[[FIRST:.*]] = affine_map<(d0, d1, d2, d3) -> (d0, d3, d1, d2)>
// CHECK-DAG: #[[BIAS:.*]] = affine_map<(d0, d1, d2, d3) -> (d3, 0, 0)>
// CHECK-DAG: #[[LAST:.*]] = affine_map<(d0, d1, d2, d3) -> (d0, d2, d3, d1)>

// The call shows ATen what it expects, as views.
// CHECK: func.func private @aten.0.channels_last(tensor<2x6x5x8xf32>, tensor<4x3x3x8xf32>) -> tensor<2x6x5x4xf32>
// CHECK-SAME: permuted{{.*}}operand{{.*}}: 0}, [0, 3, 1, 2]
// CHECK-SAME: results{{.*}}: {{\[\[}}0, 2, 3, 1]]
// CHECK-NOT: func.func private @aten.0(

// A convolution over one dimension becomes one over two.
// CHECK: func.func private @aten.2.channels_last(tensor<2x1x9x8xf32>, tensor<8x1x3x4xf32>) -> tensor<2x1x18x4xf32>
// CHECK-SAME: [1, 2], [0, 1], [1, 1], true, [0, 1], 1]

// CHECK-LABEL: func.func @between
// CHECK: %[[X:.*]] = linalg.generic {indexing_maps = [#[[FIRST]], {{.*}} ins(%arg0
// CHECK: %[[Y:.*]] = call @aten.0.channels_last(%[[X]],
// CHECK: %[[Z:.*]] = linalg.generic {indexing_maps = [#{{.*}}, #[[BIAS]], #{{.*}} ins(%[[Y]], %arg3
// CHECK: tensor<2x6x5x4xf32>
// CHECK: %[[W:.*]] = call @aten.1.channels_last(%[[Z]],
// CHECK: %[[B:.*]] = linalg.generic {indexing_maps = [#[[LAST]], {{.*}} ins(%[[W]]
// CHECK: return %[[B]]
func.func @between(%x: tensor<2x8x6x5xf32>, %u: tensor<4x8x3x3xf32>, %v: tensor<8x4x3x3xf32>, %b: tensor<4x1x1xf32>) -> tensor<2x8x6x5xf32> {
  %y = call @aten.0(%x, %u) : (tensor<2x8x6x5xf32>, tensor<4x8x3x3xf32>) -> tensor<2x4x6x5xf32>
  %e = tensor.empty() : tensor<2x4x6x5xf32>
  %z = linalg.generic {indexing_maps = [#id, affine_map<(a, b, c, d) -> (b, 0, 0)>, #id], iterator_types = ["parallel", "parallel", "parallel", "parallel"]}
      ins(%y, %b : tensor<2x4x6x5xf32>, tensor<4x1x1xf32>) outs(%e : tensor<2x4x6x5xf32>) {
  ^bb0(%i: f32, %j: f32, %o: f32):
    %s = arith.addf %i, %j : f32
    linalg.yield %s : f32
  } -> tensor<2x4x6x5xf32>
  %w = call @aten.1(%z, %v) : (tensor<2x4x6x5xf32>, tensor<8x4x3x3xf32>) -> tensor<2x8x6x5xf32>
  return %w : tensor<2x8x6x5xf32>
}

// Padding and a window; loop numbers in bodies follow their loops.
// CHECK-LABEL: func.func @pooled
// CHECK: tensor.pad %{{.*}} low[0, 1, 1, 0] high[0, 1, 1, 0]
// CHECK: linalg.generic {{.*}}iterator_types = ["parallel", "parallel", "parallel", "parallel", "reduction", "reduction"]
// CHECK: linalg.index 3
// CHECK: -> tensor<2x6x5x4xf32>
// CHECK: linalg.generic {indexing_maps = [#[[LAST]],
func.func @pooled(%x: tensor<2x8x6x5xf32>, %u: tensor<4x8x3x3xf32>) -> tensor<2x4x6x5xf32> {
  %y = call @aten.0(%x, %u) : (tensor<2x8x6x5xf32>, tensor<4x8x3x3xf32>) -> tensor<2x4x6x5xf32>
  %low = arith.constant 0xFF800000 : f32
  %p = tensor.pad %y low[0, 0, 1, 1] high[0, 0, 1, 1] {
  ^bb0(%a: index, %b: index, %c: index, %d: index):
    tensor.yield %low : f32
  } : tensor<2x4x6x5xf32> to tensor<2x4x8x7xf32>
  %e = tensor.empty() : tensor<2x4x6x5xf32>
  %f = linalg.fill ins(%low : f32) outs(%e : tensor<2x4x6x5xf32>) -> tensor<2x4x6x5xf32>
  %k = tensor.empty() : tensor<3x3xf32>
  %z = linalg.generic {indexing_maps = [affine_map<(a, b, c, d, e, f) -> (a, b, c + e, d + f)>, affine_map<(a, b, c, d, e, f) -> (e, f)>, affine_map<(a, b, c, d, e, f) -> (a, b, c, d)>], iterator_types = ["parallel", "parallel", "parallel", "parallel", "reduction", "reduction"]}
      ins(%p, %k : tensor<2x4x8x7xf32>, tensor<3x3xf32>) outs(%f : tensor<2x4x6x5xf32>) {
  ^bb0(%i: f32, %j: f32, %o: f32):
    %c = linalg.index 1 : index
    %c32 = arith.index_cast %c : index to i32
    %n = arith.sitofp %c32 : i32 to f32
    %s = arith.addf %i, %n : f32
    %m = arith.maximumf %s, %o : f32
    linalg.yield %m : f32
  } -> tensor<2x4x6x5xf32>
  return %z : tensor<2x4x6x5xf32>
}

// Views that keep channels apart from the rest stay in the order; a product puts its rows in it.
// CHECK-LABEL: func.func @views
// CHECK: tensor.extract_slice %{{.*}}[0, 0, 0, 1] [2, 6, 5, 2] [1, 1, 1, 1]
// CHECK: tensor.concat dim(3)
// CHECK: tensor.collapse_shape %{{.*}} {{\[\[}}0], [1, 2], [3]] : tensor<2x6x5x6xf32> into tensor<2x30x6xf32>
// CHECK: linalg.contract {{.*}} ins(%{{.*}}, %arg2 : tensor<2x30x6xf32>, tensor<3x6xf32>) outs(%{{.*}} : tensor<2x30x3xf32>)
// CHECK: } -> tensor<2x3x30xf32>
func.func @views(%x: tensor<2x8x6x5xf32>, %u: tensor<4x8x3x3xf32>, %q: tensor<3x6xf32>) -> tensor<2x3x30xf32> {
  %y = call @aten.0(%x, %u) : (tensor<2x8x6x5xf32>, tensor<4x8x3x3xf32>) -> tensor<2x4x6x5xf32>
  %s = tensor.extract_slice %y[0, 1, 0, 0] [2, 2, 6, 5] [1, 1, 1, 1] : tensor<2x4x6x5xf32> to tensor<2x2x6x5xf32>
  %c = tensor.concat dim(1) %y, %s : (tensor<2x4x6x5xf32>, tensor<2x2x6x5xf32>) -> tensor<2x6x6x5xf32>
  %r = tensor.collapse_shape %c [[0], [1], [2, 3]] : tensor<2x6x6x5xf32> into tensor<2x6x30xf32>
  %e = tensor.empty() : tensor<2x3x30xf32>
  %zero = arith.constant 0.0 : f32
  %f = linalg.fill ins(%zero : f32) outs(%e : tensor<2x3x30xf32>) -> tensor<2x3x30xf32>
  %z = linalg.contract indexing_maps = [affine_map<(n, o, p, k) -> (o, k)>, affine_map<(n, o, p, k) -> (n, k, p)>, affine_map<(n, o, p, k) -> (n, o, p)>]
      ins(%q, %r : tensor<3x6xf32>, tensor<2x6x30xf32>) outs(%f : tensor<2x3x30xf32>) -> tensor<2x3x30xf32>
  return %z : tensor<2x3x30xf32>
}

// Groups of channels are a view in either order; places and channels can't be merged, so that view comes after a transpose.
// CHECK-LABEL: func.func @groups
// CHECK: %[[BACK:.*]] = linalg.generic {indexing_maps = [#[[LAST]],
// CHECK: tensor.expand_shape %{{.*}} {{\[\[}}0], [1], [2], [3, 4]] output_shape [2, 6, 5, 2, 2]
// CHECK: linalg.generic {{.*}}iterator_types = ["parallel", "parallel", "reduction", "reduction", "reduction"]
// CHECK: } -> tensor<2x2xf32>
// CHECK: tensor.collapse_shape %[[BACK]] {{\[\[}}0], [1, 2, 3]] : tensor<2x4x6x5xf32> into tensor<2x120xf32>
func.func @groups(%x: tensor<2x8x6x5xf32>, %u: tensor<4x8x3x3xf32>) -> (tensor<2x2xf32>, tensor<2x120xf32>) {
  %y = call @aten.0(%x, %u) : (tensor<2x8x6x5xf32>, tensor<4x8x3x3xf32>) -> tensor<2x4x6x5xf32>
  %g = tensor.expand_shape %y [[0], [1, 2], [3], [4]] output_shape [2, 2, 2, 6, 5] : tensor<2x4x6x5xf32> into tensor<2x2x2x6x5xf32>
  %e = tensor.empty() : tensor<2x2xf32>
  %zero = arith.constant 0.0 : f32
  %f = linalg.fill ins(%zero : f32) outs(%e : tensor<2x2xf32>) -> tensor<2x2xf32>
  %z = linalg.generic {indexing_maps = [affine_map<(a, b, c, d, e) -> (a, b, c, d, e)>, affine_map<(a, b, c, d, e) -> (a, b)>], iterator_types = ["parallel", "parallel", "reduction", "reduction", "reduction"]}
      ins(%g : tensor<2x2x2x6x5xf32>) outs(%f : tensor<2x2xf32>) {
  ^bb0(%i: f32, %o: f32):
    %s = arith.addf %i, %o : f32
    linalg.yield %s : f32
  } -> tensor<2x2xf32>
  %c = tensor.collapse_shape %y [[0], [1, 2, 3]] : tensor<2x4x6x5xf32> into tensor<2x120xf32>
  return %z, %c : tensor<2x2xf32>, tensor<2x120xf32>
}

// CHECK-LABEL: func.func @one_dimension
// CHECK: tensor.expand_shape %{{.*}} {{\[\[}}0], [1, 2], [3]] output_shape [2, 1, 9, 8]
// CHECK: %[[Y1:.*]] = call @aten.2.channels_last
// CHECK: tensor.collapse_shape %[[Y1]] {{\[\[}}0], [1, 2], [3]] : tensor<2x1x18x4xf32> into tensor<2x18x4xf32>
// CHECK: "topo.demote"(%{{.*}}) : (tensor<2x18x4xf32>) -> tensor<2x18x4xbf16>
func.func @one_dimension(%x: tensor<2x8x9xf32>, %w: tensor<8x4x3xf32>) -> tensor<2x4x18xbf16> {
  %y = call @aten.2(%x, %w) : (tensor<2x8x9xf32>, tensor<8x4x3xf32>) -> tensor<2x4x18xf32>
  %z = "topo.demote"(%y) : (tensor<2x4x18xf32>) -> tensor<2x4x18xbf16>
  return %z : tensor<2x4x18xbf16>
}

// A part that was not computed in the order is transposed to it, so that what reads all parts has one order.
// CHECK-LABEL: func.func @joined
// CHECK: %[[Y2:.*]] = call @aten.0.channels_last
// CHECK: %[[PART:.*]] = linalg.generic {indexing_maps = [#[[FIRST]], {{.*}} ins(%arg2
// CHECK: %[[ALL:.*]] = tensor.concat dim(3) %[[PART]], %[[Y2]]
// CHECK: linalg.generic {indexing_maps = [#[[LAST]], {{.*}} ins(%[[ALL]]
func.func @joined(%x: tensor<2x8x6x5xf32>, %u: tensor<4x8x3x3xf32>, %p: tensor<2x3x6x5xf32>) -> tensor<2x7x6x5xf32> {
  %y = call @aten.0(%x, %u) : (tensor<2x8x6x5xf32>, tensor<4x8x3x3xf32>) -> tensor<2x4x6x5xf32>
  %c = tensor.concat dim(1) %p, %y : (tensor<2x3x6x5xf32>, tensor<2x4x6x5xf32>) -> tensor<2x7x6x5xf32>
  return %c : tensor<2x7x6x5xf32>
}

// Groups keep their order: cuDNN is slower with channels last there.
// CHECK-LABEL: func.func @grouped
// CHECK-NEXT: call @aten.3(%arg0, %arg1)
func.func @grouped(%x: tensor<2x8x6x5xf32>, %w: tensor<4x4x3x3xf32>) -> tensor<2x4x4x3xf32> {
  %y = call @aten.3(%x, %w) : (tensor<2x8x6x5xf32>, tensor<4x4x3x3xf32>) -> tensor<2x4x4x3xf32>
  return %y : tensor<2x4x4x3xf32>
}

// What follows a product whose columns are moved to the second place works in the product's order.
// CHECK-LABEL: func.func @product
// CHECK: %[[P:.*]] = linalg.contract
// CHECK-NOT: tensor<2x4x30xf32>
// CHECK: tensor.expand_shape %[[P]] {{\[\[}}0], [1, 2], [3]] output_shape [2, 6, 5, 4]
// CHECK: "topo.demote"(%{{.*}}) : (tensor<2x6x5x4xf32>) -> tensor<2x6x5x4xbf16>
// CHECK: linalg.generic {indexing_maps = [#[[LAST]],
// CHECK-SAME: outs(%{{.*}} : tensor<2x4x6x5xbf16>)
func.func @product(%x: tensor<2x30x8xf32>, %w: tensor<4x8xf32>) -> tensor<2x4x6x5xbf16> {
  %e = tensor.empty() : tensor<2x30x4xf32>
  %zero = arith.constant 0.0 : f32
  %f = linalg.fill ins(%zero : f32) outs(%e : tensor<2x30x4xf32>) -> tensor<2x30x4xf32>
  %y = linalg.contract indexing_maps = [affine_map<(n, p, o, k) -> (n, p, k)>, affine_map<(n, p, o, k) -> (o, k)>, affine_map<(n, p, o, k) -> (n, p, o)>]
      ins(%x, %w : tensor<2x30x8xf32>, tensor<4x8xf32>) outs(%f : tensor<2x30x4xf32>) -> tensor<2x30x4xf32>
  %i = tensor.empty() : tensor<2x4x30xf32>
  %t = linalg.generic {indexing_maps = [affine_map<(n, o, p) -> (n, p, o)>, affine_map<(n, o, p) -> (n, o, p)>], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%y : tensor<2x30x4xf32>) outs(%i : tensor<2x4x30xf32>) {
  ^bb0(%a: f32, %b: f32):
    linalg.yield %a : f32
  } -> tensor<2x4x30xf32>
  %s = tensor.expand_shape %t [[0], [1], [2, 3]] output_shape [2, 4, 6, 5] : tensor<2x4x30xf32> into tensor<2x4x6x5xf32>
  %z = "topo.demote"(%s) : (tensor<2x4x6x5xf32>) -> tensor<2x4x6x5xbf16>
  return %z : tensor<2x4x6x5xbf16>
}
