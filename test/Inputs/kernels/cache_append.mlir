module {
  func.func @main(%arg0: tensor<1x8x1024x64xbf16>, %arg1: tensor<1x8x1x64xbf16>, %arg2: tensor<1xi64>) -> (tensor<1x8x1024x64xbf16>) {
    %0 = "topo.index_update"(%arg0, %arg1, %arg2) {dim = 2 : i64} : (tensor<1x8x1024x64xbf16>, tensor<1x8x1x64xbf16>, tensor<1xi64>) -> tensor<1x8x1024x64xbf16>
    return %0 : tensor<1x8x1024x64xbf16>
  }
}
