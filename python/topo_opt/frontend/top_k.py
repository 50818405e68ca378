"""`aten.topk` of short rows as `topo::top_k`, which works along the last dimension."""

from typing import Any

import torch
from torch import fx

from topo_opt.frontend.graph_builder import GraphBuilder
from topo_opt.frontend.topo_ops import TOP_K

aten = torch.ops.aten

LONGEST_ROW = 2048
"""A row is held in registers, and every pick looks at all of it."""
MOST_PICKS = 64
# Types whose order fits in 32 bits, with the position beside it in one 64-bit key.
_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int16, torch.int8)


def fits_top_k(node: fx.Node) -> bool:
    """Whether an `aten.topk` of a static graph has the sizes and types that a kernel picks from."""
    x, k, dim = (
        node.args[0].meta["val"],
        node.args[1],
        node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", -1),
    )
    if x.dim() == 0 or x.numel() == 0 or x.dtype not in _TYPES:
        return False
    return x.shape[dim] <= LONGEST_ROW and 1 <= k <= MOST_PICKS


def top_k(
    b: GraphBuilder, x: fx.Node, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> list[Any]:
    """As `aten.topk`; what comes out is sorted in any case."""
    rank = x.meta["val"].dim()
    order = [d for d in range(rank) if d != dim % rank] + [dim % rank]
    moves = order != list(range(rank))
    if moves:
        x = b.emit(aten.permute.default, x, order)
    value = x.meta["val"]
    with b.mode:
        shape = (*value.shape[:-1], k)
        results = (
            torch.empty(shape, dtype=value.dtype, device=value.device),
            torch.empty(shape, dtype=torch.int64, device=value.device),
        )
    picked = b.call(TOP_K, (x, k, largest), {}, results)
    if not moves:
        return picked
    back = [order.index(d) for d in range(rank)]
    return [b.emit(aten.permute.default, p, back) for p in picked]
