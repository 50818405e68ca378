"""Quantization as arithmetic: what PT2E export calls, and the fake quantization of training.

The rules take the arguments as they are; scales and zero points are numbers, or tensors with one element or one a channel.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from topo_opt.frontend.casts import cast
from topo_opt.frontend.contractions import linear
from topo_opt.frontend.graph_builder import Argument, GraphBuilder
from topo_opt.frontend.rewrites_pointwise import clamp

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


def _quantize(
    b: GraphBuilder,
    x: fx.Node,
    scale: Argument,
    zero: Argument,
    low: Argument,
    high: Argument,
    dtype: torch.dtype,
) -> fx.Node:
    x = _wide(b, x)
    place = b.emit(aten.round.default, _times(b, x, _inverse(b, scale)))
    return cast(b, clamp(b, _plus(b, place, zero), _number(b, low, x), _number(b, high, x)), dtype)


def _dequantize(
    b: GraphBuilder, x: fx.Node, scale: Argument, zero: Argument, *rest: Argument, out_dtype: Any = None
) -> fx.Node:
    x = cast(b, x, out_dtype or torch.float32)
    if isinstance(zero, fx.Node):
        x = b.emit(aten.sub.Tensor, x, cast(b, zero, x.meta["val"].dtype))
    else:
        x = b.emit(aten.sub.Scalar, x, zero)
    return _times(b, x, scale)


def _quantize_channels(
    b: GraphBuilder,
    x: fx.Node,
    scales: fx.Node,
    zeros: fx.Node,
    axis: int,
    low: int,
    high: int,
    dtype: torch.dtype,
) -> fx.Node:
    scales, zeros = (_along(b, v, axis, x) for v in (scales, zeros))
    return _quantize(b, x, scales, zeros, low, high, dtype)


def _dequantize_channels(
    b: GraphBuilder,
    x: fx.Node,
    scales: fx.Node,
    zeros: fx.Node | None,
    axis: int,
    *rest: Argument,
    out_dtype: Any = None,
) -> fx.Node:
    scales = _along(b, scales, axis, x)
    zero: Argument = 0 if zeros is None else _along(b, zeros, axis, x)
    result = _dequantize(b, x, scales, zero, out_dtype=torch.float32)
    return cast(b, result, out_dtype or torch.float32)


def _fake_quantize(
    b: GraphBuilder, x: fx.Node, scale: Argument, zero: Argument, low: int, high: int
) -> list[fx.Node]:
    """The value after both ways, and where it was inside the range."""
    dtype = x.meta["val"].dtype
    x = _wide(b, x)
    place = _plus(b, b.emit(aten.round.default, _times(b, x, _inverse(b, scale))), zero)
    inside = b.emit(
        aten.logical_and.default, b.emit(aten.ge.Scalar, place, low), b.emit(aten.le.Scalar, place, high)
    )
    result = _dequantize(b, clamp(b, place, low, high), scale, zero, out_dtype=x.meta["val"].dtype)
    return [cast(b, result, dtype), inside]


def _fake_quantize_channels(
    b: GraphBuilder, x: fx.Node, scale: fx.Node, zero: fx.Node, axis: int, low: int, high: int
) -> list[fx.Node]:
    scale, zero = (_along(b, v, axis, x) for v in (scale, zero))
    return _fake_quantize(b, x, scale, zero, low, high)


def _wide(b: GraphBuilder, x: fx.Node) -> fx.Node:
    return cast(b, x, torch.float32) if x.meta["val"].dtype in HALF else x


def _inverse(b: GraphBuilder, scale: Argument) -> Argument:
    """1 / scale; a single number is inverted in double, as Python does."""
    if not isinstance(scale, fx.Node):
        return 1.0 / scale
    if scale.meta["val"].numel() == 1:
        scale = cast(b, scale, torch.float64)
    return b.emit(aten.div.Tensor, b.emit(aten.full_like.default, scale, 1.0), scale)


def _times(b: GraphBuilder, x: fx.Node, factor: Argument) -> fx.Node:
    if not isinstance(factor, fx.Node):
        return b.emit(aten.mul.Scalar, x, factor)
    return b.emit(aten.mul.Tensor, x, cast(b, factor, x.meta["val"].dtype))


def _plus(b: GraphBuilder, x: fx.Node, term: Argument) -> fx.Node:
    if not isinstance(term, fx.Node):
        return b.emit(aten.add.Scalar, x, term)
    return b.emit(aten.add.Tensor, x, cast(b, term, x.meta["val"].dtype))


def _number(b: GraphBuilder, bound: Argument, x: fx.Node) -> Argument:
    return cast(b, bound, x.meta["val"].dtype) if isinstance(bound, fx.Node) else bound


def _along(b: GraphBuilder, values: fx.Node, axis: int, x: fx.Node) -> fx.Node:
    """One value a channel, shaped to broadcast over `x`."""
    rank = x.meta["val"].dim()
    return b.emit(aten.view.default, values, [-1 if d == axis % rank else 1 for d in range(rank)])


def _int8_product(b: GraphBuilder, x: fx.Node, weight: fx.Node, scales: fx.Node) -> fx.Node:
    """`x @ weight.T` times one scale a column. Integers of eight bits are exact in every float of half precision."""
    return _times(b, linear(b, x, cast(b, weight, x.meta["val"].dtype)), scales)


# Schema name -> rule, for every overload; the library that defines them need not be loaded.
QUANTIZED: dict[str, Callable[..., Any]] = {
    "quantized_decomposed::quantize_per_tensor": _quantize,
    "quantized_decomposed::dequantize_per_tensor": _dequantize,
    "quantized_decomposed::quantize_per_channel": _quantize_channels,
    "quantized_decomposed::dequantize_per_channel": _dequantize_channels,
    "aten::_weight_int8pack_mm": _int8_product,
    "aten::fake_quantize_per_tensor_affine_cachemask": _fake_quantize,
    "aten::fake_quantize_per_channel_affine_cachemask": _fake_quantize_channels,
}
