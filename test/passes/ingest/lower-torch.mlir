// RUN: topo-opt %s -p topo-lower-torch | filecheck %s

// Named ops become generic ones, and the number is rounded once to the type it is used in.
// CHECK-LABEL: func.func @transposed
// CHECK-SAME: (%{{.*}}: tensor<2x3xf32>) -> tensor<3x2xf32>
// CHECK: arith.constant 1.000000e-01 : f32
// CHECK-NOT: arith.truncf
// CHECK-NOT: linalg.transpose
// CHECK: linalg.generic
func.func @transposed(%x: !torch.vtensor<[2,3],f32>) -> !torch.vtensor<[3,2],f32> {
  %int0 = torch.constant.int 0
  %int1 = torch.constant.int 1
  %float = torch.constant.float 1.000000e-01
  %dims = torch.prim.ListConstruct %int1, %int0 : (!torch.int, !torch.int) -> !torch.list<int>
  %0 = torch.aten.permute %x, %dims : !torch.vtensor<[2,3],f32>, !torch.list<int> -> !torch.vtensor<[3,2],f32>
  %1 = torch.aten.add.Scalar %0, %float, %int1 : !torch.vtensor<[3,2],f32>, !torch.float, !torch.int -> !torch.vtensor<[3,2],f32>
  return %1 : !torch.vtensor<[3,2],f32>
}
