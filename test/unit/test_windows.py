"""Windows that overlap, beside what they are windows of: every element of both is computed."""

import pytest
import torch
from torch import nn

import topo_opt


class Beside(nn.Module):
    """As many elements in the windows as in the tensor, of which one is in two windows and another in none."""

    def __init__(self, combine: str):
        super().__init__()
        self.combine = combine

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.combine == "transposed":
            z = (x * 2 + 1).t().contiguous()
            return z, (x.unfold(1, 3, 2) * z.t().reshape(4, 2, 3)).sum(-1)
        z = torch.tanh(x) if self.combine == "amax" else x * 2 + 1
        product = x.unfold(1, 3, 2) * z.reshape(4, 2, 3)
        if self.combine == "amax":
            return z, product.amax(-1)
        return z, torch.softmax(product, -1) if self.combine == "softmax" else product.sum(int(self.combine))


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("combine", ["-1", "1", "transposed", "amax", "softmax"])
def test_results_beside_windows_are_whole(combine: str, level: int) -> None:
    torch.manual_seed(0)
    module, x = Beside(combine).eval(), torch.randn(4, 6)
    program = topo_opt.compile(module, (x,), topology="cpu", level=level, tune="off")
    for ours, expected in zip(program(x), module(x), strict=True):
        torch.testing.assert_close(ours, expected)
