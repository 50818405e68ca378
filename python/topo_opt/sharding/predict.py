"""What the planner's cost model predicts for each function of a program, and the parts of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_mlir import ir

from topo_opt.errors import TopoError
from topo_opt.passes import pass_class
from topo_opt.passes.shard.propagate_shardings import shardable
from topo_opt.prediction import Prediction
from topo_opt.sharding.cost import PICOSECONDS, picoseconds
from topo_opt.sharding.cost_reshard import conversion
from topo_opt.sharding.meshes import make_mesh
from topo_opt.sharding.plan import Plan, PlanOptions, plan_topology
from topo_opt.sharding.plan_graph import PlanGraph
from topo_opt.sharding.plan_reading import read_plan_graph
from topo_opt.topology import Topology

if TYPE_CHECKING:
    from topo_opt.driver import Compilation

_BEFORE = ("topo-raise-rotary", "topo-raise-masks", "topo-count-recognised", "topo-bubble-up-slices")
"""What a compile does with structured IR before it plans."""
_ANY_SIZE = 1 << 62


def prepare(module: ir.Module) -> None:
    """Brings structured IR into the form in which a compile plans it."""
    for name in _BEFORE:
        pass_class(name)().apply(module)


def on_one_device(graph: PlanGraph, machine: Topology) -> Prediction:
    """A call of a function that is not split, on the first device of a machine, whether or not its memory suffices.

    Raises:
        InputError: the function cannot be planned.
    """
    device = machine.primary.id
    options = PlanOptions(mesh=make_mesh((1,), [device]), memory_limit=_ANY_SIZE, stages=False)
    (found,) = of_plan(plan_topology(graph, machine, options), machine).values()
    return found


def of_plan(plan: Plan, machine: Topology) -> dict[str, Prediction]:
    """Function -> a call of it, as it is planned. Each has a start of its own, where `plan.seconds` counts one for all."""
    known: dict[str, Any] = {device.id: device for device in machine.devices}
    # Processes on a CPU are no devices of the topology.
    model = known.get(plan.mesh.devices[0], machine.primary).model
    return {name: _of_part(plan, ops, model) for name, ops in plan.graph.functions}


def _of_part(plan: Plan, ops: range, model: str) -> Prediction:
    costs, graph, fit = plan.problem.costs, plan.graph, plan.fit
    launch = max(picoseconds(costs.prices.launch(d)) for d in costs.kinds)
    work = launches = moved = moves = cuts = 0
    for index in ops:
        op, variable = graph.ops[index], plan.problem.op_variables[index]
        _, table = costs.strategies(graph, index)
        work += int(table[fit.solution.choice[variable]])
        launches += op.work.kernels
        chosen = fit.chosen[index]
        sides = [(v, fit.layouts[v], chosen.operands[p]) for p, v in enumerate(op.operands) if v >= 0]
        sides += [(v, chosen.results[p], fit.layouts[v]) for p, v in enumerate(op.results) if v >= 0]
        for number, source, target in sides:
            value = graph.values[number]
            steps = conversion(source, target, costs.sizes) or ()
            taken = sum(costs.conversions.step_cost(step, value.moved_bytes) for step in steps)
            whole = costs.conversions.cost(source, target, value.moved_bytes, value.inside)
            moved, moves, cuts = moved + taken, moves + len(steps), cuts + whole - taken
    starts = launch * launches
    call = max(picoseconds(costs.prices.call(d)) for d in plan.mesh.devices)
    # A kernel that a collective takes a tensor out of takes longer itself.
    parts = [work - starts + cuts, starts, moved, call]
    kernels, started, collective, called = (part / PICOSECONDS for part in parts)
    return Prediction(
        seconds=sum(parts) / PICOSECONDS,
        kernel_seconds=kernels,
        launch_seconds=started,
        launches=launches,
        collective_seconds=collective,
        collectives=moves,
        call_seconds=called,
        devices=len(plan.mesh.devices),
        model=model,
    )


def of_compilation(compilation: Compilation) -> dict[str, Prediction | str]:
    """Symbol of a compiled function -> its prediction, or why there is none."""
    from topo_opt import dialects

    machine, symbols = compilation.options.machine, [v.symbol for v in compilation.variants if v.symbol]
    if compilation.options.split:
        planned = {k: v for plan in compilation.plans for k, v in of_plan(plan, machine).items()}
        given = "how tensors are split was given, and nothing was planned"
        return {symbol: planned.get(symbol, given) for symbol in symbols}
    found: dict[str, Prediction | str] = {}
    module = ir.Module.parse(compilation.model.module, dialects.load(ir.Context()))
    prepare(module)
    for function in shardable(module.operation):
        symbol = ir.StringAttr(function.attributes["sym_name"]).value
        if symbol not in symbols:
            continue
        try:
            found[symbol] = on_one_device(read_plan_graph(function), machine)
        except TopoError as error:
            # Nothing depends on a prediction: the report says why it has none.
            found[symbol] = f"the planner cannot read the function: {error.message}"
    return found
