// RUN: topo-opt %s | topo-opt | filecheck %s

// CHECK-LABEL: func.func @picks
// CHECK: "topo.top_k"(%{{.*}}) {k = 2 : i64, largest = true} : (tensor<3x5xbf16>) -> (tensor<3x2xbf16>, tensor<3x2xi64>)
func.func @picks(%x: tensor<3x5xbf16>) -> (tensor<3x2xbf16>, tensor<3x2xi64>) {
  %v, %i = "topo.top_k"(%x) {k = 2 : i64, largest = true} : (tensor<3x5xbf16>) -> (tensor<3x2xbf16>, tensor<3x2xi64>)
  return %v, %i : tensor<3x2xbf16>, tensor<3x2xi64>
}
