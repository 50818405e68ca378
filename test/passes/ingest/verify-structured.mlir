// RUN: topo-opt %s -p topo-verify-structured --split-input-file --verify-diagnostics

func.func @fine(%x: tensor<4xf32>) -> tensor<4xbf16> {
  %0 = "topo.demote"(%x) : (tensor<4xf32>) -> tensor<4xbf16>
  return %0 : tensor<4xbf16>
}

// -----

func.func @loop(%n: index, %x: tensor<4xf32>) -> tensor<4xf32> {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  // expected-error @+1 {{'scf.for' may not stand in the structured IR}}
  %0 = scf.for %i = %c0 to %n step %c1 iter_args(%a = %x) -> tensor<4xf32> {
    scf.yield %a : tensor<4xf32>
  }
  return %0 : tensor<4xf32>
}

// -----

func.func @check_outside_a_body(%c: i1) {
  // expected-error @+1 {{'cf.assert' may stand only in the body of a linalg.generic}}
  cf.assert %c, "no"
  return
}

// -----

func.func @dynamic(%n: index) -> tensor<4xf32> {
  // expected-error @+1 {{'tensor.empty' has a result of type tensor<?xf32>: its shape is not static}}
  %0 = tensor.empty(%n) : tensor<?xf32>
  %1 = tensor.extract_slice %0[0] [4] [1] : tensor<?xf32> to tensor<4xf32>
  return %1 : tensor<4xf32>
}
