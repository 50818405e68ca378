"""Why a plan is as it is: for every tensor and collective the choice, its cost, the runner-up and why it lost.

The runner-up of a tensor is the cheapest plan in which it lies in any other way; everything else may change with it. Tensors
of equal layers that lie alike are one entry, whose runner-up is that of the first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from topo_opt.sharding.cost import PICOSECONDS
from topo_opt.sharding.memory import memory_use, size_text
from topo_opt.sharding.plan import Plan, describe
from topo_opt.sharding.plan_result import PlannedCollective, collectives, idle, named
from topo_opt.sharding.solver import FORBIDDEN, Memory, Problem, solve
from topo_opt.sharding.spec import Sharding
from topo_opt.sharding.strategies import exclusions

MAX_RUNNERS_UP = 64
"""Entries whose runner-up is looked for, the largest tensors first: each is a problem of its own."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor, or equal ones of several layers (`count`). `nbytes` is the whole tensor, `local_bytes` what a device holds."""

    name: str
    kind: str
    count: int
    shape: tuple[int, ...]
    nbytes: int
    local_bytes: int
    choice: str
    runner_up: str | None
    slower_seconds: float | None
    why: str


@dataclass(frozen=True)
class CollectiveEntry:
    """A collective, or equal ones of several layers. `seconds` is one, `nbytes` its buffer.

    `link` is the class of the farthest routes within its groups, in the words of `nvidia-smi topo -m`; `bound` what takes most
    of the time.
    """

    kind: str
    axes: tuple[str, ...]
    tensor: str
    count: int
    nbytes: int
    seconds: float
    algorithm: str
    link: str
    bound: str
    runner_up: str | None


@dataclass(frozen=True)
class Explanation:
    """Everything that a report says about a plan. `as_dict` is for JSON."""

    summary: dict[str, Any]
    candidates: list[dict[str, Any]]
    tensors: list[TensorEntry]
    collectives: list[CollectiveEntry]

    def as_dict(self) -> dict[str, Any]:
        return {
            "summary": self.summary,
            "candidates": self.candidates,
            "tensors": [asdict(t) for t in self.tensors],
            "collectives": [asdict(c) for c in self.collectives],
        }


def explain(plan: Plan, *, runners_up: bool = True) -> Explanation:
    """The reasons of a plan.

    Args:
        runners_up: whether to look for the next best of every tensor: the problem is solved once more for each, which
            takes longer than planning.
    """
    tensors = list(_tensors(plan, MAX_RUNNERS_UP if runners_up else 0))
    return Explanation(_summary(plan), _candidates(plan), tensors, list(_collectives(plan)))


def _summary(plan: Plan) -> dict[str, Any]:
    fit, moved = plan.fit, sum(c.seconds for c in collectives(plan))
    return {
        "function": plan.graph.name,
        "objective": plan.options.objective,
        "mesh": {name: size for name, size in plan.mesh.axes},
        "devices": list(plan.mesh.devices),
        "stages": [list(group) for group in plan.stage_devices],
        "stage_starts": list(plan.stages.starts) if plan.stages else [0],
        "replicas": plan.replicas,
        "seconds": plan.seconds,
        "pace_seconds": plan.pace_seconds,
        "communication_seconds": moved,
        "gap": plan.gap,
        "memory": {**asdict(fit.memory), "total": fit.memory.total, "limit": plan.limit},
    }


def _candidates(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "mesh": {name: size for name, size in c.mesh.axes},
            "devices": list(c.mesh.devices),
            "stages": c.stages,
            "replicas": c.replicas,
            "seconds": c.seconds,
            "pace_seconds": c.pace_seconds,
            "memory_bytes": c.memory.total if c.memory else None,
            "outcome": c.outcome,
        }
        for c in plan.candidates
    ]


def _text(sharding: Sharding) -> str:
    dims = ", ".join("+".join(axes) or "_" for axes in sharding.dims)
    return f"[{dims}]" + (f" terms over {'+'.join(sharding.partial)}" if sharding.partial else "")


def _general(name: str) -> str:
    """A name with its layer number left open."""
    return re.sub(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])", "*", name)


