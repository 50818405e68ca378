// RUN: topo-opt %s -p 'func.func(cse),canonicalize' | filecheck %s
// RUN: topo-opt %s --pass-pipeline='builtin.module(func.func(cse,canonicalize))' | filecheck %s
// RUN: topo-opt < %s -p=cse,canonicalize | filecheck %s
// RUN: topo-opt %s -p cse --dump-pass-pipeline -o %t.mlir 2>&1 | filecheck %s --check-prefix=DUMP
// RUN: topo-opt %t.mlir -p canonicalize | filecheck %s

// CHECK-LABEL: func.func @sum
// CHECK-NEXT: %[[C:.*]] = arith.constant 2.0
// CHECK-NEXT: return %[[C]]
func.func @sum() -> f32 {
  %0 = arith.constant 1.0 : f32
  %1 = arith.constant 1.0 : f32
  %2 = arith.addf %0, %1 : f32
  return %2 : f32
}

// DUMP: Pass Manager with 1 passes:
// DUMP-NEXT: builtin.module(cse)
