"""Sums over devices in the type to which their results are rounded: half the bytes, and how much of the error of one device."""

from __future__ import annotations

import copy

import pytest
import torch
from float64_rule import tensors
from lowering import lowered
from sharded import check_equal
from torch import nn
from torch_mlir import ir

from topo_opt import reference
from topo_opt.frontend.ingest import bytecode, parse
from topo_opt.pipeline.run import run
from topo_opt.reference.binding import find_function
from topo_opt.runtime.numerics import compare_all
from topo_opt.sharding.plan_reading import read_plan_graph
from topo_opt.sharding.split_passes import split_passes
from topo_opt.topology import load

ROWS, WIDTH = 6, 128
SPLIT = "*up.weight=x,_;*down.weight=_,x"


class Block(nn.Module):
    """Column and row parallel products with biases, behind a norm, with a residual."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=bias), nn.Linear(2 * WIDTH, WIDTH, bias=bias)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def model(dtype: torch.dtype, *, bias: bool = True) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(*(Block(bias) for _ in range(3))).to(dtype).eval().requires_grad_(False)
    return module, torch.randn(ROWS, WIDTH, dtype=dtype)


def structured(module: nn.Module, x: torch.Tensor) -> tuple[ir.Module, list[torch.Tensor]]:
    found = lowered(torch.export.export(module, (x,), strict=False))
    return found, reference.bind_inputs(found, "main", dict(module.state_dict()), [x])


def split(module: ir.Module, mesh: str, shard: str, options: str = "") -> ir.Module:
    ranks = parse(bytecode(module))
    passes = (
        f'topo-propagate-shardings{{mesh={mesh} shard="{shard}" results=whole}},topo-partition{options},cse'
    )
    run(f"builtin.module({passes})", ranks)
    return ranks


def sums(ranks: ir.Module) -> list[str]:
    """The element types of all sums."""
    found = [v.operation for v in find_function(ranks, "main").regions[0].blocks[0].operations]
    return [
        str(ir.RankedTensorType(op.results[0].type).element_type)
        for op in found
        if op.name in ("shard.all_reduce", "shard.reduce_scatter")
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_error_of_eight_ranks_is_below_twice_that_of_eager(dtype: torch.dtype) -> None:
    """Without the floor that the rule allows besides; with wide sums the error is that of one device."""
    module, x = model(dtype)
    exact, eager = tensors(copy.deepcopy(module).double()(x.double())), tensors(module(x))
    program, arguments = structured(module, x)
    errors = {}
    for options in ("", "{sums=wide}"):
        ranks = split(program, "x=8", SPLIT, options)
        (verdict,) = compare_all(reference.run_ranks(ranks, "main", arguments), eager, exact)
        assert sums(ranks) == 3 * [
            (
                "f32"
                if options
                else str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "f")
            )
        ]
        errors[options] = (
            verdict.rms_error / verdict.eager_rms_error,
            verdict.max_error / verdict.eager_max_error,
        )
    assert max(errors[""]) < 2, errors
    assert max(errors["{sums=wide}"]) < 1.1 and errors["{sums=wide}"] < errors[""], errors


def test_what_is_not_rounded_is_summed_as_it_is() -> None:
    """Products that the model wants in f32, of which only an exponential is rounded, and an f32 model."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 8, bias=False)

        def forward(self, x):
            return torch.exp(nn.functional.linear(x.float(), self.gate.weight.float())).to(x.dtype)

    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    program, _ = structured(Router().to(torch.bfloat16).eval().requires_grad_(False), x)
    assert sums(split(program, "x=2", "gate.weight=_,x")) == ["f32"]
    module, x = model(torch.float32)
    program, arguments = structured(module, x)
    ranks = split(program, "x=2", SPLIT)
    assert set(sums(ranks)) == {"f32"}
    check_equal(ranks, arguments, reference.run(program, "main", arguments))


def test_wide_sums_reach_both_passes() -> None:
    """The planner is told too, which counts what moves."""
    machine = load("h200-x2")
    planned = split_passes("h200-x2", machine, "auto", (), wide_sums=True)
    assert "sums=wide" in planned[0] and "topo-partition{sums=wide}" in planned
    assert "topo-partition" in split_passes("h200-x2", machine, "x=2", ("w=x,_",))


def test_what_a_plan_gathers_is_not_loaded_whole() -> None:
    """It was pinned, or it saves memory; of shardings that were given nobody has counted what gathers take."""
    machine = load("h200-x2")

    def loads_whole(mesh: str, shard: tuple[str, ...]) -> bool:
        (simplify,) = (p for p in split_passes("h200-x2", machine, mesh, shard) if "simplify" in p)
        return "hoist=0" not in simplify

    assert not loads_whole("auto", ()) and not loads_whole("x=2", ()) and loads_whole("x=2", ("w=x,_",))


def test_the_planner_counts_the_bytes_that_move() -> None:
    """A product of bf16 is f32 in memory of a device, and bf16 on its way."""
    module, x = model(torch.bfloat16)
    program, _ = structured(module, x)
    func = find_function(program, "main")
    narrow, wide = read_plan_graph(func), read_plan_graph(func, narrow_sums=False)
    products = [op.results[0] for op in narrow.ops if op.name == "linalg.contract"]
    assert len(products) == 6
    for product in products:
        assert 2 * narrow.values[product].moved_bytes == narrow.values[product].nbytes
        assert wide.values[product].moved_bytes == wide.values[product].nbytes
