// RUN: topo-opt %s --split-input-file --verify-diagnostics
// RUN: sed -e 's/retur$/return/' %s > %t.mlir
// RUN: not topo-opt %t.mlir -split-input-file -verify-diagnostics 2>&1 | filecheck %s --check-prefix=MISSING
// RUN: sed -e 's/expected-error/unexpected/' %s > %t2.mlir
// RUN: not topo-opt %t2.mlir -split-input-file -verify-diagnostics 2>&1 | filecheck %s --check-prefix=UNEXPECTED

// MISSING: {{.*}}.mlir:12: error: expected error "custom op 'retur' is unknown" was not produced
// UNEXPECTED: {{.*}}.mlir:13:3: error: unexpected error: custom op 'retur' is unknown
// UNEXPECTED: {{.*}}.mlir:21:19: error: unexpected error: use of value '%x' expects different type

func.func @good() {
  // expected-error@+1 {{custom op 'retur' is unknown}}
  retur
}

// -----

func.func @types(%x: f32) -> f32 {
  // expected-note@above {{prior use here}}
  // expected-error@below {{use of value '%x' expects different type}}
  %0 = arith.addi %x, %x : i32
  return %x : f32
}
