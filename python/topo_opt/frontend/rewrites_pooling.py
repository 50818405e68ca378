"""Pooling that torch-mlir lowers for some ranks and sizes only."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from topo_opt.frontend.casts import cast
from topo_opt.frontend.graph_builder import Argument, GraphBuilder

aten = torch.ops.aten


def _with_batch(op: Any, spatial: int) -> Callable[..., Any]:
    """The op on an input without a batch dim, by way of a batch of one."""

    def rule(b: GraphBuilder, x: fx.Node, *args: Argument, **options: Argument) -> fx.Node | None:
        if x.meta["val"].dim() != spatial + 1:
            return None
        return b.emit(aten.squeeze.dim, b.emit(op, b.emit(aten.unsqueeze.default, x, 0), *args, **options), 0)

    return rule


def _windows(b: GraphBuilder, x: fx.Node, dim: int, size: int) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Positions along `dim` of the windows of an adaptive pool, which of them count, and how many do.

    Window `i` is `floor(i n / size) ... ceil((i + 1) n / size)`. Shapes [size, k], [size, k] and [size].
    """
    value = x.meta["val"]
    n, options = value.shape[dim], {"dtype": torch.int64, "device": value.device}

    def floor(product: fx.Node) -> fx.Node:
        divisor = b.emit(aten.full_like.default, product, size)
        return b.emit(aten.div.Tensor_mode, product, divisor, rounding_mode="trunc")

    i = b.emit(aten.arange.start_step, 0, size, 1, **options)
    start = floor(b.emit(aten.mul.Scalar, i, n))
    end = floor(b.emit(aten.add.Scalar, b.emit(aten.mul.Scalar, i, n), n + size - 1))
    longest = max(-(-(w + 1) * n // size) - w * n // size for w in range(size))
    offset = b.emit(aten.view.default, b.emit(aten.arange.start_step, 0, longest, 1, **options), [1, longest])
    places = b.emit(aten.add.Tensor, b.emit(aten.view.default, start, [size, 1]), offset)
    inside = b.emit(aten.lt.Tensor, places, b.emit(aten.view.default, end, [size, 1]))
    nowhere = b.emit(aten.full_like.default, places, 0)
    return b.emit(aten.where.self, inside, places, nowhere), inside, b.emit(aten.sub.Tensor, end, start)


def _gathered(b: GraphBuilder, x: fx.Node, places: fx.Node, dim: int) -> fx.Node:
    """`x` with `dim` replaced by the two dims of `places`."""
    shape = tuple(x.meta["val"].shape)
    flat = b.emit(aten.index_select.default, x, dim, b.emit(aten.view.default, places, [-1]))
    return b.emit(aten.view.default, flat, [*shape[:dim], *places.meta["val"].shape, *shape[dim + 1 :]])


def _broadcast(b: GraphBuilder, value: fx.Node, dim: int, rank: int) -> fx.Node:
    """A tensor over dims `dim` and following, shaped to broadcast over a tensor of rank `rank`."""
    own = list(value.meta["val"].shape)
    return b.emit(aten.view.default, value, [1] * dim + own + [1] * (rank - dim - len(own)))


def _adaptive_average(b: GraphBuilder, x: fx.Node, size: Sequence[int]) -> fx.Node:
    """One dim after the other: the mean over a box is the mean of means over its edges."""
    rank = x.meta["val"].dim()
    for axis, length in enumerate(size):
        dim = rank - len(size) + axis
        places, inside, count = _windows(b, x, dim, length)
        window = _gathered(b, x, places, dim)
        zero = b.emit(aten.full_like.default, window, 0.0)
        window = b.emit(aten.where.self, _broadcast(b, inside, dim, rank + 1), window, zero)
        total = b.emit(aten.sum.dim_IntList, window, [dim + 1])
        count = cast(b, count, x.meta["val"].dtype)
        x = b.emit(aten.div.Tensor, total, _broadcast(b, count, dim, rank))
    return x


def _adaptive_maximum(b: GraphBuilder, x: fx.Node, size: Sequence[int]) -> list[fx.Node]:
    first = x.meta["val"].dim() - len(size)
    windows = [_windows(b, x, first + axis, length)[:2] for axis, length in enumerate(size)]
    return _maxima(b, x, windows)


def _maximum_with_position(op: Any, spatial: int) -> Callable[..., Any]:
    """Max pooling that also returns positions; torch-mlir's form goes through every window one element after the other."""

    def rule(
        b: GraphBuilder,
        x: fx.Node,
        kernel: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        ceil_mode: bool = False,
    ) -> list[fx.Node]:
        value = x.meta["val"]
        first = value.dim() - spatial
        with b.mode:
            size = op(value, kernel, stride, padding, dilation, ceil_mode)[0].shape[first:]
        options = {"dtype": torch.int64, "device": value.device}
        windows = []
        for axis in range(spatial):
            length, step, pad, gap = (
                _of_axis(v, axis) for v in (kernel, stride or kernel, padding, dilation)
            )
            starts = b.emit(
                aten.mul.Scalar, b.emit(aten.arange.start_step, 0, size[axis], 1, **options), step
            )
            offsets = b.emit(aten.mul.Scalar, b.emit(aten.arange.start_step, 0, length, 1, **options), gap)
            starts, offsets = (
                b.emit(aten.unsqueeze.default, starts, 1),
                b.emit(aten.unsqueeze.default, offsets, 0),
            )
            places = b.emit(aten.sub.Scalar, b.emit(aten.add.Tensor, starts, offsets), pad)
            low = b.emit(aten.ge.Scalar, places, 0)
            high = b.emit(aten.lt.Scalar, places, value.shape[first + axis])
            inside = b.emit(aten.logical_and.default, low, high)
            nowhere = b.emit(aten.full_like.default, places, 0)
            windows.append((b.emit(aten.where.self, inside, places, nowhere), inside))
        return _maxima(b, x, windows)

    return rule


def _of_axis(values: Sequence[int], axis: int) -> int:
    return values[axis] if len(values) > 1 else values[0]


def _maxima(b: GraphBuilder, x: fx.Node, windows: Sequence[tuple[fx.Node, fx.Node]]) -> list[fx.Node]:
    """The maximum of every window, and its position in the flattened spatial dims: the first, or that of a NaN.

    Args:
        windows: for every spatial dim the places of the windows along it, and which of them count; [windows, places] both.
    """
    value = x.meta["val"]
    size = [places.meta["val"].shape[0] for places, _ in windows]
    first = value.dim() - len(size)
    spatial, lead = value.shape[first:], list(range(first))
    window, inside, position = x, None, None
    for axis, (places, counts) in enumerate(windows):
        dim = first + 2 * axis
        window = _gathered(b, window, places, dim)
        rank = first + 2 * len(size)
        stride = 1
        for later in spatial[axis + 1 :]:
            stride *= later
        step = _broadcast(b, b.emit(aten.mul.Scalar, places, stride), dim, rank)
        position = step if position is None else b.emit(aten.add.Tensor, position, step)
        counts = _broadcast(b, counts, dim, rank)
        inside = counts if inside is None else b.emit(aten.logical_and.default, inside, counts)
    assert inside is not None and position is not None
    lowest = float("-inf") if value.dtype.is_floating_point else torch.iinfo(value.dtype).min
    window = b.emit(aten.where.self, inside, window, b.emit(aten.full_like.default, window, lowest))
    inner = [first + 2 * axis + 1 for axis in range(len(size))]
    maximum = b.emit(aten.amax.default, window, inner, True)
    found = b.emit(aten.eq.Tensor, window, maximum)
    if value.dtype.is_floating_point:
        found = b.emit(aten.logical_or.default, found, b.emit(aten.ne.Tensor, window, window))
    found = b.emit(aten.logical_and.default, found, inside)
    nowhere = b.emit(aten.full.default, [], spatial.numel(), dtype=torch.int64, device=value.device)
    index = b.emit(aten.amin.default, b.emit(aten.where.self, found, position, nowhere), inner, False)
    shape = [*(value.shape[d] for d in lead), *size]
    return [b.emit(aten.view.default, maximum, shape), b.emit(aten.view.default, index, shape)]


POOLING: dict[Any, Callable[..., Any]] = {
    aten.avg_pool1d.default: _with_batch(aten.avg_pool1d.default, 1),
    aten.avg_pool2d.default: _with_batch(aten.avg_pool2d.default, 2),
    aten.avg_pool3d.default: _with_batch(aten.avg_pool3d.default, 3),
    aten._adaptive_avg_pool3d.default: _adaptive_average,
    aten.max_pool2d_with_indices.default: _maximum_with_position(aten.max_pool2d_with_indices.default, 2),
    aten.max_pool3d_with_indices.default: _maximum_with_position(aten.max_pool3d_with_indices.default, 3),
    aten.adaptive_max_pool2d.default: _adaptive_maximum,
    aten.adaptive_max_pool3d.default: _adaptive_maximum,
}
