"""In which type a tensor moves between devices: the one that its readers round it to anyway.

A product of halves is computed in f32 and rounded once it is whole. Its terms are rounded before they are summed, and the sum
is formed in the narrow type, as data-parallel and tensor-parallel PyTorch does it: half the bytes. Rings of NCCL and gloo round
after every addition. Of p independent terms t of equal size, which are sqrt(p) times smaller than their sum, the roundings of the terms add up to the variance
of one rounding of the sum, and the partial sums of 2, ..., p terms to that of (2 + ... + p) / p: together sqrt((p + 3) / 2 - 1 / p) times the
error of one device.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_mlir import ir

from topo_opt.sharding.loop_bodies import generic
from topo_opt.sharding.spec import Combiner
from topo_opt.structured.graph import Graph, Node

_NARROW = ("bf16", "f16")
_VIEWS = ("tensor.expand_shape", "tensor.collapse_shape", "tensor.extract_slice")
_MOST_STEPS = 4
"""Operations between a sum and its rounding, such as a bias and a scale."""
_KEEPS_ERROR = frozenset(
    ("arith.addf", "arith.subf", "arith.mulf", "arith.extf", "arith.truncf", "linalg.yield")
)
"""What may stand between: an error of the sum stays as large as it is next to the result. `exp` would enlarge it."""

ROUNDED_SUMS: tuple[Combiner, ...] = ("add", "max", "min")
"""Combinations that may be formed in the narrow type; the last two are exact there, since rounding keeps the order."""


class Transport:
    """The types in which the values of one function move."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._readers = graph.users()
        self._returned = set(graph.returns)

    def of_sum(self, value: int) -> str | None:
        """The type in which the terms of a value are summed, None for its own.

        All readers round the value to this type, at once or behind a few additions and scales.
        """
        return self._rounded(value, _MOST_STEPS)

    def of_copy(self, value: int) -> str | None:
        """The type in which elements of a value move unchanged, None for its own: all readers round to it at once, which is exact."""
        return self._rounded(value, 0)

    def _rounded(self, value: int, steps: int) -> str | None:
        info = self.graph.values[value]
        if info.element != "f32" or info.shape is None or value in self._returned:
            return None
        found = {self._by_reader(self.graph.nodes[n], value, steps) for n in self._readers[value]}
        return found.pop() if len(found) == 1 else None

    def _by_reader(self, reader: Node, value: int, steps: int) -> str | None:
        """What a reader, or the one behind it, rounds to; None where it does not."""
        if len(reader.results) != 1:
            return None
        result = reader.results[0]
        if reader.name in _VIEWS:
            return self._rounded(result, steps)
        element = self.graph.values[result].element
        if reader.name == "topo.demote" or (reader.name == "linalg.generic" and _only_rounds(reader)):
            return element if element in _NARROW else None
        if not steps or not _is_pointwise(self.graph, reader, value):
            return None
        return element if element in _NARROW else self._rounded(result, steps - 1)


def _only_rounds(node: Node) -> bool:
    """Whether a loop nest does nothing but narrow its elements."""
    ops = [v.operation for v in node.op.regions[0].blocks[0].operations]
    return not node.has_reduction and [op.name for op in ops] == ["arith.truncf", "linalg.yield"]


def _is_pointwise(graph: Graph, node: Node, value: int) -> bool:
    """Whether every element of the result is made of one element of `value` and of other tensors."""
    if node.name != "linalg.generic" or node.has_reduction or not node.body <= _KEEPS_ERROR:
        return False
    read = [position for position, operand in enumerate(node.operands) if operand == value]
    return len(read) == 1 and graph.values[node.results[0]].numel == graph.values[value].numel


def narrow(value: ir.Value, element: str) -> ir.Value:
    """`topo.demote` to a narrower type, at the insertion point."""
    return ir.Operation.create("topo.demote", [_like(value, element)], [value]).results[0]


def widen(value: ir.Value, element: str) -> ir.Value:
    """A loop nest that widens every element, at the insertion point."""
    kind = _like(value, element)
    identity = ir.AffineMap.get_identity(kind.rank)

    def body(arguments: Sequence[ir.Value]) -> ir.Value:
        return ir.Operation.create("arith.extf", [kind.element_type], [arguments[0]]).results[0]

    return generic([value], [identity], identity, kind, body)


def _like(value: ir.Value, element: str) -> ir.RankedTensorType:
    return ir.RankedTensorType.get(ir.RankedTensorType(value.type).shape, ir.Type.parse(element))
