// RUN: topo-opt %s --split-input-file --verify-diagnostics

func.func @rank(%g: tensor<2x3xi64>) -> (tensor<6xi32>, tensor<5xi32>) {
  // expected-error @+1 {{takes a 1-D integer 'group'}}
  %o, %s = "topo.group_rows"(%g) {groups = 4 : i64} : (tensor<2x3xi64>) -> (tensor<6xi32>, tensor<5xi32>)
  return %o, %s : tensor<6xi32>, tensor<5xi32>
}

// -----

func.func @none(%g: tensor<6xi64>) -> (tensor<6xi32>, tensor<1xi32>) {
  // expected-error @+1 {{has 'groups' of 1 or more, got 0}}
  %o, %s = "topo.group_rows"(%g) {groups = 0 : i64} : (tensor<6xi64>) -> (tensor<6xi32>, tensor<1xi32>)
  return %o, %s : tensor<6xi32>, tensor<1xi32>
}

// -----

func.func @order(%g: tensor<6xi64>) -> (tensor<5xi32>, tensor<5xi32>) {
  // expected-error @+1 {{has 'order' of type tensor<6xi32>, got}}
  %o, %s = "topo.group_rows"(%g) {groups = 4 : i64} : (tensor<6xi64>) -> (tensor<5xi32>, tensor<5xi32>)
  return %o, %s : tensor<5xi32>, tensor<5xi32>
}

// -----

func.func @offsets(%g: tensor<6xi64>) -> (tensor<6xi32>, tensor<4xi32>) {
  // expected-error @+1 {{has 'offsets' of type tensor<5xi32>, got}}
  %o, %s = "topo.group_rows"(%g) {groups = 4 : i64} : (tensor<6xi64>) -> (tensor<6xi32>, tensor<4xi32>)
  return %o, %s : tensor<6xi32>, tensor<4xi32>
}
