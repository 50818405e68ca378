"""Functions of complex numbers by their parts, where torch-mlir lowers the op for reals only."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from topo_opt.frontend.casts import cast
from topo_opt.frontend.graph_builder import Argument, GraphBuilder

aten = torch.ops.aten
Parts = tuple[fx.Node, fx.Node]


def _parts(b: GraphBuilder, x: fx.Node) -> Parts:
    return b.emit(aten.real.default, x), b.emit(aten.imag.default, x)


def _whole(b: GraphBuilder, real: fx.Node, imaginary: fx.Node) -> fx.Node:
    return b.emit(aten.complex.default, real, imaginary)


def _only_complex(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The rule, for calls with a complex operand; real ones are lowered as they are."""

    def applied(b: GraphBuilder, *args: Argument, **options: Argument) -> Any:
        nodes = [a for a in args if isinstance(a, fx.Node)]
        if not any(n.meta["val"].dtype.is_complex for n in nodes):
            return None
        return rule(b, *args, **options)

    return applied


def _neg(b: GraphBuilder, x: fx.Node) -> fx.Node:
    return _whole(b, *(b.emit(aten.neg.default, part) for part in _parts(b, x)))


def _exp(b: GraphBuilder, x: fx.Node) -> fx.Node:
    real, imaginary = _parts(b, x)
    size = b.emit(aten.exp.default, real)
    turns = (b.emit(op, imaginary) for op in (aten.cos.default, aten.sin.default))
    return _whole(b, *(b.emit(aten.mul.Tensor, size, turn) for turn in turns))


def _abs(b: GraphBuilder, x: fx.Node) -> fx.Node:
    """The larger part times a root of at most two, since the square of a large part overflows."""
    real, imaginary = (b.emit(aten.abs.default, part) for part in _parts(b, x))
    order = b.emit(aten.ge.Tensor, real, imaginary)
    large = b.emit(aten.where.self, order, real, imaginary)
    small = b.emit(aten.where.self, order, imaginary, real)
    ratio = b.emit(aten.div.Tensor, small, large)
    root = b.emit(aten.sqrt.default, b.emit(aten.add.Scalar, b.emit(aten.mul.Tensor, ratio, ratio), 1.0))
    even = b.emit(
        aten.logical_or.default,
        b.emit(aten.eq.Scalar, large, 0.0),
        b.emit(aten.eq.Scalar, large, float("inf")),
    )
    return b.emit(aten.where.self, even, large, b.emit(aten.mul.Tensor, large, root))


def _div(b: GraphBuilder, x: Argument, y: Argument) -> fx.Node | None:
    """By the ratio of the divisor's parts, the smaller over the larger, as c10 does: squares overflow or vanish."""
    if not isinstance(x, fx.Node):
        return None
    if not isinstance(y, fx.Node) or not y.meta["val"].dtype.is_complex:
        if isinstance(y, complex):
            return None
        return _whole(
            b,
            *(
                b.emit(aten.div.Tensor if isinstance(y, fx.Node) else aten.div.Scalar, p, y)
                for p in _parts(b, x)
            ),
        )
    (real, imaginary), (c, d) = _parts(b, cast(b, x, y.meta["val"].dtype)), _parts(b, y)
    order = b.emit(aten.ge.Tensor, b.emit(aten.abs.default, c), b.emit(aten.abs.default, d))
    large, small = b.emit(aten.where.self, order, c, d), b.emit(aten.where.self, order, d, c)
    zero = b.emit(aten.eq.Scalar, large, 0.0)
    ratio = b.emit(
        aten.where.self,
        zero,
        b.emit(aten.full_like.default, large, 0.0),
        b.emit(aten.div.Tensor, small, large),
    )
    size = b.emit(aten.add.Tensor, large, b.emit(aten.mul.Tensor, small, ratio))
    size = b.emit(aten.where.self, zero, b.emit(aten.abs.default, large), size)
    turned = [b.emit(aten.mul.Tensor, part, ratio) for part in (real, imaginary)]
    by_real = b.emit(aten.add.Tensor, real, turned[1]), b.emit(aten.sub.Tensor, imaginary, turned[0])
    by_imaginary = b.emit(aten.add.Tensor, turned[0], imaginary), b.emit(aten.sub.Tensor, turned[1], real)
    parts = (
        b.emit(aten.where.self, order, one, other) for one, other in zip(by_real, by_imaginary, strict=True)
    )
    return _whole(b, *(b.emit(aten.div.Tensor, part, size) for part in parts))


def _compared(op: Any, join: Any) -> Callable[..., Any]:
    def rule(b: GraphBuilder, x: fx.Node, y: Argument) -> fx.Node | None:
        if not isinstance(y, fx.Node) or y.meta["val"].dtype != x.meta["val"].dtype:
            return None
        pairs = zip(_parts(b, x), _parts(b, y), strict=True)
        return b.emit(join, *(b.emit(op, p, q) for p, q in pairs))

    return rule


COMPLEX: dict[Any, Callable[..., Any]] = {
    op: _only_complex(rule)
    for op, rule in (
        (aten.neg.default, _neg),
        (aten.exp.default, _exp),
        (aten.abs.default, _abs),
        (aten.div.Tensor, _div),
        (aten.ne.Tensor, _compared(aten.ne.Tensor, aten.logical_or.default)),
    )
}

equal = _only_complex(_compared(aten.eq.Tensor, aten.logical_and.default))
