"""`topo-form-kernels`: outlines compute ops into kernel functions, fused where index maps allow."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from torch_mlir import ir
from torch_mlir.dialects import func

from topo_opt.errors import UnsupportedError
from topo_opt.passes.base import Pass
from topo_opt.passes.schedule import fusion_graph
from topo_opt.passes.schedule.fusion_graph import FusionGraph
from topo_opt.passes.schedule.outline import Group, Outliner, clone_nodes, closure, results_of
from topo_opt.passes.schedule.places import Place, find_place
from topo_opt.passes.schedule.roles import Role, Roles, assign_roles, kind_of, memory_operands
from topo_opt.passes.schedule.row_factors import affine_map
from topo_opt.sim import Kind, Rules
from topo_opt.structured.graph import Graph, Node, read
from topo_opt.structured.index import symbol

FAMILIES = {
    Kind.POINTWISE: "loops",
    Kind.REDUCTION: "loops",
    Kind.CONTRACTION: "gemm",
    Kind.ATTENTION: "attention",
    Kind.UPDATE: "update",
    Kind.SCAN: "scan",
}
# The most important kind of a group names its family.
_ANCHORS = (Kind.CONTRACTION, Kind.ATTENTION, Kind.UPDATE, Kind.SCAN, Kind.REDUCTION, Kind.POINTWISE)


@dataclass(frozen=True)
class FormKernels(Pass):
    """Outlines every compute op of the plan functions into a private function with a `topo.kernel` attribute.

    `%1 = linalg.generic ...; %2 = linalg.generic(%1)`  -->  `%2 = call @k_loops_0123456789(...)`

    fuse=none makes one kernel an op, fuse=cheap fuses pointwise ops and reductions, fuse=full adds epilogues. Views and
    constants are repeated inside every kernel that reads them. ATen calls and views that alias their source stay.
    A value that costs up to `recompute` scalar ops is computed again by its reader instead of being stored.
    """

    name = "topo-form-kernels"
    fuse: Literal["none", "cheap", "full"] = "full"
    max_inputs: int = 24
    recompute: int = 64

    def apply(self, module) -> None:
        top = module.operation
        outliner = Outliner(top)
        for view in list(top.regions[0].blocks[0].operations):
            op = view.operation
            if op.name == "func.func" and op.regions[0].blocks and "topo.kernel" not in op.attributes:
                self._form(op, outliner)

    def _form(self, function: ir.Operation, outliner: Outliner) -> None:
        graph = read(function)
        roles = assign_roles(graph)
        users = graph.users()
        arrays = fusion_graph.build(roles)
        groups: list[list[Node]] = [[n] for n in arrays.nodes]
        if self.fuse != "none":
            if self.fuse == "cheap":
                cheap = (Kind.POINTWISE, Kind.REDUCTION)
                arrays.kinds = [k if k in cheap else Kind.FIXED for k in arrays.kinds]
            groups = list(self._fused(roles, arrays, users, outliner, _RULES))
        rebuild(roles, groups, outliner)

    def _fused(
        self,
        roles: Roles,
        arrays: FusionGraph,
        users: Sequence[Sequence[int]],
        outliner: Outliner,
        rules: Sequence[Rules],
    ) -> Iterator[list[Node]]:
        """Groups that code generation takes. A group that it refuses is clustered again with fewer rules, in the end taken apart.

        Clustering looks at pairs of nodes; a chain of permutations can still end at indices that no tile has.
        """
        groups: dict[int, list[Node]] = {}
        for label, node in zip(arrays.labels(rules[0], self.max_inputs, self.recompute), arrays.nodes):
            groups.setdefault(label, []).append(node)
        for nodes in groups.values():
            if is_legal(roles, nodes, users, outliner):
                yield nodes
            elif len(rules) == 1:
                yield from ([n] for n in nodes)
            else:
                yield from self._fused(roles, arrays.part(nodes), users, outliner, rules[1:])


# What is tried, in turn, until code generation takes a group around a contraction.
_RULES = (
    Rules.ALL,
    Rules.ALL & ~Rules.UPDATE,
    Rules.ALL & ~Rules.UPDATE & ~Rules.ROTATION,
    Rules.PROLOGUE | Rules.STATISTIC,
    Rules.NONE,
)


def anchor_of(graph: Graph, nodes: Sequence[Node]) -> tuple[Kind, Node]:
    """The kind that decides a group's family and its first node of that kind."""
    kinds = {n.id: kind_of(graph, n) for n in nodes}
    for kind in _ANCHORS:
        for node in nodes:
            if kinds[node.id] is kind:
                return kind, node
    raise UnsupportedError(f"{nodes[0].name} can't be part of a kernel")


