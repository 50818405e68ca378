"""Exact minimisation of a sum of tables over variables with few values each: bucket elimination.

    minimise  sum over tables T of T[x_v for v in scope(T)]

A variable is eliminated by adding up all tables that have it in their scope and keeping, for every choice of the other
variables in them, the least sum and the value that gives it. Going back through the eliminated variables in reverse gives
an optimal assignment. The result is exact; time and memory grow with the largest table that arises, which for chains with
side branches, such as decoders, stays small. (R. Dechter, Bucket elimination: a unifying framework for reasoning, 1999.)

Equal parts of a problem are solved once: tables are shared objects, and what elimination makes of equal tables over equally
placed scopes is remembered. A stack of equal layers so costs one layer and one step a seam.

Costs are whole picoseconds, so that sums do not depend on their order and ties are ties.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int64]
Scope = tuple[int, ...]

FORBIDDEN = 1 << 55
"""Ten hours in picoseconds: more than any plan costs, and small enough for the sum of a hundred tables to fit 64 bits."""


class TooWide(Exception):
    """Elimination would need a table with more entries than allowed."""


@dataclass
class Problem:
    """Variables by number, `sizes[v]` values each; tables with their scopes, axes in the order of the scope.

    `layers[v]` >= 0 says that a variable lies inside a repeated part: those are eliminated first, the seams last.
    """

    sizes: list[int] = field(default_factory=list)
    tables: list[tuple[Scope, Table]] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)

    def variable(self, size: int) -> int:
        self.sizes.append(size)
        self.layers.append(-1)
        return len(self.sizes) - 1

    def add(self, scope: Scope, table: Table) -> None:
        self.tables.append((scope, table))

    def cost(self, choice: Sequence[int]) -> int:
        """The sum of all tables at an assignment."""
        return sum(int(table[tuple(choice[v] for v in scope)]) for scope, table in self.tables)


@dataclass(frozen=True)
class Solution:
    """An assignment, its cost, a lower bound of every assignment's, and how many eliminations were computed and remembered."""

    choice: tuple[int, ...]
    cost: int
    bound: int
    computed: int = 0
    remembered: int = 0

    @property
    def feasible(self) -> bool:
        return self.cost < FORBIDDEN

    @property
    def gap(self) -> float:
        """How far above the optimum the cost can at most be, as a share of it."""
        return 0.0 if self.cost <= self.bound else (self.cost - self.bound) / max(self.bound, 1)


class Memory:
    """What eliminations made of equal tables. One serves all problems that share tables."""

    def __init__(self) -> None:
        self.steps: dict[Any, tuple[Table, Table]] = {}
        self.kept: dict[Any, Table] = {}
        self.computed = self.remembered = 0
        self._alive: list[Table] = []

    def differences(self, table: Table, axis: int) -> Table:
        """[i, j]: by how much the entries at j of an axis are at most above those at i."""
        key = ("differences", id(table), axis)
        known = self.kept.get(key)
        if known is None:
            rows = np.moveaxis(table, axis, 0).reshape(table.shape[axis], -1)
            known = self.kept[key] = np.stack([(rows - row).max(axis=1) for row in rows])
            self._alive.append(table)
        return known

    def slice(self, table: Table, axis: int, values: tuple[int, ...]) -> Table:
        """The table at some values of an axis."""
        key = ("slice", id(table), axis, values)
        known = self.kept.get(key)
        if known is None:
            known = self.kept[key] = np.ascontiguousarray(table.take(values, axis=axis))
            self._alive.append(table)
        return known

    def eliminate(
        self, parts: list[tuple[Scope, Table]], scope: Scope, variable: int, sizes: Sequence[int]
    ) -> tuple[Table, Table]:
        """The least sum over `variable` as a table over `scope`, and the value that gives it."""
        place = {v: i for i, v in enumerate(scope)}
        place[variable] = len(scope)
        shaped = [(tuple(place[v] for v in s), t) for s, t in parts]
        key = tuple(sorted((axes, id(t)) for axes, t in shaped))
        known = self.steps.get(key)
        if known is not None:
            self.remembered += 1
            return known
        self.computed += 1
        total = np.zeros(tuple(sizes[v] for v in (*scope, variable)), dtype=np.int64)
        for axes, table in shaped:
            total += _spread(table, axes, total.ndim)
        best = total.argmin(axis=-1)
        least = np.take_along_axis(total, best[..., None], axis=-1)[..., 0]
        np.minimum(least, FORBIDDEN, out=least)
        self._alive.extend(t for _, t in shaped)
        self.steps[key] = (least, best)
        return least, best


