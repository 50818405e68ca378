"""`topo-plan-shardings`: chooses a mesh and a sharding for every tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from topo_opt.errors import InputError
from topo_opt.passes.base import Pass, PassFailure, fail
from topo_opt.passes.shard.propagate_shardings import shardable
from topo_opt.pipeline import remarks
from topo_opt.sharding import not_split
from topo_opt.sharding.annotate import annotate, read_mesh, write_mesh
from topo_opt.sharding.named import parse_mesh
from topo_opt.sharding.pins import ShardingPin
from topo_opt.sharding.plan import PlanOptions, plan_topology
from topo_opt.sharding.plan_functions import join
from topo_opt.sharding.plan_reading import read_plan_graph
from topo_opt.sharding.plan_result import idle, sharding_plans
from topo_opt.sharding.plan_watch import publish
from topo_opt.sharding.spec import Mesh
from topo_opt.topology import load


@dataclass(frozen=True)
class PlanShardings(Pass):
    """Writes the cheapest plan for a machine as annotations of the `shard` dialect.

    `func.func @main(%x: tensor<8x64xf32>, ...)` with topology=hgx-h100-x8
      -->
    `shard.grid @mesh(shape = 8) ...`, `%s = shard.sharding @mesh split_axes = [[0]]`, `%y = shard.shard %x to %s`, ...

    Options: `topology` by name or file; `devices`, how many may be used; `objective` latency or throughput; `memory-limit` in bytes of one device; `mesh` such as `x=2,y=4` for this mesh and no
    other; `pin` such as `layers.*.q.weight=x,_`, several separated by `;`; `results` whole where every device is to have
    all of each result; `sums` as for `topo-partition`. A module that already has a grid keeps it. Several functions are planned together: what they share lies
    alike in all of them, and one call of each is what is made fast.
    """

    name = "topo-plan-shardings"
    topology: str = "hgx-h100-x8"
    devices: int | None = None
    objective: Literal["latency", "throughput"] = "latency"
    memory_limit: int | None = None
    mesh: str | None = None
    pin: str = ""
    results: Literal["any", "whole"] = "any"
    sums: Literal["narrow", "wide"] = "narrow"

    def apply(self, module: Any) -> None:
        functions = list(shardable(module.operation))
        if not functions:
            fail(module, "the module has no function to plan")
        try:
            machine = load(self.topology)
            devices = () if machine.primary.kind == "cpu" else machine.compute
            mesh = parse_mesh(self.mesh, devices) if self.mesh else read_mesh(module.operation)
            if mesh is not None and devices and all(name.isdigit() for name in mesh.devices):
                mesh = _numbered(mesh, devices)
            options = PlanOptions(
                devices=self.devices,
                objective=self.objective,
                memory_limit=self.memory_limit,
                mesh=mesh,
                pins=tuple(ShardingPin.parse(p) for p in self.pin.split(";") if p.strip()),
                stages=False,
                whole_results=self.results == "whole",
            )
            joined = join([read_plan_graph(f, narrow_sums=self.sums == "narrow") for f in functions])
            found = plan_topology(joined.graph, machine, options)
            plans = sharding_plans(found, joined)
        except InputError as error:
            raise PassFailure(
                error.message, location=functions[0].operation.location, hint=error.hint
            ) from None
        with module.context:
            write_mesh(module.operation, found.mesh)
            for function, made in zip(functions, plans, strict=True):
                annotate(function, made)
        for subject, reason in idle(found):
            # What the user asked for and did not get is more than what the plan chose.
            remarks.emit(not_split.KIND if mesh is not None else remarks.CHOSEN, subject, reason)
        publish(found)


def _numbered(mesh: Mesh, devices: Sequence[str]) -> Mesh:
    """A grid that names no devices is one of those of the machine, by their number.

    Raises:
        InputError: it has more places than the machine has devices.
    """
    last = max(map(int, mesh.devices))
    if last >= len(devices):
        raise InputError(
            f"the grid has device {last}, the machine has {len(devices)}", hint="choose a smaller grid"
        )
    return Mesh(mesh.axes, tuple(devices[int(name)] for name in mesh.devices), mesh.name)
