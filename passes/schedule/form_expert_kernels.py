"""`topo-form-expert-kernels`: kernels around top-k picks and grouped products."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal

from torch_mlir import ir
from torch_mlir.dialects import func

from topo_opt.passes.base import Pass
from topo_opt.passes.schedule.expert_groups import FAMILIES, choose
from topo_opt.passes.schedule.outline import Group, Outliner, closure, results_of
from topo_opt.passes.schedule.roles import Roles, assign_roles
from topo_opt.structured.graph import read

SHARED_FROM = 0.9
"""Rows are grouped when they are expected to reach fewer matrices than this share of their number."""


@dataclass(frozen=True)
class FormExpertKernels(Pass):
    """Outlines `topo.top_k` and `topo.grouped_product` with what belongs to them, as `topo-form-kernels` does the rest.

    | before | after |
    |---|---|
    | softmax, `topo.top_k`, renormalisation | one kernel of family `top_k` |
    | `topo.grouped_product` of many rows | `topo.group_rows` once for all products of the same groups, and an `experts` kernel |
    | its activation, gate times up, bias, weight | part of the `experts` kernel |

    Rows that are so few that hardly two of them share a matrix are not grouped. With fuse=none every op is a kernel of its own.
    """

    name = "topo-form-expert-kernels"
    fuse: Literal["none", "full"] = "full"

    def apply(self, module) -> None:
        top = module.operation
        outliner = Outliner(top)
        for view in list(top.regions[0].blocks[0].operations):
            op = view.operation
            is_plan = op.name == "func.func" and op.regions[0].blocks and "topo.kernel" not in op.attributes
            if is_plan and _has_anchor(op):
                _group_rows(op)
                self._form(op, outliner)

    def _form(self, function: ir.Operation, outliner: Outliner) -> None:
        graph = read(function)
        roles, users = assign_roles(graph), graph.users()
        groups: list[Group] = []
        taken: set[int] = set()
        for node in graph.nodes:
            if node.name not in FAMILIES:
                continue
            group = choose(roles, users, node, outliner, self.fuse == "full")
            if any(n.id in taken for n in group.nodes):
                group = Group((node,), group.attributes)
            taken.update(n.id for n in group.nodes)
            groups.append(group)
        _rebuild(roles, groups, outliner)


def _has_anchor(function: ir.Operation) -> bool:
    return any(o.operation.name in FAMILIES for o in function.regions[0].blocks[0].operations)


def _group_rows(function: ir.Operation) -> None:
    """Gives grouped products of many rows the order of their rows, one for all that have the same groups."""
    made: dict[tuple[int, int], tuple[ir.Value, ir.Value]] = {}
    for view in list(function.regions[0].blocks[0].operations):
        op = view.operation
        if op.name != "topo.grouped_product" or len(op.operands) != 3:
            continue
        x, weights, group = op.operands
        rows, groups = ir.RankedTensorType(group.type).shape[0], ir.RankedTensorType(weights.type).shape[0]
        if not shares_matrices(rows, groups):
            continue
        with ir.InsertionPoint(op), op.location:
            key = (hash(group), groups)
            if key not in made:
                made[key] = _order(group, rows, groups)
            segments = {"operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 1, 1, 1, 1])}
            sorted_op = ir.Operation.create(
                op.name, [op.results[0].type], [x, weights, group, *made[key]], segments
            )
        op.results[0].replace_all_uses_with(sorted_op.results[0])
        op.erase()


def _order(group: ir.Value, rows: int, groups: int) -> tuple[ir.Value, ir.Value]:
    i32 = ir.IntegerType.get_signless(32)
    types = [ir.RankedTensorType.get([rows], i32), ir.RankedTensorType.get([groups + 1], i32)]
    count = {"groups": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), groups)}
    made = ir.Operation.create("topo.group_rows", types, [group], count)
    return made.results[0], made.results[1]


def shares_matrices(rows: int, groups: int) -> bool:
    """Whether rows that pick among `groups` matrices at random are expected to share enough of them."""
    reached = groups * (1 - (1 - 1 / groups) ** rows)
    return reached < SHARED_FROM * rows


def _rebuild(roles: Roles, groups: list[Group], outliner: Outliner) -> None:
    """Puts calls in place of the groups, in an order in which every value is computed before it is read."""
    graph = roles.graph
    users = graph.users()
    block = graph.func.regions[0].blocks[0]
    terminator = block.operations[len(block.operations) - 1].operation
    mapping: dict[int, ir.Value] = {}
    replaced: list[ir.Operation] = []
    for item in _ordered(roles, groups):
        if not isinstance(item, Group):
            op = graph.nodes[item].op
            op.move_before(terminator)
            continue
        _, inputs = closure(roles, item.nodes)
        results = results_of(roles, item.nodes, users)
        replaced.extend(n.op for n in item.nodes)
        if not results:
            continue
        name = outliner.make(roles, item, inputs, results)
        with ir.InsertionPoint(terminator), item.nodes[0].op.location:
            operands = [mapping.get(v, graph.handles[v]) for v in inputs]
            call = func.CallOp([graph.handles[v].type for v in results], name, operands)
        mapping.update(zip(results, call.results))
    # Only now: the kernels are made from the ops as they were read.
    for value, result in mapping.items():
        graph.handles[value].replace_all_uses_with(result)
    for op in reversed(replaced):
        _erase_with_readers(op)


def _erase_with_readers(op: ir.Operation) -> None:
    """Erases an op of a group, and the views of its values that the kernel has copies of."""
    for result in op.results:
        for use in list(result.uses):
            _erase_with_readers(use.owner.operation)
    op.erase()


def _ordered(roles: Roles, groups: list[Group]) -> list[Group | int]:
    """Groups and the numbers of all other nodes; ties in the order of the function."""
    graph = roles.graph
    item_of = {n.id: i for i, g in enumerate(groups) for n in g.nodes}
    items: list[Group | int] = list(groups)
    for node in graph.nodes:
        if node.id not in item_of:
            item_of[node.id] = len(items)
            items.append(node.id)
    rank = [item.nodes[-1].id if isinstance(item, Group) else item for item in items]
    waiting: list[set[int]] = [set() for _ in items]
    followers: list[list[int]] = [[] for _ in items]
    for mine, item in enumerate(items):
        # A group has copies of the views it reads: it waits for what they are views of.
        needed = closure(roles, item.nodes)[1] if isinstance(item, Group) else graph.nodes[item].operands
        producers = [p for v in needed if (p := graph.producer(v)) is not None]
        waiting[mine] = {item_of[p.id] for p in producers} - {mine}
    for number, before in enumerate(waiting):
        for other in sorted(before):
            followers[other].append(number)
    missing = [len(before) for before in waiting]
    ready = [(rank[i], i) for i, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    found: list[Group | int] = []
    while ready:
        _, number = heapq.heappop(ready)
        found.append(items[number])
        for follower in followers[number]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (rank[follower], follower))
    return found
