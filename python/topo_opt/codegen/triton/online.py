"""Pairs of reductions that one read of a row is enough for, although the second needs the result of the first.

    peak = max(t);  total = sum(exp(t - peak))          (softmax, log-sum-exp)
    sum  = sum(t);  moment = sum((t - sum / n) ** 2)    (variance)
    peak = max(t);  place = min(t == peak ? i : n)      (argmax, argmin)

The second is kept up to date while the first changes: a total is rescaled when its maximum rises, a place is dropped then,
a moment follows B. P. Welford, "Note on a method for calculating corrected sums of squares and products" (Technometrics 4, 1962).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch_mlir import ir

from topo_opt.codegen.triton.emit import Scalar, Value
from topo_opt.codegen.triton.reductions import recognise
from topo_opt.codegen.triton.writer import Writer
from topo_opt.structured.access import VIEWS, domain_indices, view_sources
from topo_opt.structured.graph import Graph, Node
from topo_opt.structured.index import Expr

if TYPE_CHECKING:
    from topo_opt.codegen.triton.loops import Loops, Request


@dataclass(frozen=True)
class Place:
    """A scalar of a node's region at loop indices."""

    node: Node
    value: ir.Value
    loop: tuple[Expr, ...]

    @property
    def op(self) -> ir.Operation | None:
        """The op that computes the scalar; None for a block argument."""
        return None if isinstance(self.value.owner, ir.Block) else self.value.owner.operation

    @property
    def key(self) -> tuple[int, int, tuple[Expr, ...]]:
        """Equal for one scalar at the same indices."""
        return self.node.id, hash(self.value), self.loop

    def operand(self, position: int) -> Place:
        assert self.op is not None
        return Place(self.node, self.op.operands[position], self.loop)


@dataclass(frozen=True)
class Pair:
    """`shift` is the value that the second reduction subtracts (compares with), in terms of the result of the first."""

    kind: Literal["exponentials", "moments", "places", "first_places"]
    first: Request
    second: Request
    shift: Place


def follow(graph: Graph, place: Place) -> Place:
    """Where a scalar is computed: back through element-wise ops that pass it on, and through views."""
    while place.op is None:
        arguments = list(place.node.op.regions[0].blocks[0].arguments)
        position = [hash(a) for a in arguments].index(hash(place.value))
        value = place.node.operands[position]
        indices: Sequence[Expr] = place.node.maps[position].apply(place.loop)
        producer = graph.producer(value)
        while producer is not None and producer.name in VIEWS:
            sources = view_sources(graph, producer, indices, graph.values[value].position)
            if len(sources) != 1 or any(c.decided() is not True for c in sources[0].conditions):
                return place
            value, indices = sources[0].value, sources[0].indices
            producer = graph.producer(value)
        if producer is None or not producer.is_loop_nest or producer.has_reduction:
            return place
        result = graph.values[value].position
        block = producer.op.regions[0].blocks[0]
        yielded = block.operations[len(block.operations) - 1].operation.operands[result]
        place = Place(producer, yielded, tuple(domain_indices(producer, result, indices)))
    return place


def match(loops: Loops, first: Request, second: Request) -> Pair | None:
    """The pair that two reductions form, the second needing the first; None when they form none."""
    graph = loops.kernel.graph
    elements = [graph.values[graph.nodes[n].results[p]].element for n, p, _ in (first, second)]
    one, other = _term(loops, first), _term(loops, second)
    if one is None or other is None:
        return None
    (symbol, summed), (total, term) = one, other
    if symbol in ("max", "min") and total == "min" and elements == ["f32", "i64"]:
        compared = _compared(graph, _Asked(loops, first), summed, follow(graph, term))
        if compared is None:
            return None
        columns = compared.place == loops.space.r and loops.space.col_count < 2**31
        is_first = columns and compared.is_place_of_nan and _propagates_nan(loops, first)
        return Pair("first_places" if is_first else "places", first, second, compared.peak)
    if elements != ["f32", "f32"]:
        return None
    if total != "+" or symbol not in ("max", "+"):
        return None
    root = follow(graph, term)
    if symbol == "max":
        difference = _difference(graph, root.operand(0)) if _name(root) == "math.exp" else None
        kind: Literal["exponentials", "moments"] = "exponentials"
    else:
        difference = _squared_difference(graph, root)
        kind = "moments"
    if difference is None:
        return None
    minuend, shift = difference
    asked = _Asked(loops, first)
    if not asked.same(summed, minuend):
        return None
    fits = asked.only_first(shift) if kind == "exponentials" else asked.is_mean(shift)
    return Pair(kind, first, second, shift) if fits else None


def _term(loops: Loops, request: Request) -> tuple[str, Place] | None:
    """Symbol and term of a reduction that starts from its identity."""
    number, position, indices = request
    graph = loops.kernel.graph
    node = graph.nodes[number]
    known = recognise(node, position, graph.values[node.results[position]].element)
    if known is None or not loops.starts_from_identity(node, position, indices, known.combiner):
        return None
    loop = domain_indices(node, position, indices, loops.reduction_loop(node, loops.space.r))
    return known.combiner.symbol, Place(node, known.term, tuple(loop))


def _name(place: Place) -> str:
    return place.op.name if place.op is not None else ""