def _spread(table: Table, axes: Sequence[int], rank: int) -> Table:
    """The table with its axes at the given places of `rank` ones, the others of size one."""
    order = sorted(range(len(axes)), key=lambda i: axes[i])
    shape = [1] * rank
    for i in order:
        shape[axes[i]] = table.shape[i]
    return table.transpose(order).reshape(shape)


def solve(
    problem: Problem, memory: Memory | None = None, limit: int = 1 << 23, slack: float = 1e-3
) -> Solution:
    """An optimal assignment. Among equal ones the lowest values, later eliminated variables first.

    Where tables grow large, values that others dominate are dropped first, see `_Elimination.prune`; if that does not
    suffice, values that are worse by at most a total of `slack` of the cost. The bound of the solution says what that
    may have cost.

    Args:
        limit: entries of the largest table that may arise.

    Raises:
        TooWide: the limit does not suffice.
    """
    memory = memory or Memory()
    before = (memory.computed, memory.remembered)
    run = _Elimination(problem, memory, limit, slack)
    try:
        run.run()
    except TooWide:
        if min(problem.layers) >= 0:
            raise
        # Without seams to keep for the end an order with smaller tables may be found; equal layers are then met less often.
        flat = Problem(problem.sizes, problem.tables, [0] * len(problem.sizes))
        run = _Elimination(flat, memory, limit, slack)
        run.run()
    cost = min(run.constant, FORBIDDEN)
    computed, remembered = memory.computed - before[0], memory.remembered - before[1]
    return Solution(run.choice(), cost, cost - run.lost, computed, remembered)


_LARGE = 1 << 16
"""Entries of a table from which on it pays to look for dominated values first."""
_HUB = 8
"""Tables of a variable from which on it counts as one that holds large parts of the problem together."""


