// RUN: topo-opt %s -p topo-form-kernels --split-input-file | filecheck %s
// RUN: topo-opt %s -p 'topo-form-kernels{fuse=none}' --split-input-file | filecheck %s --check-prefix=NONE
// RUN: topo-opt %s -p 'topo-form-kernels{fuse=cheap}' --split-input-file | filecheck %s --check-prefix=CHEAP

// A pointwise op and the reduction that reads it are one row kernel.

// CHECK-LABEL: func.func @sum_of_squares
// CHECK-NEXT:    %[[R:.*]] = call @k_loops_[[A:[0-9a-f]+]](%arg0)
// CHECK-NEXT:    return %[[R]]
// CHECK:       func.func private @k_loops_
// CHECK-SAME:    cols = array<i64: 16>, family = "loops"
// CHECK-SAME:    rows = array<i64: 4>
// CHECK:         arith.mulf
// CHECK:         arith.addf
// NONE-LABEL:  func.func @sum_of_squares
// NONE-COUNT-2: call @k_loops_
func.func @sum_of_squares(%a: tensor<4x16xf32>) -> tensor<4xf32> {
  %e = tensor.empty() : tensor<4x16xf32>
  %s = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, j)>], iterator_types = ["parallel", "parallel"]}
      ins(%a : tensor<4x16xf32>) outs(%e : tensor<4x16xf32>) {
  ^bb0(%x: f32, %o: f32):
    %m = arith.mulf %x, %x : f32
    linalg.yield %m : f32
  } -> tensor<4x16xf32>
  %z = arith.constant 0.0 : f32
  %i = tensor.empty() : tensor<4xf32>
  %f = linalg.fill ins(%z : f32) outs(%i : tensor<4xf32>) -> tensor<4xf32>
  %r = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i)>], iterator_types = ["parallel", "reduction"]}
      ins(%s : tensor<4x16xf32>) outs(%f : tensor<4xf32>) {
  ^bb0(%x: f32, %o: f32):
    %m = arith.addf %x, %o : f32
    linalg.yield %m : f32
  } -> tensor<4xf32>
  return %r : tensor<4xf32>
}

// -----

// The epilogue of a product joins it at fuse=full; fuse=cheap leaves products alone.

// CHECK-LABEL: func.func @product_then_double
// CHECK-NEXT:    call @k_gemm_
// CHECK-NEXT:    return
// CHEAP-LABEL: func.func @product_then_double
// CHEAP-NEXT:    call @k_gemm_
// CHEAP-NEXT:    call @k_loops_
func.func @product_then_double(%a: tensor<8x16xf32>, %b: tensor<16x4xf32>) -> tensor<8x4xf32> {
  %z = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<8x4xf32>
  %f = linalg.fill ins(%z : f32) outs(%e : tensor<8x4xf32>) -> tensor<8x4xf32>
  %c = linalg.contract indexing_maps = [affine_map<(m, n, k) -> (m, k)>, affine_map<(m, n, k) -> (k, n)>, affine_map<(m, n, k) -> (m, n)>]
      ins(%a, %b : tensor<8x16xf32>, tensor<16x4xf32>) outs(%f : tensor<8x4xf32>) -> tensor<8x4xf32>
  %r = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, j)>], iterator_types = ["parallel", "parallel"]}
      ins(%c : tensor<8x4xf32>) outs(%e : tensor<8x4xf32>) {
  ^bb0(%x: f32, %o: f32):
    %m = arith.addf %x, %x : f32
    linalg.yield %m : f32
  } -> tensor<8x4xf32>
  return %r : tensor<8x4xf32>
}

// -----

// A product whose result goes to memory anyway leaves a lone op to the op's own reader.

