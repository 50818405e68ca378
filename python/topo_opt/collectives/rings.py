"""Orders of devices in which a ring costs least, found on a matrix of what each hop costs.

The order is the best Hamiltonian cycle: the most expensive hop first of all, then the sum. It is exact up to `EXACT` devices
(a dynamic program over subsets, Held and Karp 1962); beyond, a tour along a minimum spanning tree is improved by reversals
(2-opt), moves (or-opt) and double bridges (iterated local search), until it reaches the bound that the tree gives or the work is
used up. Everything is deterministic: of equal orders the first wins, and random numbers have a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

EXACT = 9
MAX_SWEEPS = 30
MAX_KICKS, FURTHER_KICKS, KICK_WORK = 60, 4, 60_000
"""Beyond `EXACT` a search starts again from the best order so far, changed at random: so often at most, less for rings beside
a first one and for many devices."""
MIN_CHANNEL = 0.1
"""A further ring must have this part of the first one's rate."""

Matrix = NDArray[np.float64]
Order = tuple[int, ...]


def best_order(cost: Matrix, kicks: int = MAX_KICKS) -> Order | None:
    """The cheapest cycle through all rows of `cost` (seconds or any other unit; inf where there is no hop), from row 0.

    None when no cycle exists, or none was found beyond `EXACT` devices, where `kicks` bounds the search.
    """
    n = len(cost)
    off = cost[~np.eye(n, dtype=bool)]
    if n <= 2 or not off.size or (off == off[0]).all():
        order = tuple(range(n))
        return order if n < 2 or np.isfinite(off).all() else None
    if n <= EXACT:
        return _exact(cost)
    found = _heuristic(cost, kicks)
    return found if np.isfinite(_bottleneck(cost, found)) else None


def _bottleneck(cost: Matrix, order: Order) -> float:
    return float(max(cost[a, b] for a, b in zip(order, (*order[1:], order[0]))))


def _length(cost: Matrix, order: Order) -> float:
    return float(sum(cost[a, b] for a, b in zip(order, (*order[1:], order[0]))))


def _exact(cost: Matrix) -> Order | None:
    """The least worst hop by bisection over all hop costs, then the least sum among hops that are no worse."""
    levels = sorted(
        {c for i, row in enumerate(cost.tolist()) for j, c in enumerate(row) if i != j and c < np.inf}
    )
    low, high = 0, len(levels)
    while low < high:
        middle = (low + high) // 2
        if _reaches_all(cost <= levels[middle]):
            high = middle
        else:
            low = middle + 1
    if low == len(levels):
        return None
    return _shortest(np.where(cost <= levels[low], cost, np.inf))


def _reaches_all(allowed: NDArray[np.bool_]) -> bool:
    """Whether a cycle through all devices uses allowed hops only. Sets of devices and of ends are bit masks."""
    n = len(allowed)
    into = [sum(1 << a for a in range(n) if a != b and allowed[a, b]) for b in range(n)]
    ends = [0] * (
        1 << n
    )  # set of visited devices, device 0 among them -> devices that a path through them can end at
    ends[1] = 1
    for visited in range(1, 1 << n, 2):
        reached = ends[visited]
        if not reached:
            continue
        for b in range(1, n):
            if not visited >> b & 1 and reached & into[b]:
                ends[visited | 1 << b] |= 1 << b
    return bool(ends[-1] & into[0])


def _shortest(cost: Matrix) -> Order | None:
    n = len(cost)
    rows = cost.tolist()
    infinite = float("inf")
    best: list[dict[int, tuple[float, int]]] = [{} for _ in range(1 << n)]
    best[1][0] = (0.0, -1)
    for visited in range(1, 1 << n, 2):
        for end, (length, _) in best[visited].items():
            row = rows[end]
            for b in range(1, n):
                if not visited >> b & 1 and row[b] < infinite:
                    known = best[visited | 1 << b].get(b)
                    if known is None or length + row[b] < known[0]:
                        best[visited | 1 << b][b] = (length + row[b], end)
    full = (1 << n) - 1
    closed = [(length + rows[end][0], end) for end, (length, _) in best[full].items()]
    if not closed or min(closed)[0] == infinite:
        return None
    end, visited, order = min(closed)[1], full, []
    while end != -1:
        order.append(end)
        visited, end = visited & ~(1 << end), best[visited][end][1]
    return tuple(reversed(order))


