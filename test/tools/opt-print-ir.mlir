// RUN: topo-opt %s -p cse,canonicalize,cse --mlir-print-ir-after-all -o %t 2>&1 | filecheck %s --check-prefix=ALL
// RUN: topo-opt %s -p cse,canonicalize,cse --mlir-print-ir-after=canonicalize -o %t 2>&1 | filecheck %s --check-prefix=ONE
// RUN: topo-opt %s -p cse,canonicalize,cse -mlir-print-ir-after-change -o %t 2>&1 | filecheck %s --check-prefix=CHANGE
// RUN: rm -rf %t.d && topo-opt %s -p cse,canonicalize --mlir-print-ir-after-all --mlir-print-ir-tree-dir=%t.d -o %t
// RUN: filecheck %s --check-prefix=TREE --input-file=%t.d/builtin_module_no-symbol-name/2_canonicalize.mlir
// RUN: topo-opt %s -p cse,canonicalize --mlir-timing -o %t 2>&1 | filecheck %s --check-prefix=TIME

// ALL: IR Dump After cse
// ALL: IR Dump After canonicalize
// ALL: IR Dump After cse
// ONE-NOT: IR Dump After cse
// ONE: IR Dump After canonicalize
// ONE-NOT: IR Dump After cse
// CHANGE: IR Dump After cse
// CHANGE-NEXT: module {
// CHANGE: IR Dump After canonicalize
// CHANGE-NOT: IR Dump After cse
// TREE: arith.constant 2.0
// TIME: Execution time report
// TIME: Total Execution Time: {{[0-9.]+}} seconds
// TIME: cse
// TIME-NEXT: canonicalize
// TIME-NEXT: Total
func.func @sum() -> f32 {
  %0 = arith.constant 1.0 : f32
  %1 = arith.constant 1.0 : f32
  %2 = arith.addf %0, %1 : f32
  return %2 : f32
}
