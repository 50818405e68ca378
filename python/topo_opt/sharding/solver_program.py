"""The same sum of tables under limits, as an integer program for HiGHS: for problems that elimination alone does not close.

    minimise   sum over tables T, entries e of T    T[e] * y[T, e]
    so that    sum over values a                    x[v, a] = 1            for every variable v
               sum over entries e with e[v] = a     y[T, e] = x[v, a]      for every table T, v in its scope, value a
               sum over v, a                        w[v, a] * x[v, a] <= limit     for every limit

Tables of one variable need no y. Forbidden entries have none. One thread, a fixed seed and a limit of nodes rather than of
time keep the result the same everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from topo_opt.sharding.solver import FORBIDDEN, Problem, Solution, Table

MAX_ENTRIES = 20_000
"""Entries of all tables together up to which a program is made: larger ones take HiGHS longer than a planner may."""
MAX_NODES = 2_000


@dataclass(frozen=True)
class Limit:
    """`weights[v][a]` is what value a of variable v takes of `most`."""

    weights: Mapping[int, Table]
    most: int


def solve_limited(problem: Problem, limits: Sequence[Limit]) -> Solution | None:
    """The best assignment found under the limits with a bound for all; None when there is none or the problem is too large."""
    if sum(table.size for _, table in problem.tables) > MAX_ENTRIES:
        return None
    program = _Program(problem, limits)
    return program.solve()


class _Program:
    """Columns and rows of the program, entry by entry."""

    def __init__(self, problem: Problem, limits: Sequence[Limit]):
        self.problem = problem
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.rows: list[tuple[list[int], list[float], float, float]] = []
        self.first: list[int] = []
        self.unit = max((int(t[t < FORBIDDEN].max(initial=0)) for _, t in problem.tables), default=1) or 1
        for size in problem.sizes:
            self.first.append(len(self.cost))
            self._columns([0.0] * size)
            self._row(range(self.first[-1], len(self.cost)), 1.0, 1.0)
        for scope, table in problem.tables:
            self._table(scope, table)
        for limit in limits:
            self._limit(limit)

    def _columns(self, costs: Sequence[float]) -> None:
        self.cost.extend(costs)
        self.upper.extend([1.0] * len(costs))

    def _row(self, columns: Sequence[int], low: float, high: float, factors: Sequence[float] = ()) -> None:
        self.rows.append((list(columns), list(factors) or [1.0] * len(columns), low, high))

    def _table(self, scope: tuple[int, ...], table: Table) -> None:
        if len(scope) == 1:
            for value, cost in enumerate(table):
                column = self.first[scope[0]] + value
                if cost >= FORBIDDEN:
                    self.upper[column] = 0.0
                else:
                    self.cost[column] += float(cost) / self.unit
            return
        entries = np.argwhere(table < FORBIDDEN)
        start = len(self.cost)
        self._columns([float(table[tuple(e)]) / self.unit for e in entries])
        for axis, variable in enumerate(scope):
            for value in range(table.shape[axis]):
                chosen = [start + int(i) for i in np.flatnonzero(entries[:, axis] == value)]
                self._row([*chosen, self.first[variable] + value], 0.0, 0.0, [1.0] * len(chosen) + [-1.0])

    def _limit(self, limit: Limit) -> None:
        columns, factors = [], []
        for variable, weights in limit.weights.items():
            for value, weight in enumerate(weights):
                if weight:
                    columns.append(self.first[variable] + value)
                    factors.append(float(weight) / limit.most)
        self._row(columns, -np.inf, 1.0, factors)

    def solve(self) -> Solution | None:
        import highspy

        # `highspy.Highs` itself prints a banner to standard output when it is made, which no option keeps it from.
        model = highspy._core._Highs()
        for option, setting in (
            ("output_flag", False),
            ("threads", 1),
            ("random_seed", 1),
            ("mip_max_nodes", MAX_NODES),
            ("mip_rel_gap", 1e-6),
        ):
            model.setOptionValue(option, setting)
        count, binaries = len(self.cost), sum(self.problem.sizes)
        model.addVars(count, np.zeros(count), np.array(self.upper))
        model.changeColsCost(count, np.arange(count, dtype=np.int32), np.array(self.cost))
        kinds = np.full(binaries, highspy.HighsVarType.kInteger)
        model.changeColsIntegrality(binaries, np.arange(binaries, dtype=np.int32), kinds)
        for columns, factors, low, high in self.rows:
            model.addRow(low, high, len(columns), np.array(columns, dtype=np.int32), np.array(factors))
        model.run()
        info = model.getInfo()
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        values = np.array(model.getSolution().col_value)
        choice = tuple(
            int(values[first : first + size].argmax()) for first, size in zip(self.first, self.problem.sizes)
        )
        cost = self.problem.cost(choice)
        bound = int(info.mip_dual_bound * self.unit * (1 - 1e-6))
        return Solution(choice, min(cost, FORBIDDEN), min(max(bound, 0), cost))
