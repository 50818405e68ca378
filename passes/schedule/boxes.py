"""Boxes of a tensor's elements, and how they travel backwards through reshapes and affine maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch_mlir import ir

from topo_opt.passes.schedule.row_factors import affine_map
from topo_opt.structured.graph import Map, evaluate
from topo_opt.structured.index import const, symbol

Range = tuple[int, int]
"""(first, count) along one dimension."""


@dataclass(frozen=True)
class Box:
    """The elements `first <= index < first + count` along every dimension."""

    ranges: tuple[Range, ...]

    @property
    def offsets(self) -> list[int]:
        return [first for first, _ in self.ranges]

    @property
    def sizes(self) -> list[int]:
        return [count for _, count in self.ranges]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def is_whole(self, shape: Sequence[int]) -> bool:
        """Whether the box is all of a tensor of this shape."""
        return all(count == size for (_, count), size in zip(self.ranges, shape, strict=True))

    def covers(self, shape: Sequence[int], axis: int) -> bool:
        """Whether the box is whole along one dimension of a tensor of this shape."""
        return self.ranges[axis][1] == shape[axis]

    def replaced(self, axis: int, along: Range) -> Box:
        """The box with another range along one dimension."""
        return Box((*self.ranges[:axis], along, *self.ranges[axis + 1 :]))


def box_of(ranges: Sequence[Range]) -> Box:
    return Box(tuple(ranges))


def whole(shape: Sequence[int]) -> Box:
    """All elements of a tensor of this shape."""
    return box_of([(0, size) for size in shape])


def intersection(one: Range, other: Range) -> Range:
    """What two ranges share; a count of 0 when that is nothing."""
    first = max(one[0], other[0])
    return first, max(min(sum(one), sum(other)) - first, 0)


def joined(box: Box, shape: Sequence[int], groups: Sequence[Sequence[int]]) -> Box | None:
    """The box in a tensor whose every dimension is a group of dimensions of `shape`; None when its elements don't lie together there."""
    found: list[Range] = []
    for group in groups:
        first, count, inner = 0, 1, 1
        for axis in reversed(group):
            start, length = box.ranges[axis]
            if count == inner:
                first, count = start * inner, length * inner
            elif length == 1:
                first += start * inner
            else:
                return None
            inner *= shape[axis]
        found.append((first, count))
    return box_of(found)


def divided(box: Box, shape: Sequence[int], groups: Sequence[Sequence[int]]) -> Box | None:
    """The box in a tensor of `shape` whose groups of dimensions are the dimensions of the box; None when it is no box there."""
    found: list[Range] = []
    for (first, count), group in zip(box.ranges, groups, strict=True):
        inner = prod(shape[axis] for axis in group)
        for axis in group:
            inner //= shape[axis]
            if first % inner + count <= inner:
                found.append((first // inner, 1))
                first %= inner
            elif first % inner == 0 and count % inner == 0:
                found.append((first // inner, count // inner))
                first, count = 0, inner
            else:
                return None
    return box_of(found)


def read_box(index_map: Map, domain: Sequence[Range], shape: Sequence[int]) -> Box:
    """What an operand of `shape` is read at through `index_map` while the loops run over `domain`.

    Whole along a dimension that is read at a constant, or between bounds that are no better than its size.
    """
    if index_map.is_projected_permutation:
        places = zip(index_map.positions(), shape, strict=True)
        return box_of([(0, size) if dim is None else domain[dim] for dim, size in places])
    loops = [symbol(f"d{d}", count) + first for d, (first, count) in enumerate(domain)]
    found = []
    for result, size in zip(index_map.results, shape, strict=True):
        low, high = evaluate(result, loops).bounds
        constant = isinstance(result, ir.AffineConstantExpr)
        found.append((0, size) if constant or low < 0 or high >= size else (low, high - low + 1))
    return box_of(found)


def moved_map(index_map: Map, domain: Sequence[Range], box: Box) -> ir.AffineMap:
    """`index_map` for loops that start at 0 and an operand that starts at the offset of `box`."""
    loops = [symbol(f"d{d}", count) + first for d, (first, count) in enumerate(domain)]
    moved = [
        const(result.value) if isinstance(result, ir.AffineConstantExpr) else evaluate(result, loops) - first
        for result, (first, _) in zip(index_map.results, box.ranges, strict=True)
    ]
    return affine_map(moved, {f"d{d}": d for d in range(index_map.dims)}, index_map.dims)
