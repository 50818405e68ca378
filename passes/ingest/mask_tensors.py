"""Writing formulas and elements as small tensors, with one loop nest each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir

from topo_opt.structured import formula as f
from topo_opt.structured.graph import Graph
from topo_opt.structured.index import ZERO, Div, Expr, Mod, Opaque, Symbol


def leaf_tensor(graph: Graph, leaf: f.Leaf, dims: Sequence[tuple[str, int]]) -> ir.Value:
    """An i64 tensor over `dims` (symbol and size) that holds `leaf`, at the insertion point. A reshape where that is enough."""
    kept = [(name, size) for name, size in dims if name in leaf.symbols]
    handle = graph.handles[leaf.value]
    kind = ir.RankedTensorType(handle.type)
    plain = [e for e in leaf.indices if e != ZERO]
    wanted = [Expr(((Symbol(name, size), 1),)) for name, size in kept]
    whole = [size for size in kind.shape if size != 1] == [size for _, size in kept]
    shape = [size if name in leaf.symbols else 1 for name, size in dims]
    if str(kind.element_type) == "i64" and plain == wanted and whole:
        return reshaped(handle, shape)
    builder = _Body(graph, {}, {name: axis for axis, (name, _) in enumerate(dims)})
    return _nest(shape, ir.IntegerType.get_signless(64), lambda: builder.integer(leaf))


def formula_tensor(
    graph: Graph, leaves: Mapping[str, f.Leaf], formula: f.Formula, dims: Sequence[tuple[str, int]]
) -> ir.Value:
    """An i1 tensor over `dims` that holds a formula; dims it does not depend on have size 1."""
    symbols = f.symbols(formula)
    shape = [size if name in symbols else 1 for name, size in dims]
    builder = _Body(graph, leaves, {name: axis for axis, (name, _) in enumerate(dims)})
    return _nest(shape, ir.IntegerType.get_signless(1), lambda: builder.truth(formula))


def reshaped(value: ir.Value, shape: Sequence[int]) -> ir.Value:
    """A tensor with dimensions of size 1 added and dropped."""
    kind = ir.RankedTensorType(value.type)
    if list(kind.shape) == list(shape):
        return value
    core = [size for size in kind.shape if size != 1]
    flat = (
        _reassociated("tensor.collapse_shape", value, core, kind.shape) if core != list(kind.shape) else value
    )
    return flat if core == list(shape) else _reassociated("tensor.expand_shape", flat, shape, shape)


def _reassociated(name: str, value: ir.Value, shape: Sequence[int], long: Sequence[int]) -> ir.Value:
    """`long` is the shape of more dimensions; every group of it ends before the next dimension that is not 1."""
    groups: list[list[int]] = []
    for axis, size in enumerate(long):
        if not groups or (size != 1 and any(long[a] != 1 for a in groups[-1])):
            groups.append([])
        groups[-1].append(axis)
    i64 = ir.IntegerType.get_signless(64)
    short = shape if name == "tensor.collapse_shape" else ir.RankedTensorType(value.type).shape
    listed = groups if len(short) else []
    attributes: dict[str, Any] = {
        "reassociation": ir.ArrayAttr.get(
            [ir.ArrayAttr.get([ir.IntegerAttr.get(i64, a) for a in group]) for group in listed]
        )
    }
    if name == "tensor.expand_shape":
        attributes["static_output_shape"] = ir.DenseI64ArrayAttr.get(list(shape))
    result = ir.RankedTensorType.get(list(shape), ir.RankedTensorType(value.type).element_type)
    return ir.Operation.create(name, results=[result], operands=[value], attributes=attributes).results[0]


def _nest(shape: Sequence[int], element: ir.Type, body: Callable[[], ir.Value]) -> ir.Value:
    """A tensor every element of which is what `body` builds from `linalg.index`."""
    kind = ir.RankedTensorType.get(list(shape), element)
    empty = ir.Operation.create("tensor.empty", results=[kind]).results[0]
    nest = ir.Operation.create(
        "linalg.generic",
        results=[kind],
        operands=[empty],
        attributes={
            "indexing_maps": ir.ArrayAttr.get([ir.AffineMapAttr.get(ir.AffineMap.get_identity(len(shape)))]),
            "iterator_types": ir.ArrayAttr.get(
                [ir.Attribute.parse("#linalg.iterator_type<parallel>")] * len(shape)
            ),
            "operandSegmentSizes": ir.DenseI32ArrayAttr.get([0, 1]),
        },
        regions=1,
    )
    with ir.InsertionPoint(nest.regions[0].blocks.append(element)):
        ir.Operation.create("linalg.yield", operands=[body()])
    return nest.results[0]


_SLE, _EQ = 3, 0


@dataclass
class _Body:
    """Builds scalars in the body of a loop nest over the symbols in `axes`."""

    graph: Graph
    leaves: Mapping[str, f.Leaf]
    axes: Mapping[str, int]

    def truth(self, formula: f.Formula) -> ir.Value:
        match formula:
            case f.Truth(holds=holds):
                return self._constant(ir.IntegerAttr.get(ir.IntegerType.get_signless(1), int(holds)))
            case f.AtLeast(expr=expr):
                return self._compare(_SLE, self._number(0), self._expr(expr))
            case f.Zero(expr=expr):
                return self._compare(_EQ, self._expr(expr), self._number(0))
            case f.Loaded(leaf=leaf):
                return self._load(leaf)
            case f.Not(inner=inner):
                return self._binary("arith.xori", self.truth(inner), self.truth(f.TRUE))
            case f.All(parts=parts):
                return self._folded("arith.andi", [self.truth(p) for p in parts])
            case f.Either(parts=parts):
                return self._folded("arith.ori", [self.truth(p) for p in parts])
        raise TypeError(formula)

    def integer(self, leaf: f.Leaf) -> ir.Value:
        """A loaded integer as i64."""
        value, wide = self._load(leaf), ir.IntegerType.get_signless(64)
        return value if value.type == wide else self._cast("arith.extsi", value, wide)

    def _expr(self, expr: Expr) -> ir.Value:
        """An expression as i64: what is loaded may have any value."""
        parts = [self._scaled(atom, step) for atom, step in expr.terms]
        if expr.constant or not parts:
            parts.append(self._number(expr.constant))
        return self._folded("arith.addi", parts)

    def _scaled(self, atom: Any, step: int) -> ir.Value:
        value = self._atom(atom)
        return value if step == 1 else self._binary("arith.muli", value, self._number(step))

    def _atom(self, atom: Any) -> ir.Value:
        match atom:
            case Symbol(name=name):
                attributes = {"dim": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), self.axes[name])}
                index = ir.Operation.create(
                    "linalg.index", results=[ir.IndexType.get()], attributes=attributes
                )
                return self._cast("arith.index_cast", index.results[0], ir.IntegerType.get_signless(64))
            case Opaque(name=name):
                return self.integer(self.leaves[name])
            case Div(operand=operand, divisor=divisor):
                return self._binary("arith.floordivsi", self._expr(operand), self._number(divisor))
            case Mod(operand=operand, divisor=divisor):
                quotient = self._binary("arith.floordivsi", self._expr(operand), self._number(divisor))
                whole = self._binary("arith.muli", quotient, self._number(divisor))
                return self._binary("arith.subi", self._expr(operand), whole)
        raise TypeError(atom)

    def _load(self, leaf: f.Leaf) -> ir.Value:
        tensor = self.graph.handles[leaf.value]
        index = ir.IndexType.get()
        places = [self._cast("arith.index_cast", self._expr(i), index) for i in leaf.indices]
        element = ir.RankedTensorType(tensor.type).element_type
        return ir.Operation.create("tensor.extract", results=[element], operands=[tensor, *places]).results[0]

    def _number(self, value: int) -> ir.Value:
        return self._constant(ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value))

    def _constant(self, attribute: ir.Attribute) -> ir.Value:
        return ir.Operation.create(
            "arith.constant", results=[attribute.type], attributes={"value": attribute}
        ).results[0]

    def _compare(self, predicate: int, a: ir.Value, b: ir.Value) -> ir.Value:
        attributes = {"predicate": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), predicate)}
        boolean = ir.IntegerType.get_signless(1)
        return ir.Operation.create(
            "arith.cmpi", results=[boolean], operands=[a, b], attributes=attributes
        ).results[0]

    def _cast(self, name: str, value: ir.Value, kind: ir.Type) -> ir.Value:
        return ir.Operation.create(name, results=[kind], operands=[value]).results[0]

    def _binary(self, name: str, a: ir.Value, b: ir.Value) -> ir.Value:
        return ir.Operation.create(name, results=[a.type], operands=[a, b]).results[0]

    def _folded(self, name: str, values: Sequence[ir.Value]) -> ir.Value:
        result = values[0]
        for value in values[1:]:
            result = self._binary(name, result, value)
        return result
