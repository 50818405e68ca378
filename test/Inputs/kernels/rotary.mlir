#map = affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>
#map1 = affine_map<(d0, d1) -> (d0, d1)>
#map2 = affine_map<(d0, d1, d2, d3) -> (d2, d3)>
module {
  func.func @main(%arg0: tensor<1x8x128x64xbf16>, %arg1: tensor<128x64xbf16>, %arg2: tensor<128x64xbf16>) -> (tensor<1x8x128x64xbf16>) {
    %0 = tensor.empty() : tensor<1x8x128x64xf32>
    %1 = linalg.generic {indexing_maps = [#map, #map], iterator_types = ["parallel", "parallel", "parallel", "parallel"]} ins(%arg0 : tensor<1x8x128x64xbf16>) outs(%0 : tensor<1x8x128x64xf32>) {
    ^bb0(%in: bf16, %out: f32):
      %18 = arith.extf %in : bf16 to f32
      linalg.yield %18 : f32
    } -> tensor<1x8x128x64xf32>
    %2 = tensor.empty() : tensor<128x64xf32>
    %3 = linalg.generic {indexing_maps = [#map1, #map1], iterator_types = ["parallel", "parallel"]} ins(%arg1 : tensor<128x64xbf16>) outs(%2 : tensor<128x64xf32>) {
    ^bb0(%in: bf16, %out: f32):
      %18 = arith.extf %in : bf16 to f32
      linalg.yield %18 : f32
    } -> tensor<128x64xf32>
    %4 = linalg.generic {indexing_maps = [#map, #map2, #map], iterator_types = ["parallel", "parallel", "parallel", "parallel"]} ins(%1, %3 : tensor<1x8x128x64xf32>, tensor<128x64xf32>) outs(%0 : tensor<1x8x128x64xf32>) {
    ^bb0(%in: f32, %in_1: f32, %out: f32):
      %18 = arith.mulf %in, %in_1 : f32
      linalg.yield %18 : f32
    } -> tensor<1x8x128x64xf32>
    %5 = "topo.demote"(%4) : (tensor<1x8x128x64xf32>) -> tensor<1x8x128x64xbf16>
    %extracted_slice = tensor.extract_slice %arg0[0, 0, 0, 32] [1, 8, 128, 32] [1, 1, 1, 1] : tensor<1x8x128x64xbf16> to tensor<1x8x128x32xbf16>
    %6 = tensor.empty() : tensor<1x8x128x32xf32>
    %7 = linalg.generic {indexing_maps = [#map, #map], iterator_types = ["parallel", "parallel", "parallel", "parallel"]} ins(%extracted_slice : tensor<1x8x128x32xbf16>) outs(%6 : tensor<1x8x128x32xf32>) {
    ^bb0(%in: bf16, %out: f32):
      %18 = arith.extf %in : bf16 to f32
      linalg.yield %18 : f32
    } -> tensor<1x8x128x32xf32>
    %8 = linalg.generic {indexing_maps = [#map, #map], iterator_types = ["parallel", "parallel", "parallel", "parallel"]} ins(%7 : tensor<1x8x128x32xf32>) outs(%6 : tensor<1x8x128x32xf32>) {
    ^bb0(%in: f32, %out: f32):
      %18 = arith.negf %in : f32
      linalg.yield %18 : f32
    } -> tensor<1x8x128x32xf32>
    %9 = "topo.demote"(%8) : (tensor<1x8x128x32xf32>) -> tensor<1x8x128x32xbf16>
    %extracted_slice_0 = tensor.extract_slice %arg0[0, 0, 0, 0] [1, 8, 128, 32] [1, 1, 1, 1] : tensor<1x8x128x64xbf16> to tensor<1x8x128x32xbf16>
    %concat = tensor.concat dim(3) %9, %extracted_slice_0 : (tensor<1x8x128x32xbf16>, tensor<1x8x128x32xbf16>) -> tensor<1x8x128x64xbf16>
    %10 = linalg.generic {indexing_maps = [#map, #map], iterator_types = ["parallel", "parallel", "parallel", "parallel"]} ins(%concat : tensor<1x8x128x64xbf16>) outs(%0 : tensor<1x8x128x64xf32>) {
    ^bb0(%in: bf16, %out: f32):
      %18 = arith.extf %in : bf16 to f32
      linalg.yield %18 : f32
    } -> tensor<1x8x128x64xf32>
    %11 = linalg.generic {indexing_maps = [#map1, #map1], iterator_types = ["parallel", "parallel"]} ins(%arg2 : tensor<128x64xbf16>) outs(%2 : tensor<128x64xf32>) {
    ^bb0(%in: bf16, %out: f32):
      %18 = arith.extf %in : bf16 to f32
      linalg.yield %18 : f32
    } -> tensor<128x64xf32>
    %12 = linalg.generic {indexing_maps = [#map, #map2, #map], iterator_types = ["parallel", "parallel", "parallel", "parallel"]} ins(%10, %11 : tensor<1x8x128x64xf32>, tensor<128x64xf32>) outs(%0 : tensor<1x8x128x64xf32>) {
    ^bb0(%in: f32, %in_1: f32, %out: f32):
      %18 = arith.mulf %in, %in_1 : f32
      linalg.yield %18 : f32
    } -> tensor<1x8x128x64xf32>
    %13 = "topo.demote"(%12) : (tensor<1x8x128x64xf32>) -> tensor<1x8x128x64xbf16>
    %14 = linalg.generic {indexing_maps = [#map, #map], iterator_types = ["parallel", "parallel", "parallel", "parallel"]} ins(%5 : tensor<1x8x128x64xbf16>) outs(%0 : tensor<1x8x128x64xf32>) {
    ^bb0(%in: bf16, %out: f32):
      %18 = arith.extf %in : bf16 to f32
      linalg.yield %18 : f32
    } -> tensor<1x8x128x64xf32>
    %15 = linalg.generic {indexing_maps = [#map, #map], iterator_types = ["parallel", "parallel", "parallel", "parallel"]} ins(%13 : tensor<1x8x128x64xbf16>) outs(%0 : tensor<1x8x128x64xf32>) {
    ^bb0(%in: bf16, %out: f32):
      %18 = arith.extf %in : bf16 to f32
      linalg.yield %18 : f32
    } -> tensor<1x8x128x64xf32>
    %16 = linalg.generic {indexing_maps = [#map, #map, #map], iterator_types = ["parallel", "parallel", "parallel", "parallel"]} ins(%14, %15 : tensor<1x8x128x64xf32>, tensor<1x8x128x64xf32>) outs(%0 : tensor<1x8x128x64xf32>) {
    ^bb0(%in: f32, %in_1: f32, %out: f32):
      %18 = arith.addf %in, %in_1 : f32
      linalg.yield %18 : f32
    } -> tensor<1x8x128x64xf32>
    %17 = "topo.demote"(%16) : (tensor<1x8x128x64xf32>) -> tensor<1x8x128x64xbf16>
    return %17 : tensor<1x8x128x64xbf16>
  }
}
