"""Batch norms in training: statistics of the batch, and the running ones that move towards them; nothing is left to ATen."""

from __future__ import annotations

import pytest
import torch
from float64_rule import check
from torch import nn

from topo_opt import api

OP = torch.ops.aten._native_batch_norm_legit_functional.default


class Normed(nn.Module):
    def forward(self, x, weight, bias, mean, variance):
        y, _, _, *moved = OP(x, weight, bias, mean, variance, True, 0.25, 1e-3)
        return torch.relu(y), *moved


@pytest.mark.parametrize(("shape", "dtype"), [((3, 5, 7, 9), torch.float32), ((40, 6), torch.bfloat16)])
def test_statistics_of_the_batch(shape, dtype):
    generator = torch.Generator().manual_seed(3)
    channels = [torch.rand(shape[1], generator=generator) + 0.5 for _ in range(4)]
    x = torch.randn(shape, generator=generator).mul(2).add(3).to(dtype)
    inputs = (x, *channels)
    program = api.compile(Normed(), inputs, strict=True, tune="off")
    exact = Normed()(*(i.double() for i in inputs))
    check(program(*inputs), Normed()(*inputs), exact)
