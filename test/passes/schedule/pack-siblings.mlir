// RUN: topo-opt %s -p 'topo-form-kernels,topo-mark-inout,topo-choose-tiles,topo-mark-dependent-launch,topo-pack-siblings' --split-input-file --verify-each=numeric | filecheck %s
// RUN: topo-opt %s -p 'topo-form-kernels,topo-mark-inout,topo-choose-tiles,topo-pack-siblings{topology=cpu}' --split-input-file | filecheck %s --check-prefix=CPU

// CPU-NOT: k_pack

// Two products of one row each, that read the same value: one launch. The weights stay immutable, the row does not.

// CHECK-LABEL: func.func @keys_and_values
// CHECK-NEXT:    %[[R:.*]]:2 = call @[[PACK:k_pack_[0-9a-f]+]](%arg0, %arg1, %arg2)
// CHECK-NEXT:    return %[[R]]#0, %[[R]]#1
// CHECK:       func.func private @[[PACK]](%arg0: {{.*}}, %arg1: {{.*}}, %arg2: {{.*}}) -> (tensor<1x512xbf16>, tensor<1x256xbf16>)
// CHECK-SAME:    family = "pack", immutable = array<i64: 1, 2>, pdl = true, tile = {stages = {{[0-9]}} : i64, warps = {{[0-9]}} : i64}
// CHECK-NEXT:    call @k_gemm_{{.*}}(%arg0, %arg1)
// CHECK-NEXT:    call @k_gemm_{{.*}}(%arg0, %arg2)
#row = affine_map<(m, n, k) -> (m, k)>
#weight = affine_map<(m, n, k) -> (n, k)>
#out = affine_map<(m, n, k) -> (m, n)>
func.func @keys_and_values(%x: tensor<1x1024xbf16> {topo.kind = "input", topo.name = "x"},
                           %k: tensor<512x1024xbf16> {topo.kind = "param", topo.name = "k"},
                           %v: tensor<256x1024xbf16> {topo.kind = "param", topo.name = "v"}) -> (tensor<1x512xbf16>, tensor<1x256xbf16>) {
  %zero = arith.constant 0.0 : f32
  %e0 = tensor.empty() : tensor<1x512xf32>
  %i0 = linalg.fill ins(%zero : f32) outs(%e0 : tensor<1x512xf32>) -> tensor<1x512xf32>
  %p0 = linalg.contract indexing_maps = [#row, #weight, #out] ins(%x, %k : tensor<1x1024xbf16>, tensor<512x1024xbf16>) outs(%i0 : tensor<1x512xf32>) -> tensor<1x512xf32>
  %0 = "topo.demote"(%p0) : (tensor<1x512xf32>) -> tensor<1x512xbf16>
  %e1 = tensor.empty() : tensor<1x256xf32>
  %i1 = linalg.fill ins(%zero : f32) outs(%e1 : tensor<1x256xf32>) -> tensor<1x256xf32>
  %p1 = linalg.contract indexing_maps = [#row, #weight, #out] ins(%x, %v : tensor<1x1024xbf16>, tensor<256x1024xbf16>) outs(%i1 : tensor<1x256xf32>) -> tensor<1x256xf32>
  %1 = "topo.demote"(%p1) : (tensor<1x256xf32>) -> tensor<1x256xbf16>
  return %0, %1 : tensor<1x512xbf16>, tensor<1x256xbf16>
}

// -----

// Appends to two caches: the pack rewrites both. A kernel that depends on one of them stays behind.

// CHECK-LABEL: func.func @append
// CHECK-NEXT:    %[[R:.*]]:2 = call @[[PACK:k_pack_[0-9a-f]+]]
// CHECK-NEXT:    call @k_loops
// CHECK-NEXT:    return
// CHECK:       func.func private @[[PACK]]
// CHECK-SAME:    topo.inout = {{\[}}array<i64: 0, 0>, array<i64: 1, 3>]
// CHECK-SAME:    immutable = array<i64>, pdl = true
#id = affine_map<(i, j, k) -> (i, j, k)>
func.func @append(%a: tensor<2x8x4xf32> {topo.kind = "buffer", topo.name = "a"}, %b: tensor<2x8x4xf32> {topo.kind = "buffer", topo.name = "b"},
                  %x: tensor<2x1x4xf32> {topo.kind = "input", topo.name = "x"}, %y: tensor<2x1x4xf32> {topo.kind = "input", topo.name = "y"},
                  %at: tensor<1xi64> {topo.kind = "input", topo.name = "at"})
    -> (tensor<2x8x4xf32> {topo.kind = "mutation", topo.name = "a"}, tensor<2x8x4xf32> {topo.kind = "mutation", topo.name = "b"}, tensor<2x8x4xf32>) {
  %0 = "topo.index_update"(%a, %x, %at) {dim = 1 : i64} : (tensor<2x8x4xf32>, tensor<2x1x4xf32>, tensor<1xi64>) -> tensor<2x8x4xf32>
  %1 = "topo.index_update"(%b, %y, %at) {dim = 1 : i64} : (tensor<2x8x4xf32>, tensor<2x1x4xf32>, tensor<1xi64>) -> tensor<2x8x4xf32>
  %e = tensor.empty() : tensor<2x8x4xf32>
  %2 = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%0, %1 : tensor<2x8x4xf32>, tensor<2x8x4xf32>) outs(%e : tensor<2x8x4xf32>) {
  ^bb0(%p: f32, %q: f32, %o: f32):
    %s = arith.addf %p, %q : f32
    linalg.yield %s : f32
  } -> tensor<2x8x4xf32>
  return %0, %1, %2 : tensor<2x8x4xf32>, tensor<2x8x4xf32>, tensor<2x8x4xf32>
}

// -----

// Who reads the old content of a cache runs before the kernel that rewrites it, never beside it.

// CHECK-LABEL: func.func @old_content
// CHECK-NOT:     k_pack
#flat = affine_map<(i, j, k) -> (i, j, k)>
func.func @old_content(%a: tensor<2x8x4xf32> {topo.kind = "buffer", topo.name = "a"},
                       %x: tensor<2x1x4xf32> {topo.kind = "input", topo.name = "x"}, %at: tensor<1xi64> {topo.kind = "input", topo.name = "at"})
    -> (tensor<2x8x4xf32> {topo.kind = "mutation", topo.name = "a"}, tensor<2x8x4xf32>) {
  %0 = "topo.index_update"(%a, %x, %at) {dim = 1 : i64} : (tensor<2x8x4xf32>, tensor<2x1x4xf32>, tensor<1xi64>) -> tensor<2x8x4xf32>
  %e = tensor.empty() : tensor<2x8x4xf32>
  %1 = linalg.generic {indexing_maps = [#flat, #flat], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%a : tensor<2x8x4xf32>) outs(%e : tensor<2x8x4xf32>) {
  ^bb0(%p: f32, %o: f32):
    %s = arith.negf %p : f32
    linalg.yield %s : f32
  } -> tensor<2x8x4xf32>
  return %0, %1 : tensor<2x8x4xf32>, tensor<2x8x4xf32>
}

// -----

// A pack on the results of a pack; equal packs are one function.

// CHECK-LABEL: func.func @chain
// CHECK-NEXT:    %[[R:.*]]:2 = call @[[PACK:k_pack_[0-9a-f]+]](%arg0, %arg2, %arg4, %arg1, %arg3)
// CHECK-NEXT:    %[[S:.*]]:2 = call @[[PACK]](%[[R]]#0, %arg3, %arg4, %[[R]]#1, %arg2)
// CHECK-NEXT:    return %[[S]]#0, %[[S]]#1
func.func @chain(%a: tensor<2x8x4xf32> {topo.kind = "buffer", topo.name = "a"}, %b: tensor<2x8x4xf32> {topo.kind = "buffer", topo.name = "b"},
                 %x: tensor<2x1x4xf32> {topo.kind = "input", topo.name = "x"}, %y: tensor<2x1x4xf32> {topo.kind = "input", topo.name = "y"},
                 %at: tensor<1xi64> {topo.kind = "input", topo.name = "at"})
    -> (tensor<2x8x4xf32> {topo.kind = "mutation", topo.name = "a"}, tensor<2x8x4xf32> {topo.kind = "mutation", topo.name = "b"}) {
  %0 = "topo.index_update"(%a, %x, %at) {dim = 1 : i64} : (tensor<2x8x4xf32>, tensor<2x1x4xf32>, tensor<1xi64>) -> tensor<2x8x4xf32>
  %1 = "topo.index_update"(%0, %y, %at) {dim = 1 : i64} : (tensor<2x8x4xf32>, tensor<2x1x4xf32>, tensor<1xi64>) -> tensor<2x8x4xf32>
  %2 = "topo.index_update"(%b, %y, %at) {dim = 1 : i64} : (tensor<2x8x4xf32>, tensor<2x1x4xf32>, tensor<1xi64>) -> tensor<2x8x4xf32>
  %3 = "topo.index_update"(%2, %x, %at) {dim = 1 : i64} : (tensor<2x8x4xf32>, tensor<2x1x4xf32>, tensor<1xi64>) -> tensor<2x8x4xf32>
  return %1, %3 : tensor<2x8x4xf32>, tensor<2x8x4xf32>
}

// -----

// Products of one value have one launch whatever tiles each of them would have alone, with one tile for all.

// CHECK-LABEL: func.func @query_key_value
// CHECK-NEXT:    %[[R:.*]]:3 = call @[[PACK:k_pack_[0-9a-f]+]](%arg0, %arg1, %arg2, %arg3)
// CHECK-NEXT:    return %[[R]]#0, %[[R]]#1, %[[R]]#2
// CHECK-DAG:   func.func private @[[WIDE:k_gemm_[0-9a-f_]+]](%arg0: {{.*}}, %arg1: tensor<2048x2048xbf16>) {{.*}} tile = [[TILE:{[^}]*}]]
// CHECK-DAG:   func.func private @[[NARROW:k_gemm_[0-9a-f_]+]](%arg0: {{.*}}, %arg1: tensor<512x2048xbf16>) {{.*}} tile = [[TILE]]
// CHECK:       func.func private @[[PACK]]
// CHECK-NEXT:    call @[[WIDE]](%arg0, %arg1)
// CHECK-NEXT:    call @[[NARROW]](%arg0, %arg2)
// CHECK-NEXT:    call @[[NARROW]](%arg0, %arg3)
#rows = affine_map<(m, n, k) -> (m, k)>
#weights = affine_map<(m, n, k) -> (n, k)>
#result = affine_map<(m, n, k) -> (m, n)>
func.func @query_key_value(%x: tensor<32x2048xbf16> {topo.kind = "input", topo.name = "x"},
                           %q: tensor<2048x2048xbf16> {topo.kind = "param", topo.name = "q"},
                           %k: tensor<512x2048xbf16> {topo.kind = "param", topo.name = "k"},
                           %v: tensor<512x2048xbf16> {topo.kind = "param", topo.name = "v"}) -> (tensor<32x2048xf32>, tensor<32x512xf32>, tensor<32x512xf32>) {
  %zero = arith.constant 0.0 : f32
  %e0 = tensor.empty() : tensor<32x2048xf32>
  %i0 = linalg.fill ins(%zero : f32) outs(%e0 : tensor<32x2048xf32>) -> tensor<32x2048xf32>
  %0 = linalg.contract indexing_maps = [#rows, #weights, #result] ins(%x, %q : tensor<32x2048xbf16>, tensor<2048x2048xbf16>) outs(%i0 : tensor<32x2048xf32>) -> tensor<32x2048xf32>
  %e1 = tensor.empty() : tensor<32x512xf32>
  %i1 = linalg.fill ins(%zero : f32) outs(%e1 : tensor<32x512xf32>) -> tensor<32x512xf32>
  %1 = linalg.contract indexing_maps = [#rows, #weights, #result] ins(%x, %k : tensor<32x2048xbf16>, tensor<512x2048xbf16>) outs(%i1 : tensor<32x512xf32>) -> tensor<32x512xf32>
  %2 = linalg.contract indexing_maps = [#rows, #weights, #result] ins(%x, %v : tensor<32x2048xbf16>, tensor<512x2048xbf16>) outs(%i1 : tensor<32x512xf32>) -> tensor<32x512xf32>
  return %0, %1, %2 : tensor<32x2048xf32>, tensor<32x512xf32>, tensor<32x512xf32>
}
