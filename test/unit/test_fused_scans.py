"""Scans with what computes their elements and what is computed from their results, in one kernel; flips as index arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_check import check_kernels
from torch_mlir import ir

from topo_opt import reference
from topo_opt.codegen.triton import tiles
from topo_opt.frontend.ingest import structured_module
from topo_opt.pipeline import levels
from topo_opt.pipeline.run import run as run_pipeline

X, Y = (6, 70), (4, 30, 5)


def ahead(x: torch.Tensor) -> torch.Tensor:
    """Sums of what is before each element."""
    return torch.cat((torch.zeros_like(x[:, :1]), x), dim=1)[:, :-1].cumsum(1)


FUNCTIONS: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "masked": (lambda x, m: (x * (m > 0)).cumsum(1), [X, X]),
    "reverse": (lambda x: x.flip(1).cumsum(1).flip(1), [X]),
    "exclusive": (ahead, [X]),
    "before and after": (lambda x: (x.abs() + 1).log().cumsum(1).exp() * x, [Y]),
    "middle, reversed": (lambda x: x.flip(1).cumprod(1).flip(1), [Y]),
    "transposed": (lambda x: x.t().cumsum(0).t() + 1, [X]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_kernel(name):
    function, shapes = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(len(name))
    inputs = [torch.randn(s, generator=generator) for s in shapes]
    module = structured_module(function, tuple(inputs))
    with module.context, ir.Location.unknown():
        run_pipeline(levels.pipeline(2, ("schedule", "lower")), module)
        (checked,) = check_kernels(module)
    (ours,), (expected,) = checked.ours, checked.expected
    assert "scan" in checked.name
    assert (ours - expected).abs().max() <= 3e-6 * max(expected.abs().max().item(), 1.0), (
        checked.source.source
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.flip(0, 2) * 2,
        lambda x: x.flip(1).sum(1),
        lambda x: (x + 1).flip(2).permute(1, 2, 0).contiguous(),
        lambda x: x.flip(1).softmax(1).flip(1),
    ],
)
def test_flips_cost_no_kernel(function):
    x = torch.randn(Y, generator=torch.Generator().manual_seed(1))
    module = structured_module(function, (x,))
    assert "tensor.extract " not in str(module)
    with module.context, ir.Location.unknown():
        (values,) = reference.run(module, "main", [x])
        assert torch.allclose(values, function(x), atol=1e-6)
        run_pipeline(levels.pipeline(2, ("schedule", "lower")), module)
        (checked,) = check_kernels(module)
    (ours,), (expected,) = checked.ours, checked.expected
    assert (ours - expected).abs().max() <= 1e-6 * max(expected.abs().max().item(), 1.0)


def test_sums_over_many_blocks_stay_exact(monkeypatch):
    """A sum's error does not grow with the blocks before it, and infinities stay what they are."""
    monkeypatch.setattr(tiles, "ELEMENTS", 16)
    x = torch.rand(2, 16 * 100 + 5, generator=torch.Generator().manual_seed(2)) + 1
    x[1, 900] = float("inf")
    module = structured_module(lambda x: x.cumsum(1), (x,))
    with module.context, ir.Location.unknown():
        run_pipeline(levels.pipeline(2, ("schedule", "lower")), module)
        (checked,) = check_kernels(module, lambda kind, generator: x)
    (ours,), exact = checked.ours, x.double().cumsum(1)
    assert torch.equal(torch.isinf(ours), torch.isinf(exact)) and not ours.isnan().any()
    ulp = torch.finfo(torch.float32).eps * exact[0]
    assert ((ours[0] - exact[0]).abs() / ulp).max() <= 2
