"""Pointwise kernels with operands of one element for a run of results: programs that stay within a run."""

from __future__ import annotations

import pytest
import torch
from kernel_check import launch
from loops_samples import compiled, kernels_of
from torch_mlir import ir

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.loops import lower
from topo_opt.codegen.triton.loops_tiles import default_tile
from topo_opt.codegen.triton.target import Target


def made(function, *inputs: torch.Tensor, cores: int = 4) -> tuple[dict[str, int], KernelSource]:
    """Default tile and source of the only kernel of a function, for a machine of so many cores."""
    module, functions = kernels_of(function, *inputs)
    assert len(functions) == 1
    with module.context, ir.Location.unknown():
        kernel = Kernel(functions[0], Target(cores=cores))
        tile = default_tile(kernel)
        kernel.attributes = {**kernel.attributes, "tile": tile}
        return tile, lower(kernel)


def scale_and_shift(x, scale, shift):
    return torch.relu(x * scale[:, None, None] + shift[:, None, None])


def rows_of_a_table(index, table):
    return torch.nn.functional.embedding(index, table) * 2.0


def centred(x, mean):
    return x - mean[:, None]


@pytest.mark.parametrize(
    "function,inputs,expected",
    [
        (
            scale_and_shift,
            [torch.randn(6, 5, 32, 48), torch.randn(5), torch.randn(5)],
            {"x": 512, "inner": 2},
        ),
        (rows_of_a_table, [torch.randint(0, 11, (3, 7)), torch.randn(11, 2048)], {"x": 1024, "inner": 1}),
        (centred, [torch.randn(9, 2000), torch.randn(9)], {"x": 1024, "inner": 1}),
    ],
)
def test_results_and_division_of_the_rows(function, inputs, expected):
    tile, source = made(function, *inputs)
    assert {k: tile.get(k) for k in expected} == expected
    want = function(*inputs)
    ours = torch.full_like(want, 7.5)
    launch(source, inputs, [ours])
    torch.testing.assert_close(ours, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "shape,scaled",
    [((6, 5, 7, 7), 5), ((40, 30, 3, 3), 30), ((8192, 30), 30)],
    ids=["short runs", "no vectors", "along the runs"],
)
def test_blocks_span_all_rows_where_runs_are_short_or_vary(shape, scaled):
    x, scale = torch.randn(shape), torch.randn(scaled)
    tile, _ = made(lambda x, s: x * s.view(-1, *[1] * (len(shape) - 2)), x, scale)
    assert "inner" not in tile


def test_the_element_of_a_run_is_one_load_and_the_others_are_vectors():
    shapes = [(6, 64, 112, 112), (64,), (64,)]
    _, source = made(scale_and_shift, *(torch.empty(s, device="meta") for s in shapes), cores=132)
    code = compiled(source).asm["ptx"]
    assert code.count("ld.global.v4") == 2 and code.count("ld.global.b32") == 2
    assert "bar.sync" not in code and code.count("st.global.v4") == 2
