// Picks of the largest of every row, their exponentials taken before and renormalised after.
#full = affine_map<(d0, d1) -> (d0, d1)>
#row = affine_map<(d0, d1) -> (d0)>
func.func @route(%x: tensor<4x16xf32>) -> (tensor<4x2xf32>, tensor<4x2xi64>) {
  %e = tensor.empty() : tensor<4x16xf32>
  %p = linalg.generic {indexing_maps = [#full, #full], iterator_types = ["parallel", "parallel"]} ins(%x : tensor<4x16xf32>) outs(%e : tensor<4x16xf32>) {
  ^bb0(%a: f32, %b: f32):
    %c = math.exp %a : f32
    linalg.yield %c : f32
  } -> tensor<4x16xf32>
  %v, %i = "topo.top_k"(%p) {k = 2 : i64, largest = true} : (tensor<4x16xf32>) -> (tensor<4x2xf32>, tensor<4x2xi64>)
  %zero = arith.constant 0.0 : f32
  %s = tensor.empty() : tensor<4xf32>
  %z = linalg.fill ins(%zero : f32) outs(%s : tensor<4xf32>) -> tensor<4xf32>
  %t = linalg.generic {indexing_maps = [#full, #row], iterator_types = ["parallel", "reduction"]} ins(%v : tensor<4x2xf32>) outs(%z : tensor<4xf32>) {
  ^bb0(%a: f32, %b: f32):
    %c = arith.addf %a, %b : f32
    linalg.yield %c : f32
  } -> tensor<4xf32>
  %o = tensor.empty() : tensor<4x2xf32>
  %n = linalg.generic {indexing_maps = [#full, #row, #full], iterator_types = ["parallel", "parallel"]} ins(%v, %t : tensor<4x2xf32>, tensor<4xf32>) outs(%o : tensor<4x2xf32>) {
  ^bb0(%a: f32, %b: f32, %d: f32):
    %c = arith.divf %a, %b : f32
    linalg.yield %c : f32
  } -> tensor<4x2xf32>
  return %n, %i : tensor<4x2xf32>, tensor<4x2xi64>
}