// CHECK-LABEL: func.func @norm_reads_the_product
// CHECK-NEXT:    %[[C:.*]] = call @k_gemm_{{.*}}(%arg0, %arg1) : {{.*}} -> tensor<8x4xf32>
// CHECK-NEXT:    %[[S:.*]] = call @k_loops_{{.*}}(%[[C]])
// CHECK-NEXT:    return %[[C]], %[[S]]
func.func @norm_reads_the_product(%a: tensor<8x16xf32>, %b: tensor<16x4xf32>) -> (tensor<8x4xf32>, tensor<8xf32>) {
  %z = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<8x4xf32>
  %f = linalg.fill ins(%z : f32) outs(%e : tensor<8x4xf32>) -> tensor<8x4xf32>
  %c = linalg.contract indexing_maps = [affine_map<(m, n, k) -> (m, k)>, affine_map<(m, n, k) -> (k, n)>, affine_map<(m, n, k) -> (m, n)>]
      ins(%a, %b : tensor<8x16xf32>, tensor<16x4xf32>) outs(%f : tensor<8x4xf32>) -> tensor<8x4xf32>
  %q = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, j)>], iterator_types = ["parallel", "parallel"]}
      ins(%c : tensor<8x4xf32>) outs(%e : tensor<8x4xf32>) {
  ^bb0(%x: f32, %o: f32):
    %m = arith.mulf %x, %x : f32
    linalg.yield %m : f32
  } -> tensor<8x4xf32>
  %i = tensor.empty() : tensor<8xf32>
  %g = linalg.fill ins(%z : f32) outs(%i : tensor<8xf32>) -> tensor<8xf32>
  %s = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i)>], iterator_types = ["parallel", "reduction"]}
      ins(%q : tensor<8x4xf32>) outs(%g : tensor<8xf32>) {
  ^bb0(%x: f32, %o: f32):
    %m = arith.addf %x, %o : f32
    linalg.yield %m : f32
  } -> tensor<8xf32>
  return %c, %s : tensor<8x4xf32>, tensor<8xf32>
}

// -----

// Equal ops are one kernel function, called twice; aliasing views and ATen calls stay in the plan.

// CHECK-LABEL: func.func @twice
// CHECK-NEXT:    %[[A:.*]] = call @[[K:k_loops_[0-9a-f]+]](%arg0)
// CHECK-NEXT:    %[[F:.*]] = tensor.collapse_shape %[[A]]
// CHECK-NEXT:    %[[S:.*]] = call @aten.sort.0(%[[F]])
// CHECK:       func.func private @k_loops_
// CHECK-NOT:   func.func private @k_loops_
func.func @twice(%a: tensor<4x4xf32>, %b: tensor<4x4xf32>) -> (tensor<16xf32>, tensor<4x4xf32>) {
  %e = tensor.empty() : tensor<4x4xf32>
  %r = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, j)>], iterator_types = ["parallel", "parallel"]}
      ins(%a : tensor<4x4xf32>) outs(%e : tensor<4x4xf32>) {
  ^bb0(%x: f32, %o: f32):
    %m = arith.addf %x, %x : f32
    linalg.yield %m : f32
  } -> tensor<4x4xf32>
  %c = tensor.collapse_shape %r [[0, 1]] : tensor<4x4xf32> into tensor<16xf32>
  %s = func.call @aten.sort.0(%c) : (tensor<16xf32>) -> tensor<16xf32>
  %t = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, j)>], iterator_types = ["parallel", "parallel"]}
      ins(%b : tensor<4x4xf32>) outs(%e : tensor<4x4xf32>) {
  ^bb0(%x: f32, %o: f32):
    %m = arith.addf %x, %x : f32
    linalg.yield %m : f32
  } -> tensor<4x4xf32>
  return %s, %t : tensor<16xf32>, tensor<4x4xf32>
}
func.func private @aten.sort.0(tensor<16xf32>) -> tensor<16xf32> attributes {topo.aten = "aten.sort.default"}

// -----

// A transposed copy that the caller wants in memory is a kernel; nothing is made for a tensor without elements.