def _difference(graph: Graph, place: Place) -> tuple[Place, Place] | None:
    found = follow(graph, place)
    return (found.operand(0), found.operand(1)) if _name(found) == "arith.subf" else None


def _squared_difference(graph: Graph, root: Place) -> tuple[Place, Place] | None:
    if _name(root) == "arith.mulf":
        left, right = (follow(graph, root.operand(i)) for i in (0, 1))
        return _difference(graph, left) if left.key == right.key else None
    exponent = follow(graph, root.operand(1)) if _name(root) in ("math.powf", "math.fpowi") else None
    if exponent is not None and exponent.op is not None and exponent.op.name == "arith.constant":
        return (
            _difference(graph, root.operand(0))
            if float(exponent.op.attributes["value"].value) == 2.0
            else None
        )
    return None


_EQUAL, _UNLIKE = 1, 13  # oeq and une of arith.cmpf


@dataclass(frozen=True)
class _Compared:
    """`select(term == peak or term is no number, place, beyond)`; without the second test a NaN has no place."""

    peak: Place
    place: Expr
    is_place_of_nan: bool


def _propagates_nan(loops: Loops, request: Request) -> bool:
    """Whether a largest (smallest) value is no number where any is none."""
    node = loops.kernel.graph.nodes[request[0]]
    known = recognise(node, request[1], loops.kernel.graph.values[node.results[request[1]]].element)
    return known is not None and known.combiner.function in ("_max_nan", "_min_nan")


def _compared(graph: Graph, asked: _Asked, term: Place, root: Place) -> _Compared | None:
    """What is compared in a term that is a place where it is the peak, and past every place elsewhere; else None."""
    if _name(root) != "arith.select":
        return None
    place = follow(graph, root.operand(1))
    if _name(place) == "arith.index_cast":
        place = place.operand(0)
    if _name(place) != "linalg.index":
        return None
    assert place.op is not None
    dim = ir.IntegerAttr(place.op.attributes["dim"]).value
    count = place.node.domain[dim]
    beyond = asked.integer(root.operand(2))
    if beyond is None or beyond < count - 1:
        return None
    condition = follow(graph, root.operand(0))
    tests = [condition]
    if _name(condition) == "arith.ori":
        tests = [follow(graph, condition.operand(i)) for i in (0, 1)]
    peaks = []
    for test in tests:
        if _name(test) != "arith.cmpf" or not asked.same(term, test.operand(0)):
            return None
        assert test.op is not None
        predicate = ir.IntegerAttr(test.op.attributes["predicate"]).value
        if predicate == _EQUAL and asked.is_first(test.operand(1)):
            peaks.append(test.operand(1))
        elif predicate != _UNLIKE or not asked.same(term, test.operand(1)):
            return None
    return _Compared(peaks[0], place.loop[dim], len(tests) == 2) if len(peaks) == 1 else None


@dataclass
class _Asked:
    """Evaluates scalars in a rehearsal, where the result of `first` is a name."""

    loops: Loops
    first: Request

    def _values(self, places: Sequence[Place]) -> tuple[list[Value], list[Request]]:
        asked: list[Request] = []

        def record(node: Node, position: int, indices: tuple[Expr, ...]) -> Scalar:
            request = (node.id, position, indices)
            asked.append(request)
            return Value(f"pending{int(request != self.first)}", "f32", frozenset("x"))

        loops = self.loops
        saved, loops.writer = loops.writer, Writer()
        try:
            with loops.emitter.rehearsal(loops.writer, record):
                return [loops.region_value(p.node, list(p.loop), p.value) for p in places], asked
        finally:
            loops.writer = saved

    def same(self, a: Place, b: Place) -> bool:
        """Whether two scalars are one value that needs no reduction."""
        (left, right), asked = self._values((a, b))
        return not asked and (left.source, left.narrow) == (right.source, right.narrow)

    def only_first(self, place: Place) -> bool:
        """Whether a scalar is a function of the first reduction alone."""
        (value,), asked = self._values((place,))
        return set(asked) == {self.first} and "r" not in value.depends

    def is_first(self, place: Place) -> bool:
        """Whether a scalar is the first reduction itself."""
        (value,), asked = self._values((place,))
        return set(asked) == {self.first} and value.source == "pending0"

    def integer(self, place: Place) -> int | None:
        """The number that a scalar is; None where it is none."""
        found = follow(self.loops.kernel.graph, place)
        (value,), asked = self._values((found,))
        return int(value.source) if not asked and value.is_literal and value.element == "i64" else None

    def is_mean(self, place: Place) -> bool:
        """Whether a scalar is the first reduction divided by the number of columns."""
        count = self.loops.space.col_count
        found = follow(self.loops.kernel.graph, place)
        if _name(found) not in ("arith.divf", "arith.mulf"):
            return False
        for total, factor in ((0, 1), (1, 0)) if _name(found) == "arith.mulf" else ((0, 1),):
            (value, number), asked = self._values((found.operand(total), found.operand(factor)))
            if value.source == "pending0" and set(asked) == {self.first} and number.is_literal:
                scale = float(number.source)
                return scale == count if _name(found) == "arith.divf" else abs(scale * count - 1) < 1e-6
        return False
