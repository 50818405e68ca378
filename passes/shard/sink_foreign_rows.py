"""`topo-sink-foreign-rows`: rows of other devices' experts are made zero where they are added up, not where they are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_mlir import ir

from topo_opt.passes.base import Pass
from topo_opt.passes.shard.propagate_shardings import shardable
from topo_opt.sharding.owned_rows import OWNED, rows_of_ours
from topo_opt.sharding.plan_terms import gives_zero
from topo_opt.structured.access import slice_parameters
from topo_opt.structured.graph import Graph, Node, read


@dataclass(frozen=True)
class SinkForeignRows(Pass):
    """Moves zeros in rows without a group of this device behind what is computed of each row by itself.

    `%p = topo.grouped_product %x, %w, %g; %z = zero_foreign(%p, %g); %y = f(%z)`  -->  `%p = ...; %y = f(%p); %z = zero_foreign(%y, %g)`

    where f leaves zeros zero, so that f can become part of the product's kernel, which leaves foreign rows as they are. What only a product
    of the same groups reads needs no zeros: it skips these rows.
    """

    name = "topo-sink-foreign-rows"

    def apply(self, module: Any) -> None:
        for func in shardable(module.operation):
            if any(OWNED in v.operation.attributes for v in func.regions[0].blocks[0].operations):
                graph = read(func)
                for node in graph.nodes:
                    if OWNED in node.op.attributes:
                        _Rows(graph, node).sink()
                for view in list(func.regions[0].blocks[0].operations):
                    op = view.operation
                    if OWNED in op.attributes and not list(op.results[0].uses):
                        op.erase()


@dataclass
class _Rows:
    """Values that are computed of the rows that `zeros` makes, row by row."""

    graph: Graph
    zeros: Node
    place: dict[int, int] = field(default_factory=dict)
    """Value -> its dimension that stands for rows."""
    zero: set[int] = field(default_factory=set)
    """Those of them that are zero in foreign rows."""
    inside: list[Node] = field(default_factory=list)
    """What computes them."""

    def sink(self) -> None:
        start = self.zeros.results[0]
        product, group = self.zeros.operands[:2]
        self.place, self.zero = {start: 0}, {start}
        ends = list(self._follow(start))
        needed = [end for end in ends if not self._skips(*end, group)]
        if (not self.inside and needed) or any(
            value not in self.zero or position >= len(node.op.operands) for value, node, position in needed
        ):
            return
        handles = self.graph.handles
        made: dict[int, ir.Value] = {}
        for value in dict.fromkeys(value for value, _, _ in needed if value != start):
            owner = self.graph.producer(value)
            assert owner is not None
            with ir.InsertionPoint.after(owner.op), owner.op.location:
                made[value] = rows_of_ours(handles[value], handles[group], self.count, self.place[value])
        kept = {(node.id, position) for _, node, position in needed}
        for node in [*self.inside, *(node for _, node, _ in ends)]:
            for position, value in enumerate(node.operands):
                if value == start and (node.id, position) not in kept:
                    node.op.operands[position] = handles[product]
        for value, node, position in needed:
            if value in made:
                node.op.operands[position] = made[value]
        if not any(value == start for value, _, _ in needed):
            self.zeros.op.erase()

    @property
    def count(self) -> int:
        """Groups of this device."""
        return int(ir.IntegerAttr(self.zeros.op.attributes[OWNED]).value)

    def _follow(self, start: int) -> Iterator[tuple[int, Node, int]]:
        """(value, reader, operand) of what is no work on single rows."""
        terminator = Node(-1, "func.return", _terminator(self.graph), list(self.graph.returns), [])
        for node in (*self.graph.nodes[self.zeros.id + 1 :], terminator):
            held = [p for p, operand in enumerate(node.operands) if operand in self.place]
            dim = self._dimension(node, held) if held else None
            if dim is None:
                yield from ((node.operands[p], node, p) for p in held)
                continue
            result = node.results[0]
            self.place[result] = dim
            self.inside.append(node)
            if self._stays_zero(node, held):
                self.zero.add(result)

    def _skips(self, value: int, node: Node, position: int, group: int) -> bool:
        """Whether a reader is a product that leaves out rows of other groups."""
        return (
            node.name == "topo.grouped_product"
            and position == 0
            and self.place[value] == 0
            and node.operands[2] == group
            and (self.graph.values[node.operands[1]].shape or ())[0] == self.count
        )

    def _dimension(self, node: Node, held: Sequence[int]) -> int | None:
        """The dimension of rows of what an op computes of each row by itself; None for any other op."""
        dims = {self.place[node.operands[p]] for p in held}
        if len(dims) != 1 or len(node.results) != 1:
            return None
        (dim,) = dims
        match node.name:
            case "topo.demote":
                return dim
            case "tensor.extract_slice":
                return dim if _takes_whole(self.graph, node, dim) else None
            # What rows hold that are not ours is no index of anything.
            case "linalg.generic" if not (node.has_reduction or node.body & _INDEXING) and all(
                p < node.inputs for p in held
            ):
                loops = {_loop(node.maps[p].results[self.place[node.operands[p]]]) for p in held}
                out = [_loop(e) for e in node.output_map(0).results]
                (loop,) = loops if len(loops) == 1 else (None,)
                return out.index(loop) if loop is not None and out.count(loop) == 1 else None
        return None

    def _stays_zero(self, node: Node, held: Sequence[int]) -> bool:
        zeros = {p for p in held if node.operands[p] in self.zero}
        return bool(zeros) if node.name != "linalg.generic" else gives_zero(node, zeros)


_INDEXING = frozenset({"tensor.extract", "arith.fptosi", "arith.fptoui", "arith.index_cast", "cf.assert"})
"""Ops of bodies that do more with a number than compute another one."""


def _terminator(graph: Graph) -> ir.Operation:
    operations = graph.func.regions[0].blocks[0].operations
    return operations[len(operations) - 1].operation


def _loop(expression: ir.AffineExpr) -> int | None:
    """The loop that an index is, if it is one."""
    return expression.position if isinstance(expression, ir.AffineDimExpr) else None


def _takes_whole(graph: Graph, node: Node, dim: int) -> bool:
    """Whether a slice has all of a dimension, and as many dimensions as before."""
    offsets, sizes, strides = slice_parameters(node)
    before, after = (graph.values[v].shape or () for v in (node.operands[0], node.results[0]))
    return len(before) == len(after) and (offsets[dim], sizes[dim], strides[dim]) == (0, before[dim], 1)
