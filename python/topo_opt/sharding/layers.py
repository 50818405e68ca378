"""Repeated parts of a function: equal sequences of operations one behind the other, such as the layers of a decoder.

Found by a hash of every operation's structure (rule, work, shapes; not names). Inside a layer variables are eliminated
first, so that equal layers, which make equal tables, are solved once for every way in which their seams can lie; what is left
is a chain over the seams, and its minimum is that of the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from topo_opt.sharding.plan_graph import PlanGraph

MIN_OPS = 4
"""Operations from which on a repeated part counts as a layer."""


@dataclass(frozen=True)
class Layers:
    """`layer_of[i]` is the layer of operation i, -1 outside; `starts` the first operation of every layer; `period` their length."""

    layer_of: tuple[int, ...]
    starts: tuple[int, ...]
    period: int


def layers_of(graph: PlanGraph) -> Layers:
    """The repetition that covers most operations, cut where the fewest values pass from one layer to the next."""
    kinds = graph.kinds
    start, period, count = _longest(kinds)
    if count < 2:
        return Layers((-1,) * len(graph.ops), (), 0)
    covered = period * count + _rest(kinds, start, period, count)
    crossing = _crossings(graph)
    shifts = range(min(period, covered - period * (count - 1) + 1))
    shift = min(shifts, key=lambda s: (sum(crossing[start + s + k * period] for k in range(1, count)), s))
    start += shift
    count = (covered - shift) // period
    layer_of = [-1] * len(graph.ops)
    for i in range(start, start + period * count):
        layer_of[i] = (i - start) // period
    return Layers(tuple(layer_of), tuple(start + k * period for k in range(count)), period)


def _longest(kinds: Sequence[int]) -> tuple[int, int, int]:
    """Start, period and count of the repetition with the most operations; of equal ones the shortest period."""
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for i, kind in enumerate(kinds):
        if kind in last:
            distances[i - last[kind]] += 1
        last[kind] = i
    best = (0, 0, 0)
    for period, _ in sorted(distances.most_common(64), key=lambda e: (-e[1], e[0])):
        if period < MIN_OPS:
            continue
        start, run = _run(kinds, period)
        count = run // period + 1 if run >= period else 0
        if count >= 2 and period * count > best[1] * best[2]:
            best = (start, period, count)
    return best


def _run(kinds: Sequence[int], period: int) -> tuple[int, int]:
    """Start and length of the longest run in which every operation is like the one a period later."""
    best = (0, 0)
    start = 0
    for i in range(len(kinds) - period + 1):
        if i == len(kinds) - period or kinds[i] != kinds[i + period]:
            if i - start > best[1]:
                best = (start, i - start)
            start = i + 1
    return best


def _rest(kinds: Sequence[int], start: int, period: int, count: int) -> int:
    """Operations behind the last whole layer that still continue the repetition."""
    end = start + period * count
    rest = 0
    while end + rest < len(kinds) and kinds[end + rest] == kinds[end + rest - period]:
        rest += 1
    return rest


def _crossings(graph: PlanGraph) -> list[int]:
    """How many results are used on both sides of the place before every operation."""
    change = [0] * (len(graph.ops) + 2)
    for value in graph.values:
        if value.producer >= 0 and value.uses:
            last = max(op for op, _ in value.uses)
            change[value.producer + 1] += 1
            change[last + 1] -= 1
    found, total = [], 0
    for delta in change:
        total += delta
        found.append(total)
    return found
