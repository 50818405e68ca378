"""`aten.as_strided` as a gather from the flat tensor: the IR knows tensors, not the memory under them."""

from collections.abc import Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from topo_opt.frontend.graph_builder import GraphBuilder

aten = torch.ops.aten


def storage_order(value: torch.Tensor) -> list[int] | None:
    """The dims of `value` from outermost to innermost in memory when it fills its storage without gaps, else None."""
    order = sorted(range(value.dim()), key=lambda i: (-value.stride(i), i))
    expected = 1
    for dim in reversed(order):
        if value.shape[dim] != 1 and value.stride(dim) != expected:
            return None
        expected *= value.shape[dim]
    return order if value.storage_offset() == 0 else None


def stays_inside(
    value: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> bool:
    """Whether such a view of `value` reads elements of `value` alone."""
    last = (offset or 0) + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return storage_order(value) is not None and (0 in size or 0 <= last < value.numel())


def from_base(
    x: fx.Node, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> tuple[fx.Node, Sequence[int], Sequence[int], int]:
    """The arguments of `as_strided` on the tensor that `x` is a view of: what is under a view is that tensor's memory."""
    return base_of(x), size, stride, x.meta["val"].storage_offset() if offset is None else offset


def base_of(x: fx.Node) -> fx.Node:
    """The node that made the memory `x` is a view of, or writes into."""
    while x.op == "call_function" and _is_view(x.target):
        (x, *_) = x.all_input_nodes
    return x


def _is_view(target: object) -> bool:
    if not isinstance(target, OpOverload) or len(target._schema.returns) != 1:
        return False
    return target._schema.returns[0].alias_info is not None


def as_strided(
    b: GraphBuilder, x: fx.Node, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> fx.Node:
    """Element `[i, j]` is element `offset + i * stride[0] + j * stride[1]` of `x` in the order of its memory."""
    value = x.meta["val"]
    order = storage_order(value)
    if order is not None and order != list(range(value.dim())):
        x = b.emit(aten.permute.default, x, order)
    flat = b.emit(aten.reshape.default, x, [-1])
    options = {"dtype": torch.int64, "device": value.device}
    places = b.emit(aten.full.default, list(size), offset or 0, **options)
    for dim, (length, step) in enumerate(zip(size, stride, strict=True)):
        steps = b.emit(aten.mul.Scalar, b.emit(aten.arange.start_step, 0, length, 1, **options), step)
        shape = [length if i == dim else 1 for i in range(len(size))]
        places = b.emit(aten.add.Tensor, places, b.emit(aten.view.default, steps, shape))
    rows = b.emit(aten.index_select.default, flat, 0, b.emit(aten.reshape.default, places, [-1]))
    return b.emit(aten.view.default, rows, list(size))
