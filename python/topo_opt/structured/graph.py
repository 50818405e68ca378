"""A structured function as a plain graph: nodes with value numbers, shapes and index maps, read once from MLIR.

Analyses and code generation work on this instead of asking the bindings again for every operand. The graph holds
references to operations, so it must not outlive a C++ pass over the module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

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
        return [evaluate(result, indices) for result in self.results]

    def positions(self) -> list[int | None]:
        """For a projected permutation: the dimension of every result, None for a constant.

        Raises:
            ValueError: a result is neither a dimension nor a constant.
        """
        found: list[int | None] = []
        for result in self.results:
            match result:
                case ir.AffineDimExpr():
                    found.append(result.position)
                case ir.AffineConstantExpr():
                    found.append(None)
                case _:
                    raise ValueError(f"{self.text} is not a projected permutation")
        return found

    @property
    def is_projected_permutation(self) -> bool:
        return all(isinstance(r, ir.AffineDimExpr | ir.AffineConstantExpr) for r in self.results)


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


@dataclass(frozen=True)
class ValueInfo:
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


class _Maps:
    """Maps by attribute, each read once."""

    def __init__(self) -> None:
        self._known: dict[ir.Attribute, Map] = {}

    def of(self, attribute: ir.Attribute) -> Map:
        known = self._known.get(attribute)
        if known is None:
            affine = ir.AffineMapAttr(attribute).value
            results = tuple(affine.results)
            known = self._known[attribute] = Map(affine.n_dims, results, str(affine))
        return known


def read(func: ir.Operation) -> Graph:
    """The graph of a `func.func` with one block."""
    graph, types, maps = Graph(func), _Types(), _Maps()
    block = func.regions[0].blocks[0]

    def number(value: ir.Value, node: int | None, position: int) -> int:
        shape, element = types.of(value.type)
        info = ValueInfo(len(graph.values), shape, element, node, position)
        graph.values.append(info)
        graph.numbers[hash(value)] = info.id
        graph.handles.append(value)
        return info.id

    graph.arguments = [number(a, None, i) for i, a in enumerate(block.arguments)]
    for view in block.operations:
        op = view.operation
        if op.name == "func.return":
            graph.returns = [graph.numbers[hash(v)] for v in op.operands]
            continue
        operands = [graph.numbers[hash(v)] for v in op.operands]
        node = Node(len(graph.nodes), op.name, op, operands, [])
        node.results = [number(r, node.id, i) for i, r in enumerate(op.results)]
        _read_loop_nest(graph, node, maps)
        _read_captures(graph, node)
        graph.nodes.append(node)
    return graph


def _read_loop_nest(graph: Graph, node: Node, maps: _Maps) -> None:
    if not node.is_loop_nest:
        return
    attributes = node.op.attributes
    node.maps = tuple(maps.of(a) for a in ir.ArrayAttr(attributes["indexing_maps"]))
    node.inputs = len(node.maps) - len(node.results)
    dims = node.maps[0].dims
    sizes = [1] * dims
    for index_map, operand in zip(node.maps, node.operands):
        shape = graph.values[operand].shape or ()
        for result, size in zip(index_map.results, shape):
            if isinstance(result, ir.AffineDimExpr):
                sizes[result.position] = size
    node.domain = tuple(sizes)
    if node.name == "linalg.contract":
        used = {p for p in node.maps[-1].positions() if p is not None}
        node.reduction = tuple(d not in used for d in range(dims))
    else:
        kinds = [str(a) for a in ir.ArrayAttr(attributes["iterator_types"])]
        node.reduction = tuple("reduction" in kind for kind in kinds)


def _read_captures(graph: Graph, node: Node) -> None:
    """Values of the function that a region uses without naming them as operands become operands of the node."""
    for region in node.op.regions:
        for block in region.blocks:
            for inner in block.operations:
                for value in inner.operation.operands:
                    known = graph.numbers.get(hash(value))
                    if known is not None and known not in node.operands:
                        node.operands.append(known)
