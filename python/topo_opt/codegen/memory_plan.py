"""Offsets in one arena for temporaries whose lifetimes are known.

The largest is placed first, each at the lowest offset where it meets nothing that lives at the same time (first fit by
decreasing size). Dynamic storage allocation is NP-hard; this is the usual heuristic and within a few percent of the lower
bound on networks, where a few sizes repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from topo_opt.runtime.plan import ALIGNMENT


@dataclass(frozen=True)
class Lifetime:
    """One temporary: bytes, and the first and last step (inclusive) at which its content matters."""

    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Placement:
    """Offsets in bytes, one a lifetime; the arena's size; and what it would be without reuse."""

    offsets: tuple[int, ...]
    peak: int
    naive: int


def align(nbytes: int) -> int:
    """`nbytes` rounded up to `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def place(lifetimes: Sequence[Lifetime]) -> Placement:
    """Places every lifetime. Ties are broken by first step and position, so the result is deterministic."""
    count = len(lifetimes)
    sizes = [align(t.nbytes) for t in lifetimes]
    order = sorted(range(count), key=lambda i: (-sizes[i], lifetimes[i].first, i))
    first, last, low, high = (np.empty(count, dtype=np.int64) for _ in range(4))
    offsets, peak = [0] * count, 0
    for done, i in enumerate(order):
        t = lifetimes[i]
        clash = (first[:done] <= t.last) & (last[:done] >= t.first)
        offset = _lowest_gap(low[:done][clash], high[:done][clash], sizes[i]) if sizes[i] else 0
        offsets[i] = offset
        first[done], last[done], low[done], high[done] = t.first, t.last, offset, offset + sizes[i]
        peak = max(peak, offset + sizes[i])
    return Placement(tuple(offsets), peak, sum(sizes))


def _lowest_gap(low: np.ndarray, high: np.ndarray, size: int) -> int:
    if low.size == 0:
        return 0
    order = np.argsort(low, kind="stable")
    low, reach = low[order], np.maximum.accumulate(high[order])
    if low[0] >= size:
        return 0
    gaps = np.nonzero(low[1:] - reach[:-1] >= size)[0]
    return int(reach[gaps[0]] if gaps.size else reach[-1])
