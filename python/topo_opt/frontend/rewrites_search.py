"""Positions in sorted boundaries, as a count of the boundaries that are lower."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from topo_opt.frontend.casts import cast
from topo_opt.frontend.graph_builder import Argument, GraphBuilder

aten = torch.ops.aten

# Every value is compared with every boundary; beyond this torch's binary search is better.
MOST_BOUNDARIES = 256


def bucketize(
    b: GraphBuilder, x: Argument, boundaries: fx.Node, *, out_int32: bool = False, right: bool = False
) -> fx.Node:
    """The boundaries below the value (`right`: or equal to it) are those that do not stop the search."""
    limits = boundaries.meta["val"]
    if not isinstance(x, fx.Node):
        x = b.emit(aten.full.default, [], x, dtype=limits.dtype, device=limits.device)
    common = torch.promote_types(x.meta["val"].dtype, limits.dtype)
    x, boundaries = cast(b, x, common), cast(b, boundaries, common)
    value = b.emit(aten.unsqueeze.default, x, -1)
    stops = b.emit(aten.gt.Tensor if right else aten.ge.Tensor, boundaries, value)
    passed = cast(b, b.emit(aten.logical_not.default, stops), torch.int64)
    return cast(b, b.emit(aten.sum.dim_IntList, passed, [-1]), torch.int32 if out_int32 else torch.int64)


SEARCH: dict[Any, Callable[..., Any]] = {aten.bucketize.Tensor: bucketize, aten.bucketize.Scalar: bucketize}
