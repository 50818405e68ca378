"""Tensors with their dimensions in another order in memory, and ops on them that keep that order.

An *order* of a tensor lists its dimensions from the outermost to the innermost in memory: `(0, 2, 3, 1)` for channels last. A
tensor in an order is another tensor, whose dimension `i` is dimension `order[i]` of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import linalg

Order = tuple[int, ...]


def channels_last(rank: int) -> Order:
    """Batch, then all other dimensions, channels (dimension 1) at the end."""
    return (0, *range(2, rank), 1)


def inverse(order: Sequence[int]) -> Order:
    """Where each dimension went."""
    return tuple(order.index(d) for d in range(len(order)))


def shape_of(value: ir.Value) -> list[int]:
    """The sizes of a ranked tensor."""
    return list(ir.RankedTensorType(value.type).shape)


def transposed(value: ir.Value, order: Sequence[int]) -> ir.Value:
    """`value` in an order, by a loop nest at the insertion point."""
    element = ir.RankedTensorType(value.type).element_type
    shape = [shape_of(value)[d] for d in order]
    kind = ir.RankedTensorType.get(shape, element)
    empty = ir.Operation.create("tensor.empty", results=[kind]).results[0]
    dims = [ir.AffineExpr.get_dim(d) for d in inverse(order)]
    maps = [ir.AffineMap.get(len(order), 0, dims), ir.AffineMap.get_identity(len(order))]
    parallel = ir.Attribute.parse("#linalg.iterator_type<parallel>")
    attributes = {
        "indexing_maps": ir.ArrayAttr.get([ir.AffineMapAttr.get(m) for m in maps]),
        "iterator_types": ir.ArrayAttr.get([parallel] * len(order)),
        "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 1]),
    }
    nest = ir.Operation.create("linalg.generic", [kind], [value, empty], attributes, regions=1)
    block = nest.regions[0].blocks.append(element, element)
    with ir.InsertionPoint(block):
        ir.Operation.create("linalg.yield", operands=[block.arguments[0]])
    return nest.results[0]


@dataclass(frozen=True)
class Ordered:
    """A tensor in an order. `made`: it was computed in that order; otherwise it is a transposed copy."""

    value: ir.Value
    order: Order
    made: bool


class Orders:
    """Which tensors of a function are there in another order."""

    def __init__(self) -> None:
        self._found: dict[ir.Value, Ordered] = {}

    def of(self, value: ir.Value) -> Ordered | None:
        """The tensor in an order, where it is there in one."""
        return self._found.get(value)

    def in_order(self, value: ir.Value, order: Order) -> ir.Value:
        """The tensor in this order; it is transposed at the insertion point unless it is there."""
        found = self.of(value)
        if found is not None and found.order == order:
            return found.value
        made = transposed(value, order)
        if found is None:
            self._found[value] = Ordered(made, order, made=False)
        return made

    def replace(self, old: ir.Value, new: ir.Value, order: Order) -> None:
        """Makes every reader of `old` read `new`, which is the same tensor computed in an order."""
        if order == tuple(range(len(order))):
            old.replace_all_uses_with(new)
            return
        back = transposed(new, inverse(order))
        old.replace_all_uses_with(back)
        self._found[back] = Ordered(new, order, made=True)

    def computed(self, value: ir.Value, source: ir.Value, order: Order) -> None:
        """Says that `value` is a transposed copy of `source`, which was computed and is the same tensor in an order."""
        self._found[value] = Ordered(source, order, made=True)

    def follow(self, op: ir.Operation) -> None:
        """Computes the results of `op` in the order of an operand that was computed in one; reads such operands as they are."""
        anchors = [f for v in op.operands if (f := self.of(v)) is not None and f.made]
        rule = _RULES.get(op.name)
        if anchors and rule is not None:
            rule(self, op)


def _demote(orders: Orders, op: ir.Operation) -> None:
    found = orders.of(op.operands[0])
    assert found is not None
    orders.replace(op.results[0], _same(op, [found.value], found.order), found.order)


def _same(op: ir.Operation, operands: Sequence[ir.Value], order: Order) -> ir.Value:
    """`op` on these operands, its result in an order; attributes and regions as they are."""
    kind = ir.RankedTensorType(op.results[0].type)
    result = ir.RankedTensorType.get([kind.shape[d] for d in order], kind.element_type)
    attributes = {name: op.attributes[name] for name in op.attributes}
    return ir.Operation.create(op.name, [result], list(operands), attributes).results[0]


def _pad(orders: Orders, op: ir.Operation) -> None:
    found = orders.of(op.operands[0])
    body = [o.operation.name for o in op.regions[0].blocks[0].operations]
    if found is None or len(op.operands) != 1 or body != ["tensor.yield"]:
        return
    kind = ir.RankedTensorType(op.results[0].type)
    result = ir.RankedTensorType.get([kind.shape[d] for d in found.order], kind.element_type)
    attributes = {name: op.attributes[name] for name in op.attributes} | {
        name: ir.DenseI64ArrayAttr.get([list(op.attributes[name])[d] for d in found.order])
        for name in ("static_low", "static_high")
    }
    made = ir.Operation.create("tensor.pad", [result], [found.value], attributes, regions=1)
    op.regions[0].blocks[0].append_to(made.regions[0])
    orders.replace(op.results[0], made.results[0], found.order)
    op.erase()


def _concat(orders: Orders, op: ir.Operation) -> None:
    """In the order of the first part that was computed in one; the other parts are transposed, which joins what makes them."""
    found = [orders.of(v) for v in op.operands]
    order = next(f.order for f in found if f is not None and f.made)
    parts = [orders.in_order(v, order) for v in op.operands]
    dim = order.index(ir.IntegerAttr(op.attributes["dim"]).value)
    kind = ir.RankedTensorType(op.results[0].type)
    result = ir.RankedTensorType.get([kind.shape[d] for d in order], kind.element_type)
    attributes = {"dim": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), dim)}
    made = ir.Operation.create("tensor.concat", [result], parts, attributes)
    orders.replace(op.results[0], made.results[0], order)


def _slice(orders: Orders, op: ir.Operation) -> None:
    found = orders.of(op.operands[0])
    kind = ir.RankedTensorType(op.results[0].type)
    if found is None or len(op.operands) != 1 or kind.rank != len(found.order):
        return
    parts = {f"static_{k}": list(op.attributes[f"static_{k}"]) for k in ("offsets", "sizes", "strides")}
    result = ir.RankedTensorType.get([kind.shape[d] for d in found.order], kind.element_type)
    attributes = {name: op.attributes[name] for name in op.attributes} | {
        name: ir.DenseI64ArrayAttr.get([values[d] for d in found.order]) for name, values in parts.items()
    }
    made = ir.Operation.create("tensor.extract_slice", [result], [found.value], attributes)
    orders.replace(op.results[0], made.results[0], found.order)


def _groups(op: ir.Operation) -> list[list[int]]:
    return [
        [ir.IntegerAttr(i).value for i in ir.ArrayAttr(g)]
        for g in ir.ArrayAttr(op.attributes["reassociation"])
    ]


def _reassociation(sizes: Sequence[int]) -> ir.Attribute:
    """Consecutive groups of these lengths."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return ir.Attribute.parse(str([list(range(s, s + n)) for s, n in zip(starts, sizes)]))


