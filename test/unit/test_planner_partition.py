"""Planned programs, partitioned and evaluated on all ranks, equal the program of the whole."""

from __future__ import annotations

import pytest
from planner_prices import RingPrices
from sharded import check_equal, is_every_model, models, whole_model
from torch_mlir import ir

from topo_opt.frontend.ingest import bytecode, parse
from topo_opt.pipeline.run import run
from topo_opt.reference.binding import find_function
from topo_opt.sharding.annotate import annotate, write_mesh
from topo_opt.sharding.plan import PlanOptions, plan
from topo_opt.sharding.plan_reading import read_plan_graph
from topo_opt.sharding.plan_result import collectives, sharding_plan
from topo_opt.sharding.spec import Mesh

# Communication that costs nearly nothing against work that is slow: everything that can be split is, over every axis.
EAGER = RingPrices(size=8, rate=1e15, latency=1e-12, ops_per_s=1e6, memory_bytes_per_s=1e6)
# Work that costs nothing: what is split stays so for the sake of memory, and conversions are few.
HESITANT = RingPrices(size=8, rate=1e9, latency=1e-6)


SHAPES = ((4,), (2, 4), (2,), (8,), (2, 2))


@pytest.mark.parametrize("name", models())
def test_planned_model_equals_whole(name: str) -> None:
    module, arguments, whole = whole_model(name)
    communicating = 0
    for shape in SHAPES if is_every_model() else SHAPES[:2]:
        for prices in (EAGER, HESITANT):
            ranks = parse(bytecode(module))
            communicating += _planned(ranks, shape, prices)
            check_equal(ranks, arguments, whole)
    assert communicating, "some of the plans communicate"


def _planned(module: ir.Module, shape: tuple[int, ...], prices: RingPrices) -> int:
    """Plans and partitions; the number of collectives in the plan."""
    func = find_function(module, "main")
    count = 1
    for size in shape:
        count *= size
    mesh = Mesh(tuple(zip("xy", shape)), prices.devices[:count])
    made = plan(read_plan_graph(func), prices, prices.closeness(), PlanOptions(mesh=mesh))
    with module.context, ir.Location.unknown():
        write_mesh(module.operation, mesh)
    annotate(func, sharding_plan(made))
    assert module.operation.verify()
    run("builtin.module(topo-propagate-shardings,topo-partition)", module)
    return len(list(collectives(made)))
