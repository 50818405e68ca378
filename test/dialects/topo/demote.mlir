// RUN: topo-opt %s | topo-opt | filecheck %s

// CHECK-LABEL: func.func @narrow
// CHECK: "topo.demote"(%{{.*}}) : (tensor<4xf32>) -> tensor<4xbf16>
// CHECK: "topo.demote"(%{{.*}}) : (tensor<4xf32>) -> tensor<4xf16>
func.func @narrow(%x: tensor<4xf32>) -> (tensor<4xbf16>, tensor<4xf16>) {
  %0 = "topo.demote"(%x) : (tensor<4xf32>) -> tensor<4xbf16>
  %1 = "topo.demote"(%x) : (tensor<4xf32>) -> tensor<4xf16>
  return %0, %1 : tensor<4xbf16>, tensor<4xf16>
}
