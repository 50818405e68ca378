"""Bucket elimination against enumeration, and layers that are solved once."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from topo_opt.sharding import solver
from topo_opt.sharding.solver import FORBIDDEN, Memory, Problem, TooWide, solve
from topo_opt.sharding.solver_program import Limit, solve_limited


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    problem = Problem()
    for _ in range(draw(st.integers(1, 6))):
        problem.variable(draw(st.integers(1, 4)))
    for _ in range(draw(st.integers(1, 9))):
        scope = tuple(draw(st.permutations(range(len(problem.sizes))))[: draw(st.integers(0, 3))])
        shape = [problem.sizes[v] for v in scope]
        rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
        table = rng.integers(0, 60, shape).astype(np.int64)
        if draw(st.booleans()) and scope:
            table[rng.random(shape) < 0.2] = FORBIDDEN
        problem.add(scope, table)
    return problem


def _least(problem: Problem) -> int:
    return min(
        min(problem.cost(choice), FORBIDDEN) for choice in itertools.product(*map(range, problem.sizes))
    )


@given(problems())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_solution_is_the_least_of_all(problem: Problem) -> None:
    found = solve(problem)
    assert found.cost == found.bound == _least(problem)
    assert min(problem.cost(found.choice), FORBIDDEN) == found.cost


@given(problems(), st.sampled_from([0.0, 0.5, 4.0]))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_dropped_values_cost_no_more_than_the_bound_says(problem: Problem, slack: float) -> None:
    before, solver._LARGE = solver._LARGE, 2
    try:
        found = solve(problem, slack=slack)
    finally:
        solver._LARGE = before
    assert found.bound <= _least(problem) <= found.cost
    assert min(problem.cost(found.choice), FORBIDDEN) == found.cost
    if slack == 0.0:
        assert found.cost == found.bound


def test_equal_layers_are_solved_once() -> None:
    rng = np.random.default_rng(0)
    into, inner, out = (rng.integers(0, 1000, (5, 5)).astype(np.int64) for _ in range(3))

    def stack(count: int) -> Problem:
        problem = Problem()
        seam = problem.variable(5)
        for layer in range(count):
            a, b, end = problem.variable(5), problem.variable(5), problem.variable(5)
            problem.layers[a] = problem.layers[b] = layer
            for scope, table in (((seam, a), into), ((a, b), inner), ((b, end), out)):
                problem.add(scope, table)
            seam = end
        return problem

    few, many = solve(stack(4)), solve(stack(400))
    # Inside of a layer nothing is computed again; the chain of seams takes a step each.
    assert many.computed - few.computed == 400 - 4
    assert many.cost == stack(400).cost(many.choice)


def test_what_was_remembered_serves_the_next_problem() -> None:
    rng, memory, problem = np.random.default_rng(1), Memory(), Problem()
    for _ in range(20):
        problem.variable(6)
    for i in range(19):
        problem.add((i, i + 1), rng.integers(0, 100, (6, 6)).astype(np.int64))
    first, second = solve(problem, memory), solve(problem, memory)
    assert first == solve(problem) and second.computed == 0 and second.choice == first.choice


def test_too_wide_is_an_error() -> None:
    problem = Problem()
    rng = np.random.default_rng(2)
    numbers = [problem.variable(4) for _ in range(8)]
    for a, b in itertools.combinations(numbers, 2):
        problem.add((a, b), rng.integers(0, 100, (4, 4)).astype(np.int64))
    try:
        solve(problem, limit=256, slack=0.0)
    except TooWide:
        return
    raise AssertionError("eight variables that all meet need a table of more than 256 entries")


@given(problems(), st.integers(0, 1 << 30), st.floats(0.2, 1.0))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_program_finds_the_least_within_limits(problem: Problem, seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    weights = {v: rng.integers(1, 100, size).astype(np.int64) for v, size in enumerate(problem.sizes)}
    most = int(share * sum(int(w.max()) for w in weights.values()))
    choices = itertools.product(*map(range, problem.sizes))
    allowed = [c for c in choices if sum(int(weights[v][a]) for v, a in enumerate(c)) <= most]
    least = min((min(problem.cost(c), FORBIDDEN) for c in allowed), default=FORBIDDEN)
    found = solve_limited(problem, [Limit(weights, most)])
    if least >= FORBIDDEN:
        assert found is None or not found.feasible
        return
    assert found is not None and found.choice in allowed
    assert found.cost == problem.cost(found.choice) == least
    assert found.bound <= least