def attributes_of(roles: Roles, nodes: Sequence[Node], results: Sequence[int]) -> dict[str, ir.Attribute]:
    """The `topo.kernel` dictionary of a group."""
    graph = roles.graph
    kind, anchor = anchor_of(graph, nodes)
    attributes: dict[str, ir.Attribute] = {"family": ir.StringAttr.get(FAMILIES[kind])}
    if kind is Kind.REDUCTION:
        attributes |= _reduction_space(roles, nodes, anchor, results)
    elif kind is Kind.POINTWISE:
        shape = list(graph.values[results[0]].shape or ())
        attributes |= _space(shape, [], shape, ir.AffineMap.get_identity(len(shape)))
    elif kind is Kind.CONTRACTION:
        attributes |= _column_parts(graph, nodes)
    return attributes


def _column_parts(graph: Graph, nodes: Sequence[Node]) -> dict[str, ir.Attribute]:
    """How a tile walks the columns so that a rotation finds both its halves; empty without a rotation."""
    for node in nodes:
        if node.name == "topo.rotate_half":
            *_, size = graph.values[node.results[0]].shape or (2,)
            period = 1 if ir.BoolAttr(node.op.attributes["interleaved"]).value else size // 2
            i64 = ir.IntegerType.get_signless(64)
            return {"parts": ir.IntegerAttr.get(i64, 2), "period": ir.IntegerAttr.get(i64, period)}
    return {}


def _space(
    rows: Sequence[int], cols: Sequence[int], full: Sequence[int], full_map: ir.AffineMap
) -> dict[str, ir.Attribute]:
    return {
        "rows": ir.DenseI64ArrayAttr.get(list(rows)),
        "cols": ir.DenseI64ArrayAttr.get(list(cols)),
        "full_shape": ir.DenseI64ArrayAttr.get(list(full)),
        "full_map": ir.AffineMapAttr.get(full_map),
    }


def _reduction_space(
    roles: Roles, nodes: Sequence[Node], node: Node, results: Sequence[int]
) -> dict[str, ir.Attribute]:
    """Rows and columns of a reduction; `full_map` maps them to a tensor that spans both: a result, else the operand."""
    graph = roles.graph
    kept = [d for d in node.output_map(0).positions() if d is not None]
    reduced = [d for d, r in enumerate(node.reduction) if r]
    rows, cols = [node.domain[d] for d in kept], [node.domain[d] for d in reduced]
    dims = {f"d{d}": i for i, d in enumerate(kept + reduced)}
    for operand, index_map in zip(node.operands[: node.inputs], node.maps):
        shape = graph.values[operand].shape or ()
        if prod(shape) == prod(rows) * prod(cols) and index_map.is_projected_permutation:
            indices = index_map.apply([symbol(f"d{d}", size) for d, size in enumerate(node.domain)])
            full = next((r for r in results if _is_transposed(graph.values[r].shape or (), shape)), None)
            if full is not None:
                place = find_place(roles, nodes, Place(operand, tuple(indices)), full)
                if place is not None:
                    shape, indices = graph.values[full].shape or (), list(place)
            return _space(rows, cols, shape, affine_map(indices, dims, len(dims)))
    return _space(rows, cols, rows + cols, ir.AffineMap.get_identity(len(dims)))


