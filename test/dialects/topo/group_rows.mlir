// RUN: topo-opt %s | topo-opt | filecheck %s

// CHECK-LABEL: func.func @grouped
// CHECK: "topo.group_rows"(%{{.*}}) {groups = 4 : i64} : (tensor<6xi64>) -> (tensor<6xi32>, tensor<5xi32>)
func.func @grouped(%g: tensor<6xi64>) -> (tensor<6xi32>, tensor<5xi32>) {
  %o, %s = "topo.group_rows"(%g) {groups = 4 : i64} : (tensor<6xi64>) -> (tensor<6xi32>, tensor<5xi32>)
  return %o, %s : tensor<6xi32>, tensor<5xi32>
}
