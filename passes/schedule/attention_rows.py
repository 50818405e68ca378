"""The bounds of attention's keys for a range of its rows, counted from the first of them."""

from __future__ import annotations

from typing import Any

from torch_mlir import ir

from topo_opt.passes.ingest.mask_bounds import affine
from topo_opt.passes.schedule.boxes import Range
from topo_opt.structured.graph import evaluate
from topo_opt.structured.index import Expr, Opaque, symbol

_FAR = 2**40
"""Beyond every position."""


def bounds_from(attributes: Any, rows: Range, keys: int) -> dict[str, ir.Attribute]:
    """`causal`, `low` and `high` of a `topo.attention` of `rows` alone; no bound that excludes none of the `keys`.

    Row m of the new op is row `m + first` of the old one. Causal, which counts from the first row, becomes the bound
    `n < m + first + 1` where that is another row.
    """
    first, count = rows
    row = symbol("m", count) + first
    place = Expr(((Opaque("p", -_FAR, _FAR, frozenset()), 1),))
    low, high = (
        [evaluate(r, (row, place)) for r in ir.AffineMapAttr(attributes[name]).value.results]
        if name in attributes
        else []
        for name in ("low", "high")
    )
    causal = bool(attributes["causal"].value)
    if causal and first:
        high.append(row + 1)
    found: dict[str, ir.Attribute] = {"causal": ir.BoolAttr.get(causal and not first)}
    kept = {
        "low": [bound for bound in low if bound.bounds[1] > 0],
        "high": [bound for bound in high if bound.bounds[0] < keys],
    }
    dims = ir.AffineDimExpr.get(0), ir.AffineDimExpr.get(1)
    for name, bounds in kept.items():
        if bounds:
            found[name] = ir.AffineMapAttr.get(ir.AffineMap.get(2, 0, [affine(b, *dims) for b in bounds]))
    return found
