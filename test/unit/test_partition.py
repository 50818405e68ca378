"""Programs of one device on every mesh, all ranks in one process: equal to the program of the whole."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from lowering import lowered
from sharded import MESHES, at_random, check_equal, columns, is_every_model, models, partitioned, whole_model
from test_random_programs import STEPS, Program
from torch_mlir import ir

from topo_opt import reference
from topo_opt.frontend.ingest import bytecode, parse
from topo_opt.pipeline.run import run
from topo_opt.sharding.annotate import Annotations, lift, write
from topo_opt.sharding.named import parse_mesh
from topo_opt.sharding.partition import partition
from topo_opt.sharding.propagate import propagate
from topo_opt.sharding.row_split import split_rows
from topo_opt.sharding.spec import Mesh, Sharding
from topo_opt.structured.graph import Graph, read


@pytest.mark.parametrize("name", models())
def test_model_on_meshes(name: str) -> None:
    """On every mesh by columns and at random in turn; the next model the other way round."""
    module, arguments, whole = whole_model(name)
    split, simplified = 0, ((), ("cse", "topo-simplify-collectives", "topo-lower-slices"))
    first = models().index(name)
    for seed, mesh in enumerate(MESHES):
        ways = (columns(module, mesh), at_random(module, mesh, seed))
        for shard in ways if is_every_model() else (ways[(first + seed) % 2],):
            ranks = partitioned(module, mesh, shard, simplified[seed % 2])
            split += "topo.sharding" in str(ranks)
            check_equal(ranks, arguments, whole)
    assert split >= len(MESHES) // 2 + 1, "most of the programs are split"


def _random_annotations(graph: Graph, mesh: Mesh, rng: random.Random) -> Annotations:
    """Shardings for some of the values, arguments and intermediate ones alike."""
    found = Annotations()
    for value, info in enumerate(graph.values):
        if not info.shape or rng.random() < 0.7:
            continue
        dims: list[tuple[str, ...]] = [()] * len(info.shape)
        for axis, size in mesh.axes:
            fitting = [d for d, n in enumerate(info.shape) if not dims[d] and n >= size]
            if fitting and rng.random() < 0.7:
                dims[rng.choice(fitting)] = (axis,)
        found.values[value] = Sharding(tuple(dims))
    return found


@given(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 7)), min_size=2, max_size=9),
    st.integers(0, 1000),
)
# An export takes most of a second: no shrinking, and several meshes for each.
@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
def test_random_programs_and_shardings(steps: list[tuple[str, int]], seed: int) -> None:
    torch.manual_seed(0)
    module = Program(steps).eval().requires_grad_(False)
    x = torch.randn(2, 4, 8)
    structured = lowered(torch.export.export(module, (x,), strict=False))
    state = {name: value.clone() for name, value in module.state_dict().items()}
    arguments = reference.bind_inputs(structured, "main", state, [x])
    whole = reference.run(structured, "main", arguments)
    rng = random.Random(seed)
    for mesh in ("x=2", "x=3", "x=4", "x=2,y=2", "x=3,y=2"):
        ranks = parse(bytecode(structured))
        _split(ranks, parse_mesh(mesh), rng)
        check_equal(ranks, arguments, whole)


def _split(ranks: ir.Module, mesh: Mesh, rng: random.Random) -> None:
    """Partitions by random annotations, which on their way are written into the IR and read back."""
    from topo_opt.sharding.annotate import write_mesh

    with ranks.context, ir.Location.unknown():
        write_mesh(ranks.operation, mesh)
        func = next(v.operation for v in ranks.body.operations if v.operation.name == "func.func")
        graph, _ = lift(func, mesh)
        (annotations,) = propagate([(graph, _random_annotations(graph, mesh, rng))], mesh)
        write(graph, annotations, mesh)
        assert ranks.operation.verify()
        graph, again = lift(func, mesh)
        partition(graph, again, mesh)
        assert ranks.operation.verify()


class _BytesOnly:
    """A machine where collectives cost their bytes alone, so that sums are scattered wherever rows follow."""

    def cost(self, kind: str, nbytes: float, groups: Any) -> Any:
        return SimpleNamespace(seconds=nbytes * (2 if kind == "all_reduce" else 1))

    def compute(self, flops: float, nbytes: float, dtype: str, device: str) -> float:
        return nbytes


def test_rows_behind_sums_are_shared() -> None:
    """Norms and residuals of a Llama on a share of the rows: no sum of a layer is left whole."""
    module, arguments, whole = whole_model("llama_cache_decode")
    ranks = partitioned(module, "x=2", "*.q_proj.weight=x,_;*.up_proj.weight=x,_")
    mesh = parse_mesh("x=2")
    with ranks.context, ir.Location.unknown():
        func = next(v.operation for v in ranks.body.operations if v.operation.name == "func.func")
        graph = read(func)
        annotations = split_rows(graph, mesh, _BytesOnly())
        assert annotations is not None
        partition(graph, annotations, mesh)
    run("builtin.module(topo-simplify-collectives,topo-lower-slices)", ranks)
    text = str(ranks)
    assert text.count("shard.reduce_scatter") == 4 and "shard.all_reduce" not in text
    check_equal(ranks, arguments, whole)
