"""The factors of ops that are no loop nests: views, and the named ops of the `topo` and `tm_tensor` dialects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch_mlir import ir

from topo_opt.sharding.rule import DimFactors, Factor, Rule
from topo_opt.sharding.rule_aten import aten_rule
from topo_opt.structured.access import kept_dims, reassociation, slice_parameters
from topo_opt.structured.graph import Graph, Node, evaluate
from topo_opt.structured.index import symbol

Derivation = Callable[[Graph, Node], Rule]


def _shape(graph: Graph, value: int) -> tuple[int, ...]:
    return graph.values[value].shape or ()


def _open(shape: Sequence[int]) -> DimFactors:
    """Dimensions without factors."""
    return ((),) * len(shape)


def whole(graph: Graph, node: Node) -> Rule:
    """Nothing may be split: every device computes all of it."""
    return Rule(
        (),
        tuple(_open(_shape(graph, o)) for o in node.operands),
        tuple(_open(_shape(graph, r)) for r in node.results),
    )


def along(graph: Graph, node: Node, free: Sequence[bool]) -> Rule:
    """An op whose tensors all have one rank: the dimensions that are `free` are factors of all of them, the others are whole."""
    shape = _shape(graph, node.results[0])
    factors: list[Factor] = []
    dims: list[tuple[int, ...]] = []
    for size, is_free in zip(shape, free, strict=True):
        dims.append((len(factors),) if is_free else ())
        if is_free:
            factors.append(Factor(size, "parallel"))
    operands = [
        tuple(dims) if len(_shape(graph, o)) == len(shape) and graph.values[o].shape is not None else ()
        for o in node.operands
    ]
    return Rule(tuple(factors), tuple(operands), (tuple(dims),) * len(node.results))


def _elementwise(graph: Graph, node: Node) -> Rule:
    return along(graph, node, [True] * len(_shape(graph, node.results[0])))


def _reshape(graph: Graph, node: Node) -> Rule:
    """A dimension that is taken apart has the factors of its parts, the major one first; parts of size one are none."""
    expands = node.name == "tensor.expand_shape"
    apart = _shape(graph, node.results[0] if expands else node.operands[0])
    factors = tuple(Factor(size, "parallel") for size in apart)
    parts = tuple((i,) for i in range(len(apart)))
    joined = tuple(
        tuple(d for d in group if apart[d] != 1) or tuple(group[:1]) for group in reassociation(node)
    )
    operand, result = (joined, parts) if expands else (parts, joined)
    return Rule(factors, (operand, *((),) * (len(node.operands) - 1)), (result,))


def _slice(graph: Graph, node: Node) -> Rule:
    """Dimensions that a slice takes or replaces as a whole."""
    inserts = node.name == "tensor.insert_slice"
    large = _shape(graph, node.results[0] if inserts else node.operands[0])
    small = _shape(graph, node.operands[0] if inserts else node.results[0])
    _, sizes, strides = slice_parameters(node)
    factors: list[Factor] = []
    large_dims: list[tuple[int, ...]] = [()] * len(large)
    small_dims: list[tuple[int, ...]] = [()] * len(small)
    for dim, (kept, size, stride) in enumerate(zip(kept_dims(sizes, small), sizes, strides, strict=True)):
        if kept is not None and size == large[dim] and stride == 1:
            large_dims[dim] = small_dims[kept] = (len(factors),)
            factors.append(Factor(size, "parallel"))
    if inserts:
        return Rule(tuple(factors), (tuple(small_dims), tuple(large_dims)), (tuple(large_dims),))
    return Rule(tuple(factors), (tuple(large_dims),), (tuple(small_dims),))


def _pad(graph: Graph, node: Node) -> Rule:
    low, high = (list(ir.DenseI64ArrayAttr(node.op.attributes[f"static_{end}"])) for end in ("low", "high"))
    return along(graph, node, [not (a or b) for a, b in zip(low, high, strict=True)])


def _concat(graph: Graph, node: Node) -> Rule:
    axis = ir.IntegerAttr(node.op.attributes["dim"]).value
    return along(graph, node, [d != axis for d in range(len(_shape(graph, node.results[0])))])


def _rotate_half(graph: Graph, node: Node) -> Rule:
    """Neighbours that are pairs stay together; halves of the last dimension are needed together."""
    *outer, last = _shape(graph, node.results[0])
    factors = [Factor(size, "parallel") for size in outer]
    dims: list[tuple[int, ...]] = [(i,) for i in range(len(outer))]
    if ir.BoolAttr(node.op.attributes["interleaved"]).value:
        dims.append((len(factors), len(factors) + 1))
        factors += [Factor(last // 2, "parallel"), Factor(2, "replicated")]
    else:
        dims.append(())
    return Rule(tuple(factors), (tuple(dims),), (tuple(dims),))


def _index_update(graph: Graph, node: Node) -> Rule:
    """All but the dimension whose rows are replaced: which rows these are only data tells."""
    axis = ir.IntegerAttr(node.op.attributes["dim"]).value
    shape = _shape(graph, node.results[0])
    rule = along(graph, node, [d != axis for d in range(len(shape))])
    dims = rule.results[0]
    return Rule(rule.factors, (dims, dims, ((),)), (dims,))


def _top_k(graph: Graph, node: Node) -> Rule:
    rank = len(_shape(graph, node.results[0]))
    return along(graph, node, [d != rank - 1 for d in range(rank)])


def _grouped_product(graph: Graph, node: Node) -> Rule:
    """Rows, inner dimension and columns; and groups: every device adds the rows of its own matrices.

    Sorted rows stay together with all their matrices, since order and offsets are positions among all rows and groups.
    """
    rows, inner = _shape(graph, node.operands[0])
    groups, _, columns = _shape(graph, node.operands[1])
    is_sorted = len(node.operands) == 5
    factors = (
        Factor(rows, "replicated" if is_sorted else "parallel"),
        Factor(inner, "reduction"),
        Factor(columns, "parallel"),
        Factor(groups, "replicated" if is_sorted else "reduction"),
    )
    operands: list[DimFactors] = [((0,), (1,)), ((3,), (1,), (2,)), ((0,),)]
    if is_sorted:
        operands += [((0,),), ((),)]
    return Rule(factors, tuple(operands), (((0,), (2,)),))


BATCH, GROUP, HEAD, ROW, COLUMN = range(5)
"""Factors of `topo.attention`: batch, key heads, query heads of one key head, rows of the queries, columns of the values."""


def _attention(graph: Graph, node: Node) -> Rule:
    """Batches, heads by the key head they share, rows and columns of the values. Keys stay together."""
    q, _, v = (_shape(graph, o) for o in node.operands[:3])
    groups = v[1]
    factors = (
        Factor(q[0], "parallel"),
        Factor(groups, "parallel"),
        Factor(q[1] // groups, "parallel"),
        Factor(q[2], "parallel" if row_offset(node) else "replicated"),
        Factor(v[3], "parallel"),
    )
    heads = tuple(f for f in (GROUP, HEAD) if factors[f].size != 1) or (GROUP,)
    operands: list[DimFactors] = [
        ((BATCH,), heads, (ROW,), ()),
        ((BATCH,), (GROUP,), (), ()),
        ((BATCH,), (GROUP,), (), (COLUMN,)),
    ]
    has_mask, has_positions = list(ir.DenseI32ArrayAttr(node.op.attributes["operandSegmentSizes"]))[3:]
    if has_mask:
        mask = _shape(graph, node.operands[3])
        operands.append(tuple(() if s == 1 else f for s, f in zip(mask, ((BATCH,), heads, (ROW,), ()))))
    if has_positions:
        positions = _shape(graph, node.operands[-1])
        operands.append(tuple(() if s == 1 else f for s, f in zip(positions, ((BATCH,), (ROW,)))))
    return Rule(factors, tuple(operands), (((BATCH,), heads, (ROW,), (COLUMN,)),))


def row_offset(node: Node) -> Literal["free", "position"] | None:
    """How the rows of an attention are counted from another one than the first.

    "free": no bound asks for the row. "position": every bound asks for the row plus its position, so that the constant can be
    added to the position; without positions these are ours to choose. None: neither.
    """
    attributes = node.op.attributes
    row, position, step = (symbol(name, _ANY_SIZE) for name in ("m", "p", "step"))
    bounds = [
        bound
        for name in ("low", "high")
        if name in attributes
        for bound in ir.AffineMapAttr(attributes[name]).value.results
    ]
    causal = ir.BoolAttr(attributes["causal"]).value
    if not causal and all(
        evaluate(b, [row + step, position]) == evaluate(b, [row, position]) for b in bounds
    ):
        return "free"
    if not list(ir.DenseI32ArrayAttr(attributes["operandSegmentSizes"]))[4]:
        return "position"
    moves = all(evaluate(b, [row + step, position - step]) == evaluate(b, [row, position]) for b in bounds)
    return "position" if moves and not causal else None


_ANY_SIZE = 1 << 40
"""Larger than any number of rows, so that no range decides what an expression is."""


def _scan(graph: Graph, node: Node) -> Rule:
    """All but the dimension along which it runs; the last result, the running value, does not have it."""
    axis = ir.IntegerAttr(node.op.attributes["dimension"]).value
    shape = _shape(graph, node.operands[0])
    dims = along(graph, node, [d != axis for d in range(len(shape))]).results[0]
    factors = tuple(Factor(size, "parallel") for d, size in enumerate(shape) if d != axis)
    last = dims[:axis] + dims[axis + 1 :]
    captured = tuple(_open(_shape(graph, o)) for o in node.operands[3:])
    return Rule(factors, (dims, dims, last, *captured), (dims, last))


def _scatter(graph: Graph, node: Node) -> Rule:
    """The dimensions that no index selects."""
    updates, indices, original, *captured = node.operands
    depth = _shape(graph, indices)[1]
    selected = (
        list(ir.DenseI64ArrayAttr(node.op.attributes["dimension_map"]))
        if "dimension_map" in node.op.attributes
        else list(range(depth))
    )
    shape = _shape(graph, original)
    rest = [d for d in range(len(shape)) if d not in selected]
    factors = tuple(Factor(shape[d], "parallel") for d in rest)
    into = tuple((rest.index(d),) if d in rest else () for d in range(len(shape)))
    source = _shape(graph, updates)
    if tuple(source[1:]) == tuple(shape[d] for d in rest):
        given: DimFactors = ((), *((i,) for i in range(len(rest))))
    else:
        return whole(graph, node)
    return Rule(factors, (given, ((), ()), into, *(_open(_shape(graph, o)) for o in captured)), (into,))


OPS: dict[str, Derivation] = {
    "arith.constant": _elementwise,
    "func.call": aten_rule,
    "linalg.fill": _elementwise,
    "tensor.empty": _elementwise,
    "tensor.cast": _elementwise,
    "tensor.expand_shape": _reshape,
    "tensor.collapse_shape": _reshape,
    "tensor.extract_slice": _slice,
    "tensor.insert_slice": _slice,
    "tensor.pad": _pad,
    "tensor.concat": _concat,
    "topo.attention": _attention,
    "topo.demote": _elementwise,
    "topo.grouped_product": _grouped_product,
    "topo.index_update": _index_update,
    "topo.rotate_half": _rotate_half,
    "topo.top_k": _top_k,
    "tm_tensor.scan": _scan,
    "tm_tensor.scatter": _scatter,
}
"""Ops without a row are computed whole on every device."""
