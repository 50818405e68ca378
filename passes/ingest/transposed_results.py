"""Reductions that are only read through a transpose, computed in the order of the reader."""

from __future__ import annotations

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import linalg


def reduce_in_reading_order(module: Any) -> None:
    """Rewrites every such reduction; what it starts from must be one value throughout.

    `%y = reduce(%x) : NDHWC; %z = transpose(%y) : NCDHW`  -->  `%z = reduce(%x) : NCDHW`

    Neighbouring rows of the reduction then are neighbours in the memory that is written, which they mostly were in the
    tensor that was read before something turned it around for the reduction, and what reads the result joins the kernel.
    """
    found: list[ir.Operation] = []

    def collect(op: ir.Operation) -> ir.WalkResult:
        if op.name == "linalg.generic":
            found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(collect)
    for op in found:
        order = _pure_transpose(op)
        producer = op.operands[0].owner
        if order is None or isinstance(producer, ir.Block):
            continue
        if _is_movable(producer.operation):
            _rewrite(producer.operation, op, order)


def _maps(op: ir.Operation) -> list[ir.AffineMap]:
    return [ir.AffineMapAttr(a).value for a in ir.ArrayAttr(op.attributes["indexing_maps"])]


def _reduced(op: ir.Operation) -> list[bool]:
    return ["reduction" in str(a) for a in ir.ArrayAttr(op.attributes["iterator_types"])]


def _pure_transpose(op: ir.Operation) -> list[int] | None:
    """For a loop nest that only permutes dimensions: which one of the result each of the operand is, else None."""
    maps = _maps(op)
    body = op.regions[0].blocks[0]
    if len(maps) != 2 or len(op.results) != 1 or any(_reduced(op)) or len(list(body.operations)) != 1:
        return None
    yielded = body.operations[0].operation.operands[0]
    identity = ir.AffineMap.get_identity(maps[1].n_dims, op.context)
    if hash(yielded) != hash(body.arguments[0]) or maps[1] != identity:
        return None
    if not maps[0].is_permutation or maps[0] == identity:
        return None
    return [ir.AffineDimExpr(r).position for r in maps[0].results]


def _is_movable(op: ir.Operation) -> bool:
    """Whether an op is a reduction from one value, with one reader, whose loop numbers do not occur in its body."""
    if op.name != "linalg.generic" or len(op.results) != 1 or not any(_reduced(op)):
        return False
    if sum(1 for _ in op.results[0].uses) != 1:
        return False
    start = op.operands[len(op.operands) - 1].owner
    if isinstance(start, ir.Block) or start.operation.name != "linalg.fill":
        return False
    body = [o.operation.name for o in op.regions[0].blocks[0].operations]
    return "linalg.index" not in body and _maps(op)[-1].is_projected_permutation


def _rewrite(reduction: ir.Operation, transpose: ir.Operation, order: list[int]) -> None:
    context, kind = reduction.context, ir.RankedTensorType(transpose.results[0].type)
    maps, reduced = _maps(reduction), _reduced(reduction)
    written = [ir.AffineDimExpr(r).position for r in maps[-1].results]
    # Loop of every dimension of the transposed result, then the loops over what is reduced.
    loops = [written[order.index(d)] for d in range(len(order))] + [i for i, r in enumerate(reduced) if r]
    with context:
        renamed = ir.AffineMap.get(
            len(loops), 0, [ir.AffineExpr.get_dim(loops.index(i)) for i in range(len(loops))]
        )
        moved = [ir.AffineMap.get(len(loops), 0, [r.compose(renamed) for r in m.results]) for m in maps[:-1]]
        moved.append(ir.AffineMap.get(len(loops), 0, [ir.AffineExpr.get_dim(d) for d in range(len(order))]))
    kinds = list(ir.ArrayAttr(reduction.attributes["iterator_types"]))
    attributes = {
        "indexing_maps": ir.ArrayAttr.get([ir.AffineMapAttr.get(m) for m in moved], context),
        "iterator_types": ir.ArrayAttr.get([kinds[i] for i in loops], context),
        "operandSegmentSizes": reduction.attributes["operandSegmentSizes"],
    }
    *inputs, start = reduction.operands
    with ir.InsertionPoint(reduction), reduction.location:
        empty = ir.Operation.create("tensor.empty", results=[kind]).results[0]
        fill = linalg.fill(start.owner.operation.operands[0], outs=[empty])
        made = ir.Operation.create(
            "linalg.generic", results=[kind], operands=[*inputs, fill], attributes=attributes, regions=1
        )
    reduction.regions[0].blocks[0].append_to(made.regions[0])
    transpose.results[0].replace_all_uses_with(made.results[0])
    transpose.erase()
    reduction.erase()
