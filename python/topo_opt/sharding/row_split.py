"""Sums followed by work on rows: each device does its share of the rows, between a reduce-scatter and an all-gather.

    %s = all_reduce(%p); %r = residual + %s; %n = norm(%r); product(%n)
 -->
    %s = reduce_scatter(%p); %r = slice(residual) + %s; %n = norm(%r); product(all_gather(%n))

What is known as sequence parallelism. The residual goes on as rows from one layer to the next, so that all sums of a function over
one axis are looked at together: either all of them are scattered or none. Bytes on the links stay the same, or become fewer
where the norm narrows its result; norms and additions take their share of the time. Two collectives have twice the
latency of one, so that small sums are left alone: the cost model of the machine decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from topo_opt.collectives import CollectiveModel
from topo_opt.sharding.annotate import RETURN, Annotations
from topo_opt.sharding.collective import read as read_step
from topo_opt.sharding.rule import Rule
from topo_opt.sharding.rules import FREE_OPS, sharding_rules
from topo_opt.sharding.spec import Mesh, Sharding
from topo_opt.structured.graph import Graph, Node

Axes = tuple[str, ...]

_REDUCES = "shard.all_reduce"
_VIEWS = ("tensor.expand_shape", "tensor.collapse_shape", "topo.demote")


@dataclass
class _Region:
    """Values that are computed for a share of their rows: value -> the dimension that stands for the rows."""

    axes: Axes
    rows: dict[int, int] = field(default_factory=dict)
    nodes: set[int] = field(default_factory=set)
    sums: list[Node] = field(default_factory=list)


class Prices(Protocol):
    """What `CollectiveModel` says of collectives and of memory."""

    def cost(self, kind: Any, nbytes: float, groups: Any) -> Any:
        """The cost of a collective; `.seconds` of it."""

    def compute(self, flops: float, nbytes: float, dtype: str, device: str) -> float:
        """Seconds of a kernel."""


def split_rows(graph: Graph, mesh: Mesh, model: Prices) -> Annotations | None:
    """Shardings that give each device its share of the rows behind sums, where that takes less time; None where it does not.

    The annotations are of the program of one device, for `partition`: what they leave out stays as it is.
    """
    rules = sharding_rules(graph)
    best: tuple[float, _Region] | None = None
    for axes in dict.fromkeys(read_step(n.op, mesh).axes for n in graph.nodes if n.name == _REDUCES):
        region = _grown(graph, rules, mesh, axes)
        saved = _saved_seconds(graph, region, mesh, model)
        if saved > 0 and (best is None or saved > best[0]):
            best = (saved, region)
    return _annotations(graph, rules, best[1]) if best is not None else None


def _grown(graph: Graph, rules: list[Rule], mesh: Mesh, axes: Axes) -> _Region:
    """Everything behind the sums over these axes that rows can be told apart in."""
    region = _Region(axes)
    parts = mesh.size(axes)
    for node in graph.nodes:
        if node.name == _REDUCES:
            step = read_step(node.op, mesh)
            shape = graph.values[node.results[0]].shape or ()
            dim = _row_dimension(shape, parts)
            if step.axes == axes and step.combiner == "add" and dim is not None:
                region.rows[node.results[0]] = dim
                region.sums.append(node)
        elif _follows(node):
            dims = _row_results(graph, node, rules[node.id], region, parts)
            if dims is not None:
                region.rows.update(zip(node.results, dims, strict=True))
                region.nodes.add(node.id)
    return region


def _row_dimension(shape: tuple[int, ...], parts: int) -> int | None:
    """The longest dimension but the last that divides."""
    fitting = [d for d, size in enumerate(shape[:-1]) if size % parts == 0 and size >= parts]
    return max(fitting, key=lambda d: shape[d], default=None)


def _follows(node: Node) -> bool:
    """Whether an op can be computed for some rows: element by element, or along rows; not products, which need all rows anyway."""
    if node.name in _VIEWS:
        return True
    return node.name == "linalg.generic" and not node.body & {"linalg.index", "tensor.extract", "cf.assert"}


def _row_results(graph: Graph, node: Node, rule: Rule, region: _Region, parts: int) -> list[int] | None:
    """The dimension of every result that stands for the rows; None where they get lost or mixed."""
    factors = {
        rule.operands[position][region.rows[value]]
        for position, value in enumerate(node.operands)
        if value in region.rows
    }
    if len(factors) != 1:
        return None
    (carried,) = factors
    if len(carried) != 1:
        return None
    factor = rule.factors[carried[0]]
    if factor.kind != "parallel" or factor.size % parts:
        return None
    found = []
    for dims in rule.results:
        places = [d for d, c in enumerate(dims) if c == carried]
        if len(places) != 1:
            return None
        found.append(places[0])
    return found


def _saved_seconds(graph: Graph, region: _Region, mesh: Mesh, model: Prices) -> float:
    """What is gained: sums become scatters and smaller work, for a gather of every value that is read whole."""
    if not region.nodes:
        return 0.0
    groups = mesh.groups(region.axes)
    device, share = mesh.devices[0], 1 - 1 / mesh.size(region.axes)
    saved = 0.0
    for node in region.sums:
        nbytes = graph.values[node.results[0]].nbytes
        saved += model.cost("all_reduce", nbytes, groups).seconds
        saved -= model.cost("reduce_scatter", nbytes, groups).seconds
    for value in _read_whole(graph, region):
        saved -= model.cost("all_gather", graph.values[value].nbytes, groups).seconds
    moved = sum(graph.values[n.results[0]].nbytes for n in region.sums)
    moved += sum(graph.values[v].nbytes for v in _read_whole(graph, region))
    # One pass over sums and gathers stands for the work between them: how much of it is fused is not known here.
    return saved + share * model.compute(0, moved, "f32", device)


def _read_whole(graph: Graph, region: _Region) -> Iterator[int]:
    """Values with rows that an op outside of the region or the caller reads."""
    outside = {v for n in graph.nodes if n.id not in region.nodes for v in n.operands} | set(graph.returns)
    return (v for v in sorted(region.rows) if v in outside)


def _annotations(graph: Graph, rules: list[Rule], region: _Region) -> Annotations:
    found = Annotations()

    def split(value: int) -> Sharding:
        rank = len(graph.values[value].shape or ())
        dim = region.rows.get(value)
        return Sharding(tuple(region.axes if d == dim else () for d in range(rank)))

    for value, info in enumerate(graph.values):
        if info.shape is not None:
            found.values[value] = split(value)
    for node in graph.nodes:
        if node.name in FREE_OPS:
            continue
        rule = rules[node.id]
        row = _row_factor(node, rule, region) if node.id in region.nodes else None
        for position, value in enumerate(node.operands):
            if graph.values[value].shape is not None:
                dims = rule.operands[position]
                found.uses[node.id, position] = Sharding(
                    tuple(region.axes if row is not None and row in carried else () for carried in dims)
                )
    for position, value in enumerate(graph.returns):
        if graph.values[value].shape is not None:
            found.uses[RETURN, position] = Sharding.replicated(len(graph.values[value].shape or ()))
    return found


def _row_factor(node: Node, rule: Rule, region: _Region) -> int:
    value = node.results[0]
    return rule.results[0][region.rows[value]][0]


def is_described(mesh: Mesh, model: CollectiveModel) -> bool:
    """Whether the devices of the mesh are those of the machine of the model."""
    return set(mesh.devices) <= set(model.topology.compute)


__all__ = ["is_described", "split_rows"]