def _expand(orders: Orders, op: ir.Operation) -> None:
    """Every dimension of the source is replaced by those it is split into."""
    found, groups = orders.of(op.operands[0]), _groups(op)
    if found is None or not groups:
        return
    order = tuple(d for g in found.order for d in groups[g])
    kind = ir.RankedTensorType(op.results[0].type)
    result = ir.RankedTensorType.get([kind.shape[d] for d in order], kind.element_type)
    attributes = {
        "reassociation": _reassociation([len(groups[g]) for g in found.order]),
        "static_output_shape": ir.DenseI64ArrayAttr.get(list(result.shape)),
    }
    made = ir.Operation.create("tensor.expand_shape", [result], [found.value], attributes)
    orders.replace(op.results[0], made.results[0], order)


def _collapse(orders: Orders, op: ir.Operation) -> None:
    """Dimensions can be merged where they are neighbours in the order too, in the same sequence."""
    found, groups = orders.of(op.operands[0]), _groups(op)
    if found is None or not groups:
        return
    places = [[found.order.index(d) for d in g] for g in groups]
    if any(p != list(range(p[0], p[0] + len(p))) for p in places):
        return
    order = tuple(sorted(range(len(groups)), key=lambda g: places[g][0]))
    kind = ir.RankedTensorType(op.results[0].type)
    result = ir.RankedTensorType.get([kind.shape[d] for d in order], kind.element_type)
    attributes = {"reassociation": _reassociation([len(groups[g]) for g in order])}
    made = ir.Operation.create("tensor.collapse_shape", [result], [found.value], attributes)
    orders.replace(op.results[0], made.results[0], order)


