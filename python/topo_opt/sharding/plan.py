"""The planner: mesh shape, the devices of every axis, pipeline stages, and a sharding for every tensor.

For every candidate mesh (`meshes.py`) the cheapest shardings are found exactly (`plan_problem.py`, `solver.py`) and fitted into
memory (`plan_memory.py`); a mesh whose work alone already takes longer than the best plan so far is passed over. Meshes of
fewer devices than there are compete as they are, as one stage of a pipeline (`plan_stages.py`), and, where calls a second
count, as replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from topo_opt.errors import InputError
from topo_opt.sharding import pins as pinning
from topo_opt.sharding.cost import (
    PICOSECONDS,
    Prices,
    ProcessPrices,
    TopologyPrices,
    check_devices,
    least_cost,
)
from topo_opt.sharding.layers import layers_of
from topo_opt.sharding.memory import MemoryUse, size_text
from topo_opt.sharding.meshes import Closeness, candidate_meshes, choose_devices, cluster, make_mesh
from topo_opt.sharding.meshes_closeness import closeness
from topo_opt.sharding.plan_graph import PlanGraph
from topo_opt.sharding.plan_memory import Fit, Fitting
from topo_opt.sharding.plan_problem import Costs, MeshProblem, build
from topo_opt.sharding.plan_stages import Stages, cut
from topo_opt.sharding.solver import TooWide
from topo_opt.sharding.spec import Mesh
from topo_opt.topology import Topology

Objective = Literal["latency", "throughput"]

MEMORY_SHARE = 0.9
"""Share of a device's memory that a plan may take when no limit is given; the rest is left to the runtime, its libraries
and fragmentation."""


@dataclass(frozen=True)
class PlanOptions:
    """What the user asks for.

    Args:
        devices: how many devices may be used; None for all that the machine has.
        objective: `latency` of one call, or calls a second (`throughput`).
        memory_limit: bytes of one device that a plan may take; None for a share of what the device has.
        mesh: this mesh and no other.
        pins: how some tensors must lie.
        stages: whether pipelines are considered.
        max_axes: axes of a mesh.
        whole_results: every device ends up with all of each result; otherwise results lie as is cheapest. State always
            lies as it came in.
        exchange: whether kernels add up small sums themselves; otherwise every sum is a call of the library.
    """

    devices: int | None = None
    objective: Objective = "latency"
    memory_limit: int | None = None
    mesh: Mesh | None = None
    pins: tuple[pinning.ShardingPin, ...] = ()
    stages: bool = True
    max_axes: int = 2
    whole_results: bool = False
    exchange: bool = True


@dataclass(frozen=True)
class Candidate:
    """One mesh that was looked at, as one stage or several. `seconds` and `memory` are None where it was passed over."""

    mesh: Mesh
    stages: int
    replicas: int
    seconds: float | None
    pace_seconds: float | None
    memory: MemoryUse | None
    outcome: str


@dataclass
class Plan:
    """The best plan: how `problem` is solved on its mesh, cut into stages or not, and how many copies run side by side.

    `seconds` is the time of one call, `pace_seconds` that between calls when all devices are busy.
    """

    options: PlanOptions
    problem: MeshProblem
    fit: Fit
    limit: int
    stages: Stages | None
    stage_devices: tuple[tuple[str, ...], ...]
    replicas: int
    seconds: float
    pace_seconds: float
    candidates: list[Candidate] = field(default_factory=list)
    near: Closeness = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.problem.costs.mesh

    @property
    def graph(self) -> PlanGraph:
        return self.problem.graph

    @property
    def devices(self) -> int:
        """How many devices it uses, replicas and stages included."""
        return self.replicas * sum(map(len, self.stage_devices))

    @property
    def gap(self) -> float:
        """How far the shardings on this mesh can at most be from the best ones, as a share."""
        return self.fit.solution.gap


def plan_topology(graph: PlanGraph, topology: Topology, options: PlanOptions | None = None) -> Plan:
    """The best plan of a function on a machine. A mesh on a CPU is one of processes, of which there may be any number.

    Raises:
        InputError: nothing fits into memory, a pin cannot be kept, devices are not connected; with the numbers.
    """
    options = options or PlanOptions()
    if options.mesh is not None and topology.primary.kind == "cpu":
        processes = ProcessPrices(topology.primary, options.mesh.devices)
        return plan(graph, processes, {}, options)
    prices = TopologyPrices(topology, exchange=options.exchange)
    return plan(graph, prices, closeness(topology, prices.devices), options)


def plan(graph: PlanGraph, prices: Prices, near: Closeness, options: PlanOptions) -> Plan:
    """As `plan_topology`, with prices and the nearness of devices given."""
    return _Planner(graph, prices, near, options).plan()


class _Planner:
    def __init__(self, graph: PlanGraph, prices: Prices, near: Closeness, options: PlanOptions):
        self.graph, self.prices, self.near, self.options = graph, prices, near, options
        self.layer_of = layers_of(graph).layer_of
        self._least_costs: dict[tuple[int, tuple[str, ...]], int] = {}
        self.best: Plan | None = None
        self.candidates: list[Candidate] = []
        self.smallest: tuple[Fit, Mesh, int] | None = None
        self.refused: InputError | None = None
        """Why the first mesh was passed over on which the pins cannot be kept."""

    def plan(self) -> Plan:
        total = check_devices(self.prices, self.options.devices)
        if self.options.memory_limit is not None and self.options.memory_limit <= 0:
            raise InputError(
                f"a plan may take {self.options.memory_limit} bytes of a device",
                hint="give a number of bytes above zero, or none for nine tenths of the device",
            )
        for mesh in self._meshes(total):
            self._consider(mesh, total)
        if self.best is None:
            raise self._infeasible()
        self.best.candidates, self.best.near = self.candidates, self.near
        return self.best

    def _meshes(self, total: int) -> Iterable[Mesh]:
        given = self.options.mesh
        if given is not None:
            unknown = [d for d in given.devices if d not in self.prices.devices]
            if unknown:
                raise InputError(
                    f"the mesh names '{unknown[0]}'", hint=f"devices are {', '.join(self.prices.devices[:8])}"
                )
            return [given]
        counts = counts_up_to(total)
        if len(self.prices.devices) > 1:
            return candidate_meshes(self.prices, self.near, counts, self.options.max_axes)
        return [make_mesh((1,), self.prices.devices)]

    def _limit(self, mesh: Mesh) -> int:
        if self.options.memory_limit is not None:
            return self.options.memory_limit
        return int(MEMORY_SHARE * min(self.prices.memory(d) for d in mesh.devices))

    def _consider(self, mesh: Mesh, total: int) -> None:
        costs = Costs(mesh, self.prices)
        size, limit = len(mesh.devices), self._limit(mesh)
        work = self._least(costs) / PICOSECONDS + self._call(mesh)
        most = total // size if self.options.mesh is None else 1
        least = work / most if self.options.objective == "throughput" else work
        if self._loses(least, size):
            self._pass(mesh, "its work alone takes longer than the best plan")
            return
        try:
            pins = pinning.resolve(self.options.pins, self.graph, mesh)
        except InputError as error:
            if self.options.mesh is not None:
                raise
            self.refused = self.refused or error
            self._pass(mesh, str(error))
            return
        problem = build(
            self.graph,
            costs,
            pins=pins,
            layer_of=self.layer_of,
            whole_results=self.options.whole_results,
        )
        fitting = Fitting(problem)
        try:
            free = fitting.free()
            fit = self._whole(problem, fitting, free, limit, most)
            if self.options.stages and self.options.mesh is None:
                self._pipelines(problem, fitting, free, fit, limit, most)
        except TooWide as error:
            self._pass(mesh, f"too large to solve: {error}")

    def _call(self, mesh: Mesh) -> float:
        """Seconds before a program's first kernel, on the slowest device."""
        return max(self.prices.call(d) for d in mesh.devices)

    def _least(self, costs: Costs) -> int:
        """Picoseconds that the work takes at least on the mesh, by what its devices can do at best together."""
        key = (len(costs.mesh.devices), tuple(costs.kinds))
        if key not in self._least_costs:
            found: dict[int, int] = {}
            for kind, op in zip(self.graph.kinds, self.graph.ops):
                if kind not in found:
                    found[kind] = least_cost(op, key[0], self.prices, costs.kinds)
            self._least_costs[key] = sum(found[kind] for kind in self.graph.kinds)
        return self._least_costs[key]

    def _whole(self, problem: MeshProblem, fitting: Fitting, free: Fit, limit: int, most: int) -> Fit | None:
        """The mesh as it is, one stage."""
        mesh = problem.costs.mesh
        replicas = most if self.options.objective == "throughput" else 1
        seconds = problem.time(free.solution) / PICOSECONDS + self._call(mesh)
        if self._loses(seconds / replicas, len(mesh.devices) * replicas):
            self._note(mesh, 1, replicas, free, seconds, seconds / replicas, "slower than the best plan")
            return None
        fit = fitting.within(limit, free)
        seconds = problem.time(fit.solution) / PICOSECONDS + self._call(mesh)
        if not fit.fits:
            if self.smallest is None or fit.memory.total < self.smallest[0].memory.total:
                self.smallest = (fit, mesh, limit)
            self._note(
                mesh, 1, replicas, fit, seconds, seconds / replicas, f"does not fit into {size_text(limit)}"
            )
            return None
        if not fit.solution.feasible:
            self._note(mesh, 1, replicas, fit, None, None, "the pins cannot be kept together")
            return None
        self._offer(problem, fit, limit, None, (mesh.devices,), replicas, seconds, seconds)
        return fit

    def _pipelines(
        self,
        problem: MeshProblem,
        fitting: Fitting,
        free: Fit,
        whole: Fit | None,
        limit: int,
        most: int,
    ) -> None:
        """The mesh as one stage of several: for one call only where the whole does not fit, otherwise for their number."""
        mesh, pace = problem.costs.mesh, self.options.objective == "throughput"
        if most < 2 or (not pace and (whole is not None or free.memory.total <= limit)):
            return
        root = cluster(self.prices.devices, self.near)
        for count in [c for c in counts_up_to(most) if c > 1][::-1]:
            devices = choose_devices(root, count * len(mesh.devices))
            groups = [devices[i : i + len(mesh.devices)] for i in range(0, len(devices), len(mesh.devices))]
            replicas = most // count if pace else 1
            fit = fitting.within(limit * count, free)
            stages = cut(problem, fit, count, groups[1], self.prices, limit, pace=pace) if fit.fits else None
            if stages is None:
                self._note(mesh, count, replicas, fit, None, None, f"no stages of {size_text(limit)}")
                continue
            call = self._call(mesh)
            seconds, between = stages.latency / PICOSECONDS + count * call, stages.pace / PICOSECONDS + call
            self._offer(problem, fit, limit, stages, tuple(groups), replicas, seconds, between)

    def _offer(
        self,
        problem: MeshProblem,
        fit: Fit,
        limit: int,
        stages: Stages | None,
        groups: tuple[tuple[str, ...], ...],
        replicas: int,
        seconds: float,
        pace: float,
    ) -> None:
        made = Plan(self.options, problem, fit, limit, stages, groups, replicas, seconds, pace / replicas)
        wins = not self._loses(self._value(made), made.devices)
        outcome = "fits" if wins else "slower than the best plan"
        self._note(problem.costs.mesh, len(groups), replicas, fit, seconds, pace / replicas, outcome)
        if wins:
            self.best = made

    def _loses(self, value: float, devices: int) -> bool:
        """Whether a plan of that value is no better than the best so far: neither faster nor as fast on fewer devices."""
        if self.best is None:
            return False
        return (value, devices) >= (self._value(self.best), self.best.devices)

    def _value(self, made: Plan) -> float:
        return made.pace_seconds if self.options.objective == "throughput" else made.seconds

    def _pass(self, mesh: Mesh, reason: str) -> None:
        self.candidates.append(Candidate(mesh, 1, 1, None, None, None, reason))

    def _note(
        self,
        mesh: Mesh,
        stages: int,
        replicas: int,
        fit: Fit,
        seconds: float | None,
        pace: float | None,
        outcome: str,
    ) -> None:
        self.candidates.append(Candidate(mesh, stages, replicas, seconds, pace, fit.memory, outcome))

    def _infeasible(self) -> InputError:
        if self.smallest is None and self.refused is not None:
            return self.refused
        if self.smallest is None:
            reasons = "; ".join(sorted({c.outcome for c in self.candidates}))
            return InputError(f"no plan was found: {reasons}", hint="give fewer pins or fewer axes")
        fit, mesh, limit = self.smallest
        shape = "x".join(map(str, mesh.shape))
        return InputError(
            f"'{self.graph.name}' does not fit: the smallest plan, on {shape} devices, takes {fit.memory} "
            f"on each, the limit is {size_text(limit)}",
            hint=f"allow {size_text(fit.memory.total)}, use more devices, or a smaller batch or cache",
        )


def counts_up_to(total: int) -> list[int]:
    """Numbers of devices that are tried: divisors of the total and powers of two, the largest first."""
    divisors = {n for n in range(1, total + 1) if total % n == 0}
    powers = {1 << k for k in range(total.bit_length()) if 1 << k <= total}
    return sorted(divisors | powers, reverse=True)


def describe(mesh: Mesh) -> str:
    """Axes and devices in one line."""
    axes = ", ".join(f"{name}={size}" for name, size in mesh.axes)
    return f"{axes} of {_devices(mesh.devices)}"


def _devices(devices: Sequence[str]) -> str:
    return " ".join(devices) if len(devices) <= 16 else f"{devices[0]} to {devices[-1]}"
