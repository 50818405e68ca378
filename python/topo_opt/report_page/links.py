"""How busy a plan of shardings keeps every link of the machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from topo_opt.sharding.plan import Plan
from topo_opt.sharding.plan_result import collectives
from topo_opt.topology.graph import link_graph
from topo_opt.topology.schema import Topology

Edge = tuple[str, str]


@dataclass(frozen=True)
class Load:
    """Traffic of one call over the links between two kinds of vertices, in the direction with more.

    `busy`: share of the call's time that the busiest of these links needs at its rate.
    """

    kind: str
    links: int
    nbytes: float
    busy: float


def traffic(plan: Plan) -> dict[Edge, float]:
    """Bytes of one call on every directed link that a collective of the plan uses."""
    costs, total = plan.problem.costs, Counter[Edge]()
    for one in collectives(plan):
        detail = costs.prices.collective(one.step.kind, one.nbytes, costs.groups(one.step.axes))
        for edge, nbytes in detail.link_bytes.items():
            total[edge] += nbytes
    return dict(total)


def busy(topology: Topology, moved: dict[Edge, float], seconds: float) -> dict[Edge, float]:
    """The share of `seconds` that every link needs for its bytes."""
    graph = link_graph(topology)
    return {
        edge: nbytes / graph.edges[edge]["bytes_per_s"] / seconds
        for edge, nbytes in moved.items()
        if edge in graph.edges and seconds > 0
    }


def by_kind(topology: Topology, moved: dict[Edge, float], seconds: float) -> list[Load]:
    """The traffic by kind of link, the busiest kind first."""
    graph, shares = link_graph(topology), busy(topology, moved, seconds)
    found: dict[str, list[Edge]] = {}
    for edge in shares:
        found.setdefault(graph.edges[edge]["kind"], []).append(edge)
    loads = [
        Load(
            kind,
            len({frozenset(e) for e in edges}),
            max(moved[e] for e in edges),
            max(shares[e] for e in edges),
        )
        for kind, edges in found.items()
    ]
    return sorted(loads, key=lambda load: (-load.busy, load.kind))
