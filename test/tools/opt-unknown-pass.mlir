// RUN: not topo-opt %s -p 'cse,canonicalise' 2>&1 | filecheck %s --check-prefix=UPSTREAM
// RUN: not topo-opt %s -p 'topo-mark-inouts' 2>&1 | filecheck %s --check-prefix=OURS
// RUN: not topo-opt %s -p 'cse{no-such=1}' 2>&1 | filecheck %s --check-prefix=OPTION
// RUN: not topo-opt %s -p 'convert-torch-to-linalg' 2>&1 | filecheck %s --check-prefix=ANCHOR
// RUN: not topo-opt %s -p 'func.func(cse' 2>&1 | filecheck %s --check-prefix=SYNTAX

// UPSTREAM: pipeline:1:5: error: 'canonicalise' is not a known pass (did you mean 'canonicalize'
// UPSTREAM-NEXT: cse,canonicalise
// UPSTREAM-NEXT: ^
// OURS: 'topo-mark-inouts' is not a known pass (did you mean 'topo-mark-inout'
// OPTION: pass 'cse' has no option 'no-such'
// ANCHOR: pass 'convert-torch-to-linalg' runs on 'func.func', not on 'builtin.module' (write func.func(convert-torch-to-linalg))
// SYNTAX: pipeline:1:14: error: missing ')'
