"""Pointwise kernels with operands along two axes: results against torch, runs of neighbours in the compiled code."""

from __future__ import annotations

import pytest
import torch
from kernel_check import launch
from loops_samples import compiled, kernels_of
from torch_mlir import ir

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton import loops_space
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.loops import lower
from topo_opt.codegen.triton.loops_tiles import default_tile
from topo_opt.codegen.triton.target import Target


def source_of(function, inputs, tile=None) -> tuple[dict[str, int], KernelSource]:
    """The only kernel of a function with a tile, by default the one of the cost model."""
    module, functions = kernels_of(function, *inputs)
    assert len(functions) == 1
    with module.context, ir.Location.unknown():
        kernel = Kernel(functions[0], Target())
        tile = tile or default_tile(kernel)
        kernel.attributes = {**kernel.attributes, "tile": tile}
        return tile, lower(kernel)


def to_last(x):
    return x.permute(0, 2, 3, 1).contiguous()


def to_first(x):
    return x.permute(0, 3, 1, 2).contiguous()


def transpose_add(x, y):
    return x.t() + y


def activation_to_last(x, scale):
    return (x * scale.view(1, -1, 1, 1)).relu().permute(0, 2, 3, 1).contiguous()


def two_results(x, y):
    total = x.t() + y
    return total, total * 2


CASES = [
    (transpose_add, [(70, 130), (130, 70)]),
    (to_last, [(2, 12, 5, 7)]),
    (to_first, [(2, 5, 7, 12)]),
    (to_first, [(2, 9, 15, 3)]),
    (activation_to_last, [(2, 12, 8, 8), (12,)]),
    (two_results, [(33, 64), (64, 33)]),
    (lambda x: x.transpose(2, 3) * 2, [(2, 3, 20, 16)]),
    (lambda x: x.permute(2, 1, 0).contiguous(), [(9, 10, 11)]),
    (lambda x, b: x.flip(0).t() + b, [(20, 30), (20,)]),
    (lambda x, y: torch.cat([x.t(), y], 1), [(10, 30), (30, 12)]),
    (lambda x: torch.nn.functional.pad(x.transpose(1, 2), (1, 2, 3, 0)), [(2, 14, 18)]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function,shapes", CASES)
def test_two_axes_give_what_torch_gives(function, shapes, dtype):
    inputs = [torch.randn(s).to(dtype) for s in shapes]
    expected = function(*inputs)
    expected = list(expected) if isinstance(expected, tuple) else [expected]
    default, source = source_of(function, inputs)
    small = {**default, "x": 8, "y": 4, "warps": 1}
    assert default["y"] >= 2
    for kernel in (source, source_of(function, inputs, small)[1]):
        results = [torch.full(e.shape, 7.5, dtype=dtype) for e in expected]
        launch(kernel, inputs, results)
        for ours, wanted in zip(results, expected):
            assert torch.equal(ours, wanted), kernel.source


@pytest.mark.parametrize(
    "function,shapes",
    [
        (lambda x, y: x + y, [(64, 64), (64, 64)]),
        (lambda x: x.transpose(1, 2) * 2, [(2, 16, 8, 32)]),
        (lambda x, b: x * b[:, None], [(64, 64), (64,)]),
        (lambda x: x[:, ::2] + 1, [(64, 64)]),
        (lambda x: x.permute(0, 2, 1).contiguous(), [(2, 3, 64)]),
    ],
    ids=["same", "heads", "column", "every-second", "few-streams"],
)
def test_one_axis_where_neighbours_stay_neighbours(function, shapes):
    default, _ = source_of(function, [torch.randn(s) for s in shapes])
    assert "y" not in default


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "function,shapes",
    [(transpose_add, [(256, 512), (512, 256)]), (to_last, [(2, 64, 56, 56)]), (to_first, [(2, 56, 56, 64)])],
)
def test_every_access_takes_16_bytes_a_thread(function, shapes, dtype):
    _, source = source_of(function, [torch.empty(s, dtype=dtype) for s in shapes])
    ptx = compiled(source).asm["ptx"]
    loads = [line for line in ptx.splitlines() if "ld.global" in line or "st.global" in line]
    assert loads and all(".v4.b32" in line for line in loads)


def test_candidates_keep_the_division_and_vary_both_blocks():
    inputs = [torch.empty(4096, 8192, device="meta"), torch.empty(8192, 4096, device="meta")]
    module, functions = kernels_of(transpose_add, *inputs)
    with module.context, ir.Location.unknown():
        kernel = Kernel(functions[0], Target())
        found = loops_space.candidates(kernel)
        assert found[0] == default_tile(kernel)
    assert all((t["across"], t["inner"]) == (1, 1) for t in found)
    shapes = [(t["x"], t["y"]) for t in found[:10]]
    assert len(set(shapes)) > 3 and {(64, 64), (32, 64), (64, 32)} <= set(shapes)


def test_a_short_axis_has_candidates_too():
    module, functions = kernels_of(to_first, torch.empty(512, 224, 224, 3, device="meta"))
    with module.context, ir.Location.unknown():
        found = loops_space.candidates(Kernel(functions[0], Target()))
    assert len(found) > 3 and all(t["y"] == 4 for t in found)


def test_small_tensors_have_smaller_blocks_so_that_more_cores_work():
    few, _ = source_of(to_last, [torch.empty(1, 64, 32, 32)])
    many, _ = source_of(to_last, [torch.empty(64, 64, 32, 32)])
    assert many["x"] * many["y"] == 64 * 64 and few["x"] * few["y"] == 512


def test_blocks_of_inner_rows_have_candidates_of_all_rows_too():
    module, functions = kernels_of(lambda x: x.sum(1), torch.empty(256, 512, 127, device="meta"))
    with module.context, ir.Location.unknown():
        found = loops_space.candidates(Kernel(functions[0], Target()))
    assert found[0]["inner"] == 1 and any("inner" not in t for t in found[:10])
    assert all(t["x"] <= 128 for t in found)
