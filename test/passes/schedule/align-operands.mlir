// RUN: topo-opt %s -p topo-form-kernels,topo-align-operands,topo-choose-tiles --split-input-file | filecheck %s

// Rows of 2949 and 2985 floats start off the boundaries that descriptors and vectors need: both factors are copied, one copy
// serves two products, and these read what is no padding through descriptors.

// CHECK-LABEL: func.func @odd_rows
// CHECK-SAME:    (%[[X:.*]]: tensor<4103x2949xf32>, %[[W:.*]]: tensor<2949x2985xf32>, %[[V:.*]]: tensor<2949x2985xf32>)
// CHECK-DAG:     %[[XP:.*]] = call @k_loops_{{[0-9a-f]+}}(%[[X]]) : (tensor<4103x2949xf32>) -> tensor<4103x2976xf32>
// CHECK-DAG:     %[[WP:.*]] = call @[[PAD:k_loops_[0-9a-f]+]](%[[W]]) : (tensor<2949x2985xf32>) -> tensor<2949x3008xf32>
// CHECK:         %[[A:.*]] = call @[[GEMM:k_gemm_[0-9a-f]+]](%[[XP]], %[[WP]])
// CHECK-NOT:     (%[[X]])
// CHECK:         %[[VP:.*]] = call @[[PAD]](%[[V]])
// CHECK:         %[[B:.*]] = call @[[GEMM]](%[[XP]], %[[VP]])
// CHECK:         return %[[A]], %[[B]]
// CHECK:       func.func private @[[GEMM]](%{{.*}}: tensor<4103x2976xf32>, %{{.*}}: tensor<2949x3008xf32>) -> tensor<4103x2985xf32>
// CHECK-SAME:    tma = 1
// CHECK:         tensor.extract_slice {{.*}}[4103, 2949]
// CHECK:         tensor.extract_slice {{.*}}[2949, 2985]
// CHECK:         linalg.contract
// CHECK:       func.func private @[[PAD]](
// CHECK:         tensor.pad {{.*}} low[0, 0] high[0, 23]
#a = affine_map<(m, n, k) -> (m, k)>
#b = affine_map<(m, n, k) -> (k, n)>
#c = affine_map<(m, n, k) -> (m, n)>
func.func @odd_rows(%x: tensor<4103x2949xf32>, %w: tensor<2949x2985xf32>, %v: tensor<2949x2985xf32>)
    -> (tensor<4103x2985xf32>, tensor<4103x2985xf32>) {
  %z = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<4103x2985xf32>
  %i = linalg.fill ins(%z : f32) outs(%e : tensor<4103x2985xf32>) -> tensor<4103x2985xf32>
  %0 = linalg.contract indexing_maps = [#a, #b, #c]
      ins(%x, %w : tensor<4103x2949xf32>, tensor<2949x2985xf32>) outs(%i : tensor<4103x2985xf32>) -> tensor<4103x2985xf32>
  %1 = linalg.contract indexing_maps = [#a, #b, #c]
      ins(%x, %v : tensor<4103x2949xf32>, tensor<2949x2985xf32>) outs(%i : tensor<4103x2985xf32>) -> tensor<4103x2985xf32>
  return %0, %1 : tensor<4103x2985xf32>, tensor<4103x2985xf32>
}

// -----

// The copy of a weight is made when the program is loaded, so it pays for a small product as well; that of the rows does not.

// CHECK-LABEL: func.func @weight_of_odd_rows
// CHECK-SAME:    (%[[X:.*]]: tensor<256x512xbf16> {{.*}}, %[[W:.*]]: tensor<512x301xbf16> {{.*}})
// CHECK-NEXT:    %[[P:.*]] = call @k_loops_{{[0-9a-f]+}}(%[[W]]) : (tensor<512x301xbf16>) -> tensor<512x304xbf16>
// CHECK-NEXT:    call @k_gemm_{{[0-9a-f]+}}(%[[X]], %[[P]])
#a = affine_map<(m, n, k) -> (m, k)>
#b = affine_map<(m, n, k) -> (k, n)>
#c = affine_map<(m, n, k) -> (m, n)>
func.func @weight_of_odd_rows(%x: tensor<256x512xbf16> {topo.kind = "input", topo.name = "x", topo.dtype = "bfloat16"},
                              %w: tensor<512x301xbf16> {topo.kind = "param", topo.name = "w", topo.dtype = "bfloat16"})
    -> tensor<256x301xf32> {
  %z = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<256x301xf32>
  %i = linalg.fill ins(%z : f32) outs(%e : tensor<256x301xf32>) -> tensor<256x301xf32>
  %0 = linalg.contract indexing_maps = [#a, #b, #c]
      ins(%x, %w : tensor<256x512xbf16>, tensor<512x301xbf16>) outs(%i : tensor<256x301xf32>) -> tensor<256x301xf32>
  return %0 : tensor<256x301xf32>
}

// -----

// A copy at every call would take longer than the product; few rows only read the weights once.

// CHECK-LABEL: func.func @too_small
// CHECK-NEXT:    call @k_gemm_{{[0-9a-f]+}}(%arg0, %arg1)
// CHECK-NEXT:    call @k_gemm_{{[0-9a-f]+}}(%arg2, %arg1)
// CHECK-NEXT:    return
#a = affine_map<(m, n, k) -> (m, k)>
#b = affine_map<(m, n, k) -> (k, n)>
#c = affine_map<(m, n, k) -> (m, n)>
func.func @too_small(%x: tensor<256x512xbf16>, %w: tensor<512x301xbf16>, %few: tensor<8x512xbf16>) -> (tensor<256x301xf32>, tensor<8x301xf32>) {
  %z = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<256x301xf32>
  %i = linalg.fill ins(%z : f32) outs(%e : tensor<256x301xf32>) -> tensor<256x301xf32>
  %0 = linalg.contract indexing_maps = [#a, #b, #c]
      ins(%x, %w : tensor<256x512xbf16>, tensor<512x301xbf16>) outs(%i : tensor<256x301xf32>) -> tensor<256x301xf32>
  %e1 = tensor.empty() : tensor<8x301xf32>
  %i1 = linalg.fill ins(%z : f32) outs(%e1 : tensor<8x301xf32>) -> tensor<8x301xf32>
  %1 = linalg.contract indexing_maps = [#a, #b, #c]
      ins(%few, %w : tensor<8x512xbf16>, tensor<512x301xbf16>) outs(%i1 : tensor<8x301xf32>) -> tensor<8x301xf32>
  return %0, %1 : tensor<256x301xf32>, tensor<8x301xf32>
}
