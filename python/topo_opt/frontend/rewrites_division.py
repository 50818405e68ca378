"""Division and remainders as eager defines them, for integers without a way through floats."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from topo_opt.frontend.graph_builder import Argument, GraphBuilder

aten = torch.ops.aten


def _promoted(b: GraphBuilder, x: fx.Node, y: Argument) -> fx.Node:
    """`x` in the type that eager computes `x op y` in; tensors are promoted already, numbers may turn integers to float."""
    own = x.meta["val"].dtype
    if isinstance(y, fx.Node) or own.is_floating_point:
        return x
    if isinstance(y, float):
        return b.emit(aten._to_copy.default, x, dtype=torch.get_default_dtype())
    return b.emit(aten._to_copy.default, x, dtype=torch.int64) if own == torch.bool else x


def _like(b: GraphBuilder, x: fx.Node, y: Argument) -> fx.Node:
    return y if isinstance(y, fx.Node) else b.emit(aten.full_like.default, x, y)


def _is_float(x: fx.Node) -> bool:
    return x.meta["val"].dtype.is_floating_point


def _rounds_up(b: GraphBuilder, rest: fx.Node, y: Argument) -> fx.Node:
    """Whether truncation rounded up: `rest` is not zero and has another sign than the divisor. A boolean tensor."""
    if not isinstance(y, fx.Node):
        return b.emit(aten.lt.Scalar if y > 0 else aten.gt.Scalar, rest, 0)
    apart = b.emit(aten.ne.Tensor, b.emit(aten.lt.Scalar, rest, 0), b.emit(aten.lt.Scalar, y, 0))
    return b.emit(aten.logical_and.default, b.emit(aten.ne.Scalar, rest, 0), apart)


def _fmod(b: GraphBuilder, x: fx.Node, y: Argument) -> fx.Node | None:
    """Floats by way of the remainder of absolute values, which is exact; torch-mlir subtracts the rounded quotient times y."""
    x = _promoted(b, x, y)
    y = _like(b, x, y)
    if not _is_float(x):
        return b.emit(aten.fmod.Tensor, x, y)
    rest = b.emit(aten.remainder.Tensor, b.emit(aten.abs.default, x), b.emit(aten.abs.default, y))
    return b.emit(aten.where.self, b.emit(aten.lt.Scalar, x, 0), b.emit(aten.neg.default, rest), rest)


def _floor_divide(b: GraphBuilder, x: Argument, y: Argument) -> fx.Node | None:
    """As c10::div_floor_integer and c10::div_floor_floating."""
    if not isinstance(x, fx.Node):
        return None
    x = _promoted(b, x, y)
    divisor = _like(b, x, y)
    if not _is_float(x):
        quotient = b.emit(aten.div.Tensor_mode, x, divisor, rounding_mode="trunc")
        rest = b.emit(aten.sub.Tensor, x, b.emit(aten.mul.Tensor, quotient, divisor))
        return b.emit(aten.where.self, _rounds_up(b, rest, y), b.emit(aten.sub.Scalar, quotient, 1), quotient)
    rest = _fmod(b, x, divisor)
    ratio = b.emit(aten.div.Tensor, x, divisor)
    exact = b.emit(aten.div.Tensor, b.emit(aten.sub.Tensor, x, rest), divisor)
    exact = b.emit(aten.where.self, _rounds_up(b, rest, y), b.emit(aten.sub.Scalar, exact, 1), exact)
    whole = b.emit(aten.floor.default, exact)
    off = b.emit(aten.gt.Scalar, b.emit(aten.sub.Tensor, exact, whole), 0.5)
    whole = b.emit(aten.where.self, off, b.emit(aten.add.Scalar, whole, 1), whole)
    # A zero quotient has the sign of the ratio, which a product with zero keeps.
    zero = b.emit(aten.mul.Scalar, ratio, 0.0)
    whole = b.emit(aten.where.self, b.emit(aten.eq.Scalar, exact, 0), zero, whole)
    return b.emit(aten.where.self, b.emit(aten.eq.Scalar, divisor, 0), ratio, whole)


def _div_mode(
    b: GraphBuilder, x: Argument, y: Argument, *, rounding_mode: str | None = None
) -> fx.Node | None:
    if not isinstance(x, fx.Node) or rounding_mode is None:
        return None
    if rounding_mode == "floor":
        return _floor_divide(b, x, y)
    x = _promoted(b, x, y)
    divisor = _like(b, x, y)
    if _is_float(x):
        return b.emit(aten.trunc.default, b.emit(aten.div.Tensor, x, divisor))
    return b.emit(aten.div.Tensor_mode, x, divisor, rounding_mode="trunc")


DIVISION: dict[Any, Callable[..., Any]] = {
    aten.floor_divide.default: _floor_divide,
    aten.floor_divide.Scalar: _floor_divide,
    aten.div.Tensor_mode: _div_mode,
    aten.div.Scalar_mode: _div_mode,
    aten.fmod.Scalar: _fmod,
    aten.fmod.Tensor: _fmod,
}
