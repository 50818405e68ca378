#map = affine_map<(d0, d1, d2, d3) -> (d0, d1, d3)>
#map1 = affine_map<(d0, d1, d2, d3) -> (d2, d3)>
#map2 = affine_map<(d0, d1, d2, d3) -> (d0, d1, d2)>
#map3 = affine_map<(d0) -> (d0)>
#map4 = affine_map<(d0, d1, d2) -> (d0, d1, d2)>
#map5 = affine_map<(d0, d1, d2) -> (d2)>
module {
  func.func @main(%arg0: tensor<8x512x768xbf16>, %arg1: tensor<3072x768xbf16>, %arg2: tensor<3072xbf16>) -> (tensor<8x512x3072xbf16>) {
    %cst = arith.constant 0.000000e+00 : f32
    %cst_0 = arith.constant 1.41421354 : f32
    %cst_1 = arith.constant 1.000000e+00 : f32
    %cst_2 = arith.constant 5.000000e-01 : f32
    %0 = tensor.empty() : tensor<8x512x3072xf32>
    %1 = linalg.fill ins(%cst : f32) outs(%0 : tensor<8x512x3072xf32>) -> tensor<8x512x3072xf32>
    %2 = linalg.contract indexing_maps = [#map, #map1, #map2] ins(%arg0, %arg1 : tensor<8x512x768xbf16>, tensor<3072x768xbf16>) outs(%1 : tensor<8x512x3072xf32>) -> tensor<8x512x3072xf32>
    %3 = tensor.empty() : tensor<3072xf32>
    %4 = linalg.generic {indexing_maps = [#map3, #map3], iterator_types = ["parallel"]} ins(%arg2 : tensor<3072xbf16>) outs(%3 : tensor<3072xf32>) {
    ^bb0(%in: bf16, %out: f32):
      %10 = arith.extf %in : bf16 to f32
      linalg.yield %10 : f32
    } -> tensor<3072xf32>
    %5 = linalg.generic {indexing_maps = [#map4, #map5, #map4], iterator_types = ["parallel", "parallel", "parallel"]} ins(%2, %4 : tensor<8x512x3072xf32>, tensor<3072xf32>) outs(%0 : tensor<8x512x3072xf32>) {
    ^bb0(%in: f32, %in_3: f32, %out: f32):
      %10 = arith.addf %in, %in_3 : f32
      linalg.yield %10 : f32
    } -> tensor<8x512x3072xf32>
    %6 = "topo.demote"(%5) : (tensor<8x512x3072xf32>) -> tensor<8x512x3072xbf16>
    %7 = linalg.generic {indexing_maps = [#map4, #map4], iterator_types = ["parallel", "parallel", "parallel"]} ins(%6 : tensor<8x512x3072xbf16>) outs(%0 : tensor<8x512x3072xf32>) {
    ^bb0(%in: bf16, %out: f32):
      %10 = arith.extf %in : bf16 to f32
      linalg.yield %10 : f32
    } -> tensor<8x512x3072xf32>
    %8 = linalg.generic {indexing_maps = [#map4, #map4], iterator_types = ["parallel", "parallel", "parallel"]} ins(%7 : tensor<8x512x3072xf32>) outs(%0 : tensor<8x512x3072xf32>) {
    ^bb0(%in: f32, %out: f32):
      %10 = arith.divf %in, %cst_0 : f32
      %11 = math.erf %10 : f32
      %12 = arith.addf %11, %cst_1 : f32
      %13 = arith.mulf %12, %cst_2 : f32
      %14 = arith.mulf %in, %13 : f32
      linalg.yield %14 : f32
    } -> tensor<8x512x3072xf32>
    %9 = "topo.demote"(%8) : (tensor<8x512x3072xf32>) -> tensor<8x512x3072xbf16>
    return %9 : tensor<8x512x3072xbf16>
  }
}
