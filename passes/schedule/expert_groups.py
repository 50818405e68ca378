"""Which ops around a top-k or a grouped product become part of its kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch_mlir import ir

from topo_opt.passes.schedule.outline import Group, Outliner, closure, results_of
from topo_opt.passes.schedule.roles import Role, Roles, kind_of
from topo_opt.sim import Kind
from topo_opt.structured.graph import Graph, Node

# Op -> family of its kernel.
FAMILIES = {
    "topo.top_k": "top_k",
    "topo.group_rows": "group_rows",
    "topo.grouped_product": "experts",
}
MOST_NODES = 64


@dataclass(frozen=True)
class Grower:
    """Proposes nodes for the kernel of an anchor, in the order of the graph."""

    roles: Roles
    users: Sequence[Sequence[int]]

    @property
    def graph(self) -> Graph:
        return self.roles.graph

    def proposals(self, anchor: Node) -> Iterator[list[Node]]:
        """Groups with `anchor`, the largest first and the anchor alone last."""
        if anchor.name == "topo.top_k":
            before, after = self._before_picks(anchor), self._after_picks(anchor)
            for nodes in ([*before, anchor, *after], [*before, anchor], [anchor, *after]):
                if len(nodes) > 1:
                    yield nodes
        elif anchor.name == "topo.grouped_product":
            nodes = self._epilogue(anchor)
            if len(nodes) > 1:
                yield nodes
        yield [anchor]

    def _before_picks(self, anchor: Node) -> list[Node]:
        """What makes the rows picked from and is needed for nothing else: a softmax, a sigmoid."""
        shape = self.graph.values[anchor.operands[0]].shape or ()
        sizes = {prod(shape), prod(shape[:-1])}
        inside = {anchor.id}
        found: list[Node] = []
        for node in reversed(self.graph.nodes[: anchor.id]):
            read = any(self._readers(r) for r in node.results)
            # What eager rounds before it picks is stored so, by whatever computes it: the picks are the same then.
            if node.name == "topo.demote" or not read or not self._is_nest(node, sizes):
                continue
            if len(found) == MOST_NODES:
                break
            if all(self._readers(r) <= inside and r not in self.roles.in_memory for r in node.results):
                inside.add(node.id)
                found.insert(0, node)
        return found

    def _after_picks(self, anchor: Node) -> list[Node]:
        """What is computed of the picks row by row: their sum, a renormalisation, a cast."""
        shape = self.graph.values[anchor.results[0]].shape or ()
        return self._forward(anchor, {prod(shape), prod(shape[:-1])}, reductions=True)[1:]

    def _epilogue(self, anchor: Node) -> list[Node]:
        """What is computed of the product element by element, as far as it ends in one result."""
        nodes = self._forward(anchor, None, reductions=False)
        while len(nodes) > 1 and len(results_of(self.roles, nodes, self.users)) != 1:
            nodes = nodes[:-1]
        return nodes

    def _forward(self, anchor: Node, sizes: set[int] | None, reductions: bool) -> list[Node]:
        """The anchor and the nodes that read it and otherwise only what does not depend on it."""
        inside, nodes = {anchor.id}, [anchor]
        # In order, a kernel visits the rows that have a group, and leaves the others as they were.
        group = anchor.operands[2] if len(anchor.operands) == 5 else None
        reached = set(anchor.results)
        """Values that depend on the anchor."""
        grown = set(anchor.results)
        """Those of them that the group computes, and views of them."""
        for node in self.graph.nodes[anchor.id + 1 :]:
            touched = [o for o in node.operands if o in reached]
            if not touched:
                continue
            reached.update(node.results)
            if any(o not in grown for o in touched) or _tells_groups_apart(node, group):
                continue
            if self.roles.of(node) is not Role.COMPUTE:
                grown.update(node.results)
            elif self._is_nest(node, sizes, reductions) and len(nodes) < MOST_NODES:
                inside.add(node.id)
                nodes.append(node)
                grown.update(node.results)
        return nodes

    def _is_nest(self, node: Node, sizes: set[int] | None, reductions: bool = True) -> bool:
        """A pointwise op or a reduction whose results have one of the given numbers of elements."""
        if self.roles.of(node) is not Role.COMPUTE or node.name not in ("linalg.generic", "topo.demote"):
            return False
        kind = kind_of(self.graph, node)
        if kind is not Kind.POINTWISE and not (reductions and kind is Kind.REDUCTION):
            return False
        return sizes is None or all(self.graph.values[r].numel in sizes for r in node.results)

    def _readers(self, value: int) -> set[int]:
        """Compute nodes that read a value, also through views."""
        found: set[int] = set()
        for user in self.users[value]:
            node = self.graph.nodes[user]
            if self.roles.of(node) is Role.COMPUTE:
                found.add(user)
            else:
                found.update(*(self._readers(r) for r in node.results))
        return found


def _tells_groups_apart(node: Node, group: int | None) -> bool:
    """Whether an op does anything with the numbers of groups but look something up by them: give rows without a group zero, for one."""
    if group is None or group not in node.operands or node.name != "linalg.generic":
        return False
    arguments = list(node.op.regions[0].blocks[0].arguments)
    waiting = [a for a, operand in zip(arguments, node.operands) if operand == group]
    while waiting:
        for use in waiting.pop().uses:
            op = use.owner.operation
            if op.name in _CHECKS:
                waiting += op.results
            elif op.name != "tensor.extract" and op.name != "cf.assert":
                # A comparison counts when something else than a check asks for it.
                return True
    return False


_CHECKS = (
    "arith.index_cast",
    "arith.index_castui",
    "arith.extsi",
    "arith.trunci",
    "arith.cmpi",
    "arith.andi",
)


def choose(
    roles: Roles, users: Sequence[Sequence[int]], anchor: Node, outliner: Outliner, fuse: bool
) -> Group:
    """The largest proposed group that code generation can express."""
    attributes = {"family": ir.StringAttr.get(FAMILIES[anchor.name])}
    lowers: Callable[..., bool] = outliner.lowers
    for nodes in Grower(roles, users).proposals(anchor) if fuse else ():
        group = Group(tuple(nodes), attributes)
        _, inputs = closure(roles, nodes)
        results = results_of(roles, nodes, users)
        if len(nodes) == 1 or (results and lowers(roles, group, inputs, results)):
            return group
    return Group((anchor,), attributes)
