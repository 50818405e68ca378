"""ATen ops written with other ATen ops, where torch-mlir's own lowering gives another value than eager."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from topo_opt.frontend.graph_builder import GraphBuilder

aten = torch.ops.aten


def _softmax(b: GraphBuilder, x: fx.Node, dim: int, dtype: Any = None) -> fx.Node:
    """Without the argmax that torch-mlir computes along with the maximum."""
    if isinstance(dtype, torch.dtype) and x.meta["val"].dtype != dtype:
        x = b.emit(aten._to_copy.default, x, dtype=dtype)
    if 0 in x.meta["val"].shape or not x.meta["val"].dtype.is_floating_point:
        return None
    shifted = b.emit(aten.sub.Tensor, x, b.emit(aten.amax.default, x, [dim], True))
    powers = b.emit(aten.exp.default, shifted)
    return b.emit(aten.div.Tensor, powers, b.emit(aten.sum.dim_IntList, powers, [dim], True))


def _log_softmax(b: GraphBuilder, x: fx.Node, dim: int, dtype: Any = None) -> fx.Node:
    if isinstance(dtype, torch.dtype) and x.meta["val"].dtype != dtype:
        x = b.emit(aten._to_copy.default, x, dtype=dtype)
    if 0 in x.meta["val"].shape or not x.meta["val"].dtype.is_floating_point:
        return None
    shifted = b.emit(aten.sub.Tensor, x, b.emit(aten.amax.default, x, [dim], True))
    total = b.emit(aten.sum.dim_IntList, b.emit(aten.exp.default, shifted), [dim], True)
    return b.emit(aten.sub.Tensor, shifted, b.emit(aten.log.default, total))


def _gelu(b: GraphBuilder, x: fx.Node, approximate: str = "none") -> fx.Node | None:
    """The tanh form, whose constant sqrt(2 / pi) torch-mlir writes as 0.797724."""
    if approximate != "tanh":
        return None
    cube = b.emit(aten.mul.Tensor, b.emit(aten.mul.Tensor, x, x), x)
    inner = b.emit(aten.add.Tensor, x, b.emit(aten.mul.Tensor, cube, 0.044715))
    curve = b.emit(aten.tanh.default, b.emit(aten.mul.Tensor, inner, math.sqrt(2.0 / math.pi)))
    return b.emit(aten.mul.Tensor, b.emit(aten.mul.Tensor, x, 0.5), b.emit(aten.add.Tensor, curve, 1.0))


def _reciprocal(b: GraphBuilder, x: fx.Node) -> fx.Node:
    """Without the check for zero that torch-mlir adds: eager gives infinity."""
    if not x.meta["val"].dtype.is_floating_point:
        x = b.emit(aten._to_copy.default, x, dtype=torch.get_default_dtype())
    return b.emit(aten.div.Tensor, b.emit(aten.full_like.default, x, 1.0), x)


def _fmod(b: GraphBuilder, x: fx.Node, divisor: float) -> fx.Node | None:
    """torch-mlir has only the form with two tensors."""
    if x.meta["val"].dtype != torch.result_type(x.meta["val"], divisor):
        return None
    return b.emit(aten.fmod.Tensor, x, b.emit(aten.full_like.default, x, divisor))


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


def _batch_norm_inference(
    b: GraphBuilder,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    mean: fx.Node,
    variance: fx.Node,
    momentum: float,
    epsilon: float,
) -> list[fx.Node]:
    """`x * scale + shift` with a scale and shift for each channel, as eager computes it; no saved statistics."""
    scale = b.emit(aten.rsqrt.default, b.emit(aten.add.Scalar, variance, epsilon))
    if weight is not None:
        scale = b.emit(aten.mul.Tensor, scale, weight)
    shift = b.emit(aten.neg.default, b.emit(aten.mul.Tensor, mean, scale))
    if bias is not None:
        shift = b.emit(aten.add.Tensor, shift, bias)
    shape = [-1, *[1] * (x.meta["val"].dim() - 2)]
    scale, shift = b.emit(aten.view.default, scale, shape), b.emit(aten.view.default, shift, shape)
    saved = b.emit(aten.new_empty.default, x, [0])
    return [b.emit(aten.add.Tensor, b.emit(aten.mul.Tensor, x, scale), shift), saved, saved]


def _batch_norm_of_batch(
    b: GraphBuilder, x: fx.Node, weight: Any, bias: Any, training: bool, momentum: float, epsilon: float
) -> list[fx.Node] | None:
    """Statistics of the input itself (instance norm)."""
    value = x.meta["val"]
    if not training or value.dim() < 2:
        return None
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
    return [result, b.emit(aten.view.default, mean, [-1]), b.emit(aten.view.default, inverse, [-1])]


# Op -> rule(builder, *args, **kwargs): the result as a node, or None where the op is right as it is.
# Half tensors among the arguments are f32 already.
REWRITES: dict[Any, Callable[..., Any]] = {
    aten._native_batch_norm_legit.no_stats: _batch_norm_of_batch,
    aten._native_batch_norm_legit_no_training.default: _batch_norm_inference,
    aten.constant_pad_nd.default: _pad,
    aten.fmod.Scalar: _fmod,
    aten.gelu.default: _gelu,
    aten.reciprocal.default: _reciprocal,
    aten.softmax.int: _softmax,
    aten._softmax.default: _softmax,
    aten.log_softmax.int: _log_softmax,
    aten._log_softmax.default: _log_softmax,
}
