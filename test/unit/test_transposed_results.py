"""Reductions read through a transpose are computed in the order of the reader: one kernel, with neighbours as neighbours."""

from __future__ import annotations

import pytest
import torch
from kernel_check import check_kernels
from torch.nn import functional as F
from torch_mlir import ir

from topo_opt import reference
from topo_opt.frontend.ingest import structured_module
from topo_opt.passes.ingest.transposed_results import reduce_in_reading_order
from topo_opt.pipeline import levels
from topo_opt.pipeline.run import run as run_pipeline


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: F.avg_pool3d(x, 3, stride=2, padding=1), (2, 3, 7, 9, 11)),
        (lambda x: F.gelu(F.avg_pool3d(x + 1, 2)), (1, 5, 4, 6, 10)),
        (lambda x: x.sum(1).t() * 2, (5, 30, 7)),
        (lambda x: x.sum((1, 3)).permute(2, 0, 1).exp(), (5, 4, 3, 2, 7)),
    ],
)
def test_one_kernel_in_the_order_of_its_reader(function, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    module = structured_module(function, (x,))
    with module.context, ir.Location.unknown():
        (values,) = reference.run(module, "main", [x])
        assert torch.allclose(values, function(x), atol=1e-5)
        run_pipeline(levels.pipeline(2, ("schedule", "lower")), module)
        (checked,) = check_kernels(module)
    (ours,), (expected,) = checked.ours, checked.expected
    assert torch.allclose(ours, expected, atol=1e-5), checked.source.source


TEXT = """
#swap = affine_map<(d0, d1) -> (d1, d0)>
#id = affine_map<(d0, d1) -> (d0, d1)>
#all = affine_map<(d0, d1, d2) -> (d0, d1, d2)>
#rows = affine_map<(d0, d1, d2) -> (d0, d1)>
func.func @main(%x: tensor<4x5x6xf32>, %start: tensor<4x5xf32>) -> (tensor<5x4xf32>{MORE}) {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<4x5xf32>
  %fill = linalg.fill ins(%zero : f32) outs(%e : tensor<4x5xf32>) -> tensor<4x5xf32>
  %y = linalg.generic {indexing_maps = [#all, #rows], iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%x : tensor<4x5x6xf32>) outs({START} : tensor<4x5xf32>) {
  ^bb0(%a: f32, %b: f32):
    %s = arith.addf %a, %b : f32
    linalg.yield %s : f32
  } -> tensor<4x5xf32>
  %t = tensor.empty() : tensor<5x4xf32>
  %z = linalg.generic {indexing_maps = [#swap, #id], iterator_types = ["parallel", "parallel"]}
      ins(%y : tensor<4x5xf32>) outs(%t : tensor<5x4xf32>) {
  ^bb0(%a: f32, %b: f32):
    linalg.yield %a : f32
  } -> tensor<5x4xf32>
  return %z{RESULT} : tensor<5x4xf32>{MORE}
}
"""


@pytest.mark.parametrize(
    ("start", "second_reader", "left"),
    [("%fill", False, 1), ("%start", False, 2), ("%fill", True, 2)],
)
def test_only_where_nothing_else_sees_the_order(start, second_reader, left):
    more, result = (", tensor<4x5xf32>", ", %y") if second_reader else ("", "")
    text = TEXT.replace("{MORE}", more).replace("{RESULT}", result).replace("{START}", start)
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        reduce_in_reading_order(module)
        assert module.operation.verify()
        assert str(module).count("linalg.generic") == left