// CHECK-LABEL: func.func @copies
// CHECK-NEXT:    %[[E:.*]] = tensor.empty() : tensor<0x4xf32>
// CHECK-NEXT:    %[[T:.*]] = call @k_loops_{{.*}}(%arg0)
// CHECK-NEXT:    return %[[T]], %[[E]]
func.func @copies(%a: tensor<2x3xf32>, %z: tensor<0x4xf32>) -> (tensor<3x2xf32>, tensor<0x4xf32>) {
  %f = tensor.empty() : tensor<0x4xf32>
  %n = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, j)>], iterator_types = ["parallel", "parallel"]}
      ins(%z : tensor<0x4xf32>) outs(%f : tensor<0x4xf32>) {
  ^bb0(%x: f32, %o: f32):
    %m = arith.negf %x : f32
    linalg.yield %m : f32
  } -> tensor<0x4xf32>
  %e = tensor.empty() : tensor<3x2xf32>
  %t = linalg.generic {indexing_maps = [affine_map<(i, j) -> (j, i)>, affine_map<(i, j) -> (i, j)>], iterator_types = ["parallel", "parallel"]}
      ins(%a : tensor<2x3xf32>) outs(%e : tensor<3x2xf32>) {
  ^bb0(%x: f32, %o: f32):
    linalg.yield %x : f32
  } -> tensor<3x2xf32>
  return %t, %n : tensor<3x2xf32>, tensor<0x4xf32>
}

// -----

// Factors of channels: computing them again for every element costs less than a launch here, but not for 2^24 elements.

// CHECK-LABEL: func.func @few_elements
// CHECK-NEXT:    %[[R:.*]] = call @k_loops_{{.*}}(%arg1, %arg0)
// CHECK-NEXT:    return %[[R]]
func.func @few_elements(%x: tensor<64x1024xf32>, %v: tensor<64xf32>) -> tensor<64x1024xf32> {
  %e = tensor.empty() : tensor<64xf32>
  %s = linalg.generic {indexing_maps = [affine_map<(i) -> (i)>, affine_map<(i) -> (i)>], iterator_types = ["parallel"]}
      ins(%v : tensor<64xf32>) outs(%e : tensor<64xf32>) {
  ^bb0(%a: f32, %o: f32):
    %q = math.rsqrt %a : f32
    linalg.yield %q : f32
  } -> tensor<64xf32>
  %f = tensor.empty() : tensor<64x1024xf32>
  %r = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i)>, affine_map<(i, j) -> (i, j)>], iterator_types = ["parallel", "parallel"]}
      ins(%x, %s : tensor<64x1024xf32>, tensor<64xf32>) outs(%f : tensor<64x1024xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %p = arith.mulf %a, %b : f32
    linalg.yield %p : f32
  } -> tensor<64x1024xf32>
  return %r : tensor<64x1024xf32>
}

// -----

// CHECK-LABEL: func.func @many_elements
// CHECK-COUNT-2: call @k_loops_
func.func @many_elements(%x: tensor<64x262144xf32>, %v: tensor<64xf32>) -> tensor<64x262144xf32> {
  %e = tensor.empty() : tensor<64xf32>
  %s = linalg.generic {indexing_maps = [affine_map<(i) -> (i)>, affine_map<(i) -> (i)>], iterator_types = ["parallel"]}
      ins(%v : tensor<64xf32>) outs(%e : tensor<64xf32>) {
  ^bb0(%a: f32, %o: f32):
    %q = math.rsqrt %a : f32
    linalg.yield %q : f32
  } -> tensor<64xf32>
  %f = tensor.empty() : tensor<64x262144xf32>
  %r = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i)>, affine_map<(i, j) -> (i, j)>], iterator_types = ["parallel", "parallel"]}
      ins(%x, %s : tensor<64x262144xf32>, tensor<64xf32>) outs(%f : tensor<64x262144xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %p = arith.mulf %a, %b : f32
    linalg.yield %p : f32
  } -> tensor<64x262144xf32>
  return %r : tensor<64x262144xf32>
}
