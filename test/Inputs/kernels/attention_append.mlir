module {
  func.func @main(%arg0: tensor<2x8x1x64xbf16>, %arg1: tensor<2x2x256x64xbf16>, %arg2: tensor<2x2x256x64xbf16>, %arg3: tensor<2x2x1x64xbf16>, %arg4: tensor<2x2x1x64xbf16>, %arg5: tensor<1xi64>, %arg6: tensor<1x1x1x256xi1>) -> (tensor<2x2x256x64xbf16>, tensor<2x2x256x64xbf16>, tensor<2x8x1x64xbf16>) {
    %0 = "topo.index_update"(%arg1, %arg3, %arg5) {dim = 2 : i64} : (tensor<2x2x256x64xbf16>, tensor<2x2x1x64xbf16>, tensor<1xi64>) -> tensor<2x2x256x64xbf16>
    %1 = "topo.index_update"(%arg2, %arg4, %arg5) {dim = 2 : i64} : (tensor<2x2x256x64xbf16>, tensor<2x2x1x64xbf16>, tensor<1xi64>) -> tensor<2x2x256x64xbf16>
    %2 = "topo.attention"(%arg0, %0, %1, %arg6) {causal = false, operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>, scale = 1.250000e-01 : f64} : (tensor<2x8x1x64xbf16>, tensor<2x2x256x64xbf16>, tensor<2x2x256x64xbf16>, tensor<1x1x1x256xi1>) -> tensor<2x8x1x64xbf16>
    return %0, %1, %2 : tensor<2x2x256x64xbf16>, tensor<2x2x256x64xbf16>, tensor<2x8x1x64xbf16>
  }
}
