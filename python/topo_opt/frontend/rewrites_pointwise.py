"""Pointwise ops, pads and constants."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from topo_opt.frontend.casts import cast
from topo_opt.frontend.graph_builder import Argument, GraphBuilder
from topo_opt.frontend.rewrites_complex import equal

aten = torch.ops.aten
_LARGEST_POWER = 64


def _equal(b: GraphBuilder, x: fx.Node, y: fx.Node) -> fx.Node | None:
    """A float is not always equal to itself, as torch-mlir's folder takes it to be."""
    if x.meta["val"].dtype.is_complex:
        return equal(b, x, y)
    if x is not y or not x.meta["val"].dtype.is_floating_point:
        return None
    return b.emit(aten.logical_not.default, b.emit(aten.ne.Tensor, x, x))


def _is_finite(b: GraphBuilder, x: fx.Node) -> fx.Node | None:
    if not x.meta["val"].dtype.is_floating_point:
        return None
    return b.emit(aten.lt.Scalar, b.emit(aten.abs.default, x), math.inf)


def _integer_power(b: GraphBuilder, x: fx.Node, exponent: Argument) -> fx.Node | None:
    """Whole powers of integers by repeated squaring, which wraps as eager does."""
    dtype = x.meta["val"].dtype
    whole = isinstance(exponent, int) and 0 <= exponent <= _LARGEST_POWER
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool or not whole:
        return None
    result, square = None, x
    while exponent:
        if exponent & 1:
            result = square if result is None else b.emit(aten.mul.Tensor, result, square)
        exponent >>= 1
        if exponent:
            square = b.emit(aten.mul.Tensor, square, square)
    return b.emit(aten.full_like.default, x, 1) if result is None else result


def _reciprocal(b: GraphBuilder, x: fx.Node) -> fx.Node | None:
    """Without the check for zeros that torch-mlir puts into it."""
    if not x.meta["val"].dtype.is_floating_point:
        x = b.emit(aten._to_copy.default, x, dtype=torch.get_default_dtype())
    return b.emit(aten.div.Tensor, b.emit(aten.full_like.default, x, 1.0), x)


def clamp(b: GraphBuilder, x: fx.Node, low: Argument = None, high: Argument = None) -> fx.Node:
    """NaN stays NaN, and `high` wins over `low`, as in eager. Bounds are numbers or tensors."""
    bounds = [v for v in (low, high) if v is not None]
    dtype = x.meta["val"].dtype
    if not dtype.is_floating_point and any(isinstance(v, float) for v in bounds):
        x = b.emit(aten._to_copy.default, x, dtype=torch.get_default_dtype())
    for bound, number_beyond, tensor_beyond in (
        (low, aten.lt.Scalar, aten.lt.Tensor),
        (high, aten.gt.Scalar, aten.gt.Tensor),
    ):
        if isinstance(bound, fx.Node):
            # A bound that is NaN makes the result NaN.
            beyond = b.emit(
                aten.logical_or.default, b.emit(tensor_beyond, x, bound), b.emit(aten.ne.Tensor, bound, bound)
            )
            x = b.emit(aten.where.self, beyond, bound, x)
        elif bound is not None:
            x = b.emit(
                aten.where.self, b.emit(number_beyond, x, bound), b.emit(aten.full_like.default, x, bound), x
            )
    return x


def _hardtanh(b: GraphBuilder, x: fx.Node, low: float = -1.0, high: float = 1.0) -> fx.Node:
    return clamp(b, x, low, high)


def _gelu(b: GraphBuilder, x: fx.Node, approximate: str = "none") -> fx.Node | None:
    """The tanh form, whose constant sqrt(2 / pi) torch-mlir writes as 0.797724."""
    if approximate != "tanh":
        return None
    cube = b.emit(aten.mul.Tensor, b.emit(aten.mul.Tensor, x, x), x)
    inner = b.emit(aten.add.Tensor, x, b.emit(aten.mul.Tensor, cube, 0.044715))
    curve = b.emit(aten.tanh.default, b.emit(aten.mul.Tensor, inner, math.sqrt(2.0 / math.pi)))
    return b.emit(aten.mul.Tensor, b.emit(aten.mul.Tensor, x, 0.5), b.emit(aten.add.Tensor, curve, 1.0))


