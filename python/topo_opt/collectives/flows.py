"""Flows that share links fairly: rates, and the order in which they finish.

Rates are max-min fair (progressive filling, Bertsekas and Gallager, "Data Networks", 6.5.2): all flows grow alike until a
link is full; those that cross it keep their rate, the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
# Flows that finish this close to each other, as a part of their size, finish together: rounding must not make events.
TOGETHER = 1e-9
KEPT = 4096


class FairFlows:
    """Flows on given routes. All flows of one route have the same rate, so that a route is advanced as a whole.

    Args:
        crossings: (routes, links), how often a byte on each route crosses each link.
        capacities: (links,) in bytes per second.
    """

    def __init__(self, crossings: Array, capacities: Array) -> None:
        self._crossings, self._capacities = crossings, capacities
        routes = len(crossings)
        self._count = np.zeros(routes)
        self._served = np.zeros(routes)  # bytes that each flow of a route has got since the beginning
        self._next = np.full(routes, np.inf)  # of those, where the next flow finishes
        self._waiting: list[list[tuple[float, int]]] = [[] for _ in range(routes)]
        self._rates = np.zeros(routes)
        self._known: dict[bytes, Array] = {}
        self._changed = False
        self.carried = np.zeros(routes)

    def start(self, flow: int, route: int, nbytes: float) -> None:
        """Begins to send."""
        heappush(self._waiting[route], (self._served[route] + nbytes, flow))
        self._next[route] = self._waiting[route][0][0]
        self._count[route] += 1
        self.carried[route] += nbytes
        self._changed = True

    def until_next(self) -> float:
        """Seconds until the next flow finishes; inf when none is active."""
        if self._changed:
            self._rates = self._fair()
            self._changed = False
        left = np.full(len(self._count), np.inf)
        np.divide(self._next - self._served, self._rates, out=left, where=self._count > 0)
        return max(0.0, float(left.min()))

    def advance(self, seconds: float) -> list[int]:
        """Lets time pass, at most until the next flow finishes; the flows that have finished."""
        self._served += self._rates * seconds * (self._count > 0)
        done = []
        near = self._served >= self._next * (1 - TOGETHER)
        for route in np.flatnonzero(near & (self._count > 0)):
            waiting = self._waiting[route]
            while waiting and waiting[0][0] * (1 - TOGETHER) <= self._served[route]:
                done.append(heappop(waiting)[1])
                self._count[route] -= 1
            self._next[route] = waiting[0][0] if waiting else np.inf
            if not waiting:
                self._served[route] = 0.0
            self._changed = True
        return done

    def _fair(self) -> Array:
        key = self._count.tobytes()
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= KEPT:
                self._known.clear()
            found = self._known[key] = max_min(self._crossings, self._capacities, self._count)
        return found


def max_min(crossings: Array, capacities: Array, counts: Sequence[float] | Array) -> Array:
    """Fair rates of a flow on each route, with so many flows on them; 0 where there are none.

    Args:
        crossings: (routes, links).
        capacities: (links,).
        counts: (routes,).
    """
    count = np.asarray(counts, dtype=float)
    rates = np.zeros(len(count))
    growing = count > 0
    left = capacities.astype(float).copy()
    while growing.any():
        load = (count * growing) @ crossings
        share = np.divide(left, load, out=np.full(len(left), np.inf), where=load > 0)
        level = share.min()
        full = share <= level * (1 + 1e-12)
        stopped = growing & (crossings @ full > 0)
        rates[stopped] = level
        left = np.maximum(left - level * ((count * stopped) @ crossings), 0.0)
        growing &= ~stopped
    return rates
