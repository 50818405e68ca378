"""Small machines with stated latencies and rates, for tests of the cost of collectives."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from topo_opt.topology import Topology
from topo_opt.topology.loading import parse

ALPHA, BETA = 2e-6, 50e9
SOURCE = "test"


def link(
    a: str, b: str, rate: float = BETA, alpha: float | None = ALPHA, kind: str = "nvlink"
) -> dict[str, Any]:
    """A link of `rate` bytes per second and a latency of `alpha` seconds, none stated where it is None."""
    out: dict[str, Any] = {"ends": [a, b], "kind": kind, "bytes_per_s": {"value": rate, "source": SOURCE}}
    if alpha is not None:
        out["latency_ns"] = {"value": alpha * 1e9, "source": SOURCE}
    return out


def machine(
    count: int, links: Iterable[dict[str, Any]], nodes: Sequence[tuple[str, str]] = (), **more: Any
) -> Topology:
    """gpu0 to gpu(count-1) with these links and (id, kind) nodes."""
    return parse(
        json.dumps(
            {
                "schema_version": 1,
                "name": "test",
                "description": "test",
                "compute": [f"gpu{i}" for i in range(count)],
                "devices": [{"id": f"gpu{i}", "figures": "nvidia-h200-sxm"} for i in range(count)],
                "nodes": [{"id": name, "kind": kind} for name, kind in nodes],
                "links": list(links),
                **more,
            }
        ).encode(),
        "test",
    )


def ring(count: int, rate: float = BETA) -> Topology:
    """Each GPU is linked to the next one."""
    pairs = {tuple(sorted((i, (i + 1) % count))) for i in range(count)}
    return machine(count, [link(f"gpu{a}", f"gpu{b}", rate) for a, b in sorted(pairs)])


def torus(rows: int, columns: int) -> Topology:
    """gpu(r * columns + c) is linked to its neighbours in its row and its column, both of which close to rings."""
    pairs = set()
    for r in range(rows):
        for c in range(columns):
            for other in (r * columns + (c + 1) % columns, ((r + 1) % rows) * columns + c):
                if other != r * columns + c:
                    pairs.add(tuple(sorted((r * columns + c, other))))
    return machine(rows * columns, [link(f"gpu{a}", f"gpu{b}") for a, b in sorted(pairs)])


def switch(count: int, rate: float = BETA, alpha: float | None = ALPHA) -> Topology:
    """All GPUs on one switch; `alpha` is the latency from one GPU to another."""
    half = None if alpha is None else alpha / 2
    links = [link(f"gpu{i}", "switch", rate, half) for i in range(count)]
    return machine(count, links, [("switch", "nvswitch")])


def mesh(count: int) -> Topology:
    """A link between every two GPUs."""
    return machine(count, [link(f"gpu{a}", f"gpu{b}") for b in range(count) for a in range(b)])


def group(count: int) -> tuple[tuple[str, ...], ...]:
    """All GPUs as one group."""
    return (tuple(f"gpu{i}" for i in range(count)),)
