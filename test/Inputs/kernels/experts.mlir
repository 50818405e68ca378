// Gate and up of a mixture of experts: many rows, grouped on the device.
#map = affine_map<(d0, d1, d2) -> (d0, d2)>
#map1 = affine_map<(d0, d1, d2) -> (d0, d1, d2)>
#map2 = affine_map<(d0, d1, d2) -> (d0, d2, d1)>
#map3 = affine_map<(d0, d1) -> (d0, d1)>
#map4 = affine_map<(d0, d1) -> (d0)>
module {
  func.func @main(%arg0: tensor<64x256xbf16>, %arg1: tensor<8x256x256xbf16>, %arg2: tensor<256xi64>, %arg3: tensor<256xf32>) -> tensor<256x128xbf16> {
    %0 = tensor.empty() : tensor<64x4x256xbf16>
    %1 = linalg.generic {indexing_maps = [#map, #map1], iterator_types = ["parallel", "parallel", "parallel"]} ins(%arg0 : tensor<64x256xbf16>) outs(%0 : tensor<64x4x256xbf16>) {
    ^bb0(%in: bf16, %out: bf16):
      linalg.yield %in : bf16
    } -> tensor<64x4x256xbf16>
    %collapsed = tensor.collapse_shape %1 [[0, 1], [2]] : tensor<64x4x256xbf16> into tensor<256x256xbf16>
    %2 = tensor.empty() : tensor<8x256x256xbf16>
    %3 = linalg.generic {indexing_maps = [#map2, #map1], iterator_types = ["parallel", "parallel", "parallel"]} ins(%arg1 : tensor<8x256x256xbf16>) outs(%2 : tensor<8x256x256xbf16>) {
    ^bb0(%in: bf16, %out: bf16):
      linalg.yield %in : bf16
    } -> tensor<8x256x256xbf16>
    %4 = "topo.grouped_product"(%collapsed, %3, %arg2) {operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<256x256xbf16>, tensor<8x256x256xbf16>, tensor<256xi64>) -> tensor<256x256xf32>
    %extracted_slice = tensor.extract_slice %4[0, 0] [256, 128] [1, 1] : tensor<256x256xf32> to tensor<256x128xf32>
    %extracted_slice_0 = tensor.extract_slice %4[0, 128] [256, 128] [1, 1] : tensor<256x256xf32> to tensor<256x128xf32>
    %5 = tensor.empty() : tensor<256x128xf32>
    %6 = linalg.generic {indexing_maps = [#map3, #map3, #map4, #map3], iterator_types = ["parallel", "parallel"]} ins(%extracted_slice, %extracted_slice_0, %arg3 : tensor<256x128xf32>, tensor<256x128xf32>, tensor<256xf32>) outs(%5 : tensor<256x128xf32>) {
    ^bb0(%in: f32, %in_1: f32, %in_2: f32, %out: f32):
      %8 = math.tanh %in : f32
      %9 = arith.mulf %8, %in_1 : f32
      %10 = arith.mulf %9, %in_2 : f32
      linalg.yield %10 : f32
    } -> tensor<256x128xf32>
    %7 = "topo.demote"(%6) : (tensor<256x128xf32>) -> tensor<256x128xbf16>
    return %7 : tensor<256x128xbf16>
  }
}