class _Elimination:
    """One run of bucket elimination. `buckets[v]` has the tables with v in their scope, by number."""

    def __init__(self, problem: Problem, memory: Memory, limit: int, slack: float):
        self.memory, self.limit, self.slack = memory, limit, slack
        self.sizes = list(problem.sizes)
        self.kept: list[NDArray[np.int64] | None] = [None] * len(self.sizes)
        self.tables = dict(enumerate(problem.tables))
        self.buckets: list[dict[int, tuple[Scope, Table]]] = [{} for _ in self.sizes]
        self.constant = self.lost = 0
        self.least: int | None = None
        for number, (scope, table) in self.tables.items():
            if not scope:
                self.constant += int(table)
            for v in scope:
                self.buckets[v][number] = (scope, table)
        self.counter = len(problem.tables)
        self.queue = _Queue(self.sizes, problem.layers, self.buckets)
        self.steps: list[tuple[int, Scope, Table, tuple[NDArray[np.int64] | None, ...]]] = []

    def run(self) -> None:
        while (variable := self.queue.pop()) is not None:
            scope = self._scope(variable)
            if self._entries(scope, variable) > _LARGE:
                self._shrink((*scope, variable))
            if self._entries(scope, variable) > self.limit:
                raise TooWide(f"a table over {len(scope) + 1} variables")
            self._eliminate(variable, scope)

    def _shrink(self, variables: Scope) -> None:
        """Drops values of these variables until their table is of bearable size, those first that stand in most tables.

        The loss that is allowed goes to tensors that the whole program reads before any other one.
        """
        self.least = None
        order = sorted(variables, key=lambda v: (-len(self.buckets[v]), v))
        hubs = [v for v in order if len(self.buckets[v]) >= _HUB]
        for share, group in (
            (0.0, order),
            (0.05, hubs),
            (0.2, hubs),
            (0.02, order),
            (0.1, order),
            (1.0, order),
        ):
            for v in group:
                if math.prod(self.sizes[u] for u in variables) <= (_LARGE if share == 0.0 else 4 * _LARGE):
                    return
                self.prune(v, share * self.slack)

    def choice(self) -> tuple[int, ...]:
        """The values of all variables, in the numbers of the problem."""
        found = [0] * len(self.sizes)
        for variable, scope, best, kept in reversed(self.steps):
            # A step knows only the values that were left when it was made.
            places = (found[v] if k is None else int(k.searchsorted(found[v])) for v, k in zip(scope, kept))
            place, own = int(best[tuple(places)]), kept[-1]
            found[variable] = place if own is None else int(own[place])
        return tuple(found)

    def prune(self, variable: int, tolerance: float) -> None:
        """Drops values of a variable that another one dominates: whatever the other variables are, it costs at most the
        tolerance more (as a share of all costs), by the sum over tables of the largest difference. (Dead-end elimination:
        R. Goldstein, Efficient rotamer elimination applied to protein side-chains, 1994.)
        """
        size = self.sizes[variable]
        if size < 2:
            return
        worse = np.zeros((size, size), dtype=np.int64)  # [i, j]: how much worse j can be than i
        counted: dict[tuple[int, int], int] = {}
        parts: dict[tuple[int, int], Table] = {}
        for scope, table in self.buckets[variable].values():
            key = (id(table), scope.index(variable))
            counted[key] = counted.get(key, 0) + 1
            parts[key] = table
        for key, table in parts.items():
            worse += counted[key] * self.memory.differences(table, key[1])
            np.clip(worse, -FORBIDDEN, FORBIDDEN, out=worse)
        np.fill_diagonal(worse, FORBIDDEN)
        allowed = self._allowed(tolerance)
        alive = np.ones(size, dtype=bool)
        safe = np.zeros(size, dtype=bool)
        lost = 0
        for i in reversed(np.flatnonzero(worse.min(axis=1) <= allowed)):
            others = np.where(alive, worse[i], FORBIDDEN)
            best = int(others.argmin())
            if not safe[i] and others[best] <= allowed:
                alive[i], safe[best] = False, True
                lost = max(lost, int(others[best]))
        self.lost += lost
        if not alive.all():
            self._restrict(variable, [int(v) for v in np.flatnonzero(alive)])

    def _restrict(self, variable: int, alive: list[int]) -> None:
        kept = np.array(alive, dtype=np.int64)
        before = self.kept[variable]
        self.kept[variable] = kept if before is None else before[kept]
        self.sizes[variable] = len(alive)
        touched = {variable}
        for number, (scope, table) in list(self.buckets[variable].items()):
            entry = (scope, self.memory.slice(table, scope.index(variable), tuple(alive)))
            for v in scope:
                self.buckets[v][number] = entry
                touched.add(v)
        self.queue.touch(sorted(touched))

    def _allowed(self, tolerance: float) -> int:
        """The tolerance as a cost: of a lower bound of all costs, every table at its least, and of what is left of the slack."""
        if not tolerance:
            return 0
        if self.least is None:
            seen = {n: t for bucket in self.buckets for n, (_, t) in bucket.items()}
            self.least = self.constant + sum(int(t.min()) for t in seen.values())
        return max(min(int(tolerance * self.least), int(self.slack * self.least) - self.lost), 0)

    def _scope(self, variable: int) -> Scope:
        return tuple(sorted({v for s, _ in self.buckets[variable].values() for v in s} - {variable}))

    def _entries(self, scope: Scope, variable: int) -> int:
        return math.prod(self.sizes[v] for v in scope) * self.sizes[variable]

    def _eliminate(self, variable: int, scope: Scope) -> None:
        parts = self.buckets[variable]
        least, best = self.memory.eliminate(list(parts.values()), scope, variable, self.sizes)
        self.steps.append((variable, scope, best, tuple(self.kept[v] for v in (*scope, variable))))
        for number, (s, _) in parts.items():
            for v in s:
                if v != variable:
                    self.buckets[v].pop(number, None)
        self.buckets[variable] = {}
        if scope:
            for v in scope:
                self.buckets[v][self.counter] = (scope, least)
            self.counter += 1
            self.queue.touch(scope)
        else:
            self.constant += int(least)


class _Queue:
    """Variables by the size of the table that their elimination makes, those inside layers before the seams."""

    def __init__(self, sizes: list[int], layers: list[int], buckets: list[dict[int, tuple[Scope, Table]]]):
        self.sizes, self.layers, self.buckets = sizes, layers, buckets
        self.current: list[tuple[int, int, int] | None] = [self._key(v) for v in range(len(self.sizes))]
        self.heap = [k for k in self.current if k is not None]
        heapq.heapify(self.heap)

    def _key(self, variable: int) -> tuple[int, int, int]:
        scope = {v for s, _ in self.buckets[variable].values() for v in s}
        scope.add(variable)
        return (int(self.layers[variable] < 0), math.prod(self.sizes[v] for v in scope), variable)

    def touch(self, variables: Iterable[int]) -> None:
        for v in variables:
            if self.current[v] is not None:
                key = self._key(v)
                if key != self.current[v]:
                    self.current[v] = key
                    heapq.heappush(self.heap, key)

    def pop(self) -> int | None:
        while self.heap:
            key = heapq.heappop(self.heap)
            if self.current[key[2]] == key:
                self.current[key[2]] = None
                return key[2]
        return None
