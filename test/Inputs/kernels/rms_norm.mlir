#map = affine_map<(d0, d1, d2) -> (d0, d1, d2)>
#map1 = affine_map<(d0, d1, d2) -> (d0, d1, 0)>
#map2 = affine_map<(d0) -> (d0)>
#map3 = affine_map<(d0, d1, d2) -> (d2)>
module {
  func.func @main(%arg0: tensor<1x128x2048xbf16>, %arg1: tensor<2048xbf16> {topo.kind = "param", topo.name = "weight"}) -> (tensor<1x128x2048xbf16>) {
    %cst = arith.constant 9.99999974E-6 : f32
    %c2_i64 = arith.constant 2 : i64
    %cst_0 = arith.constant 0.000000e+00 : f32
    %cst_1 = arith.constant 2.048000e+03 : f32
    %0 = tensor.empty() : tensor<1x128x2048xf32>
    %1 = linalg.generic {indexing_maps = [#map, #map], iterator_types = ["parallel", "parallel", "parallel"]} ins(%arg0 : tensor<1x128x2048xbf16>) outs(%0 : tensor<1x128x2048xf32>) {
    ^bb0(%in: bf16, %out: f32):
      %17 = arith.extf %in : bf16 to f32
      linalg.yield %17 : f32
    } -> tensor<1x128x2048xf32>
    %2 = linalg.generic {indexing_maps = [#map, #map], iterator_types = ["parallel", "parallel", "parallel"]} ins(%1 : tensor<1x128x2048xf32>) outs(%0 : tensor<1x128x2048xf32>) {
    ^bb0(%in: f32, %out: f32):
      %17 = math.fpowi %in, %c2_i64 : f32, i64
      linalg.yield %17 : f32
    } -> tensor<1x128x2048xf32>
    %3 = tensor.empty() : tensor<1x128x1xf32>
    %4 = linalg.fill ins(%cst_0 : f32) outs(%3 : tensor<1x128x1xf32>) -> tensor<1x128x1xf32>
    %5 = linalg.generic {indexing_maps = [#map, #map1], iterator_types = ["parallel", "parallel", "reduction"]} ins(%2 : tensor<1x128x2048xf32>) outs(%4 : tensor<1x128x1xf32>) {
    ^bb0(%in: f32, %out: f32):
      %17 = arith.addf %in, %out : f32
      linalg.yield %17 : f32
    } -> tensor<1x128x1xf32>
    %6 = linalg.generic {indexing_maps = [#map, #map], iterator_types = ["parallel", "parallel", "parallel"]} ins(%5 : tensor<1x128x1xf32>) outs(%3 : tensor<1x128x1xf32>) {
    ^bb0(%in: f32, %out: f32):
      %17 = arith.divf %in, %cst_1 : f32
      linalg.yield %17 : f32
    } -> tensor<1x128x1xf32>
    %7 = linalg.generic {indexing_maps = [#map, #map], iterator_types = ["parallel", "parallel", "parallel"]} ins(%6 : tensor<1x128x1xf32>) outs(%3 : tensor<1x128x1xf32>) {
    ^bb0(%in: f32, %out: f32):
      %17 = arith.addf %in, %cst : f32
      linalg.yield %17 : f32
    } -> tensor<1x128x1xf32>
    %8 = linalg.generic {indexing_maps = [#map, #map], iterator_types = ["parallel", "parallel", "parallel"]} ins(%7 : tensor<1x128x1xf32>) outs(%3 : tensor<1x128x1xf32>) {
    ^bb0(%in: f32, %out: f32):
      %17 = math.rsqrt %in : f32
      linalg.yield %17 : f32
    } -> tensor<1x128x1xf32>
    %9 = linalg.generic {indexing_maps = [#map, #map1, #map], iterator_types = ["parallel", "parallel", "parallel"]} ins(%1, %8 : tensor<1x128x2048xf32>, tensor<1x128x1xf32>) outs(%0 : tensor<1x128x2048xf32>) {
    ^bb0(%in: f32, %in_2: f32, %out: f32):
      %17 = arith.mulf %in, %in_2 : f32
      linalg.yield %17 : f32
    } -> tensor<1x128x2048xf32>
    %10 = tensor.empty() : tensor<1x128x2048xbf16>
    %11 = linalg.generic {indexing_maps = [#map, #map], iterator_types = ["parallel", "parallel", "parallel"]} ins(%9 : tensor<1x128x2048xf32>) outs(%10 : tensor<1x128x2048xbf16>) {
    ^bb0(%in: f32, %out: bf16):
      %17 = arith.truncf %in : f32 to bf16
      linalg.yield %17 : bf16
    } -> tensor<1x128x2048xbf16>
    %12 = linalg.generic {indexing_maps = [#map, #map], iterator_types = ["parallel", "parallel", "parallel"]} ins(%11 : tensor<1x128x2048xbf16>) outs(%0 : tensor<1x128x2048xf32>) {
    ^bb0(%in: bf16, %out: f32):
      %17 = arith.extf %in : bf16 to f32
      linalg.yield %17 : f32
    } -> tensor<1x128x2048xf32>
    %13 = tensor.empty() : tensor<2048xf32>
    %14 = linalg.generic {indexing_maps = [#map2, #map2], iterator_types = ["parallel"]} ins(%arg1 : tensor<2048xbf16>) outs(%13 : tensor<2048xf32>) {
    ^bb0(%in: bf16, %out: f32):
      %17 = arith.extf %in : bf16 to f32
      linalg.yield %17 : f32
    } -> tensor<2048xf32>
    %15 = linalg.generic {indexing_maps = [#map, #map3, #map], iterator_types = ["parallel", "parallel", "parallel"]} ins(%12, %14 : tensor<1x128x2048xf32>, tensor<2048xf32>) outs(%0 : tensor<1x128x2048xf32>) {
    ^bb0(%in: f32, %in_2: f32, %out: f32):
      %17 = arith.mulf %in, %in_2 : f32
      linalg.yield %17 : f32
    } -> tensor<1x128x2048xf32>
    %16 = "topo.demote"(%15) : (tensor<1x128x2048xf32>) -> tensor<1x128x2048xbf16>
    return %16 : tensor<1x128x2048xbf16>
  }
}
