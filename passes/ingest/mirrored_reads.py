"""Loop nests that only move a tensor, with its places computed in the body, as loop nests that say them in a map."""

from __future__ import annotations

from typing import Any

from torch_mlir import ir

_SUMS = {"arith.addi": lambda a, b: a + b, "arith.subi": lambda a, b: a - b}


def move_into_maps(module: Any) -> None:
    """Rewrites every such loop nest.

    | before | after |
    |---|---|
    | `tensor.extract %x[linalg.index 0, 7 - linalg.index 1]` | maps `(d0, d1) -> (d0, 7 - d1)`, body `yield %in` |

    A flip then is index arithmetic of its reader, as a transpose is.
    """
    found: list[ir.Operation] = []

    def collect(op: ir.Operation) -> ir.WalkResult:
        if op.name == "linalg.generic":
            found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(collect)
    for op in found:
        read = _only_read(op)
        if read is None:
            continue
        source, places = read
        index_map = ir.AffineMap.get(len(ir.ArrayAttr(op.attributes["iterator_types"])), 0, places)
        if _is_inside(op, source, places):
            _rewrite(op, source, index_map)


def _only_read(op: ir.Operation) -> tuple[ir.Value, list[ir.AffineExpr]] | None:
    """The tensor that a body extracts its only value from, and at which places; None where a body does anything else."""
    if len(op.results) != 1 or any(
        "reduction" in str(a) for a in ir.ArrayAttr(op.attributes["iterator_types"])
    ):
        return None
    *body, terminator = [o.operation for o in op.regions[0].blocks[0].operations]
    if not body or body[-1].name != "tensor.extract":
        return None
    extract = body[-1]
    if hash(terminator.operands[0]) != hash(extract.results[0]):
        return None
    known: dict[int, ir.AffineExpr] = {}
    for inner in body[:-1]:
        place = _place(inner, known)
        if place is None:
            return None
        known[hash(inner.results[0])] = place
    source, *indices = extract.operands
    places = [_known(index, known) for index in indices]
    complete = [p for p in places if p is not None]
    return (source, complete) if len(complete) == len(places) else None


def _place(inner: ir.Operation, known: dict[int, ir.AffineExpr]) -> ir.AffineExpr | None:
    if inner.name == "linalg.index":
        return ir.AffineExpr.get_dim(ir.IntegerAttr(inner.attributes["dim"]).value)
    if inner.name == "arith.constant" and isinstance(inner.attributes["value"], ir.IntegerAttr):
        return ir.AffineExpr.get_constant(ir.IntegerAttr(inner.attributes["value"]).value)
    if inner.name in _SUMS:
        left, right = (_known(o, known) for o in inner.operands)
        if left is not None and right is not None:
            return _SUMS[inner.name](left, right)
    return None


def _known(value: ir.Value, known: dict[int, ir.AffineExpr]) -> ir.AffineExpr | None:
    if hash(value) in known:
        return known[hash(value)]
    owner = value.owner
    if isinstance(owner, ir.Block):
        return None
    return _place(owner.operation, {}) if owner.operation.name == "arith.constant" else None


def _is_inside(op: ir.Operation, source: ir.Value, places: list[ir.AffineExpr]) -> bool:
    """Whether the places at both ends of the loops are elements of the source, which a map must say of all."""
    from topo_opt.structured.graph import evaluate
    from topo_opt.structured.index import symbol

    sizes = ir.RankedTensorType(op.results[0].type).shape
    loops = [symbol(f"d{i}", size) for i, size in enumerate(sizes)]
    bounds = [evaluate(place, loops).bounds for place in places]
    shape = ir.RankedTensorType(source.type).shape
    return all(low >= 0 and high < size for (low, high), size in zip(bounds, shape))


def _rewrite(op: ir.Operation, source: ir.Value, index_map: ir.AffineMap) -> None:
    kind = op.results[0].type
    element = ir.RankedTensorType(kind).element_type
    output_map = list(ir.ArrayAttr(op.attributes["indexing_maps"]))[-1]
    attributes = {
        "indexing_maps": ir.ArrayAttr.get([ir.AffineMapAttr.get(index_map), output_map]),
        "iterator_types": op.attributes["iterator_types"],
        "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 1]),
    }
    with ir.InsertionPoint(op), op.location:
        operands = [source, op.operands[len(op.operands) - 1]]
        made = ir.Operation.create(
            "linalg.generic", results=[kind], operands=operands, attributes=attributes, regions=1
        )
        block = made.regions[0].blocks.append(element, element)
        with ir.InsertionPoint(block):
            ir.Operation.create("linalg.yield", operands=[block.arguments[0]])
    op.results[0].replace_all_uses_with(made.results[0])
    op.erase()
