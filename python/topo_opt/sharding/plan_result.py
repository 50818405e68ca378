"""A plan as what others read: shardings by value number with named axes, and the collectives in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from topo_opt.errors import InputError
from topo_opt.sharding.cost import PICOSECONDS
from topo_opt.sharding.cost_reshard import Step, conversion
from topo_opt.sharding.plan import Plan
from topo_opt.sharding.plan_functions import Joined
from topo_opt.sharding.plan_graph import PlanGraph, PlanValue
from topo_opt.sharding.spec import Mesh, Sharding, ShardingPlan
from topo_opt.sharding.strategies import TERMS, Axes, Layout


@dataclass(frozen=True)
class PlannedCollective:
    """One collective of a plan: `step` for `value`, in front of operation `op`, or behind it where `produced`.

    `nbytes` is the size of the buffer, as in `CollectiveModel.cost`.
    """

    value: int
    op: int
    produced: bool
    step: Step
    nbytes: int
    seconds: float


def named(layout: Layout, mesh: Mesh) -> Sharding:
    """A layout with the names of the mesh's axes."""
    return Sharding(
        tuple(_names(axes, mesh) for axes in layout.dims), _names(layout.pending, mesh), layout.combiner
    )


def _names(axes: Axes, mesh: Mesh) -> tuple[str, ...]:
    return tuple(mesh.axes[a][0] for a in axes)


def sharding_plan(plan: Plan) -> ShardingPlan:
    """The shardings of a plan of one function, without stages.

    Raises:
        InputError: the plan is a pipeline, of which each stage has devices of its own.
    """
    everything = range(len(plan.graph.ops))
    return _of_part(plan, plan.graph, everything, range(len(plan.graph.values)))


def sharding_plans(plan: Plan, joined: Joined) -> list[ShardingPlan]:
    """The shardings of every function of a plan that was made for `joined.graph`. Errors as of `sharding_plan`."""
    parts = zip(joined.functions, joined.operations, joined.values, strict=True)
    return [_of_part(plan, function, ops, values) for function, ops, values in parts]


def _of_part(plan: Plan, function: PlanGraph, ops: range, places: Sequence[int]) -> ShardingPlan:
    """The shardings of a function whose operations and values are these of the plan's graph."""
    if plan.stages is not None:
        raise InputError(
            f"the plan is a pipeline of {len(plan.stages.starts)} stages, which is no sharding over one mesh",
            hint="plan without stages, for more devices or with a higher memory limit",
        )
    mesh, layouts = plan.mesh, plan.fit.layouts
    assignments: dict[int, dict[int, tuple[str, ...]]] = {}
    terms: dict[int, tuple[str, ...]] = {}
    for index in ops:
        op, chosen = plan.graph.ops[index], plan.fit.chosen[index]
        split: dict[int, Axes] = {}
        for axis, factor in enumerate(chosen.axes):
            if factor >= 0:
                split[factor] = (*split.get(factor, ()), axis)
        if split:
            assignments[op.node] = {factor: _names(axes, mesh) for factor, axes in split.items()}
        through = tuple(a for a, factor in enumerate(chosen.axes) if factor == TERMS)
        if op.owns >= 0 and op.terms is not None:
            rows = layouts[op.operands[op.terms.operands[0][0]]]
            through = tuple(a for a in split.get(op.owns, ()) if a in rows.pending)
        if through:
            terms[op.node] = _names(through, mesh)
    shardings = {value.number: named(layouts[place], mesh) for value, place in zip(function.values, places)}
    memory = {d: plan.fit.memory.total for d in mesh.devices}
    notes = tuple(f"{c.mesh.shape} {c.outcome}" for c in plan.candidates)
    return ShardingPlan(mesh, shardings, assignments, terms, plan.seconds, memory, notes)


def idle(plan: Plan) -> Iterator[tuple[str, str]]:
    """What of the machine the plan gives no work of its own: (axis or devices, why)."""
    mesh, there = plan.mesh, len(plan.problem.costs.prices.devices)
    for axis, (name, size) in enumerate(mesh.axes):
        if size > 1 and all(
            chosen.axes[axis] < 0 and chosen.axes[axis] != TERMS for chosen in plan.fit.chosen
        ):
            yield (
                name,
                f"nothing is split over {name}, so its {size} devices do the same: by the plan every split takes longer, "
                "or no dimension divides; pins decide otherwise",
            )
    if plan.options.mesh is None and plan.devices < there:
        yield (
            "devices",
            f"{plan.devices} of {there} devices are used: by the plan more of them take longer; a mesh decides otherwise",
        )


def collectives(plan: Plan) -> Iterator[PlannedCollective]:
    """Every collective of the plan, in program order."""
    fit, graph = plan.fit, plan.graph
    for index, op in enumerate(graph.ops):
        taken = [
            (value, graph.values[value], fit.layouts[value], fit.chosen[index].operands[position])
            for position, value in enumerate(op.operands)
            if value >= 0
        ]
        for number, value, source, target in taken:
            yield from _steps(plan, number, value, index, False, source, target)
        for position, number in enumerate(op.results):
            if number >= 0:
                source = fit.chosen[index].results[position]
                yield from _steps(
                    plan, number, graph.values[number], index, True, source, fit.layouts[number]
                )


def _steps(
    plan: Plan, number: int, value: PlanValue, op: int, produced: bool, source: Layout, target: Layout
) -> Iterator[PlannedCollective]:
    conversions = plan.problem.costs.conversions
    for step in conversion(source, target, plan.problem.costs.sizes) or ():
        seconds = conversions.step_cost(step, value.moved_bytes) / PICOSECONDS
        yield PlannedCollective(number, op, produced, step, -(-value.moved_bytes // step.share), seconds)
