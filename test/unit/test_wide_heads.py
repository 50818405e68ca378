"""Attention over heads wider than a program can hold: products and a softmax, right in every type."""

from __future__ import annotations

import pytest
import torch
from float64_rule import check
from torch import nn
from torch.nn import functional as F

from topo_opt import api
from topo_opt.frontend.attention import WIDEST


class Attend(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    ("width", "dtype", "families"),
    [
        (WIDEST + 16, torch.float32, ["gemm", "loops", "gemm"]),
        (WIDEST + 16, torch.bfloat16, ["gemm", "loops", "gemm"]),
        (64, torch.float32, ["attention"]),
    ],
)
def test_wide_heads(width, dtype, families):
    generator = torch.Generator().manual_seed(width)
    inputs = [torch.randn(2, 2, n, width, generator=generator).to(dtype) for n in (19, 35, 35)]
    program = api.compile(Attend(), tuple(inputs), strict=True, tune="off")
    (variant,) = program.plan.functions["main"].variants
    assert [step.kernel.split("_")[1] for step in variant.steps if hasattr(step, "kernel")] == families
    check(program(*inputs), Attend()(*inputs), Attend()(*(i.double() for i in inputs)))