def _tensors(plan: Plan, most: int) -> Iterator[TensorEntry]:
    graph, fit = plan.graph, plan.fit
    groups: dict[tuple[object, ...], list[int]] = {}
    moved = {c.value for c in collectives(plan)}
    for number, value in enumerate(graph.values):
        if plan.problem.value_variables[number] < 0:
            continue
        if value.kind is None and not value.returned and number not in moved:
            continue
        key = (_general(value.name), value.kind, value.shape, fit.layouts[number], value.returned)
        groups.setdefault(key, []).append(number)
    order = sorted(groups.values(), key=lambda g: -graph.values[g[0]].nbytes * len(g))
    memory = Memory()
    for place, group in enumerate(order):
        number = group[0]
        value, layout = graph.values[number], fit.layouts[number]
        runner_up, slower, why = (
            _runner_up(plan, number, memory)
            if place < most
            else (None, None, "not looked for: larger tensors came first")
        )
        yield TensorEntry(
            _general(value.name) if len(group) > 1 else value.name,
            value.kind or ("result" if value.returned else "intermediate"),
            len(group),
            value.shape,
            value.nbytes,
            value.nbytes // layout.parts(plan.problem.costs.sizes),
            _text(named(layout, plan.mesh)),
            runner_up,
            slower,
            why,
        )


def _runner_up(plan: Plan, number: int, memory: Memory) -> tuple[str | None, float | None, str]:
    """The cheapest plan in which the tensor lies otherwise: how it lies there, how much slower that is, and why it lost."""
    problem, fit = plan.problem, plan.fit
    variable, layouts = problem.value_variables[number], problem.value_layouts[number]
    if len(layouts) < 2:
        return None, None, _no_other(plan, number)
    # What becomes the choice by mere cutting is used as the choice is, and only takes more memory.
    chosen_layout, size = fit.layouts[number], plan.graph.values[number].nbytes
    same = [problem.costs.conversions.cost(x, chosen_layout, size) == 0 for x in layouts]
    if all(same):
        return None, None, "every other way is used as this one, and takes more memory"
    ban = np.where(same, FORBIDDEN, 0).astype(np.int64)
    base = problem.problem
    solution = solve(Problem(base.sizes, [*base.tables, ((variable,), ban)], base.layers), memory)
    if not solution.feasible:
        return None, None, "no other way goes together with the rest"
    chosen = problem.strategies_of(solution.choice)
    other = problem.layouts_of(solution.choice, chosen)
    text = _text(named(layouts[solution.choice[variable]], plan.mesh))
    slower = (solution.cost - fit.solution.cost) / PICOSECONDS
    use = memory_use(plan.graph, other, chosen, problem.costs.sizes)
    if use.total > plan.limit:
        return text, max(slower, 0.0), f"takes {size_text(use.total)} of {size_text(plan.limit)}"
    work = (_work(plan, solution.choice) - _work(plan, fit.solution.choice)) / PICOSECONDS
    if abs(slower) < 0.5e-12:
        return text, 0.0, f"as fast; takes {_difference(use.total - fit.memory.total)} memory"
    return (
        text,
        slower,
        f"work {work * 1e6:+.1f} us, communication {(slower - work) * 1e6:+.1f} us",
    )


def _no_other(plan: Plan, number: int) -> str:
    """Why there is only one way: what does not divide, as far as that is the reason."""
    graph, sizes = plan.graph, plan.problem.costs.sizes
    pins = [p for p in plan.options.pins if fnmatchcase(graph.values[number].name, p.pattern)]
    if pins:
        return f"pinned by '{pins[-1]}'" + (f", the last of {len(pins)} that match" if len(pins) > 1 else "")
    found = {
        str(excluded)
        for op, position in graph.values[number].uses
        for excluded in exclusions(graph.ops[op].rule, sizes)
        if any(excluded.factor in carried for carried in graph.ops[op].rule.operands[position])
    }
    return "; ".join(sorted(found)) or "no other way is allowed or possible"


def _difference(nbytes: int) -> str:
    return "the same" if not nbytes else f"{size_text(abs(nbytes))} {'more' if nbytes > 0 else 'less'}"


def _work(plan: Plan, choice: Sequence[int]) -> int:
    """Picoseconds of all operations without communication."""
    problem = plan.problem
    return sum(
        int(problem.costs.strategies(problem.graph, i)[1][choice[v]])
        for i, v in enumerate(problem.op_variables)
    )


