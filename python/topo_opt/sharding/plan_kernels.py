"""Which operations of a function share a kernel when nothing is split, and so what passes through memory between kernels.

The clustering is that of `topo-form-kernels`. What later passes do is told from it by three rules: products of one left operand are
one launch (`topo-pack-siblings`); a norm that only products of few rows read is a part of them (`topo-sink-row-scale`); what
stands around products of experts and the choice of experts belongs to them (`topo-form-expert-kernels`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from topo_opt.passes.schedule import fusion_graph
from topo_opt.passes.schedule.form_kernels import FormKernels
from topo_opt.passes.schedule.roles import Role, Roles, assign_roles
from topo_opt.sim import Few, Kind, Rules
from topo_opt.structured.graph import Graph, Node

EXPERTS = ("topo.grouped_product", "topo.top_k")
_LIGHT = (Kind.POINTWISE, Kind.REDUCTION)


@dataclass(frozen=True)
class Kernels:
    """`of` has the kernel of every node that computes; views belong to whoever reads them and have none."""

    roles: Roles
    of: dict[int, int]

    def base(self, value: int) -> int:
        """The tensor in memory or in a kernel that `value` is a view of."""
        graph = self.roles.graph
        while (node := graph.producer(value)) is not None and self.is_view(node):
            value = node.operands[0]
        return value

    def is_view(self, node: Node) -> bool:
        return node.id not in self.of and self.roles.of(node) is Role.VIEW


def kernels_of(graph: Graph) -> Kernels:
    """The kernels of a function."""
    roles = assign_roles(graph)
    arrays = fusion_graph.build(roles)
    arrays.kinds = [
        Kind.FIXED if node.name in EXPERTS else kind for node, kind in zip(arrays.nodes, arrays.kinds)
    ]
    form = FormKernels()
    labels = arrays.labels(Rules.ALL, form.max_inputs, form.recompute)
    return _Joined(roles, arrays, labels).kernels()


class _Joined:
    """Clusters, joined by the three rules."""

    def __init__(self, roles: Roles, arrays: fusion_graph.FusionGraph, labels: Sequence[int]):
        self.graph, self.arrays = roles.graph, arrays
        self.made = Kernels(roles, {n.id: label for n, label in zip(arrays.nodes, labels)})
        self.light: dict[int, bool] = {}
        for kind, label in zip(arrays.kinds, labels):
            self.light[label] = self.light.get(label, True) and kind in _LIGHT

    def kernels(self) -> Kernels:
        self._join_products()
        self._join_experts()
        self._sink_norms()
        return self.made

    def _sources(self, node: Node) -> Iterable[int]:
        """The nodes that compute what a node reads."""
        for operand in node.operands:
            producer = self.graph.producer(self.made.base(operand))
            if producer is not None and producer.id in self.made.of:
                yield producer.id

    def _readers(self) -> dict[int, set[int]]:
        """Kernel -> kernels that read from it, in the order of the program; returned values are read by -1."""
        of, found = self.made.of, dict[int, set[int]]()
        for node in self.arrays.nodes:
            for source in self._sources(node):
                if of[source] != of[node.id]:
                    found.setdefault(of[source], set()).add(of[node.id])
        for value in self.graph.returns:
            producer = self.graph.producer(self.made.base(value))
            if producer is not None and producer.id in of:
                found.setdefault(of[producer.id], set()).add(-1)
        return found

    def _join(self, moved: dict[int, int]) -> None:
        """Kernels that become a part of others."""

        def last(kernel: int) -> int:
            while kernel in moved:
                kernel = moved[kernel]
            return kernel

        for node, kernel in self.made.of.items():
            self.made.of[node] = last(kernel)

    def _join_products(self) -> None:
        of, readers = self.made.of, self._readers()
        first: dict[int, int] = {}
        moved: dict[int, int] = {}
        for node, kind in zip(self.arrays.nodes, self.arrays.kinds):
            if kind is not Kind.CONTRACTION:
                continue
            kernel = of[node.id]
            left = self.made.base(node.operands[self._left(node)])
            host = first.setdefault(left, kernel)
            # A product that reads what the other one makes cannot stand beside it.
            if host != kernel and kernel not in moved and kernel not in readers.get(host, ()):
                moved[kernel] = host
        self._join(moved)

    def _left(self, node: Node) -> int:
        """The position of the operand that is no argument where the other one is: rows of activations, not weights."""
        bases = [self.graph.producer(self.made.base(o)) for o in node.operands[:2]]
        return 1 if bases[0] is None and bases[1] is not None else 0

    def _join_experts(self) -> None:
        """Pointwise operations behind products of experts, and what only the choice of experts reads or that only reads it."""
        of = self.made.of
        experts = {of[n.id]: n.name == "topo.top_k" for n in self.arrays.nodes if n.name in EXPERTS}
        for node, kind in zip(self.arrays.nodes, self.arrays.kinds):
            behind = {of[s] for s in self._sources(node)} & experts.keys()
            # A reduction behind the choice makes weights of what was chosen; behind a product it is a kernel of its own.
            if len(behind) == 1 and (
                kind is Kind.POINTWISE or (kind is Kind.REDUCTION and experts[min(behind)])
            ):
                of[node.id] = behind.pop()
        readers = self._readers()
        moved: dict[int, int] = {}
        for kernel in reversed(dict.fromkeys(of.values())):
            read_by = {moved.get(r, r) for r in readers.get(kernel, ())}
            if self.light[kernel] and len(read_by) == 1 and experts.get(min(read_by)):
                moved[kernel] = read_by.pop()
        self._join(moved)

    def _sink_norms(self) -> None:
        of, readers = self.made.of, self._readers()
        few = {
            of[n.id]
            for n, kind, count in zip(self.arrays.nodes, self.arrays.kinds, self.arrays.few)
            if kind is Kind.CONTRACTION and count != Few.MANY
        }
        reduces = {of[n.id] for n, k in zip(self.arrays.nodes, self.arrays.kinds) if k is Kind.REDUCTION}
        self._join(
            {
                kernel: next(iter(readers[kernel]))
                for kernel in reduces
                if self.light.get(kernel) and len(readers.get(kernel, ())) == 1 and readers[kernel] <= few
            }
        )
