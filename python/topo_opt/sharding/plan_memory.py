"""The cheapest plan that fits into memory.

Memory is a sum over the same variables as the cost: bytes of arguments as they lie, and of what is alive where intermediate
results take the most. With a price on every byte (a Lagrange multiplier) it becomes part of the cost, and the problem keeps
its form. For any price `cost + price * (bytes - limit)` at its minimum is below the cost of every plan that fits, which
bounds how far the plan that is found can be from the best. Raising the price for the first k arguments only, in the order of
the function, goes in small steps from a plan that is too large to one that fits. What is then left between the plan and
the bound an integer program closes where the problem is small enough (`solver_program.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from topo_opt.sharding.memory import MemoryUse, lifetimes, memory_use
from topo_opt.sharding.plan_problem import MeshProblem
from topo_opt.sharding.solver import FORBIDDEN, Memory, Problem, Solution, Table, solve
from topo_opt.sharding.solver_program import Limit, solve_limited
from topo_opt.sharding.strategies import Layout, Strategy

PRICE_STEPS = 8
"""Bisections of the price, and of the number of arguments that it applies to."""
PROGRAMS = 4
"""Integer programs that are solved at most, each for less memory."""
GAP_TO_CLOSE = 0.005
"""Distance to the bound, as a share, from which on an integer program is tried."""


@dataclass(frozen=True)
class Fit:
    """A plan for one mesh: the solution, what it stands for, and the memory of one device. `fits` says whether that is allowed."""

    solution: Solution
    chosen: list[Strategy]
    layouts: list[Layout]
    memory: MemoryUse
    fits: bool


class Fitting:
    """Solves one problem under memory limits."""

    def __init__(self, problem: MeshProblem, memory: Memory | None = None):
        self.problem, self.memory = problem, memory or Memory()
        graph = problem.graph
        self._arguments = [n for n in graph.arguments if problem.value_variables[n] >= 0]
        self._lifetimes = lifetimes(graph)

    def free(self) -> Fit:
        """The cheapest plan, whatever memory it takes."""
        return self._fit(solve(self.problem.problem, self.memory), limit=None)

    def _least_arguments(self) -> int:
        """Bytes of one device that arguments take when each lies in as many parts as it can."""
        return sum(int(self.problem.stored_bytes(n).min()) for n in self._arguments)

    def within(self, limit: int, start: Fit | None = None) -> Fit:
        """The cheapest plan found that fits; one with the least memory when none does.

        Args:
            start: what `free` gave.
        """
        best = replace(start or self.free(), fits=False)
        if best.memory.total <= limit:
            return replace(best, fits=True)
        bound, points = best.solution.cost, [best.memory.peak_op]
        low, high = 0.0, 4.0 * best.solution.cost / limit
        if self._least_arguments() > limit:  # nothing fits: what comes closest is told
            fit, _ = self._priced(high * 8**6, limit, points, len(self._arguments), 0.0)
            return replace(fit, fits=False) if fit.memory.total < best.memory.total else best
        fitting: Fit | None = None
        for _ in range(12):  # find a price that makes it fit
            fit, least = self._priced(high, limit, points, len(self._arguments), 0.0)
            bound = max(bound, least)
            if fit.memory.total <= limit:
                fitting = fit
                break
            if fit.memory.peak_op not in points:
                points.append(fit.memory.peak_op)
            if fit.memory.total < best.memory.total or fit.solution.cost >= FORBIDDEN:
                best = replace(fit, fits=False)
            low, high = high, high * 8
        if fitting is None:
            return self._programmed(limit, None, bound) or best
        for _ in range(PRICE_STEPS):
            middle = (low + high) / 2 if low else high / 8
            fit, least = self._priced(middle, limit, points, len(self._arguments), 0.0)
            bound = max(bound, least)
            if fit.memory.total <= limit:
                high, fitting = middle, _cheaper(fit, fitting)
            else:
                low = middle
        few, many = 0, len(self._arguments)
        while many - few > 1 and fitting.solution.cost > bound:
            middle_count = (few + many) // 2
            fit, _ = self._priced(high, limit, points, middle_count, low)
            if fit.memory.total <= limit:
                many, fitting = middle_count, _cheaper(fit, fitting)
            else:
                few = middle_count
        solution = replace(fitting.solution, bound=min(bound, fitting.solution.cost))
        found = replace(fitting, solution=solution, fits=True)
        if solution.gap > GAP_TO_CLOSE:
            return self._programmed(limit, found, bound) or found
        return found

    def _programmed(self, limit: int, known: Fit | None, bound: int) -> Fit | None:
        """The plan of the integer program with memory as limits, one for every point of the function, or `known` with a better
        bound; None when there is neither. Copies that operations make of their operands are no part of the program: where
        they do not fit, it is solved again for less memory.
        """
        points = sorted({tuple(self._alive(op)) for op in {first for _, first, _ in self._lifetimes}}) or [()]
        most = limit
        for _ in range(PROGRAMS):
            limits = [self._limit(alive, most) for alive in points]
            solution = solve_limited(self.problem.problem, limits) if most > 0 else None
            if solution is None or not solution.feasible:
                return None
            if most == limit:
                bound = max(bound, solution.bound)
            fit = self._fit(replace(solution, bound=min(bound, solution.cost)), limit)
            if fit.fits:
                better = known is None or known.solution.cost >= solution.cost
                if known is not None and not better:
                    return replace(known, solution=replace(known.solution, bound=bound))
                return fit
            most -= fit.memory.total - limit
        if known is None:
            return None
        return replace(known, solution=replace(known.solution, bound=min(bound, known.solution.cost)))

    def _limit(self, alive: Sequence[int], most: int) -> Limit:
        weights: dict[int, Table] = {}
        for number in (*self._arguments, *alive):
            variable, nbytes = self._holder(number)
            weights[variable] = weights[variable] + nbytes if variable in weights else nbytes
        return Limit(weights, most)

    def _holder(self, number: int) -> tuple[int, Table]:
        """The variable that says how a value lies, and the bytes on one device for each of its values."""
        problem = self.problem
        if problem.value_variables[number] >= 0:
            return problem.value_variables[number], problem.stored_bytes(number)
        value = problem.graph.values[number]
        op, position = value.uses[0] if value.uses else (value.producer, 0)
        layouts = problem.costs.side(problem.graph, op, position, "operands" if value.uses else "results")
        return problem.op_variables[op], problem.bytes_of(number, layouts)

    def _priced(
        self, price: float, limit: int, points: Sequence[int], first: int, rest: float
    ) -> tuple[Fit, int]:
        """The plan with `price` (picoseconds a byte) on the first arguments and intermediate results and `rest` on others;
        and, when the price is one for all, the bound that follows."""
        base = self.problem.problem
        priced = Problem(base.sizes, list(base.tables), base.layers)
        for place, number in enumerate(self._arguments):
            self._charge(priced, number, price if place < first else rest)
        for number in self._alive(points[-1]):
            self._charge(priced, number, price)
        solution = solve(priced, self.memory)
        least = 0
        if first == len(self._arguments):
            least = solution.bound - int(price * limit)
        cost = base.cost(solution.choice)
        return self._fit(replace(solution, cost=min(cost, FORBIDDEN), bound=0), limit), least

    def _charge(self, problem: Problem, number: int, price: float) -> None:
        if not price:
            return
        variable, nbytes = self._holder(number)
        key = ("priced", id(nbytes), price)
        tables = self.problem.costs.tables
        if key not in tables:
            tables[key] = np.minimum(nbytes * price, FORBIDDEN).astype(np.int64)
        problem.add((variable,), tables[key])

    def _alive(self, op: int) -> list[int]:
        return [n for n, first, last in self._lifetimes if first <= op <= last]

    def _fit(self, solution: Solution, limit: int | None) -> Fit:
        chosen = self.problem.strategies_of(solution.choice)
        layouts = self.problem.layouts_of(solution.choice, chosen)
        use = memory_use(self.problem.graph, layouts, chosen, self.problem.costs.sizes)
        return Fit(solution, chosen, layouts, use, limit is None or use.total <= limit)


def _cheaper(one: Fit, other: Fit) -> Fit:
    return one if one.solution.cost < other.solution.cost else other
