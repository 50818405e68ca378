"""Dimensions that do not divide: every device has ceil(n / p) elements, the last ones of the last devices are padding.

What a device holds there is anything: an operation whose loop runs over the dimension in parallel computes padding from
padding. Where it would matter it is kept out: reductions skip it, lookups read something that exists, checks and integer divisions pass
(`partition_ops`), and what is put together again is cut to its size. Padding is zero in what is loaded or cut from a whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch_mlir import ir

from topo_opt.sharding.loop_bodies import (
    binary,
    compare,
    constant,
    generic,
    index_constant,
    loop_number,
    select,
)
from topo_opt.sharding.spec import Combiner, Mesh, Sharding


def uneven_dims(sharding: Sharding, shape: Sequence[int], mesh: Mesh) -> frozenset[int]:
    """The dimensions whose parts are not all of one size."""
    return frozenset(
        d for d, (axes, size) in enumerate(zip(sharding.dims, shape, strict=True)) if size % mesh.size(axes)
    )


def stretched(value: ir.Value, dim: int, size: int) -> ir.Value:
    """A tensor with `size` elements along a dimension, the last one repeated; at the insertion point."""

    def place(index: ir.Value, length: int) -> ir.Value:
        last = index_constant(length - 1)
        return select(compare("slt", index, last), index, last)

    return _read(value, dim, size, place)


def cut_part(value: ir.Value, dim: int, size: int, first: Callable[[], ir.Value]) -> ir.Value:
    """`size` elements of a whole tensor along a dimension from `first()` on, an index; at the insertion point.

    Beyond the end are zeros, of complex tensors copies of the first element.
    """
    kind = ir.RankedTensorType(value.type)

    def place(index: ir.Value, length: int) -> ir.Value:
        moved = binary("arith.addi", index, first())
        return select(compare("slt", moved, index_constant(length)), moved, index_constant(0))

    def element(read: ir.Value) -> ir.Value:
        if not isinstance(kind.element_type, ir.FloatType | ir.IntegerType):
            return read
        moved = binary("arith.addi", loop_number(dim), first())
        return select(
            compare("slt", moved, index_constant(kind.shape[dim])), read, constant(kind.element_type, 0)
        )

    return _read(value, dim, size, place, element)


def _read(
    value: ir.Value,
    dim: int,
    size: int,
    place: Callable[[ir.Value, int], ir.Value],
    element: Callable[[ir.Value], ir.Value] = lambda read: read,
) -> ir.Value:
    """A loop nest that reads a tensor, along one dimension where `place` says of the number and the length there."""
    kind = ir.RankedTensorType(value.type)
    shape = [size if d == dim else n for d, n in enumerate(kind.shape)]

    def body(arguments: Sequence[ir.Value]) -> ir.Value:
        indices = [loop_number(d) for d in range(kind.rank)]
        indices[dim] = place(indices[dim], kind.shape[dim])
        return element(
            ir.Operation.create("tensor.extract", [kind.element_type], [value, *indices]).results[0]
        )

    identity = ir.AffineMap.get_identity(kind.rank)
    return generic([], [], identity, ir.RankedTensorType.get(shape, kind.element_type), body)


def shortened(value: ir.Value, dim: int, size: int) -> ir.Value:
    """The first `size` elements along a dimension; at the insertion point."""
    kind = ir.RankedTensorType(value.type)
    shape = [size if d == dim else n for d, n in enumerate(kind.shape)]
    i64 = ir.DenseI64ArrayAttr.get
    attributes = {
        "static_offsets": i64([0] * kind.rank),
        "static_sizes": i64(shape),
        "static_strides": i64([1] * kind.rank),
        "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 0, 0, 0]),
    }
    made = ir.RankedTensorType.get(shape, kind.element_type)
    return ir.Operation.create("tensor.extract_slice", [made], [value], attributes).results[0]


def masked(
    value: ir.Value, dims: Mapping[int, tuple[int, int]], first_of: Callable[[int], ir.Value]
) -> ir.Value:
    """A part with zeros in its padding.

    Args:
        dims: dimension -> (its factor, the size of the whole).
        first_of: where the part of a factor starts, an index.
    """
    kind = ir.RankedTensorType(value.type)

    def body(arguments: Sequence[ir.Value]) -> ir.Value:
        inside = all_inside([(dim, first_of(factor), size) for dim, (factor, size) in dims.items()])
        return select(inside, arguments[0], constant(kind.element_type, 0))

    identity = ir.AffineMap.get_identity(kind.rank)
    return generic([value], [identity], identity, kind, body)


def all_inside(loops: Sequence[tuple[int, ir.Value, int]]) -> ir.Value:
    """In a body: whether the iteration is none of padding. `loops`: (loop, first of this device, size of the whole)."""
    found: ir.Value | None = None
    for loop, first, size in loops:
        inside = compare("slt", binary("arith.addi", loop_number(loop), first), index_constant(size))
        found = inside if found is None else binary("arith.andi", found, inside)
    assert found is not None
    return found


def neutral(kind: ir.Type, combiner: Combiner) -> ir.Value:
    """What changes nothing when it is combined; at the insertion point. Integers are signed, truth values have one bit."""
    if combiner in ("add", "or"):
        return constant(kind, 0)
    if combiner in ("mul", "and"):
        return constant(kind, 1)
    sign = -1 if combiner == "max" else 1
    if isinstance(kind, ir.FloatType):
        return constant(kind, sign * float("inf"))
    width = ir.IntegerType(kind).width
    return constant(kind, -(1 << (width - 1)) if sign < 0 else (1 << (width - 1)) - 1)
