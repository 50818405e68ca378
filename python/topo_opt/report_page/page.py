"""The page: its figures are those of the report and of the plans, its pictures are drawn by `topology.drawing`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from topo_opt.report_page import times
from topo_opt.report_page.links import busy, by_kind, traffic
from topo_opt.report_page.memory import parts, size_text
from topo_opt.runtime import strict_json
from topo_opt.runtime.plan import Plan as Program
from topo_opt.sharding.explain import explain
from topo_opt.sharding.plan import Plan
from topo_opt.topology.drawing import draw
from topo_opt.topology.schema import Topology

if TYPE_CHECKING:
    from topo_opt.report import Report

MOST_ROWS = 200
"""Of a table; what is left out is counted."""


def page(report: Report, program: Program, topology: Topology, plans: Sequence[Plan] = ()) -> str:
    """The page of a bundle.

    Args:
        program: what the bundle runs, on one device or on each of several.
        plans: how the planner split the model; none where the user said how, or where there is one device.
    """
    environment = Environment(
        loader=PackageLoader("topo_opt.report_page", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["size"] = size_text
    environment.filters["us"] = lambda seconds: f"{seconds * 1e6:.1f}"
    environment.filters["ms"] = lambda seconds: f"{seconds * 1e3:.3f}"
    return environment.get_template("page.html.jinja").render(
        report=report.as_json(),
        bases=dict(Counter(row.tuning["basis"] for row in report.kernels if row.tuning)),
        left=_left(report),
        memory=_memory(program, topology, plans),
        mesh=[(axis.name, axis.size) for axis in program.mesh],
        devices=list(program.devices),
        topology=topology,
        picture=None if plans else Markup(draw(topology)),
        plans=[_plan(plan, topology) for plan in plans],
        most=MOST_ROWS,
        times=Markup(f"{times.BEGIN}\n{times.section(strict_json.encode(report.as_json()))}{times.END}"),
    )


def _memory(program: Program, topology: Topology, plans: Sequence[Plan]) -> dict[str, Any]:
    # Ranks on a CPU are processes, which no topology lists.
    known = {device.id: device for device in topology.devices}
    device = known.get(program.devices[0], topology.primary) if program.devices else topology.primary
    capacity = device.memory.capacity_bytes.value
    found = parts(program, capacity)
    return {
        "model": device.model,
        "count": max(1, len(program.devices)),
        "capacity": capacity,
        "parts": [asdict(part) for part in found],
        "limit": min((plan.limit for plan in plans), default=None),
        "total": sum(part.nbytes for part in found),
    }


def _plan(plan: Plan, topology: Topology) -> dict[str, Any]:
    moved = traffic(plan)
    found = explain(plan, runners_up=False)
    shares = busy(topology, moved, plan.seconds)
    most = max(shares.values(), default=1.0)
    return {
        **found.as_dict(),
        "loads": [asdict(load) for load in by_kind(topology, moved, plan.seconds)],
        # Red is the busiest link: a few per cent would look like nothing.
        "picture": Markup(draw(topology, {edge: share / most for edge, share in shares.items()})),
    }


def _left(report: Report) -> list[dict[str, Any]]:
    """What did not take effect, equal reasons together."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for remark in report.left:
        places.setdefault((remark.kind, remark.subject, remark.reason), []).append(
            remark.where or "unknown place"
        )
    return [
        {"kind": kind, "subject": subject, "reason": reason, "count": len(at), "where": at[0]}
        for (kind, subject, reason), at in places.items()
    ]