def _is_transposed(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether a shape of as many elements has its dimensions in another order."""
    return prod(shape) == prod(other) and [s for s in shape if s > 1] != [s for s in other if s > 1]


def is_legal(roles: Roles, nodes: list[Node], users: Sequence[Sequence[int]], outliner: Outliner) -> bool:
    """Whether a group can be one kernel: every value in it is asked for at indices that the kernel has."""
    if len(nodes) == 1:
        return True
    results = results_of(roles, nodes, users)
    if not results or all(roles.graph.values[r].numel == 0 for r in results):
        return True
    _, inputs = closure(roles, nodes)
    group = Group(tuple(nodes), attributes_of(roles, nodes, results))
    return outliner.lowers(roles, group, inputs, results)


def rebuild(roles: Roles, groups: list[list[Node]], outliner: Outliner) -> None:
    """Replaces the body of the plan function by kernel calls, ATen calls and aliasing views."""
    graph = roles.graph
    values = graph.handles
    users = graph.users()
    block = graph.func.regions[0].blocks[0]
    old = [n.op for n in graph.nodes]
    terminator = block.operations[len(block.operations) - 1].operation
    mapping = {a: values[a] for a in graph.arguments}

    def materialise(value: int) -> ir.Value:
        """The plan's value, cloning aliasing views (and dense constants) on the way."""
        if value not in mapping:
            producer = graph.producer(value)
            assert producer is not None and roles.of(producer) is not Role.COMPUTE, producer
            for operand in producer.operands:
                materialise(operand)
            clone_nodes(roles, [producer], mapping)
        return mapping[value]

    calls: dict[tuple[str, tuple[int, ...]], func.CallOp] = {}
    with ir.InsertionPoint(terminator):
        for nodes in ordered(roles, groups):
            first = nodes[0]
            with first.op.location:
                if first.name in ("func.call", "arith.constant"):
                    for operand in first.operands:
                        materialise(operand)
                    clone_nodes(roles, [first], mapping)
                    continue
                results = results_of(roles, nodes, users)
                if not results:
                    continue
                if all(graph.values[r].numel == 0 for r in results):
                    _empty_results(roles, results, mapping)
                    continue
                _, inputs = closure(roles, nodes)
                name = outliner.make(
                    roles, Group(tuple(nodes), attributes_of(roles, nodes, results)), inputs, results
                )
                operands = [materialise(v) for v in inputs]
                key = (name, tuple(hash(o) for o in operands))
                # What was repeated to become part of several kernels and became none is computed once.
                if key not in calls or any(memory_operands(n) for n in nodes):
                    calls[key] = func.CallOp([values[r].type for r in results], name, operands)
                mapping.update(zip(results, calls[key].results))
        for position, value in enumerate(graph.returns):
            terminator.operands[position] = materialise(value)
    for op in reversed(old):
        op.erase()


def _empty_results(roles: Roles, results: Sequence[int], mapping: dict[int, ir.Value]) -> None:
    """Tensors without elements need no kernel."""
    for result in results:
        made = ir.Operation.create("tensor.empty", results=[roles.graph.handles[result].type])
        mapping[result] = made.results[0]


def ordered(roles: Roles, groups: list[list[Node]]) -> list[list[Node]]:
    """Groups in an order in which every value is computed before it is read; ties by first node."""
    graph = roles.graph
    group_of = {n.id: i for i, g in enumerate(groups) for n in g}
    waiting: list[set[int]] = []
    for position, nodes in enumerate(groups):
        needed, _ = closure(roles, nodes)
        before = {
            group_of[p.id]
            for n in needed
            for o in n.operands
            if (p := graph.producer(o)) is not None and p.id in group_of
        }
        waiting.append(before - {position})
    followers: list[list[int]] = [[] for _ in groups]
    missing = [len(w) for w in waiting]
    for position, before in enumerate(waiting):
        for b in before:
            followers[b].append(position)
    ready = [(groups[i][0].id, i) for i, m in enumerate(missing) if m == 0]
    heapq.heapify(ready)
    result = []
    while ready:
        _, position = heapq.heappop(ready)
        result.append(groups[position])
        for follower in followers[position]:
            missing[follower] -= 1
            if missing[follower] == 0:
                heapq.heappush(ready, (groups[follower][0].id, follower))
    if len(result) != len(groups):
        raise UnsupportedError("fusion made a cycle between kernels")
    return result
