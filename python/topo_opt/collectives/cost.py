"""The time of a schedule: latencies, and bytes over the link that is loaded most, with every link's load counted from routes.

A step takes the longest latency among its moves plus the largest quotient of a link's bytes and its rate. In a pipelined
phase the latencies of all stages add up, and the last chunk follows behind:

    step      alpha + max over links (bytes / rate)
    pipeline  sum of alpha + max over links (bytes / rate) + (stages - 1) * (time of one chunk)

A library adds the launch and a base latency to each call, and a way out of its buffers (`Library.drained`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topo_opt.collectives.network import Network, Route
from topo_opt.collectives.protocols import Protocol, RouteClass
from topo_opt.collectives.schedule import Phase, Schedule, chunks_of

CHUNK_BYTES = 262144
"""Chunks of pipelined phases without a library, which has a size of its own."""
_CLASSES: tuple[RouteClass, ...] = ("nvlink", "pcie", "staged", "network")
NONE = "none"
"""The protocol without a library: latency and rate of the links, nothing is added."""


@dataclass(frozen=True)
class _Terms:
    """What a phase costs, with bytes as parts of the size of the collective."""

    steps: int
    stages: int  # 0: not pipelined
    hops_s: Mapping[str, float]  # latency of all steps or stages, by protocol
    loaded_s: float  # of the busiest link, a byte of the collective, one step
    share: float  # the largest move
    move_s: float  # the slowest move by itself, a byte of the collective
    busiest: int  # resource
    classes: frozenset[RouteClass]


@dataclass(frozen=True)
class Timed:
    """Seconds, and the protocol that gives them."""

    seconds: float
    protocol: str


class ScheduleCost:
    """Times of one schedule for all sizes.

    Args:
        launch_s: what starting a kernel costs; counted where a library runs it.
    """

    def __init__(self, schedule: Schedule, network: Network, launch_s: float) -> None:
        self.schedule, self._network, self._launch_s = schedule, network, launch_s
        for phase in schedule.phases:
            for source, targets in phase.targets().items():
                network.find_routes(source, targets)
        self.loads: NDArray[np.float64] = np.zeros(len(network.resources))
        self._protocols = _protocols(schedule, network)
        self._phases = [self._terms(phase, network.capacities) for phase in schedule.phases]
        classes = {route for terms in self._phases for route in terms.classes}
        self._protocols = {
            name: protocol
            for name, protocol in self._protocols.items()
            if protocol is None or classes <= set(protocol.hop_ns)
        }

    @property
    def usable(self) -> bool:
        """Whether any protocol knows all kinds of routes of the schedule."""
        return bool(self._protocols)

    def _terms(self, phase: Phase, rates: NDArray[np.float64]) -> _Terms:
        routes = [self._network.route(move.source, move.target) for move in phase.moves]
        crossed = np.fromiter((r for route in routes for r in route.resources), dtype=np.int64)
        counts = [len(route.resources) for route in routes]
        shares = np.repeat([move.share for move in phase.moves], counts)
        shares = shares * np.fromiter((w for route in routes for w in route.weights), dtype=np.float64)
        load = np.bincount(crossed, shares, minlength=len(rates))
        self.loads += load * phase.steps
        seconds = load / rates
        busiest = int(np.argmax(seconds))
        alone = np.maximum.reduceat(shares / rates[crossed], np.cumsum([0, *counts[:-1]]))
        return _Terms(
            steps=phase.steps,
            stages=phase.stages if phase.pipelined else 0,
            hops_s={
                name: _hops(phase, [_hop(protocol, route) for route in routes])
                for name, protocol in self._protocols.items()
            },
            loaded_s=float(seconds[busiest]),
            share=max(move.share for move in phase.moves),
            move_s=float(alone.max()),
            busiest=busiest,
            classes=frozenset(route.route_class for route in routes),
        )

    @property
    def bottleneck(self) -> int:
        """The resource that takes the most time in all phases together."""
        by_phase = [(terms.loaded_s * terms.steps, -i) for i, terms in enumerate(self._phases)]
        return self._phases[-max(by_phase)[1]].busiest

    def at(self, nbytes: float) -> Timed:
        """The time with the best protocol for that size."""
        return min(
            (Timed(self._seconds(nbytes, name, p), name) for name, p in self._protocols.items()),
            key=lambda timed: timed.seconds,
        )

    def _seconds(self, nbytes: float, name: str, protocol: Protocol | None) -> float:
        scaled = nbytes if protocol is None else nbytes / protocol.rate_share.value
        total, library = 0.0, self._network.library
        for terms in self._phases:
            total += terms.hops_s[name]
            if terms.stages:
                chunks = chunks_of(
                    terms.share, nbytes, library.tree_chunk_bytes.value if library else CHUNK_BYTES
                )
                total += scaled * (terms.loaded_s + (terms.stages - 1) / chunks * terms.move_s)
            else:
                total += scaled * terms.loaded_s * terms.steps
        if protocol is None or library is None:
            return total
        last = self._phases[-1]
        if protocol.drains and not last.stages:
            slowest = max(last.classes, key=_CLASSES.index)
            total += scaled * last.loaded_s * library.drained(last.share * nbytes, slowest)
        return total + self._launch_s + protocol.base_ns.value * 1e-9


def _protocols(schedule: Schedule, network: Network) -> dict[str, Protocol | None]:
    library = network.library
    if library is None:
        return {NONE: None}
    if schedule.symmetric is not None:
        return {"symmetric memory": library.symmetric[schedule.symmetric]}
    return dict(library.protocols)


def _hop(protocol: Protocol | None, route: Route) -> float:
    """Latency of a transfer: what the library needs for it, which includes the links, or what the links state if that is more."""
    if protocol is None or route.route_class not in protocol.hop_ns:
        return route.latency_s
    return max(protocol.hop_ns[route.route_class].value * 1e-9, route.latency_s)


def _hops(phase: Phase, hops_s: list[float]) -> float:
    """Latency of a phase.

    Data that go round a ring cross each of its hops once: their mean counts, not the longest in every step.
    """
    if phase.ring:
        rings: dict[tuple[str, int], list[float]] = {}
        first: dict[str, str] = {}
        for move, hop in zip(phase.moves, hops_s):
            group = first.setdefault(move.source, first.get(move.target, move.source))
            first.setdefault(move.target, group)
            rings.setdefault((group, move.channel), []).append(hop)
        return phase.steps * max(sum(hops) / len(hops) for hops in rings.values())
    if not phase.pipelined:
        return phase.steps * max(hops_s)
    slowest: dict[int, float] = {}
    for move, hop in zip(phase.moves, hops_s):
        slowest[move.stage] = max(slowest.get(move.stage, 0.0), hop)
    return sum(slowest.values())