def _heuristic(cost: Matrix, kicks: int) -> Order:
    # Hops that don't exist are very expensive instead of impossible, so that a search can pass over them.
    finite = cost[np.isfinite(cost)]
    dear = float(finite.max()) * len(cost) * 4 if finite.size else 1.0
    usable = np.where(np.isfinite(cost), cost, dear)
    order, tree = _spanning_tree_order(usable)
    # A cycle without one hop spans all devices, and it crosses the dearest cut of the tree twice.
    least = (sum(tree) + max(tree)) * (1 + 1e-9)
    best = _improved(usable, order)
    random = np.random.default_rng(0)
    for _ in range(min(kicks, KICK_WORK // len(cost) ** 2)):
        if _length(usable, tuple(best)) <= least:
            break
        found = _improved(usable, _kicked(best, random))
        if _rank(usable, found) <= _rank(usable, best):
            best = found
    start = best.index(0)
    return tuple(best[start:] + best[:start])


def _improved(cost: Matrix, order: list[int]) -> list[int]:
    for _ in range(MAX_SWEEPS):
        if not (_two_opt(cost, order) or _or_opt(cost, order)):
            break
    return order


def _rank(cost: Matrix, order: list[int]) -> tuple[float, float]:
    return _bottleneck(cost, tuple(order)), _length(cost, tuple(order))


def _kicked(order: list[int], random: np.random.Generator) -> list[int]:
    """Two neighbouring stretches change places (a double bridge), which reversals and moves do not undo."""
    a, b, c = sorted(random.choice(len(order) - 1, 3, replace=False) + 1)
    return order[:a] + order[b:c] + order[a:b] + order[c:]


def _spanning_tree_order(cost: Matrix) -> tuple[list[int], list[float]]:
    """Devices in the order of a walk over a minimum spanning tree (Prim), nearest branches first: clusters stay together.

    Also the costs of the tree's hops.
    """
    n = len(cost)
    distance, parent = cost[0].copy(), np.zeros(n, dtype=int)
    outside = np.ones(n, dtype=bool)
    outside[0] = False
    children: list[list[int]] = [[] for _ in range(n)]
    hops: list[float] = []
    for _ in range(n - 1):
        nearest = int(np.argmin(np.where(outside, distance, np.inf)))
        hops.append(float(distance[nearest]))
        outside[nearest] = False
        children[parent[nearest]].append(nearest)
        closer = cost[nearest] < distance
        parent[closer & outside] = nearest
        distance = np.minimum(distance, cost[nearest])
    order, stack = [], [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(children[node]))
    return order, hops


def _two_opt(cost: Matrix, order: list[int]) -> bool:
    """Reverses the stretch whose reversal shortens the cycle most; repeats while any does. Costs must be near symmetric."""
    n, changed = len(order), False
    for _ in range(4 * n):
        at = np.array(order)
        after = np.array(order[1:] + order[:1])
        step = cost[at, after]
        gain = step[:, None] + step[None, :] - cost[np.ix_(at, at)] - cost[np.ix_(after, after)]
        gain[np.tril_indices(n)] = -np.inf
        i, j = divmod(int(np.argmax(gain)), n)
        if gain[i, j] <= 1e-9 * float(step.sum()):
            return changed
        candidate = order[: i + 1] + order[i + 1 : j + 1][::-1] + order[j + 1 :]
        if _length(cost, tuple(candidate)) >= _length(cost, tuple(order)):
            return changed
        order[:] = candidate
        changed = True
    return changed


def _or_opt(cost: Matrix, order: list[int]) -> bool:
    """Moves up to three neighbours to another place; the first improvement of each length."""
    n, changed = len(order), False
    for length in (1, 2, 3):
        for i in range(n):
            rotated = order[i:] + order[:i]
            piece, rest = rotated[:length], rotated[length:]
            if len(rest) < 2:
                continue
            at, after = np.array(rest), np.array(rest[1:] + rest[:1])
            removed = cost[rest[-1], piece[0]] + cost[piece[-1], rest[0]] - cost[rest[-1], rest[0]]
            added = cost[at, piece[0]] + cost[piece[-1], after] - cost[at, after]
            place = int(np.argmin(added))
            if added[place] < removed - 1e-9 * abs(removed):
                order[:] = rest[: place + 1] + piece + rest[place + 1 :]
                changed = True
    return changed


def channels(
    capacity: Matrix, cost: Matrix, spend: Callable[[Order], tuple[float, Matrix]], most: int
) -> list[tuple[Order, float]]:
    """Rings that together use links which one ring leaves idle, each with the rate that it gets, the best first.

    Args:
        capacity: what each pair of devices has, bytes per second.
        cost: what each hop costs, as `best_order` takes it.
        spend: takes a ring off the links; gives the rate that it had and what is left between pairs.
        most: no more rings than this.
    """
    out: list[tuple[Order, float]] = []
    while len(out) < most:
        left = np.where(capacity > 0, cost, np.inf)
        back = (out[-1][0][0], *reversed(out[-1][0][1:])) if len(out) % 2 else None
        # The same ring the other way round uses the other directions of the same links: what is left stays regular.
        order = (
            back
            if back and np.isfinite(_bottleneck(left, back))
            else best_order(left, MAX_KICKS if not out else FURTHER_KICKS)
        )
        if order is None:
            break
        rate, capacity = spend(order)
        if rate < MIN_CHANNEL * (out[0][1] if out else 0.0):
            break
        out.append((order, rate))
    return out
