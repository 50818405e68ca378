"""Pipelines: the function cut into stages that follow each other on different devices.

Every stage runs on a mesh of the same shape, planned once for the whole function; the cuts are places in program order.
Between two stages every value that is alive crosses, each device sending its part to the one in its place. For one call
stages cost the transfers and save memory; with many calls under way the slowest stage sets the pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from topo_opt.sharding.cost import Prices, picoseconds
from topo_opt.sharding.memory import lifetimes
from topo_opt.sharding.plan_memory import Fit
from topo_opt.sharding.plan_problem import MeshProblem
from topo_opt.sharding.solver import FORBIDDEN

MAX_CUTS = 256
"""Places that are considered for cuts: those that the fewest bytes cross."""


@dataclass(frozen=True)
class Stages:
    """`starts[k]` is the first operation of stage k; picoseconds of each, the transfer to the next one included; bytes of each."""

    starts: tuple[int, ...]
    costs: tuple[int, ...]
    memory: tuple[int, ...]

    @property
    def latency(self) -> int:
        return sum(self.costs)

    @property
    def pace(self) -> int:
        """Picoseconds between two calls when all stages are busy."""
        return max(self.costs)


def op_costs(problem: MeshProblem, fit: Fit) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Picoseconds of every operation in a plan: its work, what makes its results lie as they do, and what its operands need."""
    costs, graph = problem.costs, problem.graph
    found = np.zeros(len(graph.ops), dtype=np.int64)
    for index, op in enumerate(graph.ops):
        choices, table = costs.strategies(graph, index)
        chosen = fit.chosen[index]
        found[index] += int(table[choices.index(chosen)])
        for position, operand in enumerate(op.operands):
            if operand >= 0:
                value = graph.values[operand]
                found[index] += costs.conversions.cost(
                    fit.layouts[operand], chosen.operands[position], value.moved_bytes, value.inside
                )
        for position, result in enumerate(op.results):
            if result >= 0:
                value = graph.values[result]
                found[index] += costs.conversions.cost(
                    chosen.results[position], fit.layouts[result], value.moved_bytes, value.inside
                )
    return found


def cut(
    problem: MeshProblem,
    fit: Fit,
    count: int,
    next_devices: Sequence[str],
    prices: Prices,
    limit: int,
    *,
    pace: bool,
) -> Stages | None:
    """The best `count` stages whose memory stays below `limit`; None when there are none.

    Args:
        next_devices: of the second stage, in the order of the mesh: what transfers are priced between.
        pace: whether the slowest stage is to be fast, or all together. State of all calls under way is then kept: with as
            many calls as stages, every stage holds as much state as the whole function would.
    """
    graph, sizes = problem.graph, problem.costs.sizes
    work = np.concatenate([[0], np.cumsum(op_costs(problem, fit))])
    crossing = _crossing(problem, fit)
    places = sorted(np.argsort(crossing[1:-1], kind="stable")[:MAX_CUTS] + 1)
    pairs = tuple(zip(problem.costs.mesh.devices, next_devices))
    sends = {
        int(p): picoseconds(prices.collective("send", int(crossing[p]), pairs).seconds) if crossing[p] else 0
        for p in places
    }
    held = _Held(problem, fit, count if pace else 1, sizes)
    ends = [*(int(p) for p in places), len(graph.ops)]
    starts = [0, *(int(p) for p in places)]
    best: list[dict[int, tuple[int, int]]] = [{0: (0, -1)}]  # stage -> start -> (value so far, start before)
    for stage in range(count):
        reached: dict[int, tuple[int, int]] = {}
        targets = [len(graph.ops)] if stage == count - 1 else ends[:-1]
        for start in starts:
            if start not in best[stage]:
                continue
            value = best[stage][start][0]
            for end in targets:
                if end <= start:
                    continue
                cost = int(work[end] - work[start]) + sends.get(end, 0)
                total = max(value, cost) if pace else value + cost
                known = reached.get(end)
                if (known is None or total < known[0]) and held.between(start, end) <= limit:
                    reached[end] = (total, start)
        best.append(reached)
    if len(graph.ops) not in best[count]:
        return None
    chain = [len(graph.ops)]
    for stage in range(count, 0, -1):
        chain.append(best[stage][chain[-1]][1])
    bounds = chain[::-1]
    costs = tuple(int(work[e] - work[s]) + sends.get(e, 0) for s, e in pairwise(bounds))
    if max(costs) >= FORBIDDEN:
        return None
    memory = tuple(held.between(s, e) for s, e in pairwise(bounds))
    return Stages(tuple(bounds[:-1]), costs, memory)


def _crossing(problem: MeshProblem, fit: Fit) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Bytes of one device that are alive between operation p - 1 and p."""
    graph, sizes = problem.graph, problem.costs.sizes
    change = np.zeros(len(graph.ops) + 2, dtype=np.int64)
    for number, value in enumerate(graph.values):
        if value.producer < 0 or not value.uses:
            continue
        last = max(op for op, _ in value.uses)
        if last > value.producer:
            size = value.nbytes // fit.layouts[number].parts(sizes)
            change[value.producer + 1] += size
            change[last + 1] -= size
    return np.cumsum(change)[:-1]


class _Held:
    """Bytes that a stage holds: the arguments that its operations read, and the most that is alive at one time."""

    def __init__(self, problem: MeshProblem, fit: Fit, states: int, sizes: Sequence[int]):
        graph = problem.graph
        self._arguments: list[tuple[int, int, int]] = []  # first reader, last reader, bytes
        for number in graph.arguments:
            value = graph.values[number]
            readers = [op for op, _ in value.uses] or [0]
            size = -(-value.nbytes // fit.layouts[number].parts(sizes))
            times = states if value.kind in ("buffer", "input") else 1
            self._arguments.append((min(readers), max(readers), size * times))
        columns = np.array(self._arguments, dtype=np.int64).reshape(-1, 3)
        self._first, self._last, self._size = columns.T
        change = np.zeros(len(graph.ops) + 1, dtype=np.int64)
        for number, begin, end in lifetimes(graph):
            nbytes = -(-graph.values[number].nbytes // fit.layouts[number].parts(sizes))
            change[begin] += nbytes
            change[end + 1] -= nbytes
        self._alive = np.cumsum(change[:-1])
        self._known: dict[tuple[int, int], int] = {}

    def between(self, start: int, end: int) -> int:
        known = self._known.get((start, end))
        if known is None:
            inside = (self._first < end) & (self._last >= start)
            known = int(self._size[inside].sum()) + int(self._alive[start:end].max(initial=0))
            self._known[(start, end)] = known
        return known
