#map = affine_map<(d0, d1, d2, d3) -> (d0, d1, d3)>
#map1 = affine_map<(d0, d1, d2, d3) -> (d2, d3)>
#map2 = affine_map<(d0, d1, d2, d3) -> (d0, d1, d2)>
#map3 = affine_map<(d0, d1, d2) -> (d0, d1, d2)>
module {
  func.func @main(%arg0: tensor<1x1x2048xbf16>, %arg1: tensor<2048x2048xbf16>, %arg2: tensor<1x1x2048xbf16>) -> (tensor<1x1x2048xbf16>) {
    %cst = arith.constant 0.000000e+00 : f32
    %0 = tensor.empty() : tensor<1x1x2048xf32>
    %1 = linalg.fill ins(%cst : f32) outs(%0 : tensor<1x1x2048xf32>) -> tensor<1x1x2048xf32>
    %2 = linalg.contract indexing_maps = [#map, #map1, #map2] ins(%arg0, %arg1 : tensor<1x1x2048xbf16>, tensor<2048x2048xbf16>) outs(%1 : tensor<1x1x2048xf32>) -> tensor<1x1x2048xf32>
    %3 = "topo.demote"(%2) : (tensor<1x1x2048xf32>) -> tensor<1x1x2048xbf16>
    %4 = linalg.generic {indexing_maps = [#map3, #map3], iterator_types = ["parallel", "parallel", "parallel"]} ins(%3 : tensor<1x1x2048xbf16>) outs(%0 : tensor<1x1x2048xf32>) {
    ^bb0(%in: bf16, %out: f32):
      %8 = arith.extf %in : bf16 to f32
      linalg.yield %8 : f32
    } -> tensor<1x1x2048xf32>
    %5 = linalg.generic {indexing_maps = [#map3, #map3], iterator_types = ["parallel", "parallel", "parallel"]} ins(%arg2 : tensor<1x1x2048xbf16>) outs(%0 : tensor<1x1x2048xf32>) {
    ^bb0(%in: bf16, %out: f32):
      %8 = arith.extf %in : bf16 to f32
      linalg.yield %8 : f32
    } -> tensor<1x1x2048xf32>
    %6 = linalg.generic {indexing_maps = [#map3, #map3, #map3], iterator_types = ["parallel", "parallel", "parallel"]} ins(%4, %5 : tensor<1x1x2048xf32>, tensor<1x1x2048xf32>) outs(%0 : tensor<1x1x2048xf32>) {
    ^bb0(%in: f32, %in_0: f32, %out: f32):
      %8 = arith.addf %in, %in_0 : f32
      linalg.yield %8 : f32
    } -> tensor<1x1x2048xf32>
    %7 = "topo.demote"(%6) : (tensor<1x1x2048xf32>) -> tensor<1x1x2048xbf16>
    return %7 : tensor<1x1x2048xbf16>
  }
}
