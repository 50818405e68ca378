"""Softmax, batch and group normalization in the form that fuses best."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from topo_opt.frontend.graph_builder import GraphBuilder

aten = torch.ops.aten


def _shifted(b: GraphBuilder, x: fx.Node, dim: int, dtype: Any) -> fx.Node | None:
    """`x` minus its maximum along `dim`; None when there is nothing to reduce or it is not of a float type."""
    if isinstance(dtype, torch.dtype) and x.meta["val"].dtype != dtype:
        x = b.emit(aten._to_copy.default, x, dtype=dtype)
    value = x.meta["val"]
    if 0 in value.shape or value.dim() == 0 or not value.dtype.is_floating_point:
        return None
    return b.emit(aten.sub.Tensor, x, b.emit(aten.amax.default, x, [dim], True))


def _softmax(b: GraphBuilder, x: fx.Node, dim: int, dtype: Any = None) -> fx.Node | None:
    """Without the argmax that torch-mlir computes along with the maximum."""
    if (shifted := _shifted(b, x, dim, dtype)) is None:
        return None
    powers = b.emit(aten.exp.default, shifted)
    return b.emit(aten.div.Tensor, powers, b.emit(aten.sum.dim_IntList, powers, [dim], True))


def _log_softmax(b: GraphBuilder, x: fx.Node, dim: int, dtype: Any = None) -> fx.Node | None:
    if (shifted := _shifted(b, x, dim, dtype)) is None:
        return None
    total = b.emit(aten.sum.dim_IntList, b.emit(aten.exp.default, shifted), [dim], True)
    return b.emit(aten.sub.Tensor, shifted, b.emit(aten.log.default, total))


def _batch_norm(
    b: GraphBuilder,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    mean: fx.Node,
    variance: fx.Node,
    momentum: float,
    epsilon: float,
) -> list[fx.Node]:
    """Inference: one factor and one term per channel, as eager does it. The saved statistics are empty."""
    factor = b.emit(aten.rsqrt.default, b.emit(aten.add.Scalar, variance, epsilon))
    if weight is not None:
        factor = b.emit(aten.mul.Tensor, factor, weight)
    term = b.emit(aten.neg.default, b.emit(aten.mul.Tensor, mean, factor))
    if bias is not None:
        term = b.emit(aten.add.Tensor, term, bias)
    value = x.meta["val"]
    channels = [1, value.shape[1], *[1] * (value.dim() - 2)]
    factor, term = (b.emit(aten.view.default, v, channels) for v in (factor, term))
    result = b.emit(aten.add.Tensor, b.emit(aten.mul.Tensor, x, factor), term)
    empty = b.emit(aten.full.default, [0], 0.0, dtype=factor.meta["val"].dtype, device=value.device)
    return [result, empty, empty]


def _batch_norm_of_batch(
    b: GraphBuilder, x: fx.Node, weight: Any, bias: Any, training: bool, momentum: float, epsilon: float
) -> list[fx.Node] | None:
    """Statistics of the input itself (instance norm)."""
    if not training or x.meta["val"].dim() < 2:
        return None
    return _normalized(b, x, weight, bias, epsilon)[0]


def _batch_norm_in_training(
    b: GraphBuilder,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    running_mean: fx.Node,
    running_variance: fx.Node,
    training: bool,
    momentum: float,
    epsilon: float,
) -> list[fx.Node] | None:
    """Statistics of the input, which the running ones move towards; their variance is that of a sample."""
    value = x.meta["val"]
    count = value.numel() // value.shape[1] if value.dim() > 1 and 0 not in value.shape else 0
    if not training or count < 2:
        return None
    results, variance = _normalized(b, x, weight, bias, epsilon)
    seen = b.emit(aten.mul.Tensor, b.emit(aten.view.default, variance, [-1]), count / (count - 1))
    moved = []
    for running, new in ((running_mean, results[1]), (running_variance, seen)):
        kept = b.emit(aten.mul.Tensor, running, 1 - momentum)
        moved.append(b.emit(aten.add.Tensor, kept, b.emit(aten.mul.Tensor, new, momentum)))
    return [*results, *moved]


def _normalized(
    b: GraphBuilder, x: fx.Node, weight: fx.Node | None, bias: fx.Node | None, epsilon: float
) -> tuple[list[fx.Node], fx.Node]:
    """The normalized input, its mean and the inverse of its deviation by channel; and the variance, with all dimensions."""
    value = x.meta["val"]
    dims = [d for d in range(value.dim()) if d != 1]
    mean = b.emit(aten.mean.dim, x, dims, True)
    centered = b.emit(aten.sub.Tensor, x, mean)
    variance = b.emit(aten.mean.dim, b.emit(aten.mul.Tensor, centered, centered), dims, True)
    inverse = b.emit(aten.rsqrt.default, b.emit(aten.add.Scalar, variance, epsilon))
    result = b.emit(aten.mul.Tensor, centered, inverse)
    shape = [-1, *[1] * (value.dim() - 2)]
    if weight is not None:
        result = b.emit(aten.mul.Tensor, result, b.emit(aten.view.default, weight, shape))
    if bias is not None:
        result = b.emit(aten.add.Tensor, result, b.emit(aten.view.default, bias, shape))
    columns = [b.emit(aten.view.default, v, [-1]) for v in (mean, inverse)]
    return [result, *columns], variance


def _group_norm(
    b: GraphBuilder,
    x: fx.Node,
    groups: int,
    weight: fx.Node | None = None,
    bias: fx.Node | None = None,
    epsilon: float = 1e-5,
    _: bool = True,
) -> fx.Node | None:
    """In the type of the input; torch-mlir computes the variance in f64."""
    value = x.meta["val"]
    if 0 in value.shape:
        return None
    # Channels of a group apart from places: that is a view of either order of the two in memory.
    batch, channels, *places = value.shape
    grouped = b.emit(aten.view.default, x, [batch, groups, channels // groups, *places])
    inner = list(range(2, grouped.meta["val"].dim()))
    mean = b.emit(aten.mean.dim, grouped, inner, True)
    centered = b.emit(aten.sub.Tensor, grouped, mean)
    variance = b.emit(aten.mean.dim, b.emit(aten.mul.Tensor, centered, centered), inner, True)
    inverse = b.emit(aten.rsqrt.default, b.emit(aten.add.Scalar, variance, epsilon))
    result = b.emit(aten.view.default, b.emit(aten.mul.Tensor, centered, inverse), list(value.shape))
    shape = [-1, *[1] * (value.dim() - 2)]
    if weight is not None:
        result = b.emit(aten.mul.Tensor, result, b.emit(aten.view.default, weight, shape))
    if bias is not None:
        result = b.emit(aten.add.Tensor, result, b.emit(aten.view.default, bias, shape))
    return result


NORMALIZATION: dict[Any, Callable[..., Any]] = {
    aten.softmax.int: _softmax,
    aten._softmax.default: _softmax,
    aten.log_softmax.int: _log_softmax,
    aten._log_softmax.default: _log_softmax,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_norm_of_batch,
    aten._native_batch_norm_legit_functional.default: _batch_norm_in_training,
    aten.group_norm.default: _group_norm,
}
