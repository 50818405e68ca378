// RUN: topo-opt %s | topo-opt | filecheck %s

// CHECK-LABEL: func.func @halves
// CHECK: "topo.rotate_half"(%{{.*}}) {interleaved = false} : (tensor<2x4xbf16>) -> tensor<2x4xbf16>
// CHECK: "topo.rotate_half"(%{{.*}}) {interleaved = true} : (tensor<2x4xbf16>) -> tensor<2x4xbf16>
func.func @halves(%x: tensor<2x4xbf16>) -> tensor<2x4xbf16> {
  %0 = "topo.rotate_half"(%x) {interleaved = false} : (tensor<2x4xbf16>) -> tensor<2x4xbf16>
  %1 = "topo.rotate_half"(%0) {interleaved = true} : (tensor<2x4xbf16>) -> tensor<2x4xbf16>
  return %1 : tensor<2x4xbf16>
}
