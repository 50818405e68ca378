"""Writes of whole rows at given positions (the KV-cache forms) as `topo::index_update`."""

from typing import Any

import torch
from torch import fx

from topo_opt.frontend.graph_builder import GraphBuilder
from topo_opt.frontend.topo_ops import INDEX_UPDATE

aten = torch.ops.aten


def index_copy(b: GraphBuilder, dest: fx.Node, dim: int, index: fx.Node, source: fx.Node) -> Any:
    """`aten.index_copy` along `dim`."""
    return _update(b, dest, source, index, dim)


def index_put(
    b: GraphBuilder, dest: fx.Node, indices: list[fx.Node | None], values: fx.Node, accumulate: bool = False
) -> Any:
    """`aten.index_put` with one 1-D index: `dest[:, :, index] = values`."""
    (dim,) = (i for i, index in enumerate(indices) if index is not None)
    index = indices[dim]
    assert index is not None
    shape = tuple(dest.meta["val"].shape)
    rows = [*shape[:dim], index.meta["val"].shape[0], *shape[dim + 1 :]]
    if list(values.meta["val"].shape) != rows:
        values = b.emit(aten.expand.default, values, rows)
    return _update(b, dest, values, _wrapped(b, index, shape[dim]), dim)


def updates_rows(
    dest: fx.Node, indices: list[fx.Node | None], values: fx.Node, accumulate: bool = False
) -> bool:
    """Whether an `index_put` has the form that `index_put` above takes.

    With several indices or a boolean one it is a scatter. So it is when `accumulate` adds, since a position may come twice.
    """
    given = [i for i in indices if i is not None]
    if accumulate or len(given) != 1:
        return False
    index = given[0].meta["val"]
    return index.dim() == 1 and index.dtype in (torch.int64, torch.int32)


def _update(b: GraphBuilder, dest: fx.Node, source: fx.Node, index: fx.Node, dim: int) -> Any:
    value = dest.meta["val"]
    if value.dim() == 0:
        return b.emit(aten.reshape.default, source, [])
    if index.meta["val"].dim() == 0:
        index = b.emit(aten.reshape.default, index, [1])
    with b.mode:
        result = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    return b.call(INDEX_UPDATE, (dest, source, index, dim % value.dim()), {}, result)


def _wrapped(b: GraphBuilder, index: fx.Node, length: int) -> fx.Node:
    """Positions counted from the end made positions."""
    from_end = b.emit(aten.add.Scalar, index, length)
    return b.emit(aten.where.self, b.emit(aten.lt.Scalar, index, 0), from_end, index)


def scatter(
    b: GraphBuilder, dest: fx.Node, indices: list[fx.Node | None], values: fx.Node, accumulate: bool = False
) -> Any:
    """`aten.index_put` in general, with positions from the end resolved, which torch-mlir does not do."""
    if any(i is not None and i.meta["val"].dtype == torch.bool for i in indices):
        return None
    lengths = dest.meta["val"].shape
    wrapped = [i if i is None else _wrapped(b, i, lengths[dim]) for dim, i in enumerate(indices)]
    return b.emit(aten.index_put.default, dest, wrapped, values, accumulate)


def masked_put(
    b: GraphBuilder, dest: fx.Node, indices: list[fx.Node | None], values: fx.Node, accumulate: bool = False
) -> Any:
    """`dest[mask] = value` with one value for all: a selection, where in general the number of positions depends on data."""
    (mask,) = indices
    assert mask is not None
    value = dest.meta["val"]
    shape = [*mask.meta["val"].shape, *[1] * (value.dim() - mask.meta["val"].dim())]
    mask = b.emit(aten.reshape.default, mask, shape)
    return b.emit(aten.where.self, mask, b.emit(aten.reshape.default, values, []), dest)


def puts_one_value(
    dest: fx.Node, indices: list[fx.Node | None], values: fx.Node, accumulate: bool = False
) -> bool:
    """Whether an `index_put` has the form that `masked_put` takes."""
    if accumulate or len(indices) != 1 or indices[0] is None:
        return False
    return indices[0].meta["val"].dtype == torch.bool and values.meta["val"].numel() == 1


def masked_rows_put(
    b: GraphBuilder, dest: fx.Node, indices: list[fx.Node | None], values: fx.Node, accumulate: bool = False
) -> Any:
    """`dest[mask] = values` with a row of values for each true position: the n-th true position gets the n-th row."""
    (mask,) = indices
    assert mask is not None
    shape, covered = tuple(dest.meta["val"].shape), mask.meta["val"].dim()
    rows, rest = values.meta["val"].shape[0], shape[covered:]
    values = b.emit(aten.expand.default, values, [rows, *rest])
    counted = b.emit(aten._to_copy.default, b.emit(aten.reshape.default, mask, [-1]), dtype=torch.int64)
    place = b.emit(aten.sub.Scalar, b.emit(aten.cumsum.default, counted, 0), 1)
    outside = b.emit(
        aten.logical_or.default, b.emit(aten.lt.Scalar, place, 0), b.emit(aten.ge.Scalar, place, rows)
    )
    place = b.emit(aten.where.self, outside, b.emit(aten.full_like.default, place, 0), place)
    spread = b.emit(aten.reshape.default, b.emit(aten.index_select.default, values, 0, place), list(shape))
    if accumulate:
        spread = b.emit(aten.add.Tensor, dest, spread)
    mask = b.emit(aten.reshape.default, mask, [*shape[:covered], *[1] * len(rest)])
    return b.emit(aten.where.self, mask, spread, dest)


def puts_rows_by_mask(
    dest: fx.Node, indices: list[fx.Node | None], values: fx.Node, accumulate: bool = False
) -> bool:
    """Whether an `index_put` has the form that `masked_rows_put` takes."""
    if len(indices) != 1 or indices[0] is None or indices[0].meta["val"].dtype != torch.bool:
        return False
    target, given, mask = dest.meta["val"], values.meta["val"], indices[0].meta["val"]
    narrow = accumulate and target.dtype in (torch.float16, torch.bfloat16, torch.bool)
    whole = given.dim() == target.dim() - mask.dim() + 1 and 0 not in (*given.shape, *target.shape)
    return whole and given.dtype == target.dtype and mask.dim() > 0 and not narrow


def index_add(
    b: GraphBuilder, dest: fx.Node, dim: int, index: fx.Node, source: fx.Node, *, alpha: Any = 1
) -> Any:
    """`aten.index_add` as an accumulating `index_put` along the first dim."""
    rank = dest.meta["val"].dim()
    if rank == 0 or index.meta["val"].dim() == 0:
        return None
    if alpha != 1:
        source = b.emit(aten.mul.Scalar, source, alpha)
    dim %= rank
    order = [dim, *(d for d in range(rank) if d != dim)]
    back = [order.index(d) for d in range(rank)]
    dest, source = (b.emit(aten.permute.default, x, order) for x in (dest, source))
    result = b.emit(aten.index_put.default, dest, [index], source, True)
    return b.emit(aten.permute.default, result, back)
