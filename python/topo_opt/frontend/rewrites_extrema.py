"""Maxima and minima that give NaN when there is one, as eager's do, and their positions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from topo_opt.frontend.graph_builder import GraphBuilder

aten = torch.ops.aten


def _is_float(x: fx.Node) -> bool:
    return x.meta["val"].dtype.is_floating_point


def _pairwise(beats: Any, ignores_nan: bool) -> Callable[..., Any]:
    """The larger or smaller of two floats; a NaN wins, or loses where it is ignored."""

    def rule(b: GraphBuilder, x: fx.Node, y: fx.Node) -> fx.Node | None:
        if not _is_float(x):
            return None
        nan = b.emit(aten.ne.Tensor, y, y) if ignores_nan else b.emit(aten.ne.Tensor, x, x)
        return b.emit(aten.where.self, b.emit(aten.logical_or.default, b.emit(beats, x, y), nan), x, y)

    return rule


def _of_all(reduce: Any) -> Callable[..., Any]:
    def rule(b: GraphBuilder, x: fx.Node) -> fx.Node:
        return b.emit(reduce, x, list(range(x.meta["val"].dim())), False)

    return rule


def position(b: GraphBuilder, x: fx.Node, extreme: fx.Node, dim: int) -> fx.Node:
    """The first position along `dim` at which `x` is `extreme` (which has size 1 there) or NaN; size 1 at `dim`."""
    value = x.meta["val"]
    found = b.emit(aten.eq.Tensor, x, extreme)
    if _is_float(x):
        found = b.emit(aten.logical_or.default, found, b.emit(aten.ne.Tensor, x, x))
    length = value.shape[dim]
    places = b.emit(aten.arange.start_step, 0, length, 1, dtype=torch.int64, device=value.device)
    places = b.emit(aten.view.default, places, [-1 if i == dim else 1 for i in range(value.dim())])
    nowhere = b.emit(aten.full.default, [], length, dtype=torch.int64, device=value.device)
    return b.emit(aten.amin.default, b.emit(aten.where.self, found, places, nowhere), [dim], True)


def _with_position(reduce: Any) -> Callable[..., Any]:
    def rule(b: GraphBuilder, x: fx.Node, dim: int, keepdim: bool = False) -> list[fx.Node] | None:
        value = x.meta["val"]
        if value.dim() == 0 or value.dtype == torch.bool:
            return None
        dim %= value.dim()
        extreme = b.emit(reduce, x, [dim], True)
        results = [extreme, position(b, x, extreme, dim)]
        return results if keepdim else [b.emit(aten.squeeze.dim, r, dim) for r in results]

    return rule


def _only_position(reduce: Any) -> Callable[..., Any]:
    def rule(b: GraphBuilder, x: fx.Node, dim: int | None = None, keepdim: bool = False) -> fx.Node | None:
        value = x.meta["val"]
        if value.dim() == 0 or value.dtype == torch.bool:
            return None
        if dim is None:
            flat = b.emit(aten.reshape.default, x, [-1])
            place = position(b, flat, b.emit(reduce, flat, [0], True), 0)
            return b.emit(aten.view.default, place, [1] * value.dim() if keepdim else [])
        dim %= value.dim()
        place = position(b, x, b.emit(reduce, x, [dim], True), dim)
        return place if keepdim else b.emit(aten.squeeze.dim, place, dim)

    return rule


EXTREMA: dict[Any, Callable[..., Any]] = {
    aten.maximum.default: _pairwise(aten.gt.Tensor, ignores_nan=False),
    aten.minimum.default: _pairwise(aten.lt.Tensor, ignores_nan=False),
    aten.fmax.default: _pairwise(aten.gt.Tensor, ignores_nan=True),
    aten.fmin.default: _pairwise(aten.lt.Tensor, ignores_nan=True),
    aten.max.default: _of_all(aten.amax.default),
    aten.min.default: _of_all(aten.amin.default),
    aten.max.dim: _with_position(aten.amax.default),
    aten.min.dim: _with_position(aten.amin.default),
    aten.argmax.default: _only_position(aten.amax.default),
    aten.argmin.default: _only_position(aten.amin.default),
}
