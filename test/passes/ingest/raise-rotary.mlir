// Halves and pairs that are put together again with one of them negated; what is no rotation stays.

// RUN: topo-opt %s -p 'topo-raise-rotary' --verify-each=numeric | filecheck %s

#id = affine_map<(a, b) -> (a, b)>

// CHECK-LABEL: func.func @halves
// CHECK-NEXT: %[[T:.*]] = "topo.rotate_half"(%arg0) {interleaved = false} : (tensor<3x8xf32>) -> tensor<3x8xf32>
// CHECK-NEXT: return %[[T]]
func.func @halves(%x: tensor<3x8xf32>) -> tensor<3x8xf32> {
  %a = tensor.extract_slice %x[0, 0] [3, 4] [1, 1] : tensor<3x8xf32> to tensor<3x4xf32>
  %b = tensor.extract_slice %x[0, 4] [3, 4] [1, 1] : tensor<3x8xf32> to tensor<3x4xf32>
  %e = tensor.empty() : tensor<3x4xf32>
  %n = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%b : tensor<3x4xf32>) outs(%e : tensor<3x4xf32>) {
  ^bb0(%i: f32, %o: f32):
    %m = arith.negf %i : f32
    linalg.yield %m : f32
  } -> tensor<3x4xf32>
  %c = tensor.concat dim(1) %n, %a : (tensor<3x4xf32>, tensor<3x4xf32>) -> tensor<3x8xf32>
  return %c : tensor<3x8xf32>
}

// Only elements 2 to 5 are turned, in half precision with the sign changed in f32.
// CHECK-LABEL: func.func @partial
// CHECK: %[[S:.*]] = tensor.extract_slice %arg0[0, 2] [3, 4] [1, 1]
// CHECK: "topo.rotate_half"(%[[S]]) {interleaved = false} : (tensor<3x4xbf16>) -> tensor<3x4xbf16>
// CHECK-NOT: concat
func.func @partial(%x: tensor<3x8xbf16>) -> tensor<3x4xbf16> {
  %a = tensor.extract_slice %x[0, 2] [3, 2] [1, 1] : tensor<3x8xbf16> to tensor<3x2xbf16>
  %b = tensor.extract_slice %x[0, 4] [3, 2] [1, 1] : tensor<3x8xbf16> to tensor<3x2xbf16>
  %e = tensor.empty() : tensor<3x2xf32>
  %n = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%b : tensor<3x2xbf16>) outs(%e : tensor<3x2xf32>) {
  ^bb0(%i: bf16, %o: f32):
    %w = arith.extf %i : bf16 to f32
    %m = arith.negf %w : f32
    linalg.yield %m : f32
  } -> tensor<3x2xf32>
  %d = "topo.demote"(%n) : (tensor<3x2xf32>) -> tensor<3x2xbf16>
  %c = tensor.concat dim(1) %d, %a : (tensor<3x2xbf16>, tensor<3x2xbf16>) -> tensor<3x4xbf16>
  return %c : tensor<3x4xbf16>
}

// CHECK-LABEL: func.func @interleaved
// CHECK-NEXT: "topo.rotate_half"(%arg0) {interleaved = true} : (tensor<3x8xf32>) -> tensor<3x8xf32>
// CHECK-NEXT: return
func.func @interleaved(%x: tensor<3x8xf32>) -> tensor<3x8xf32> {
  %a = tensor.extract_slice %x[0, 0] [3, 4] [1, 2] : tensor<3x8xf32> to tensor<3x4xf32>
  %b = tensor.extract_slice %x[0, 1] [3, 4] [1, 2] : tensor<3x8xf32> to tensor<3x4xf32>
  %e = tensor.empty() : tensor<3x4xf32>
  %n = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%b : tensor<3x4xf32>) outs(%e : tensor<3x4xf32>) {
  ^bb0(%i: f32, %o: f32):
    %m = arith.negf %i : f32
    linalg.yield %m : f32
  } -> tensor<3x4xf32>
  %p = tensor.expand_shape %n [[0], [1, 2]] output_shape [3, 4, 1] : tensor<3x4xf32> into tensor<3x4x1xf32>
  %q = tensor.expand_shape %a [[0], [1, 2]] output_shape [3, 4, 1] : tensor<3x4xf32> into tensor<3x4x1xf32>
  %c = tensor.concat dim(2) %p, %q : (tensor<3x4x1xf32>, tensor<3x4x1xf32>) -> tensor<3x4x2xf32>
  %r = tensor.collapse_shape %c [[0], [1, 2]] : tensor<3x4x2xf32> into tensor<3x8xf32>
  return %r : tensor<3x8xf32>
}

// The second half is negated: the inverse rotation, which is another op.
// CHECK-LABEL: func.func @inverse
// CHECK-NOT: topo.rotate_half
// CHECK: tensor.concat
func.func @inverse(%x: tensor<3x8xf32>) -> tensor<3x8xf32> {
  %a = tensor.extract_slice %x[0, 0] [3, 4] [1, 1] : tensor<3x8xf32> to tensor<3x4xf32>
  %b = tensor.extract_slice %x[0, 4] [3, 4] [1, 1] : tensor<3x8xf32> to tensor<3x4xf32>
  %e = tensor.empty() : tensor<3x4xf32>
  %n = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%a : tensor<3x4xf32>) outs(%e : tensor<3x4xf32>) {
  ^bb0(%i: f32, %o: f32):
    %m = arith.negf %i : f32
    linalg.yield %m : f32
  } -> tensor<3x4xf32>
  %c = tensor.concat dim(1) %b, %n : (tensor<3x4xf32>, tensor<3x4xf32>) -> tensor<3x8xf32>
  return %c : tensor<3x8xf32>
}

// Halves of two tensors.
// CHECK-LABEL: func.func @two
// CHECK-NOT: topo.rotate_half
// CHECK: tensor.concat
func.func @two(%x: tensor<3x8xf32>, %y: tensor<3x8xf32>) -> tensor<3x8xf32> {
  %a = tensor.extract_slice %x[0, 0] [3, 4] [1, 1] : tensor<3x8xf32> to tensor<3x4xf32>
  %b = tensor.extract_slice %y[0, 4] [3, 4] [1, 1] : tensor<3x8xf32> to tensor<3x4xf32>
  %e = tensor.empty() : tensor<3x4xf32>
  %n = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%b : tensor<3x4xf32>) outs(%e : tensor<3x4xf32>) {
  ^bb0(%i: f32, %o: f32):
    %m = arith.negf %i : f32
    linalg.yield %m : f32
  } -> tensor<3x4xf32>
  %c = tensor.concat dim(1) %n, %a : (tensor<3x4xf32>, tensor<3x4xf32>) -> tensor<3x8xf32>
  return %c : tensor<3x8xf32>
}
