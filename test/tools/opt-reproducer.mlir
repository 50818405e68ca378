// A failing pass leaves a file that fails in the same way; a run that goes well leaves none.

// RUN: rm -f %t.crash %t.none
// RUN: not topo-opt --allow-unregistered-dialect %s -p canonicalize,topo-verify-structured,cse --mlir-pass-pipeline-crash-reproducer=%t.crash 2>&1 | filecheck %s --check-prefix=ERROR
// RUN: filecheck %s --check-prefix=FILE --input-file=%t.crash
// RUN: not topo-opt --allow-unregistered-dialect --run-reproducer %t.crash 2>&1 | filecheck %s --check-prefix=ERROR
// RUN: topo-opt --allow-unregistered-dialect %s -p canonicalize --mlir-pass-pipeline-crash-reproducer=%t.none -o %t.mlir
// RUN: not ls %t.none

// ERROR: error: '{{.*}}' may not stand in the structured IR
// FILE: test.keep
// FILE: mlir_reproducer: {
// FILE-NEXT: pipeline: "builtin.module(topo-verify-structured)"
// FILE: verify_each: true
func.func @choose(%p: i1, %x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = scf.if %p -> tensor<4xf32> {
    %1 = "test.keep"() : () -> tensor<4xf32>
    scf.yield %1 : tensor<4xf32>
  } else {
    scf.yield %x : tensor<4xf32>
  }
  return %0 : tensor<4xf32>
}