def _collectives(plan: Plan) -> Iterator[CollectiveEntry]:
    groups: dict[tuple[object, ...], list[PlannedCollective]] = {}
    for one in collectives(plan):
        value, op = plan.graph.values[one.value], plan.graph.ops[one.op]
        key = (one.step.kind, one.step.axes, one.nbytes, value.shape, op.name, _general(value.name))
        groups.setdefault(key, []).append(one)
    costs = plan.problem.costs
    for same in sorted(groups.values(), key=lambda g: -sum(c.seconds for c in g)):
        one = same[0]
        detail = costs.prices.collective(one.step.kind, one.nbytes, costs.groups(one.step.axes))
        others = [f"{name} {seconds * 1e6:.1f} us" for name, seconds in detail.considered[1:2]]
        value, op = plan.graph.values[one.value], plan.graph.ops[one.op]
        name = _general(value.name) if len(same) > 1 else value.name
        yield CollectiveEntry(
            one.step.kind,
            tuple(plan.mesh.axes[a][0] for a in one.step.axes),
            f"{name} {list(value.shape)} {'of' if one.produced else 'for'} {op.name}",
            len(same),
            one.nbytes,
            one.seconds,
            detail.algorithm,
            "+".join(detail.link_kinds) or "-",
            detail.bottleneck_kind,
            others[0] if others else None,
        )


def render(found: Explanation, plan: Plan, console: Console) -> None:
    """Prints the tables of an explanation."""
    console.print(_headline(found, plan))
    for _, reason in idle(plan):
        console.print(f"note: {reason}")
    for table in (_candidate_table(plan), _collective_table(found), _tensor_table(found)):
        console.print(table)


def _headline(found: Explanation, plan: Plan) -> str:
    s = found.summary
    stages = f", {len(plan.stage_devices)} stages" if plan.stages else ""
    copies = f", {plan.replicas} replicas" if plan.replicas > 1 else ""
    return (
        f"{s['function']}: {describe(plan.mesh)}{stages}{copies}: {s['seconds'] * 1e3:.3f} ms a call, "
        f"{s['communication_seconds'] * 1e3:.3f} ms of it communication; at most {s['gap']:.2%} above the optimum; "
        f"{plan.fit.memory} of {size_text(plan.limit)} a device"
    )


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def _candidate_table(plan: Plan) -> Table:
    table = Table("mesh", "stages", "replicas", "ms", "ms a call", "memory", "outcome", title="Meshes")
    shapes = Counter((c.mesh.axes, c.stages, c.replicas) for c in plan.candidates)
    for c in plan.candidates:
        shape = ", ".join(f"{name}={size}" for name, size in c.mesh.axes)
        if shapes[c.mesh.axes, c.stages, c.replicas] > 1:
            # The same shape over other devices, or over these in another order.
            shape += f" of {', '.join(c.mesh.devices[:8])}{', ...' if len(c.mesh.devices) > 8 else ''}"
        memory = size_text(c.memory.total) if c.memory else "-"
        row = (shape, str(c.stages), str(c.replicas), _milliseconds(c.seconds), _milliseconds(c.pace_seconds))
        table.add_row(*row, memory, c.outcome)
    return table


def _collective_table(found: Explanation) -> Table:
    table = Table(
        "collective",
        "axes",
        "tensor",
        "times",
        "bytes",
        "us",
        "algorithm",
        "links",
        "bound by",
        "next",
        title="Collectives",
    )
    for c in found.collectives:
        row = (
            c.kind,
            "+".join(c.axes),
            c.tensor,
            str(c.count),
            size_text(c.nbytes),
            f"{c.seconds * 1e6:.1f}",
        )
        table.add_row(*map(escape, row), c.algorithm, c.link, c.bound, c.runner_up or "-")
    return table


def _tensor_table(found: Explanation) -> Table:
    table = Table(
        "tensor",
        "times",
        "shape",
        "a device",
        "lies",
        "runner-up",
        "us slower",
        "why it lost",
        title="Tensors",
    )
    for t in found.tensors:
        shape = "x".join(map(str, t.shape))
        slower = "-" if t.slower_seconds is None else f"{t.slower_seconds * 1e6:.1f}"
        row = (t.name, str(t.count), shape, size_text(t.local_bytes), t.choice)
        table.add_row(*map(escape, row), escape(t.runner_up or "-"), slower, t.why)
    return table
