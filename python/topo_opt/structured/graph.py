"""A structured function as a plain graph: nodes with value numbers, shapes and index maps, read once from MLIR.

Analyses and code generation work on this instead of asking the bindings again for every operand. The graph holds
references to operations, so it must not outlive a C++ pass over the module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from torch_mlir import ir

from topo_opt.structured.index import Expr, const

AffineResult = Callable[[Sequence[Expr]], Expr]


@dataclass(frozen=True)
class Map:
    """An affine map: `dims` inputs, one expression a result. `text` identifies it."""

    dims: int
    results: tuple[ir.AffineExpr, ...]
    text: str

    def apply(self, indices: Sequence[Expr]) -> list[Expr]:
        """The results at the given dimension values."""
        if self.is_projected_permutation:
            return [const(fixed) if dim is None else indices[dim] for dim, fixed in self._places]
        return [evaluate(result, indices) for result in self.results]

    @cached_property
    def _places(self) -> tuple[tuple[int | None, int], ...]:
        """For a projected permutation: dimension and constant of every result, one of them without meaning."""
        return tuple(
            (r.position, 0) if isinstance(r, ir.AffineDimExpr) else (None, r.value)  # type: ignore[attr-defined]
            for r in self.results
        )

    def positions(self) -> list[int | None]:
        """For a projected permutation: the dimension of every result, None for a constant.

        Raises:
            ValueError: a result is neither a dimension nor a constant.
        """
        if not self.is_projected_permutation:
            raise ValueError(f"{self.text} is not a projected permutation")
        return [dim for dim, _ in self._places]

    @cached_property
    def is_projected_permutation(self) -> bool:
        return all(isinstance(r, ir.AffineDimExpr | ir.AffineConstantExpr) for r in self.results)

    def mirrored(self) -> list[tuple[int, int, int]] | None:
        """(dimension, factor 1 or -1, offset) of every result; None where a result is anything else, or a dimension occurs twice."""
        zeros = [const(0)] * self.dims
        found = []
        for result in self.results:
            offset = evaluate(result, zeros).constant
            moves = [
                (d, evaluate(result, [const(int(i == d)) for i in range(self.dims)]).constant - offset)
                for d in range(self.dims)
            ]
            used = [(d, step) for d, step in moves if step]
            linear = evaluate(result, [const(3)] * self.dims).constant - offset == 3 * sum(s for _, s in used)
            if len(used) != 1 or abs(used[0][1]) != 1 or not linear:
                return None
            found.append((*used[0], offset))
        return found if len({d for d, _, _ in found}) == len(found) else None


def evaluate(expr: ir.AffineExpr, dims: Sequence[Expr]) -> Expr:
    """An MLIR affine expression at symbolic dimension values.

    Raises:
        ValueError: a product of two dimensions or a symbol (semi-affine maps don't occur with static shapes).
    """
    match expr:
        case ir.AffineDimExpr():
            return dims[expr.position]
        case ir.AffineConstantExpr():
            return const(expr.value)
        case ir.AffineAddExpr():
            return evaluate(expr.lhs, dims) + evaluate(expr.rhs, dims)
        case ir.AffineMulExpr():
            left, right = evaluate(expr.lhs, dims), evaluate(expr.rhs, dims)
            if right.is_constant:
                return left * right.constant
            if left.is_constant:
                return right * left.constant
        case ir.AffineFloorDivExpr():
            return evaluate(expr.lhs, dims) // evaluate(expr.rhs, dims).constant
        case ir.AffineCeilDivExpr():
            divisor = evaluate(expr.rhs, dims).constant
            return (evaluate(expr.lhs, dims) + (divisor - 1)) // divisor
        case ir.AffineModExpr():
            return evaluate(expr.lhs, dims) % evaluate(expr.rhs, dims).constant
    raise ValueError(f"affine expression {expr} is not linear in its dimensions")


class ValueInfo(NamedTuple):
    """A tensor or scalar value. Scalars have shape None. `node` is None for function arguments."""

    id: int
    shape: tuple[int, ...] | None
    element: str
    node: int | None
    position: int

    @property
    def numel(self) -> int:
        return prod(self.shape or ())

    @property
    def nbytes(self) -> int:
        """Size in memory; an i1 takes one byte."""
        return self.numel * element_bytes(self.element)


_BYTES = {"index": 8, "i1": 1}


def element_bytes(element: str) -> int:
    """Bytes of one element in memory of an MLIR element type such as `bf16`, `i64`, `complex<f32>`."""
    if element in _BYTES:
        return _BYTES[element]
    if element.startswith("complex<"):
        return 2 * element_bytes(element[8:-1])
    digits = "".join(c for c in element.replace("bf", "f").split("E")[0] if c.isdigit())
    return max(int(digits) // 8, 1)


@dataclass
class Node:
    """One operation. `domain`, `iterators` and `maps` (inputs, then outputs) are set for linalg ops with a loop nest."""

    id: int
    name: str
    op: ir.Operation
    operands: list[int]
    results: list[int]
    inputs: int = 0
    domain: tuple[int, ...] = ()
    reduction: tuple[bool, ...] = ()
    maps: tuple[Map, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def is_loop_nest(self) -> bool:
        return self.name in ("linalg.generic", "linalg.contract")

    @property
    def has_reduction(self) -> bool:
        return any(self.reduction)

    @cached_property
    def body(self) -> frozenset[str]:
        """Names of the ops in the body of a `linalg.generic`; nothing for other ops."""
        if self.name != "linalg.generic":
            return frozenset()
        return frozenset(v.operation.name for v in self.op.regions[0].blocks[0].operations)

    def output_map(self, position: int) -> Map:
        """The map of result `position` from the domain to the result's indices."""
        return self.maps[self.inputs + position]


@dataclass
class Graph:
    """The body of one function. `arguments` and `returns` are value numbers."""

    func: ir.Operation
    nodes: list[Node] = field(default_factory=list)
    values: list[ValueInfo] = field(default_factory=list)
    arguments: list[int] = field(default_factory=list)
    returns: list[int] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    handles: list[ir.Value] = field(default_factory=list)
    """The MLIR value of every value number."""

    def value_of(self, value: ir.Value) -> int:
        """The number of a value of this function (also of values used inside regions)."""
        return self.numbers[hash(value)]

    def producer(self, value: int) -> Node | None:
        node = self.values[value].node
        return None if node is None else self.nodes[node]

    def users(self) -> list[list[int]]:
        """For every value the nodes that use it, in order, each once."""
        found: list[list[int]] = [[] for _ in self.values]
        for node in self.nodes:
            for value in dict.fromkeys(node.operands):
                found[value].append(node.id)
        return found


_SHAPED = "tensor<"


class _Types:
    """Shape and element text of types, each type looked at once."""

    def __init__(self) -> None:
        self._known: dict[ir.Type, tuple[tuple[int, ...] | None, str]] = {}

    def of(self, kind: ir.Type) -> tuple[tuple[int, ...] | None, str]:
        known = self._known.get(kind)
        if known is None:
            if str(kind).startswith(_SHAPED):
                shaped = ir.RankedTensorType(kind)
                known = (tuple(shaped.shape), str(shaped.element_type))
            else:
                known = (None, str(kind))
            self._known[kind] = known
        return known


@dataclass(frozen=True)
class _Nest:
    """What the attributes of a loop nest say: its maps, and which dimensions are reduced."""

    maps: tuple[Map, ...]
    reduction: tuple[bool, ...]
    sized: tuple[tuple[int, int, int], ...]
    """(operand, axis, dimension) for every axis of an operand that is a whole dimension."""


class _Nests:
    """Loop nests by their attributes, each read once; maps by attribute."""

    def __init__(self) -> None:
        self._maps: dict[ir.Attribute, Map] = {}
        self._nests: dict[tuple[ir.Attribute, ir.Attribute | None], _Nest] = {}

    def of(self, node: Node) -> _Nest:
        attributes = node.op.attributes
        is_contract = node.name == "linalg.contract"
        key = (attributes["indexing_maps"], None if is_contract else attributes["iterator_types"])
        known = self._nests.get(key)
        if known is None:
            maps = tuple(self._map(a) for a in ir.ArrayAttr(key[0]))
            known = self._nests[key] = _Nest(maps, _reduction(maps, key[1]), _sized(maps))
        return known

    def _map(self, attribute: ir.Attribute) -> Map:
        known = self._maps.get(attribute)
        if known is None:
            affine = ir.AffineMapAttr(attribute).value
            results = tuple(affine.results)
            known = self._maps[attribute] = Map(affine.n_dims, results, str(affine))
        return known


def _reduction(maps: Sequence[Map], iterators: ir.Attribute | None) -> tuple[bool, ...]:
    """By the iterator types; of a contraction, which has none, the dimensions that the result does not have."""
    if iterators is not None:
        return tuple("reduction" in str(a) for a in ir.ArrayAttr(iterators))
    used = {p for p in maps[-1].positions() if p is not None}
    return tuple(d not in used for d in range(maps[0].dims))


def _sized(maps: Sequence[Map]) -> tuple[tuple[int, int, int], ...]:
    return tuple(
        (operand, axis, result.position)  # type: ignore[attr-defined]
        for operand, index_map in enumerate(maps)
        for axis, result in enumerate(index_map.results)
        if isinstance(result, ir.AffineDimExpr)
    )


def read(func: ir.Operation) -> Graph:
    """The graph of a `func.func` with one block."""
    graph, types, nests = Graph(func), _Types(), _Nests()
    values, numbers, handles = graph.values, graph.numbers, graph.handles
    block = func.regions[0].blocks[0]

    def number(value: ir.Value, node: int | None, position: int) -> int:
        shape, element = types.of(value.type)
        place = len(values)
        values.append(ValueInfo(place, shape, element, node, position))
        numbers[hash(value)] = place
        handles.append(value)
        return place

    graph.arguments = [number(a, None, i) for i, a in enumerate(block.arguments)]
    for view in block.operations:
        op = view.operation
        name = op.name
        operands = [numbers[hash(v)] for v in op.operands]
        if name == "func.return":
            graph.returns = operands
            continue
        place = len(graph.nodes)
        results = [number(r, place, i) for i, r in enumerate(op.results)]
        node = Node(place, name, op, operands, results)
        if node.is_loop_nest:
            _read_loop_nest(graph, node, nests)
        if name not in _WITHOUT_CAPTURES:
            _read_captures(graph, node)
        graph.nodes.append(node)
    return graph


# Ops without a region, or with one that is made from their name alone.
_WITHOUT_CAPTURES = ("arith.constant", "tensor.empty", "linalg.fill", "linalg.contract", "topo.demote")


def _read_loop_nest(graph: Graph, node: Node, nests: _Nests) -> None:
    nest = nests.of(node)
    node.maps, node.reduction = nest.maps, nest.reduction
    node.inputs = len(node.maps) - len(node.results)
    sizes = [1] * node.maps[0].dims
    shapes = [graph.values[o].shape or () for o in node.operands]
    for operand, axis, dimension in nest.sized:
        if axis < len(shapes[operand]):
            sizes[dimension] = shapes[operand][axis]
    node.domain = tuple(sizes)


def _read_captures(graph: Graph, node: Node) -> None:
    """Values of the function that a region uses without naming them as operands become operands of the node."""
    numbers = graph.numbers
    for region in node.op.regions:
        for block in region.blocks:
            for inner in block.operations:
                for value in inner.operation.operands:
                    known = numbers.get(hash(value))
                    if known is not None and known not in node.operands:
                        node.operands.append(known)
