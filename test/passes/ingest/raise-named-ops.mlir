// RUN: topo-opt %s -p topo-raise-named-ops --split-input-file | filecheck %s

// CHECK-DAG: #[[A:.+]] = affine_map<(d0, d1, d2) -> (d0, d2)>
// CHECK-DAG: #[[B:.+]] = affine_map<(d0, d1, d2) -> (d1, d2)>
// CHECK-DAG: #[[C:.+]] = affine_map<(d0, d1, d2) -> (d0, d1)>
// CHECK-LABEL: func.func @contract
// CHECK: %[[INIT:.+]] = linalg.fill ins(%{{.*}} : f32)
// CHECK: linalg.contract indexing_maps = [#[[A]], #[[B]], #[[C]]] ins(%{{.*}}, %{{.*}} : tensor<2x8xbf16>, tensor<3x8xbf16>) outs(%[[INIT]] : tensor<2x3xf32>)
// CHECK: "topo.demote"
// CHECK-NOT: torch.operator
func.func @contract(%a: !torch.vtensor<[2,8],bf16>, %b: !torch.vtensor<[3,8],bf16>) -> !torch.vtensor<[2,3],bf16> {
  %eq = torch.constant.str "mk,nk->mn"
  %f32 = torch.constant.int 6
  %bf16 = torch.constant.int 15
  %0 = torch.operator "torch.topo.contract"(%a, %b, %eq, %f32) : (!torch.vtensor<[2,8],bf16>, !torch.vtensor<[3,8],bf16>, !torch.str, !torch.int) -> !torch.vtensor<[2,3],f32>
  %1 = torch.operator "torch.topo.demote"(%0, %bf16) : (!torch.vtensor<[2,3],f32>, !torch.int) -> !torch.vtensor<[2,3],bf16>
  return %1 : !torch.vtensor<[2,3],bf16>
}

// -----

// Equal calls share a declaration.
// CHECK: func.func private @aten.0(tensor<4xi8>) -> tensor<4xi64> attributes {topo.aten = "aten.bincount.default", topo.call = "{}", topo.dtypes = ["uint8", "int64"], topo.reason = "why"}
// CHECK-NOT: func.func private
// CHECK-LABEL: func.func @left
// CHECK-COUNT-2: call @aten.0(
func.func @left(%a: !torch.vtensor<[4],ui8>) -> (!torch.vtensor<[4],si64>, !torch.vtensor<[4],si64>) {
  %op = torch.constant.str "aten.bincount.default"
  %call = torch.constant.str "{}"
  %why = torch.constant.str "why"
  %types = torch.constant.str "uint8 int64"
  %0 = torch.operator "torch.topo.aten_1_1"(%op, %call, %why, %types, %a) : (!torch.str, !torch.str, !torch.str, !torch.str, !torch.vtensor<[4],ui8>) -> !torch.vtensor<[4],si64>
  %1 = torch.operator "torch.topo.aten_1_1"(%op, %call, %why, %types, %a) : (!torch.str, !torch.str, !torch.str, !torch.str, !torch.vtensor<[4],ui8>) -> !torch.vtensor<[4],si64>
  return %0, %1 : !torch.vtensor<[4],si64>, !torch.vtensor<[4],si64>
}

// -----

// CHECK-LABEL: func.func @attention_and_update
// CHECK: "topo.attention"(%{{.*}}) {causal = true, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>, scale = 5.000000e-01 : f64, softcap = 3.000000e+01 : f64}
// CHECK: "topo.index_update"(%{{.*}}) {dim = 2 : i64}
func.func @attention_and_update(%q: !torch.vtensor<[1,2,3,4],f32>, %i: !torch.vtensor<[3],si64>) -> !torch.vtensor<[1,2,3,4],f32> {
  %none = torch.constant.none
  %scale = torch.constant.float 5.000000e-01
  %true = torch.constant.bool true
  %dim = torch.constant.int 2
  %cap = torch.constant.float 3.000000e+01
  %0 = torch.operator "torch.topo.attention"(%q, %q, %q, %none, %scale, %true, %cap) : (!torch.vtensor<[1,2,3,4],f32>, !torch.vtensor<[1,2,3,4],f32>, !torch.vtensor<[1,2,3,4],f32>, !torch.none, !torch.float, !torch.bool, !torch.float) -> !torch.vtensor<[1,2,3,4],f32>
  %1 = torch.operator "torch.topo.index_update"(%q, %0, %i, %dim) : (!torch.vtensor<[1,2,3,4],f32>, !torch.vtensor<[1,2,3,4],f32>, !torch.vtensor<[3],si64>, !torch.int) -> !torch.vtensor<[1,2,3,4],f32>
  return %1 : !torch.vtensor<[1,2,3,4],f32>
}