def _nest(orders: Orders, op: ir.Operation) -> None:
    """Operands are read in their orders by changed maps; results are made in the order of the operand that has most of them."""
    maps = [ir.AffineMapAttr(a).value for a in ir.ArrayAttr(op.attributes["indexing_maps"])]
    inputs = len(maps) - len(op.results)
    found = [orders.of(v) for v in list(op.operands)[:inputs]]
    if not any(f is not None and f.made for f in found):
        return
    loops = _loop_order(maps, [f.order if f is not None and f.made else None for f in found])
    inits = list(op.operands)[inputs:]
    kept = [_result_order(m, loops) for m in maps[inputs:]]
    if any(o is None for o in kept) or not all(_is_uniform(v) for v in inits):
        kept = [tuple(range(len(m.results))) for m in maps[inputs:]]
        loops = list(range(maps[0].n_dims))
    _rewrite_nest(orders, op, maps, found, [o or () for o in kept], loops)


def _loop_order(maps: Sequence[ir.AffineMap], known: Sequence[Order | None]) -> list[int]:
    """All loops, those of the first ordered operand with the most dimensions in its order, before them what it lacks."""
    best = max(
        (i for i, order in enumerate(known) if order is not None), key=lambda i: (len(known[i] or ()), -i)
    )
    wanted: list[int] = []
    for d in known[best] or ():
        wanted += [loop for loop in _loops_of(maps[best].results[d], maps[best].n_dims) if loop not in wanted]
    return [d for d in range(maps[best].n_dims) if d not in wanted] + wanted


def _loops_of(expr: ir.AffineExpr, count: int) -> list[int]:
    text = {f"d{i}" for i in range(count)} & set(str(expr).replace("(", " ").replace(")", " ").split())
    return sorted(int(name[1:]) for name in text)


def _result_order(index_map: ir.AffineMap, loops: Sequence[int]) -> Order | None:
    """The dimensions of a result in the order of their loops, constants where they are; None for any other map."""
    positions: list[int | None] = []
    for r in index_map.results:
        if isinstance(r, ir.AffineDimExpr):
            positions.append(r.position)
        elif isinstance(r, ir.AffineConstantExpr):
            positions.append(None)
        else:
            return None
    if None in positions:
        return tuple(range(len(positions)))
    return tuple(sorted(range(len(positions)), key=lambda d: loops.index(positions[d])))


def _is_uniform(init: ir.Value) -> bool:
    """Whether a result starts from nothing or from one value throughout."""
    owner = init.owner
    return not isinstance(owner, ir.Block) and owner.operation.name in ("tensor.empty", "linalg.fill")


def _uniform(init: ir.Value, order: Order) -> ir.Value:
    if order == tuple(range(len(order))):
        return init
    kind = ir.RankedTensorType(init.type)
    shape = ir.RankedTensorType.get([kind.shape[d] for d in order], kind.element_type)
    empty = ir.Operation.create("tensor.empty", results=[shape]).results[0]
    owner = init.owner.operation
    return linalg.fill(owner.operands[0], outs=[empty]) if owner.name == "linalg.fill" else empty


