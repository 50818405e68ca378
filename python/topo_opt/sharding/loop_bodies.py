"""Loop nests and the scalar ops of their bodies, at the insertion point of the calling code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_mlir import ir

from topo_opt.sharding.collective import position_terms
from topo_opt.sharding.rule_assignment import Axes
from topo_opt.sharding.spec import Mesh


def first_of_part(coordinate: ir.Value, mesh: Mesh, axes: Axes, size: int) -> ir.Value:
    """`size` times the position of the device in its group over `axes`, as an index, from the coordinates of the device."""
    total: ir.Value | None = None
    for place, step in position_terms(mesh, axes):
        at = index_constant(place)
        read = ir.Operation.create(
            "tensor.extract", [ir.IntegerType.get_signless(64)], [coordinate, at]
        ).results[0]
        term = binary("arith.muli", index_cast(read), index_constant(step * size))
        total = term if total is None else binary("arith.addi", total, term)
    assert total is not None
    return total


def index_constant(number: int) -> ir.Value:
    return constant(ir.IndexType.get(), number)


def index_cast(value: ir.Value, to: ir.Type | None = None) -> ir.Value:
    return ir.Operation.create("arith.index_cast", [to or ir.IndexType.get()], [value]).results[0]


def binary(name: str, one: ir.Value, other: ir.Value) -> ir.Value:
    return ir.Operation.create(name, [one.type], [one, other]).results[0]


_PREDICATES = {"slt": 2, "sge": 5}


def compare(predicate: str, one: ir.Value, other: ir.Value) -> ir.Value:
    i64 = ir.IntegerType.get_signless(64)
    attributes = {"predicate": ir.IntegerAttr.get(i64, _PREDICATES[predicate])}
    return ir.Operation.create(
        "arith.cmpi", [ir.IntegerType.get_signless(1)], [one, other], attributes
    ).results[0]


def select(condition: ir.Value, one: ir.Value, other: ir.Value) -> ir.Value:
    return ir.Operation.create("arith.select", [one.type], [condition, one, other]).results[0]


def loop_number(loop: int) -> ir.Value:
    """In a body: which iteration of a loop this is."""
    attributes = {"dim": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), loop)}
    return ir.Operation.create("linalg.index", [ir.IndexType.get()], attributes=attributes).results[0]


def constant(kind: ir.Type, number: float) -> ir.Value:
    """A scalar that is no complex number."""
    attribute = (
        ir.FloatAttr.get(kind, number)
        if isinstance(kind, ir.FloatType)
        else ir.IntegerAttr.get(kind, int(number))
    )
    return ir.Operation.create("arith.constant", [kind], attributes={"value": attribute}).results[0]


def generic(
    inputs: Sequence[ir.Value],
    maps: Sequence[ir.AffineMap],
    output: ir.AffineMap,
    kind: ir.RankedTensorType,
    body: Callable[[Sequence[ir.Value]], ir.Value],
) -> ir.Value:
    """A parallel loop nest over the elements of its result, at the insertion point."""
    empty = ir.Operation.create("tensor.empty", [kind]).results[0]
    parallel = ir.Attribute.parse("#linalg.iterator_type<parallel>")
    op = ir.Operation.create(
        "linalg.generic",
        [kind],
        [*inputs, empty],
        {
            "indexing_maps": ir.ArrayAttr.get([ir.AffineMapAttr.get(m) for m in (*maps, output)]),
            "iterator_types": ir.ArrayAttr.get([parallel] * output.n_dims),
            "operandSegmentSizes": ir.DenseI32ArrayAttr.get([len(inputs), 1]),
        },
        regions=1,
    )
    elements = [ir.RankedTensorType(v.type).element_type for v in (*inputs, empty)]
    block = op.regions[0].blocks.append(*elements, arg_locs=[op.location] * len(elements))
    with ir.InsertionPoint(block):
        ir.Operation.create("linalg.yield", operands=[body(list(block.arguments)[: len(inputs)])])
    return op.results[0]
