"""How each op is computed for a box of its result: what it then reads of its operands, and how it is rewritten.

`RULES[name](graph, node, wants)` answers for a node whose results are read at the boxes `wants` (None for a result that
nothing reads); None when the op can't be computed for them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir

from topo_opt.passes.schedule.attention_rows import bounds_from
from topo_opt.passes.schedule.boxes import (
    Box,
    Range,
    box_of,
    divided,
    intersection,
    joined,
    moved_map,
    read_box,
    whole,
)
from topo_opt.structured.access import is_empty_reduction, reassociation, slice_parameters
from topo_opt.structured.graph import Graph, Node

Wants = Sequence[Box | None]
Build = Callable[[ir.Operation, Sequence[ir.Value | None]], Sequence[ir.Value]]
"""Rewrites an op, whose operands have been cut to their boxes, and returns its results. None stands for an operand that is not read."""


@dataclass(frozen=True)
class Narrowed:
    """An op for a box: what it reads of every operand (None: all of it; a box without elements: nothing), and the rewrite."""

    operands: list[Box | None]
    build: Build


Rule = Callable[[Graph, Node, Wants], Narrowed | None]


def in_place(boxes: Sequence[Box], attributes: dict[str, ir.Attribute] | None = None) -> Build:
    """Gives an op its new operands, attributes and the shapes of `boxes` as results."""

    def build(op: ir.Operation, operands: Sequence[ir.Value | None]) -> Sequence[ir.Value]:
        for place, operand in enumerate(operands):
            if operand is not None:
                op.operands[place] = operand
        for name, attribute in (attributes or {}).items():
            op.attributes[name] = attribute
        for result, box in zip(op.results, boxes, strict=True):
            result.set_type(sized(result, box))
        return list(op.results)

    return build


def sized(value: ir.Value, box: Box) -> ir.Type:
    """The type of a value with the shape of a box."""
    return ir.RankedTensorType.get(box.sizes, ir.RankedTensorType(value.type).element_type)


def _shape(graph: Graph, value: int) -> tuple[int, ...]:
    return graph.values[value].shape or ()


def _i64(values: Sequence[int]) -> ir.Attribute:
    return ir.DenseI64ArrayAttr.get(list(values))


def _nest(graph: Graph, node: Node, wants: Wants) -> Narrowed | None:
    """Loops over the part of their domain that the results are wanted for; reductions keep their extents.

    An op that checks something of every element (`cf.assert`) goes on to do so.
    """
    domain = _domain(node, wants)
    if domain is None or "cf.assert" in node.body or is_empty_reduction(node):
        return None
    shapes = [_shape(graph, o) for o in node.operands[: len(node.maps)]]
    boxes = [read_box(m, domain, shape) for m, shape in zip(node.maps, shapes)]
    maps = [
        ir.AffineMapAttr.get(moved_map(m, domain, box)) if not m.is_projected_permutation else original
        for m, box, original in zip(node.maps, boxes, ir.ArrayAttr(node.op.attributes["indexing_maps"]))
    ]
    inner = in_place(boxes[node.inputs :], {"indexing_maps": ir.ArrayAttr.get(maps)})

    def build(op: ir.Operation, operands: Sequence[ir.Value | None]) -> Sequence[ir.Value]:
        if "linalg.index" in node.body:
            _move_indices(op, domain)
        return inner(op, operands)

    operands: list[Box | None] = [None if box.is_whole(shape) else box for box, shape in zip(boxes, shapes)]
    # What the body captures is read at indices that are not known.
    return Narrowed(operands + [None] * (len(node.operands) - len(operands)), build)


def _domain(node: Node, wants: Wants) -> list[Range] | None:
    """The loops that compute the wanted boxes, when all results ask for the same."""
    found: list[Range] | None = None
    for position, want in enumerate(wants):
        output = node.output_map(position)
        if not output.is_projected_permutation or node.domain == ():
            return None
        if want is None:
            continue
        domain: list[Range] = [(0, size) for size in node.domain]
        for along, dim in zip(want.ranges, output.positions(), strict=True):
            if dim is not None:
                domain[dim] = along
            elif along != (0, 1):
                return None
        if found not in (None, domain):
            return None
        found = domain
    return found


def _move_indices(op: ir.Operation, domain: Sequence[Range]) -> None:
    """Adds to every `linalg.index` where its loop started before."""
    for view in list(op.regions[0].blocks[0].operations):
        inner = view.operation
        first = (
            domain[ir.IntegerAttr(inner.attributes["dim"]).value][0] if inner.name == "linalg.index" else 0
        )
        if not first:
            continue
        index = ir.IndexType.get()
        with ir.InsertionPoint.after(inner), inner.location:
            start = ir.Operation.create(
                "arith.constant", results=[index], attributes={"value": ir.IntegerAttr.get(index, first)}
            )
            moved = ir.Operation.create(
                "arith.addi", results=[index], operands=[inner.results[0], start.results[0]]
            )
        inner.results[0].replace_all_uses_except(moved.results[0], [moved])


def _expand(graph: Graph, node: Node, wants: Wants) -> Narrowed | None:
    box = _only(wants)
    source = joined(box, _shape(graph, node.results[0]), reassociation(node))
    if source is None:
        return None
    return Narrowed([source], in_place([box], {"static_output_shape": _i64(box.sizes)}))


def _collapse(graph: Graph, node: Node, wants: Wants) -> Narrowed | None:
    box = _only(wants)
    source = divided(box, _shape(graph, node.operands[0]), reassociation(node))
    return None if source is None else Narrowed([source], in_place([box]))


def _same(graph: Graph, node: Node, wants: Wants) -> Narrowed | None:
    box = _only(wants)
    return Narrowed([box], in_place([box]))


def _concat(graph: Graph, node: Node, wants: Wants) -> Narrowed | None:
    """Those of the parts that the box reaches into; a single one takes the place of the op."""
    box, axis = _only(wants), ir.IntegerAttr(node.op.attributes["dim"]).value
    operands: list[Box | None] = []
    start = 0
    for operand in node.operands:
        size = _shape(graph, operand)[axis]
        first, count = intersection(box.ranges[axis], (start, size))
        operands.append(box.replaced(axis, (first - start, count)))
        start += size

    def build(op: ir.Operation, parts: Sequence[ir.Value | None]) -> Sequence[ir.Value]:
        kept = [p for p in parts if p is not None]
        if len(kept) == 1:
            return kept
        attributes = {name: op.attributes[name] for name in op.attributes}
        kind = sized(op.results[0], box)
        return list(ir.Operation.create(op.name, [kind], kept, attributes).results)

    return Narrowed(operands, build)


def _insert(graph: Graph, node: Node, wants: Wants) -> Narrowed | None:
    """The part of the source that is inserted into the box, into the box of the destination."""
    box = _only(wants)
    offsets, sizes, strides = slice_parameters(node)
    source = _shape(graph, node.operands[0])
    if any(s != 1 for s in strides) or len(source) != len(sizes):
        return None
    shared = [intersection(along, place) for along, place in zip(box.ranges, zip(offsets, sizes))]
    part = box_of([(first - offset, count) for (first, count), offset in zip(shared, offsets)])
    if not part.numel:
        return Narrowed([part, box], lambda op, operands: [_read(operands[1])])
    if part.sizes == box.sizes:
        nothing = box_of([(0, 0)] * len(sizes))
        return Narrowed([part, nothing], lambda op, operands: [_read(operands[0])])
    places = [first - start for (first, _), start in zip(shared, box.offsets)]
    attributes = {"static_offsets": _i64(places), "static_sizes": _i64(part.sizes)}
    return Narrowed([part, box], in_place([box], attributes))


def _read(value: ir.Value | None) -> ir.Value:
    assert value is not None
    return value


def _pad(graph: Graph, node: Node, wants: Wants) -> Narrowed | None:
    """As much of the padding as the box has; where it has none the source takes the place of the op."""
    box, shape = _only(wants), _shape(graph, node.operands[0])
    before = list(ir.DenseI64ArrayAttr(node.op.attributes["static_low"]))
    if len(list(node.op.operands)) != 1 or min(before, default=0) < 0:
        return None
    shared = [intersection(along, place) for along, place in zip(box.ranges, zip(before, shape))]
    part = box_of([(first - low, count) for (first, count), low in zip(shared, before)])
    if not part.numel:
        return None
    # The padding is a value that the region captures.
    operands: list[Box | None] = [part, *([None] * (len(node.operands) - 1))]
    if part.sizes == box.sizes:
        return Narrowed(operands, lambda op, values: [_read(values[0])])
    low = [first - start for (first, _), start in zip(shared, box.offsets)]
    high = [size - count - below for size, (_, count), below in zip(box.sizes, shared, low)]
    attributes = {"static_low": _i64(low), "static_high": _i64(high)}
    return Narrowed(operands, in_place([box], attributes))


def _rotate(graph: Graph, node: Node, wants: Wants) -> Narrowed | None:
    box, shape = _only(wants), _shape(graph, node.results[0])
    return _same(graph, node, wants) if box.covers(shape, len(shape) - 1) else None


def _top_k(graph: Graph, node: Node, wants: Wants) -> Narrowed | None:
    """Whole rows of some rows."""
    boxes, last = {w for w in wants if w is not None}, len(_shape(graph, node.results[0])) - 1
    box = boxes.pop()
    if boxes or not box.covers(_shape(graph, node.results[0]), last):
        return None
    source = box.replaced(last, (0, _shape(graph, node.operands[0])[last]))
    return Narrowed([source], in_place([box, box]))


def _index_update(graph: Graph, node: Node, wants: Wants) -> Narrowed | None:
    """Parts of the rows that are replaced, never some of the rows: which ones are is not known."""
    box, axis = _only(wants), ir.IntegerAttr(node.op.attributes["dim"]).value
    if not box.covers(_shape(graph, node.results[0]), axis):
        return None
    source = box.replaced(axis, (0, _shape(graph, node.operands[1])[axis]))
    return Narrowed([box, source, None], in_place([box]))


def _grouped_product(graph: Graph, node: Node, wants: Wants) -> Narrowed | None:
    """Some rows and columns, of rows that have not been sorted."""
    box = _only(wants)
    if len(node.operands) != 3:
        return None
    rows, columns = box.ranges
    groups, inner, _ = _shape(graph, node.operands[1])
    operands: list[Box | None] = [
        box_of([rows, (0, inner)]),
        box_of([(0, groups), (0, inner), columns]),
        box_of([rows]),
    ]
    return Narrowed(operands, in_place([box]))


def _attention(graph: Graph, node: Node, wants: Wants) -> Narrowed | None:
    """Some rows, heads and batches; every row goes on to see the keys that it saw.

    Heads of several groups are taken by whole groups, so that they still share their keys.
    """
    box = _only(wants)
    q, k, v = (_shape(graph, o) for o in node.operands[:3])
    groups = _key_heads(box.ranges[1], q[1], k[1])
    if groups is None or not box.covers(_shape(graph, node.results[0]), 3):
        return None
    batch, heads, rows, _ = box.ranges
    operands: list[Box | None] = [
        box_of([batch, heads, rows, (0, q[3])]),
        box_of([batch, groups, (0, k[2]), (0, k[3])]),
        box_of([batch, groups, (0, v[2]), (0, v[3])]),
    ]
    has_mask, has_positions = list(ir.DenseI32ArrayAttr(node.op.attributes["operandSegmentSizes"]))[3:]
    if has_mask:
        operands.append(_broadcast([batch, heads, rows, (0, k[2])], _shape(graph, node.operands[3])))
    if has_positions:
        operands.append(_broadcast([batch, rows], _shape(graph, node.operands[-1])))

    def build(op: ir.Operation, parts: Sequence[ir.Value | None]) -> Sequence[ir.Value]:
        bounds: dict[str, Any] = bounds_from(op.attributes, rows, k[2])
        for name in ("low", "high"):
            if name in op.attributes and name not in bounds:
                del op.attributes[name]
        return in_place([box], bounds)(op, parts)

    return Narrowed(operands, build)


def _key_heads(heads: Range, all_heads: int, all_groups: int) -> Range | None:
    """The key heads that a range of query heads reads; None when it takes parts of several groups."""
    size = all_heads // all_groups
    first, last = heads[0] // size, (sum(heads) - 1) // size
    aligned = heads[0] % size == 0 and heads[1] % size == 0
    return (first, last + 1 - first) if aligned or first == last else None


def _broadcast(ranges: Sequence[Range], shape: Sequence[int]) -> Box:
    """The ranges in a tensor that is repeated along its dimensions of size 1."""
    return box_of([(0, 1) if size == 1 else along for along, size in zip(ranges, shape, strict=True)])


def _extract(graph: Graph, node: Node, wants: Wants) -> Narrowed | None:
    """A slice of a slice."""
    box = _only(wants)
    offsets, sizes, strides = slice_parameters(node)
    if len(sizes) != len(box.ranges):
        return None
    places = [o + first * s for o, (first, _), s in zip(offsets, box.ranges, strides)]
    attributes = {"static_offsets": _i64(places), "static_sizes": _i64(box.sizes)}
    return Narrowed([None], in_place([box], attributes))


def slice_box(graph: Graph, node: Node, want: Box | None) -> Box | None:
    """What an `extract_slice`, itself read at `want`, reads of its source; None when that is not a box."""
    offsets, sizes, strides = slice_parameters(node)
    if any(s != 1 for s in strides) or (want is not None and len(want.ranges) != len(sizes)):
        return None
    inner = want or whole(sizes)
    return box_of([(o + first, count) for o, (first, count) in zip(offsets, inner.ranges)])


def _only(wants: Wants) -> Box:
    """What an op with one result is wanted for."""
    (box,) = wants
    assert box is not None
    return box


RULES: dict[str, Rule] = {
    "linalg.generic": _nest,
    "linalg.contract": _nest,
    "tensor.expand_shape": _expand,
    "tensor.collapse_shape": _collapse,
    "tensor.extract_slice": _extract,
    "tensor.concat": _concat,
    "tensor.insert_slice": _insert,
    "tensor.pad": _pad,
    "topo.attention": _attention,
    "topo.demote": _same,
    "topo.rotate_half": _rotate,
    "topo.top_k": _top_k,
    "topo.index_update": _index_update,
    "topo.grouped_product": _grouped_product,
}