def _pad(b: GraphBuilder, x: fx.Node, pad: list[int], value: float = 0) -> fx.Node | None:
    """Negative padding crops, which `tensor.pad` does not do."""
    if min(pad, default=0) >= 0:
        return None
    rank = x.meta["val"].dim()
    for i, (low, high) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = rank - 1 - i
        if min(low, high) < 0:
            size = x.meta["val"].shape[dim]
            x = b.emit(aten.slice.Tensor, x, dim, max(0, -low), size - max(0, -high))
    return b.emit(aten.constant_pad_nd.default, x, [max(0, p) for p in pad], value)


def _to_copy(b: GraphBuilder, x: fx.Node, **options: Any) -> fx.Node | None:
    """The conversions that torch-mlir has not, or not as eager."""
    dtype = options.get("dtype")
    return None if dtype is None or dtype == x.meta["val"].dtype else cast(b, x, dtype)


def _zeros_for_empty(size_from: Callable[..., Any]) -> Callable[..., Any]:
    """Memory that was never written reads as zero: a result must not depend on what was there before."""

    def rule(b: GraphBuilder, *args: Argument, **options: Any) -> fx.Node:
        size, like = size_from(*args)
        dtype = options.get("dtype") or (
            like.meta["val"].dtype if like is not None else torch.get_default_dtype()
        )
        device = options.get("device") or (
            like.meta["val"].device if like is not None else torch.device("cpu")
        )
        value = False if dtype == torch.bool else 0
        return b.emit(aten.full.default, list(size), value, dtype=dtype, device=device)

    return rule


def _rrelu(
    b: GraphBuilder, x: fx.Node, noise: fx.Node, lower: float = 0.125, upper: float = 1 / 3, *rest: Argument
) -> list[fx.Node]:
    """In inference: a leaky relu with the mean slope."""
    return [b.emit(aten.leaky_relu.default, x, (lower + upper) / 2), noise]


def _shift(op: Any) -> Callable[..., Any]:
    """By a number: the same for every element."""

    def rule(b: GraphBuilder, x: fx.Node, count: int) -> fx.Node:
        return b.emit(op, x, b.emit(aten.full_like.default, x, count))

    return rule


def _scalar_tensor(
    b: GraphBuilder, value: Argument, dtype: Any = None, device: Any = None, **_: Any
) -> fx.Node:
    """A tensor without dimensions."""
    return b.emit(aten.full.default, [], value, dtype=dtype or torch.get_default_dtype(), device=device)


POINTWISE: dict[Any, Callable[..., Any]] = {
    aten.scalar_tensor.default: _scalar_tensor,
    aten.eq.Tensor: _equal,
    aten.isfinite.default: _is_finite,
    aten.reciprocal.default: _reciprocal,
    aten.gelu.default: _gelu,
    aten.constant_pad_nd.default: _pad,
    aten.clamp.default: clamp,
    aten.clamp.Tensor: clamp,
    aten.clamp_min.default: clamp,
    aten.clamp_min.Tensor: clamp,
    aten.clamp_max.default: lambda b, x, high: clamp(b, x, None, high),
    aten.clamp_max.Tensor: lambda b, x, high: clamp(b, x, None, high),
    aten.rrelu_with_noise_functional.default: _rrelu,
    aten.bitwise_left_shift.Tensor_Scalar: _shift(aten.bitwise_left_shift.Tensor),
    aten.bitwise_right_shift.Tensor_Scalar: _shift(aten.bitwise_right_shift.Tensor),
    aten.hardtanh.default: _hardtanh,
    aten.relu6.default: lambda b, x: clamp(b, x, 0.0, 6.0),
    aten.pow.Tensor_Scalar: _integer_power,
    aten._to_copy.default: _to_copy,
    aten.empty.memory_format: _zeros_for_empty(lambda size, *_: (size, None)),
    aten.empty_permuted.default: _zeros_for_empty(lambda size, *_: (size, None)),
    aten.empty_strided.default: _zeros_for_empty(lambda size, *_: (size, None)),
    aten.empty_like.default: _zeros_for_empty(lambda like, *_: (like.meta["val"].shape, like)),
    aten.new_empty.default: _zeros_for_empty(lambda like, size, *_: (size, like)),
    aten.new_empty_strided.default: _zeros_for_empty(lambda like, size, *_: (size, like)),
}
