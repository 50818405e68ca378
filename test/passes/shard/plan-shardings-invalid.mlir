// RUN: topo-opt %s -p 'topo-plan-shardings{topology=hgx-h100-x8 memory-limit=100000 devices=2}' --split-input-file --verify-diagnostics

#id = affine_map<(i, j) -> (i, j)>

// expected-error@below {{'too_large' does not fit: the smallest plan, on 2 devices, takes 4.19 MB}}
func.func @too_large(%x: tensor<1024x1024xf32> {topo.kind = "input", topo.name = "x"}) -> tensor<1024x1024xf32> {
  %e = tensor.empty() : tensor<1024x1024xf32>
  %y = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]} ins(%x : tensor<1024x1024xf32>) outs(%e : tensor<1024x1024xf32>) {
  ^bb0(%a: f32, %o: f32):
    %r = math.exp %a : f32
    linalg.yield %r : f32
  } -> tensor<1024x1024xf32>
  return %y : tensor<1024x1024xf32>
}

// -----

// expected-error@below {{the module has no function to plan}}
module {
}

// -----

// expected-error@below {{'w' is [8] in 'second' and [4] in another function}}
func.func @first(%w: tensor<4xf32> {topo.kind = "param", topo.name = "w"}) -> tensor<4xf32> {
  return %w : tensor<4xf32>
}
func.func @second(%w: tensor<8xf32> {topo.kind = "param", topo.name = "w"}) -> tensor<8xf32> {
  return %w : tensor<8xf32>
}
