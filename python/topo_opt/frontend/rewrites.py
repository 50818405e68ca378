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


# Op -> rule(builder, *args, **kwargs): the result as a node, or None where the op is right as it is.
# Half tensors among the arguments are f32 already.
REWRITES: dict[Any, Callable[..., Any]] = {
    aten.gelu.default: _gelu,
    aten.softmax.int: _softmax,
    aten._softmax.default: _softmax,
    aten.log_softmax.int: _log_softmax,
    aten._log_softmax.default: _log_softmax,
}
