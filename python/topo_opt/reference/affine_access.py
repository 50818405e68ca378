"""Affine maps as views: an operand of a loop nest seen over the iteration space, without copying where possible.

A *space view* has one dimension per loop, of the loop's extent, or of size 1 when the operand does not vary along that
loop (so a broadcast costs no memory). A map that is linear with non-negative coefficients, pooling windows included, is one
strided view; a reversed or quasi-affine one (`floordiv`, `mod`) is a gather.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_mlir import ir

from topo_opt.errors import InputError, UnsupportedError


@dataclass(frozen=True)
class Linear:
    """`sum(coefficients[d] * d) + offset` over the loops."""

    coefficients: tuple[int, ...]
    offset: int

    def bounds(self, extents: Sequence[int]) -> tuple[int, int]:
        """Smallest and largest value over a non-empty space."""
        ends = [c * (n - 1) for c, n in zip(self.coefficients, extents, strict=True)]
        return self.offset + sum(min(0, e) for e in ends), self.offset + sum(max(0, e) for e in ends)


def linear(expr: ir.AffineExpr, rank: int) -> Linear | None:
    """The linear form of an expression over `rank` loops, or None for a quasi-affine one."""
    if isinstance(expr, ir.AffineConstantExpr):
        return Linear((0,) * rank, expr.value)
    if isinstance(expr, ir.AffineDimExpr):
        return Linear(tuple(int(d == expr.position) for d in range(rank)), 0)
    if isinstance(expr, ir.AffineAddExpr | ir.AffineMulExpr):
        lhs, rhs = linear(expr.lhs, rank), linear(expr.rhs, rank)
        if lhs is None or rhs is None:
            return None
        if isinstance(expr, ir.AffineAddExpr):
            summed = tuple(a + b for a, b in zip(lhs.coefficients, rhs.coefficients, strict=True))
            return Linear(summed, lhs.offset + rhs.offset)
        factor, form = (lhs.offset, rhs) if not any(lhs.coefficients) else (rhs.offset, lhs)
        return Linear(tuple(c * factor for c in form.coefficients), form.offset * factor)
    return None


def loop_index(dim: int, rank: int, start: int, count: int) -> Tensor:
    """The values of one loop's index as a space view."""
    return torch.arange(start, start + count).reshape([count if d == dim else 1 for d in range(rank)])


def evaluate_index(expr: ir.AffineExpr, extents: Sequence[int]) -> Tensor:
    """Any affine expression over the whole space, as an int64 space view."""
    rank = len(extents)
    value = evaluate_at(expr, [loop_index(d, rank, 0, extents[d]) for d in range(rank)])
    return value.reshape((1,) * rank) if value.dim() < rank else value


def evaluate_at(expr: ir.AffineExpr, dims: Sequence[Tensor]) -> Tensor:
    """An affine expression at given values of its dimensions, which broadcast (int64)."""
    if isinstance(expr, ir.AffineConstantExpr):
        return torch.tensor(expr.value, dtype=torch.int64)
    if isinstance(expr, ir.AffineDimExpr):
        return dims[expr.position]
    if not isinstance(expr, ir.AffineBinaryExpr):
        raise UnsupportedError(f"affine expression {expr} has a symbol", hint="structured IR is static")
    lhs, rhs = evaluate_at(expr.lhs, dims), evaluate_at(expr.rhs, dims)
    for kind, function in _BINARY:
        if isinstance(expr, kind):
            return function(lhs, rhs)
    raise UnsupportedError(f"affine expression {expr} is not known to the reference executor")


_BINARY = (
    (ir.AffineAddExpr, torch.add),
    (ir.AffineMulExpr, torch.mul),
    (ir.AffineModExpr, torch.remainder),
    (ir.AffineFloorDivExpr, lambda a, b: torch.div(a, b, rounding_mode="floor")),
    (ir.AffineCeilDivExpr, lambda a, b: -torch.div(-a, b, rounding_mode="floor")),
)


def is_strided(amap: ir.AffineMap) -> bool:
    """Whether `space_view` gives a view of the tensor's own memory."""
    forms = [linear(expr, amap.n_dims) for expr in amap.results]
    return all(f is not None and min(f.coefficients, default=0) >= 0 for f in forms)


def space_view(tensor: Tensor, amap: ir.AffineMap, extents: Sequence[int]) -> Tensor:
    """`tensor` read through `amap`, as a space view over `extents`.

    Raises:
        InputError: the map leaves the tensor; the IR is invalid.
    """
    rank = len(extents)
    if 0 in extents:
        return tensor.new_empty([n if n == 0 else 1 for n in extents])
    forms = [linear(expr, rank) for expr in amap.results]
    if not is_strided(amap):
        indices = tuple(evaluate_index(expr, extents) for expr in amap.results)
        for index, size in zip(indices, tensor.shape, strict=True):
            _check_bounds(int(index.min()), int(index.max()), size, amap)
        return tensor[indices]
    sizes, strides, offset = [1] * rank, [0] * rank, tensor.storage_offset()
    for form, size, stride in zip(forms, tensor.shape, tensor.stride(), strict=True):
        assert form is not None
        _check_bounds(*form.bounds(extents), size, amap)
        offset += form.offset * stride
        for d, coefficient in enumerate(form.coefficients):
            if coefficient:
                sizes[d] = extents[d]
                strides[d] += coefficient * stride
    return tensor.as_strided(sizes, strides, offset)


def _check_bounds(low: int, high: int, size: int, amap: ir.AffineMap) -> None:
    if low < 0 or high >= size:
        raise InputError(f"{amap} reads index {low if low < 0 else high} of a dimension of size {size}")


def projected_dims(amap: ir.AffineMap) -> list[int | None] | None:
    """For a projected permutation, the loop behind each result (None for a constant 0); None for any other map."""
    dims: list[int | None] = []
    for expr in amap.results:
        if isinstance(expr, ir.AffineDimExpr) and expr.position not in dims:
            dims.append(expr.position)
        elif isinstance(expr, ir.AffineConstantExpr) and expr.value == 0:
            dims.append(None)
        else:
            return None
    return dims


def from_space(value: Tensor, dims: Sequence[int | None], extents: Sequence[int]) -> Tensor:
    """A space view (size 1 along loops not in `dims`) laid out as the tensor whose map has these results."""
    kept = [d for d in dims if d is not None]
    full = value.expand([extents[d] if d in kept else value.shape[d] for d in range(len(extents))])
    order = kept + [d for d in range(len(extents)) if d not in kept]
    packed = (
        full.permute(order).flatten(len(kept)).select(-1, 0)
        if len(kept) < len(extents)
        else full.permute(order)
    )
    for position, d in enumerate(dims):
        if d is None:
            packed = packed.unsqueeze(position)
    return packed
