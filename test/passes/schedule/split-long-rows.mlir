// RUN: topo-opt %s -p topo-form-kernels,topo-split-long-rows --split-input-file | filecheck %s

// Sixteen rows of a million columns: the statistic is a kernel whose rows programs can share, the rest runs over all elements.

// CHECK-LABEL: func.func @root_of_squares
// CHECK-NEXT:    %[[S:.*]] = call @[[SUM:k_loops_[0-9a-f]+]](%arg0) : (tensor<16x1048576xf32>) -> tensor<16xf32>
// CHECK-NEXT:    %[[R:.*]] = call @[[DIV:k_loops_[0-9a-f]+]](%arg0, %[[S]])
// CHECK-NEXT:    return %[[R]]
// CHECK:       func.func private @[[SUM]]({{.*}} -> tensor<16xf32>
// CHECK-SAME:    cols = array<i64: 1048576>
// CHECK:         arith.mulf
// CHECK-NOT:     arith.divf
// CHECK:       func.func private @[[DIV]](
// CHECK-SAME:    cols = array<i64>
// CHECK-SAME:    rows = array<i64: 16, 1048576>
// CHECK-NOT:     arith.mulf
// CHECK:         arith.divf
func.func @root_of_squares(%a: tensor<16x1048576xf32>) -> tensor<16x1048576xf32> {
  %z = arith.constant 0.0 : f32
  %i = tensor.empty() : tensor<16xf32>
  %f = linalg.fill ins(%z : f32) outs(%i : tensor<16xf32>) -> tensor<16xf32>
  %s = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i)>], iterator_types = ["parallel", "reduction"]}
      ins(%a : tensor<16x1048576xf32>) outs(%f : tensor<16xf32>) {
  ^bb0(%x: f32, %o: f32):
    %m = arith.mulf %x, %x : f32
    %t = arith.addf %m, %o : f32
    linalg.yield %t : f32
  } -> tensor<16xf32>
  %e = tensor.empty() : tensor<16x1048576xf32>
  %r = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i)>, affine_map<(i, j) -> (i, j)>], iterator_types = ["parallel", "parallel"]}
      ins(%a, %s : tensor<16x1048576xf32>, tensor<16xf32>) outs(%e : tensor<16x1048576xf32>) {
  ^bb0(%x: f32, %y: f32, %o: f32):
    %d = arith.divf %x, %y : f32
    linalg.yield %d : f32
  } -> tensor<16x1048576xf32>
  return %r : tensor<16x1048576xf32>
}

// -----

// Rows for every core stay whole.

// CHECK-LABEL: func.func @many_rows
// CHECK-NEXT:    %[[R:.*]] = call @k_loops_{{[0-9a-f]+}}(%arg0)
// CHECK-NEXT:    return %[[R]]
func.func @many_rows(%a: tensor<4096x65536xf32>) -> tensor<4096x65536xf32> {
  %z = arith.constant 0.0 : f32
  %i = tensor.empty() : tensor<4096xf32>
  %f = linalg.fill ins(%z : f32) outs(%i : tensor<4096xf32>) -> tensor<4096xf32>
  %s = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i)>], iterator_types = ["parallel", "reduction"]}
      ins(%a : tensor<4096x65536xf32>) outs(%f : tensor<4096xf32>) {
  ^bb0(%x: f32, %o: f32):
    %t = arith.addf %x, %o : f32
    linalg.yield %t : f32
  } -> tensor<4096xf32>
  %e = tensor.empty() : tensor<4096x65536xf32>
  %r = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i)>, affine_map<(i, j) -> (i, j)>], iterator_types = ["parallel", "parallel"]}
      ins(%a, %s : tensor<4096x65536xf32>, tensor<4096xf32>) outs(%e : tensor<4096x65536xf32>) {
  ^bb0(%x: f32, %y: f32, %o: f32):
    %d = arith.divf %x, %y : f32
    linalg.yield %d : f32
  } -> tensor<4096x65536xf32>
  return %r : tensor<4096x65536xf32>
}

// -----

// What is computed of a row moves to the kernel of its sum: the elements read the mean, and nothing else is stored.

// CHECK-LABEL: func.func @centred
// CHECK-NEXT:    %[[M:.*]] = call @[[MEAN:k_loops_[0-9a-f]+]](%arg0) : (tensor<16x1048576xf32>) -> tensor<16xf32>
// CHECK-NEXT:    %[[R:.*]] = call @[[SUB:k_loops_[0-9a-f]+]](%arg0, %[[M]])
// CHECK-NEXT:    return %[[R]]
// CHECK:       func.func private @[[MEAN]]({{.*}} -> tensor<16xf32>
// CHECK:         arith.addf
// CHECK:         arith.mulf
// CHECK:       func.func private @[[SUB]](
// CHECK-NOT:     arith.mulf
// CHECK:         arith.subf
func.func @centred(%a: tensor<16x1048576xf32>) -> tensor<16x1048576xf32> {
  %z = arith.constant 0.0 : f32
  %n = arith.constant 9.53674316E-7 : f32
  %i = tensor.empty() : tensor<16xf32>
  %f = linalg.fill ins(%z : f32) outs(%i : tensor<16xf32>) -> tensor<16xf32>
  %s = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i)>], iterator_types = ["parallel", "reduction"]}
      ins(%a : tensor<16x1048576xf32>) outs(%f : tensor<16xf32>) {
  ^bb0(%x: f32, %o: f32):
    %t = arith.addf %x, %o : f32
    linalg.yield %t : f32
  } -> tensor<16xf32>
  %m = linalg.generic {indexing_maps = [affine_map<(i) -> (i)>, affine_map<(i) -> (i)>], iterator_types = ["parallel"]}
      ins(%s : tensor<16xf32>) outs(%i : tensor<16xf32>) {
  ^bb0(%x: f32, %o: f32):
    %t = arith.mulf %x, %n : f32
    linalg.yield %t : f32
  } -> tensor<16xf32>
  %c = tensor.expand_shape %m [[0, 1]] output_shape [16, 1] : tensor<16xf32> into tensor<16x1xf32>
  %e = tensor.empty() : tensor<16x1048576xf32>
  %r = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, 0)>, affine_map<(i, j) -> (i, j)>], iterator_types = ["parallel", "parallel"]}
      ins(%a, %c : tensor<16x1048576xf32>, tensor<16x1xf32>) outs(%e : tensor<16x1048576xf32>) {
  ^bb0(%x: f32, %y: f32, %o: f32):
    %d = arith.subf %x, %y : f32
    linalg.yield %d : f32
  } -> tensor<16x1048576xf32>
  return %r : tensor<16x1048576xf32>
}
