// RUN: topo-opt %s -p topo-lower-slices | filecheck %s

// The part of a device begins where its coordinates say; the function gets them as an argument.

// CHECK-LABEL: func.func @cut
// CHECK-SAME:    %[[X:.*]]: tensor<16x3xf32>, %[[AT:.*]]: tensor<2xi64> {topo.dtype = "int64", topo.kind = "coordinate", topo.name = "coordinate"}
// CHECK:         linalg.generic
// CHECK:           tensor.extract %[[AT]]
// CHECK:           tensor.extract %[[AT]]
// CHECK:           tensor.extract %[[X]]
// CHECK:         -> tensor<2x3xf32>
shard.grid @mesh(shape = 2x4) {topo.axes = ["data", "model"]}
func.func @cut(%x: tensor<16x3xf32>) -> tensor<2x3xf32> {
  %y = shard.all_slice %x on @mesh grid_axes = [0, 1] slice_axis = 0 : tensor<16x3xf32> -> tensor<2x3xf32>
  return %y : tensor<2x3xf32>
}
