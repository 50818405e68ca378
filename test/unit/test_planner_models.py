"""Plans of decoders with the sizes of published models, a few layers of them, on the machines of the package."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from lowering import lowered

from topo_opt.collectives import CollectiveModel
from topo_opt.collectives.simulate import simulate
from topo_opt.reference.binding import find_function
from topo_opt.sharding.explain import explain
from topo_opt.sharding.meshes import make_mesh
from topo_opt.sharding.pins import ShardingPin
from topo_opt.sharding.plan import Plan, PlanOptions, plan_topology
from topo_opt.sharding.plan_graph import PlanGraph
from topo_opt.sharding.plan_reading import read_plan_graph
from topo_opt.sharding.plan_result import collectives, named, sharding_plan
from topo_opt.topology import Topology, load

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import bench_models
import predicted

LAYERS = 2
# The vocabulary is in proportion, so that the head has the share of the time that it has in the whole model.
SHAPES = {
    "8b": replace(
        bench_models.LLAMA_8B, layers=LAYERS, positions=4096, vocabulary=128256 * LAYERS // 32 // 64 * 64
    ),
    "70b": bench_models.DecoderShape(8192, 64, 8, 128, 28672, LAYERS, 128256 * LAYERS // 80 // 64 * 64),
}
MEGATRON = tuple(
    ShardingPin.parse(f"*.{name}.weight={'_,x' if name in ('o', 'down') else 'x,_'}")
    for name in ("q", "k", "v", "gate", "up", "o", "down")
)


@cache
def _graph(model: str, what: str, size: int) -> PlanGraph:
    """`decode` of a batch of `size`, `prefill` of as many tokens, or a block of experts with them."""
    if model == "experts":
        work = bench_models.qwen3_moe_block(size)("meta")
    elif what == "decode":
        work = bench_models.decode(SHAPES[model], size, 1024)("meta")
    else:
        work = bench_models.prefill(SHAPES[model], size)("meta")
    module = lowered(torch.export.export(work.module, work.inputs, strict=False))
    return read_plan_graph(find_function(module, "main"))


def _flat(graph: PlanGraph, machine: Topology) -> Plan:
    """Tensor parallelism over eight devices in their order, every sum a call of the library, what the pins leave open chosen at its best."""
    mesh = make_mesh((8,), machine.compute[:8])
    return plan_topology(
        graph, machine, PlanOptions(mesh=mesh, pins=MEGATRON, memory_limit=10**12, exchange=False)
    )


def _simulated(plan: Plan, machine: Topology) -> float:
    """The time of a plan with every collective simulated instead of modelled."""
    model, groups = CollectiveModel(machine, exchange=plan.options.exchange), plan.problem.costs.groups
    counts = Counter((c.step.kind, c.nbytes, groups(c.step.axes)) for c in collectives(plan))
    modelled = sum(c.seconds for c in collectives(plan))
    taken = sum(simulate(model, kind, n, g).seconds * times for (kind, n, g), times in counts.items())
    return plan.seconds - modelled + taken


@pytest.mark.parametrize("model", ["8b", "70b"])
def test_decoding_on_a_switch_is_column_then_row_with_two_sums_a_layer(model: str) -> None:
    plan = plan_topology(_graph(model, "decode", 1), load("hgx-h100-x8"))
    lies = {v.name: named(x, plan.mesh).dims for v, x in zip(plan.graph.values, plan.fit.layouts)}
    for layer in range(LAYERS):
        for name in ("q", "k", "v", "gate", "up"):
            first, second = lies[f"layers.{layer}.{name}.weight"]
            assert first and not second
        for name in ("o", "down"):
            first, second = lies[f"layers.{layer}.{name}.weight"]
            assert second and not first
    kinds = Counter(c.step.kind for c in collectives(plan))
    sums = kinds["all_reduce"] + kinds["reduce_scatter"]
    assert sums == 2 * LAYERS and kinds["all_gather"] <= kinds["reduce_scatter"] + 2
    assert plan.gap == 0.0


@pytest.mark.parametrize("machine", ["rtx4090-x8-pcie", "l20-x8-pcie"])
@pytest.mark.parametrize(
    ("what", "size", "factor"),
    [("prefill", 4096, 2.0), ("decode", 1, 1.25), ("decode", 64, 1.2), ("decode", 256, 1.25)],
)
def test_uneven_links_are_used_better_than_by_flat_tensor_parallelism(
    machine: str, what: str, size: int, factor: float
) -> None:
    topology, graph = load(machine), _graph("8b", what, size)
    plan, flat = plan_topology(graph, topology, PlanOptions(stages=False)), _flat(graph, topology)
    assert flat.seconds >= factor * plan.seconds
    assert _simulated(flat, topology) >= factor * _simulated(plan, topology)


@pytest.mark.parametrize("machine", ["rtx4090-x8-pcie", "l20-x8-pcie"])
def test_replicas_decode_more_than_flat_tensor_parallelism(machine: str) -> None:
    topology, graph = load(machine), _graph("8b", "decode", 1)
    plan = plan_topology(graph, topology, PlanOptions(objective="throughput"))
    assert plan.replicas > 1 and _flat(graph, topology).seconds >= 1.25 * plan.pace_seconds


def test_experts_of_a_prompt_are_split_by_expert() -> None:
    graph = _graph("experts", "block", 2048)
    limit = 300_000_000  # all experts take 1.2 GB
    plan = plan_topology(graph, load("hgx-h100-x8"), PlanOptions(memory_limit=limit))
    lies = {v.name: named(x, plan.mesh).dims for v, x in zip(plan.graph.values, plan.fit.layouts)}
    assert lies["experts.gate_up_proj"][0] and lies["experts.down_proj"][0] == lies["experts.gate_up_proj"][0]
    # Nothing is exchanged between the two products: the sum is formed once, behind the second.
    assert [c.step.kind for c in collectives(plan)] == ["reduce_scatter"]
    assert sharding_plan(plan).terms


def test_more_nodes_are_used_only_where_they_pay() -> None:
    machine, graph = load("hgx-h100-x8-ib-x16"), _graph("8b", "decode", 1)
    plan = plan_topology(graph, machine, PlanOptions(devices=16))
    inside = plan_topology(graph, machine, PlanOptions(devices=8))
    assert plan.seconds <= inside.seconds
    crossing = [
        c
        for c in collectives(plan)
        if any(len({d.partition(".")[0] for d in g}) > 1 for g in plan.problem.costs.groups(c.step.axes))
    ]
    assert not crossing or plan.seconds < inside.seconds


def _without_link(machine: Topology, a: str, b: str) -> Topology:
    links = tuple(x for x in machine.links if {*x.ends} != {a, b})
    assert len(links) == len(machine.links) - 1
    return machine.model_copy(update={"links": links})


def test_a_dead_link_between_two_devices_is_avoided() -> None:
    whole = load("mi300x-x8")
    gpus = whole.compute
    broken = _without_link(whole, gpus[0], gpus[1])
    graph = _graph("8b", "decode", 64)
    plan = plan_topology(graph, broken)
    intact = plan_topology(graph, whole)
    natural = make_mesh(plan.mesh.shape, gpus[: len(plan.mesh.devices)])
    kept = plan_topology(graph, broken, PlanOptions(mesh=natural))
    assert intact.seconds <= plan.seconds <= kept.seconds
    for one in collectives(plan):
        groups = plan.problem.costs.groups(one.step.axes)
        cost = CollectiveModel(broken).cost(one.step.kind, one.nbytes, groups)
        assert (gpus[0], gpus[1]) not in cost.link_bytes and (gpus[1], gpus[0]) not in cost.link_bytes


def test_every_choice_is_explained() -> None:
    plan = plan_topology(_graph("8b", "decode", 1), load("l20-x8-pcie"))
    found = explain(plan)
    by_name = {entry.name: entry for entry in found.tensors}
    down = by_name["layers.*.down.weight"]
    assert down.count == LAYERS and down.local_bytes < down.nbytes
    assert down.runner_up not in (None, down.choice) and (down.slower_seconds or 0) >= 0
    assert re.search(r"work [+-][\d.]+ us, communication [+-][\d.]+ us|as fast|takes", down.why)
    total = sum(c.seconds * c.count for c in found.collectives)
    assert total == pytest.approx(found.summary["communication_seconds"])
    assert all(c.algorithm and c.nbytes for c in found.collectives)
    assert {c["outcome"] for c in found.candidates} >= {"fits"}


def _llama(batch: int, layers: int) -> Callable[[str], bench_models.Work]:
    return bench_models.decode(replace(bench_models.LLAMA_1B, layers=layers), batch, 1024)


LAYERED = {
    "llama1b-decode-b1": (bench_models.LLAMA_1B.layers, partial(_llama, 1)),
    "llama1b-decode-b8": (bench_models.LLAMA_1B.layers, partial(_llama, 8)),
    "bert-base-8x512": (12, partial(bench_models.bert, 8, 512)),
}


@pytest.mark.parametrize("case", LAYERED)
def test_one_device_takes_what_was_measured(case: str) -> None:
    """Layers are alike: a model takes the time of one layer with all around it, and for each further one what the second adds."""
    layers, build = LAYERED[case]
    one, two = (predicted.predicted_ms(build(layers=n)) for n in (1, 2))
    assert one + (layers - 1) * (two - one) == pytest.approx(predicted.MEASURED[case], rel=0.15)


@pytest.mark.parametrize("case", ["qwen3moe-block-t1", "qwen3moe-block-t2048"])
def test_a_block_of_experts_takes_what_was_measured(case: str) -> None:
    found = predicted.predicted_ms(bench_models.CASES[case])
    assert found == pytest.approx(predicted.MEASURED[case], rel=0.15)


def test_two_of_eight_devices_are_two_with_a_link() -> None:
    machine = load("mi300x-x8")
    first, second = machine.compute[:2]
    plan = plan_topology(
        _graph("8b", "decode", 1), _without_link(machine, first, second), PlanOptions(devices=2)
    )
    assert {*plan.mesh.devices} != {first, second}