def _rewrite_nest(
    orders: Orders,
    op: ir.Operation,
    maps: Sequence[ir.AffineMap],
    reads: Sequence[Ordered | None],
    kept: Sequence[Order],
    loops: Sequence[int],
) -> None:
    """The loop nest with its loops in another sequence (parallel ones first), operands and results in their orders."""
    kinds = list(ir.ArrayAttr(op.attributes["iterator_types"]))
    parallel = [d for d in loops if "parallel" in str(kinds[d])]
    sequence = parallel + [d for d in loops if d not in parallel]
    renamed = ir.AffineMap.get(
        len(sequence), 0, [ir.AffineExpr.get_dim(sequence.index(d)) for d in range(len(sequence))]
    )
    chosen: list[Order] = [
        r.order if r is not None else tuple(range(len(m.results))) for r, m in zip(reads, maps)
    ]
    moved = [
        ir.AffineMap.get(len(sequence), 0, [m.results[d].compose(renamed) for d in order])
        for m, order in zip(maps, [*chosen, *kept])
    ]
    inputs = [r.value if r is not None else v for r, v in zip(reads, op.operands)]
    starts = [_uniform(v, order) for v, order in zip(list(op.operands)[len(reads) :], kept)]
    attributes = {
        "indexing_maps": ir.ArrayAttr.get([ir.AffineMapAttr.get(m) for m in moved]),
        "iterator_types": ir.ArrayAttr.get([kinds[d] for d in sequence]),
        "operandSegmentSizes": op.attributes["operandSegmentSizes"],
    }
    results = [v.type for v in starts]
    made = ir.Operation.create("linalg.generic", results, [*inputs, *starts], attributes, regions=1)
    op.regions[0].blocks[0].append_to(made.regions[0])
    for inner in made.regions[0].blocks[0].operations:
        if inner.operation.name == "linalg.index":
            place = sequence.index(ir.IntegerAttr(inner.operation.attributes["dim"]).value)
            inner.operation.attributes["dim"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), place)
    for old, new, order in zip(op.results, made.results, kept):
        orders.replace(old, new, order)
    op.erase()


def _contract(orders: Orders, op: ir.Operation) -> None:
    """A product whose first factor was computed in an order, with its own dimensions first and in that order in the result."""
    maps = [ir.AffineMapAttr(a).value for a in ir.ArrayAttr(op.attributes["indexing_maps"])]
    operands = list(op.operands)
    both = [orders.of(v) for v in operands[:2]]
    first = next((i for i, f in enumerate(both) if f is not None and f.made), None)
    if first is None or not _is_uniform(operands[2]):
        return
    loops = _loop_order(
        maps[:2], [f.order if f is not None and i == first else None for i, f in enumerate(both)]
    )
    own = [loop for loop in loops if loop in _positions(maps[first])]
    order = _result_order(maps[2], own + [loop for loop in loops if loop not in own])
    assert order is not None, "the maps of a product are projected permutations"
    factors, read = [], []
    for i in (first, 1 - first):
        found = both[i]
        seen = found.order if found is not None else tuple(range(len(maps[i].results)))
        factors.append(found.value if found is not None else operands[i])
        read.append(_selected(maps[i], seen))
    written = [ir.AffineMapAttr.get(m) for m in (*read, _selected(maps[2], order))]
    start = _uniform(operands[2], order)
    made = linalg.contract(*factors, outs=[start], indexing_maps=ir.ArrayAttr.get(written))
    orders.replace(op.results[0], made, order)
    op.erase()


def _selected(index_map: ir.AffineMap, order: Order) -> ir.AffineMap:
    return ir.AffineMap.get(index_map.n_dims, 0, [index_map.results[d] for d in order])


def _positions(index_map: ir.AffineMap) -> set[int]:
    return {ir.AffineDimExpr(r).position for r in index_map.results}


_RULES = {
    "linalg.generic": _nest,
    "linalg.contract": _contract,
    "tensor.pad": _pad,
    "tensor.concat": _concat,
    "tensor.extract_slice": _slice,
    "tensor.expand_shape": _expand,
    "tensor.collapse_shape": _collapse,
    "topo.demote": _demote,
}
