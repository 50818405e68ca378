// How far each level fuses: one op per kernel, what costs no recomputation, everything that is legal. The IR that comes out is
// executed after every pass and compared.

// RUN: topo-opt %s -p 'topo-form-kernels{fuse=none},topo-mark-inout,topo-choose-tiles' --verify-each=numeric | filecheck %s --check-prefix=O0
// RUN: topo-opt %s -p 'topo-form-kernels{fuse=cheap},topo-mark-inout,topo-choose-tiles' --verify-each=numeric | filecheck %s --check-prefix=O1
// RUN: topo-opt %s -p 'topo-form-kernels{fuse=full},topo-mark-inout,topo-choose-tiles' --verify-each=numeric | filecheck %s --check-prefix=O2

// O0-LABEL: func.func @linear
// O0-COUNT-3: call @k_
// O0-NOT: call @k_
// O0: return
// O1-LABEL: func.func @linear
// O1-COUNT-2: call @k_
// O1-NOT: call @k_
// O1: return
// O2-LABEL: func.func @linear
// O2-COUNT-1: call @k_gemm
// O2-NOT: call @k_
// O2: return
#row = affine_map<(m, n, k) -> (m, k)>
#weight = affine_map<(m, n, k) -> (n, k)>
#out = affine_map<(m, n, k) -> (m, n)>
#id = affine_map<(m, n) -> (m, n)>
#bias = affine_map<(m, n) -> (n)>
func.func @linear(%x: tensor<4x16xf32> {topo.kind = "input", topo.name = "x", topo.dtype = "float32"},
                  %w: tensor<8x16xf32> {topo.kind = "param", topo.name = "w", topo.dtype = "float32"},
                  %b: tensor<8xf32> {topo.kind = "param", topo.name = "b", topo.dtype = "float32"})
    -> (tensor<4x8xf32> {topo.kind = "output", topo.name = "0", topo.dtype = "float32"})
    attributes {topo.function = "linear", topo.bucket = {}} {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<4x8xf32>
  %init = linalg.fill ins(%zero : f32) outs(%empty : tensor<4x8xf32>) -> tensor<4x8xf32>
  %0 = linalg.contract indexing_maps = [#row, #weight, #out]
      ins(%x, %w : tensor<4x16xf32>, tensor<8x16xf32>) outs(%init : tensor<4x8xf32>) -> tensor<4x8xf32>
  %1 = linalg.generic {indexing_maps = [#id, #bias, #id], iterator_types = ["parallel", "parallel"]}
      ins(%0, %b : tensor<4x8xf32>, tensor<8xf32>) outs(%empty : tensor<4x8xf32>) {
  ^bb0(%a: f32, %c: f32, %o: f32):
    %s = arith.addf %a, %c : f32
    linalg.yield %s : f32
  } -> tensor<4x8xf32>
  %2 = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%1 : tensor<4x8xf32>) outs(%empty : tensor<4x8xf32>) {
  ^bb0(%a: f32, %o: f32):
    %m = arith.maximumf %a, %zero : f32
    linalg.yield %m : f32
  } -> tensor<4x8xf32>
  return %2 : tensor<4x8xf32>
}
