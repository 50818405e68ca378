// RUN: topo-opt %s -p 'topo-choose-tiles{topology=h200-x1}' -o %t.mlir
// RUN: %python -m topo_opt.tuning.kernel_ir %t.mlir --prepare %t.problems.json
// RUN: %python %inputs/fake_tuning.py %t.problems.json '{"x": 8, "r": 256, "warps": 8}' %t.json
// RUN: topo-opt %t.mlir -p 'topo-choose-tiles{tune=cache cache=%t.none data=%t.json}' 2>&1 | filecheck %s
// RUN: not topo-opt %t.mlir -p 'topo-choose-tiles{tune=cache data=%t.mlir}' 2>&1 | filecheck %s --check-prefix=NODATA

// Data decides about kernels that have a tile already; what a choice rests on is a remark.

// CHECK-DAG: remark: rows: data: measured with torch 1 triton 2
// CHECK-DAG: tile = {r = 256 : i64, warps = 8 : i64, x = 8 : i64}
// NODATA: has no tuning data
func.func private @rows(%a: tensor<64x200xf32>) -> tensor<64xf32> attributes {
    topo.kernel = {family = "loops", rows = array<i64: 64>, cols = array<i64: 200>, full_shape = array<i64: 64, 200>,
                   full_map = affine_map<(i, j) -> (i, j)>}} {
  %z = arith.constant 0.0 : f32
  %i = tensor.empty() : tensor<64xf32>
  %f = linalg.fill ins(%z : f32) outs(%i : tensor<64xf32>) -> tensor<64xf32>
  %r = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i)>], iterator_types = ["parallel", "reduction"]}
      ins(%a : tensor<64x200xf32>) outs(%f : tensor<64xf32>) {
  ^bb0(%x: f32, %o: f32):
    %m = arith.addf %x, %o : f32
    linalg.yield %m : f32
  } -> tensor<64xf32>
  return %r : tensor<64xf32>
}
