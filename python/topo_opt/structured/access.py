"""How indices travel backwards through ops that only move data.

`view_sources(graph, node, indices)` answers: to know the result of `node` at `indices`, which operand must be known, where,
and under which condition? Used for fusion legality and for code generation, so both agree by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_mlir import ir

from topo_opt.structured.graph import Graph, Node
from topo_opt.structured.index import ZERO, Expr, delinearize, linearize


@dataclass(frozen=True)
class Condition:
    """`low <= index < high` and, when `step` > 1, `(index - low) % step == 0`."""

    index: Expr
    low: int
    high: int
    step: int = 1

    def decided(self) -> bool | None:
        """True or False when the ranges decide it, else None."""
        low, high = self.index.bounds
        if high < self.low or low >= self.high:
            return False
        offset = (self.index - self.low) % self.step
        if offset.is_constant and offset.constant:
            return False
        if low >= self.low and high < self.high and offset.is_constant:
            return True
        return None


@dataclass(frozen=True)
class Source:
    """A piece of the result: `value` at `indices` where all `conditions` hold (value None: the padding scalar `scalar`)."""

    value: int
    indices: list[Expr]
    conditions: tuple[Condition, ...] = ()


def _ints(node: Node, name: str) -> list[int]:
    return list(ir.DenseI64ArrayAttr(node.op.attributes[name]))


def reassociation(node: Node) -> list[list[int]]:
    """The groups of dimensions of an `expand_shape` or `collapse_shape`."""
    groups = ir.ArrayAttr(node.op.attributes["reassociation"])
    return [[ir.IntegerAttr(d).value for d in ir.ArrayAttr(g)] for g in groups]


def _expand(graph: Graph, node: Node, indices: Sequence[Expr]) -> list[Source]:
    shape = graph.values[node.results[0]].shape or ()
    inner = [linearize([indices[d] for d in g], [shape[d] for d in g]) for g in reassociation(node)]
    return [Source(node.operands[0], inner)]


def _collapse(graph: Graph, node: Node, indices: Sequence[Expr]) -> list[Source]:
    shape = graph.values[node.operands[0]].shape or ()
    groups = reassociation(node)
    if not groups:
        return [Source(node.operands[0], [ZERO] * len(shape))]
    inner: list[Expr] = []
    for index, group in zip(indices, groups, strict=True):
        inner.extend(delinearize(index, [shape[d] for d in group]))
    return [Source(node.operands[0], inner)]


def kept_dims(sizes: Sequence[int], shape: Sequence[int]) -> list[int | None]:
    """For a rank-reduced slice: which result dimension each source dimension is, None where it was dropped (MLIR's greedy rule)."""
    kept: list[int | None] = []
    axis = 0
    for size in sizes:
        if axis < len(shape) and size == shape[axis]:
            kept.append(axis)
            axis += 1
        else:
            kept.append(None)
    return kept


def slice_parameters(node: Node) -> tuple[list[int], list[int], list[int]]:
    """Static offsets, sizes and strides of an `extract_slice` or `insert_slice`."""
    return _ints(node, "static_offsets"), _ints(node, "static_sizes"), _ints(node, "static_strides")


def _extract_slice(graph: Graph, node: Node, indices: Sequence[Expr]) -> list[Source]:
    offsets, sizes, strides = slice_parameters(node)
    kept = kept_dims(sizes, graph.values[node.results[0]].shape or ())
    inner = [
        (ZERO if axis is None else indices[axis]) * stride + offset
        for axis, offset, stride in zip(kept, offsets, strides)
    ]
    return [Source(node.operands[0], inner)]


def _insert_slice(graph: Graph, node: Node, indices: Sequence[Expr]) -> list[Source]:
    offsets, sizes, strides = slice_parameters(node)
    kept = kept_dims(sizes, graph.values[node.operands[0]].shape or ())
    inner: list[Expr] = []
    conditions = []
    for position, (axis, offset, size, stride) in enumerate(zip(kept, offsets, sizes, strides)):
        index = indices[position]
        conditions.append(
            Condition(index, offset, offset + (size - 1) * stride + 1 if size else offset, stride)
        )
        if axis is not None:
            inner.append((index - offset) // stride)
    return [Source(node.operands[0], inner, tuple(conditions)), Source(node.operands[1], list(indices))]


def _pad(graph: Graph, node: Node, indices: Sequence[Expr]) -> list[Source]:
    low = _ints(node, "static_low")
    shape = graph.values[node.operands[0]].shape or ()
    inner = [index - before for index, before in zip(indices, low)]
    conditions = tuple(
        Condition(index, before, before + size) for index, before, size in zip(indices, low, shape)
    )
    return [Source(node.operands[0], inner, conditions)]


def _concat(graph: Graph, node: Node, indices: Sequence[Expr]) -> list[Source]:
    axis = ir.IntegerAttr(node.op.attributes["dim"]).value
    sources, start = [], 0
    for operand in node.operands:
        size = (graph.values[operand].shape or ())[axis]
        inner = [*indices[:axis], indices[axis] - start, *indices[axis + 1 :]]
        sources.append(Source(operand, inner, (Condition(indices[axis], start, start + size),)))
        start += size
    return sources


def rotation_partner(graph: Graph, node: Node, indices: Sequence[Expr]) -> tuple[list[Expr], Condition]:
    """Where `topo.rotate_half` reads its operand, and the condition under which it negates what it reads."""
    size = (graph.values[node.results[0]].shape or ())[-1]
    *outer, last = indices
    if ir.BoolAttr(node.op.attributes["interleaved"]).value:
        return [*outer, last + 1 - (last % 2) * 2], Condition(last, 0, size, 2)
    return [*outer, (last + size // 2) % size], Condition(last, 0, size // 2)


def _same(graph: Graph, node: Node, indices: Sequence[Expr]) -> list[Source]:
    return [Source(node.operands[0], list(indices))]


# In a list of sources the first whose conditions hold wins. `tensor.pad` has a scalar for where none holds.
VIEWS: dict[str, Callable[[Graph, Node, Sequence[Expr]], list[Source]]] = {
    "tensor.expand_shape": _expand,
    "tensor.collapse_shape": _collapse,
    "tensor.extract_slice": _extract_slice,
    "tensor.insert_slice": _insert_slice,
    "tensor.pad": _pad,
    "tensor.concat": _concat,
    "topo.demote": _same,
    "tensor.cast": _same,
}

# Views that cost nothing on contiguous memory.
RESHAPES = ("tensor.expand_shape", "tensor.collapse_shape")


def is_movement(node: Node) -> bool:
    """Whether a loop nest only moves or widens one tensor: a transpose, a broadcast, a flip, windows, an `extf`."""
    if node.name != "linalg.generic" or node.inputs != 1 or len(node.results) != 1 or node.has_reduction:
        return False
    if not node.output_map(0).is_projected_permutation:
        return False
    block = node.op.regions[0].blocks[0]
    source = hash(block.arguments[0])
    *body, terminator = [o.operation for o in block.operations]
    yielded = terminator.operands[0]
    if not body:
        return hash(yielded) == source
    return len(body) == 1 and body[0].name == "arith.extf" and hash(body[0].operands[0]) == source


def shows_windows(node: Node) -> bool:
    """Whether a loop nest moves a tensor and reads it at sums of its loops, as windows do: they may show some elements twice and others not
    at all."""
    if not is_movement(node):
        return False
    return not node.maps[0].is_projected_permutation and node.maps[0].mirrored() is None


def is_empty_reduction(node: Node) -> bool:
    """Whether a loop nest reduces over nothing: its results are its inits."""
    return node.is_loop_nest and any(r and size == 0 for r, size in zip(node.reduction, node.domain))


def view_sources(graph: Graph, node: Node, indices: Sequence[Expr], position: int = 0) -> list[Source]:
    """Where result `position` of a data-movement op comes from (see `Source`)."""
    if is_empty_reduction(node):
        loop = domain_indices(node, position, indices)
        return [Source(node.operands[node.inputs + position], node.output_map(position).apply(loop))]
    if node.name == "linalg.generic":
        return [Source(node.operands[0], node.maps[0].apply(domain_indices(node, 0, indices)))]
    return VIEWS[node.name](graph, node, indices)


def domain_indices(
    node: Node, position: int, indices: Sequence[Expr], reduction: Sequence[Expr] = ()
) -> list[Expr]:
    """Loop indices of a linalg op at which result `position` has the given `indices`.

    Args:
        reduction: values of the reduction dimensions, in order.

    Raises:
        ValueError: the output map is not a projected permutation.
    """
    loop: list[Expr] = [ZERO] * len(node.domain)
    for index, dim in zip(indices, node.output_map(position).positions(), strict=True):
        if dim is not None:
            loop[dim] = index
    remaining = iter(reduction)
    for dim, reduced in enumerate(node.reduction):
        if reduced:
            loop[dim] = next(remaining, ZERO)
    return loop


def forward_indices(graph: Graph, anchor: int, indices: Sequence[Expr]) -> dict[int, list[Expr]]:
    """Indices of every value that is one-to-one with `anchor`, when the anchor is at `indices`.

    Follows reshapes, slices that hold all of the indices, `topo.demote` and loop nests whose map for the operand is a permutation: the values an epilogue of
    the anchor computes element by element.
    """
    known: dict[int, list[Expr]] = {anchor: list(indices)}
    for node in graph.nodes:
        reached = [(p, o) for p, o in enumerate(node.operands) if o in known]
        if not reached or node.results[0] in known:
            continue
        for position, operand in reached:
            moved = _forward(graph, node, position, known[operand])
            if moved is not None:
                known.update(zip(node.results, moved))
                break
    return known


def _forward_slice(graph: Graph, node: Node, indices: list[Expr]) -> list[list[Expr]] | None:
    """Indices in a slice, when the ranges show that all of them are inside."""
    offsets, sizes, strides = slice_parameters(node)
    inside = all(
        Condition(i, offset, offset + (size - 1) * stride + 1, stride).decided()
        for i, offset, size, stride in zip(indices, offsets, sizes, strides)
    )
    kept = kept_dims(sizes, graph.values[node.results[0]].shape or ())
    moved = [
        (i - offset) // stride
        for i, axis, offset, stride in zip(indices, kept, offsets, strides)
        if axis is not None
    ]
    return [moved] if inside else None


def _forward(graph: Graph, node: Node, position: int, indices: list[Expr]) -> list[list[Expr]] | None:
    source = graph.values[node.operands[position]].shape or ()
    if node.name in RESHAPES:
        shape = graph.values[node.results[0]].shape or ()
        return [delinearize(linearize(indices, source), shape)]
    if node.name in ("topo.demote", "tensor.cast"):
        return [indices]
    if node.name == "tensor.extract_slice":
        return _forward_slice(graph, node, indices)
    if node.name != "linalg.generic" or node.has_reduction or position >= len(node.maps):
        return None
    loop = loop_at(node, position, indices)
    if loop is None:
        return None
    if any(index is None for index in loop):
        return None
    complete = [index for index in loop if index is not None]
    return [node.output_map(i).apply(complete) for i in range(len(node.results))]


def loop_at(node: Node, position: int, indices: Sequence[Expr]) -> list[Expr | None] | None:
    """Loop indices at which an operand is read at `indices`, None for those that these leave open."""
    index_map = node.maps[position]
    loop: list[Expr | None] = [ZERO if size == 1 else None for size in node.domain]
    if index_map.is_projected_permutation:
        for index, dim in zip(indices, index_map.positions()):
            if dim is not None:
                loop[dim] = index
        return loop
    moves = index_map.mirrored()
    if moves is None:
        return None
    for index, (dim, factor, offset) in zip(indices, moves):
        loop[dim] = (index - offset) * factor
    return loop


__all__ = [
    "RESHAPES",
    "VIEWS",
    "Condition",
    "Source",
    "domain_indices",
    "forward_indices",
    "is_empty_reduction",
    "is_movement",
    "kept_dims",
    "loop_at",
    "reassociation",
    "rotation_partner",
    "shows_windows",
    "slice_parameters",
    "view_sources",
]
