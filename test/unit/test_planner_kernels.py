"""What operations cost: which of them share a kernel, and what kernels reach of a device."""

from __future__ import annotations

import pytest
import torch
from lowering import lowered
from test_experts import TOKENS, Experts
from test_experts import WIDTH as WIDTH_OF_EXPERTS
from torch import nn

from topo_opt.codegen.triton.contraction import SMALL_ROWS
from topo_opt.collectives import CollectiveModel
from topo_opt.collectives.kernels import Tile, kernels
from topo_opt.passes.schedule.leading_norm import ALONE
from topo_opt.reference.binding import find_function
from topo_opt.sharding.cost import TopologyPrices, compute_table, least_cost, local_shape
from topo_opt.sharding.plan_graph import PlanGraph, PlanOp, Work
from topo_opt.sharding.plan_reading import read_plan_graph
from topo_opt.sharding.rule import Factor, Rule
from topo_opt.sharding.strategies import WHOLE, Strategy
from topo_opt.topology import load

WIDTH = 256


class _Block(nn.Module):
    """Norm, three products of its result, a fourth product and the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.first = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        a, b, c = (product(y) for product in self.first)
        return x + self.last(torch.relu(a) * b + c)


def _graph(rows: int) -> PlanGraph:
    module = _Block().to(torch.bfloat16)
    program = torch.export.export(module, (torch.randn(rows, WIDTH, dtype=torch.bfloat16),), strict=False)
    structured = lowered(program)
    return read_plan_graph(find_function(structured, "main"))


@pytest.mark.parametrize(("rows", "count"), [(1, 2), (64, 2), (1024, 3)])
def test_products_side_by_side_are_one_kernel_and_take_the_norm_of_few_rows(rows: int, count: int) -> None:
    graph = _graph(rows)
    products = [op for op in graph.ops if op.work.kind == "product"]
    assert sorted(op.work.products for op in products) == [1, 3, 3, 3]
    assert sum(op.work.kernels for op in graph.ops) == count


def test_only_what_passes_between_kernels_is_traffic() -> None:
    graph = _graph(1024)
    weights = sum(v.nbytes for v in graph.values if v.kind == "param")
    moved = sum(size for op in graph.ops for _, size in (*op.work.reads, *op.work.writes))
    # The input for the norm and for the residual; the normed rows, what the three products make, and the result.
    assert moved == weights + (2 + 2 + 2 + 1) * 1024 * WIDTH * 2


def test_what_a_kernel_hands_on_to_itself_is_inside() -> None:
    graph = _graph(1024)
    product = next(op for op in reversed(graph.ops) if op.work.kind == "product")
    assert graph.values[product.results[0]].inside  # the residual is added in its kernel


def test_rows_of_kernels_are_those_of_the_generators() -> None:
    """Where norms are handed over, products leave the vector form."""
    assert [reach.rows for reach in kernels().product] == [ALONE, SMALL_ROWS, None]


def test_a_tile_runs_in_waves() -> None:
    tile = Tile.model_validate({"m": 128, "n": 128, "ops_share": {"value": 1.0, "source": "test"}})
    assert tile.spread(1280, 1280, 100) == 1.0
    assert tile.spread(1280, 1280, 99) == pytest.approx(2 * 99 / 100)
    assert tile.spread(1, 128, 1) == 128


def test_few_columns_leave_cores_idle() -> None:
    model = CollectiveModel(load("h200-x1"))

    def seconds(columns: int) -> float:
        return model.compute(2.0 * 4096 * 4096 * columns, 0, "bf16", "gpu0", (4096, columns, 4096))

    assert seconds(4096) < 8 * seconds(512) and seconds(4096) < 1.1 * 64 * seconds(64)


def test_experts_pad_their_tiles() -> None:
    reach = kernels().reach("grouped_product", 16384)
    assert reach.ragged(16384, 128) == pytest.approx(1.5)  # 128 rows each, tiles of 128
    assert reach.ragged(1, 128) == pytest.approx(9.0)  # one tile of 16


def test_experts_of_a_device_have_their_share_of_the_rows() -> None:
    """A split of the experts leaves as much of every tile empty, so that half of them take more than half of the time."""
    factors = tuple(Factor(size, "parallel") for size in (16384, 2048, 128))
    work = Work(1.0, "bf16", shared_rows=16384, kind="grouped_product", shape=((0,), (1,), (2,)))
    op = PlanOp(0, "topo.grouped_product", Rule(factors, (), ()), (), (), work)
    whole, experts = (Strategy(axes, (), ()) for axes in ((WHOLE,), (2,)))
    assert local_shape(op, whole, [2]) == (16384, 2048, 128)
    assert local_shape(op, experts, [2]) == (8192, 2048, 64)


@pytest.mark.parametrize("rows, groups", [(100, 8), (16384, 128), (37, 6)])
def test_no_split_of_experts_takes_less_than_the_bound(rows: int, groups: int) -> None:
    factors = tuple(Factor(size, "parallel") for size in (rows, 256, groups))
    work = Work(1e12, "bf16", shared_rows=rows, kind="grouped_product", shape=((0,), (1,), (2,)), kernels=1)
    op = PlanOp(0, "topo.grouped_product", Rule(factors, (), ()), (), (), work)
    prices = TopologyPrices(load("hgx-h100-x8"))
    for count in (2, 4, 8):
        found = [Strategy((f,), (), ()) for f, factor in enumerate(factors) if factor.size % count == 0]
        table = compute_table(op, found, [count], prices, ["gpu0"])
        assert least_cost(op, count, prices, ["gpu0"]) <= table.min()


def test_the_largest_of_a_row_is_no_choice_of_experts() -> None:
    program = torch.export.export(_Largest(), (torch.randn(64, 512),), strict=False)
    structured = lowered(program)
    (choice,) = (
        op for op in read_plan_graph(find_function(structured, "main")).ops if op.name == "topo.top_k"
    )
    assert choice.work.kind is None and choice.work.reads


class _Largest(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.topk(x, 4)[0]


def test_choosing_experts_takes_longer_than_its_bytes() -> None:
    x = torch.randn(TOKENS, WIDTH_OF_EXPERTS, dtype=torch.bfloat16)
    program = torch.export.export(Experts().bfloat16(), (x,), strict=False)
    structured = lowered(program)
    graph = read_plan_graph(find_function(structured, "main"))
    (choice,) = (op for op in graph.ops if op.name == "topo.top_k")
    assert (choice.work.kind, choice.work.reads) == ("top_k", ())
    model = CollectiveModel(load("h200-x1"))
    of_eight, of_many = (
        model.compute(0.0, tokens * 8 * 8, "f32", "gpu0", kind="top_k") for tokens in (8, 2048)
    )
    # As measured with the launch, 1.9 and 5.3 us, without.
    assert of_eight == pytest.approx(1.1e-6, rel=0.05) and of_many == pytest.approx(4.5e-6, rel=0.05)
