// RUN: topo-opt %s --emit-bytecode --verify-roundtrip -o %t.mlirbc
// RUN: topo-opt %t.mlirbc | filecheck %s
// RUN: topo-opt %s --emit-bytecode | topo-opt - | filecheck %s
// RUN: topo-opt %s --mlir-print-debuginfo | filecheck %s --check-prefix=LOC
// RUN: head -c 60 %t.mlirbc > %t.cut
// RUN: not topo-opt %t.cut 2>&1 | filecheck %s --check-prefix=CUT

// CHECK: func.func @demote
// CHECK-NEXT: topo.demote
// LOC: loc("{{.*}}":[[#]]:
// CUT: error:
func.func @demote(%x: tensor<4xf32>) -> tensor<4xbf16> {
  %0 = "topo.demote"(%x) : (tensor<4xf32>) -> tensor<4xbf16>
  return %0 : tensor<4xbf16>
}
