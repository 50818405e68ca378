"""The time of a schedule: latencies, and bytes over the link that is loaded most, with every link's load counted from routes.

A step takes the longest latency among its moves plus the largest quotient of a link's bytes and its rate. Steps of a ring
don't wait for each other: either data go round, hop by hop, or the slowest link is busy all the time. In a pipelined phase
the latencies of all stages add up, and the last chunk follows behind:

    step      alpha + max over links (bytes / rate)
    ring      max (sum over hops (alpha + bytes / rate), alpha + steps * max over links (bytes / rate))
    pipeline  sum of alpha + max over links (bytes / rate) + sum over all stages but one (time of a chunk)

On a uniform ring the first two are the same.

A library adds the launch and a base latency to each call, and a way out of its buffers (`Library.drained`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topo_opt.collectives.network import Network
from topo_opt.collectives.protocols import Protocol, RouteClass
from topo_opt.collectives.schedule import Move, Phase, Schedule, chunks_of

CHUNK_BYTES = 262144
"""Chunks of pipelined phases without a library, which has a size of its own."""
NONE = "none"
"""The protocol without a library: latency and rate of the links, nothing is added."""


@dataclass(frozen=True)
class _Terms:
    """What a phase costs, with bytes as parts of the size of the collective."""

    steps: int
    stages: int  # 0: not pipelined
    hops_s: Mapping[str, float]  # latency of all steps or stages, by protocol
    hop_s: Mapping[str, float]  # the longest latency, by protocol
    loaded_s: float  # of the busiest link, a byte of the collective, one step
    path_s: float  # of moves one behind the other, a byte of the collective, all steps
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
        launch_s: what starting a kernel costs; counted where a library runs it, not for an exchange, which is a part of another kernel.
    """

    def __init__(self, schedule: Schedule, network: Network, launch_s: float) -> None:
        self.schedule, self._network = schedule, network
        self._launch_s = 0.0 if schedule.kernel == "exchange" else launch_s
        for phase in schedule.phases:
            for source, targets in phase.targets().items():
                network.find_routes(source, targets)
        self.loads: NDArray[np.float64] = np.zeros(len(network.resources))
        self._protocols = _protocols(schedule, network)
        self._phases = [self._terms(phase, network.capacities) for phase in schedule.phases]
        classes = self.classes = frozenset(route for terms in self._phases for route in terms.classes)
        self._protocols = {
            name: protocol
            for name, protocol in self._protocols.items()
            if protocol is None or classes <= protocol.hop_ns.keys()
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
        starts = np.cumsum([0, *counts[:-1]])
        alone = np.maximum.reduceat(shares / rates[crossed], starts)
        shared = np.maximum.reduceat(seconds[crossed], starts).tolist()
        kinds = {(route.route_class, route.latency_s): route for route in routes}
        hops = {}
        for name, protocol in self._protocols.items():
            hop_of = {kind: self._network.hop_s(route, protocol) for kind, route in kinds.items()}
            hops[name] = [hop_of[route.route_class, route.latency_s] for route in routes]
        return _Terms(
            steps=phase.steps,
            stages=phase.stages if phase.pipelined else 0,
            hops_s={name: _hops(phase, each) for name, each in hops.items()},
            hop_s={name: max(each) for name, each in hops.items()},
            loaded_s=float(seconds[busiest]),
            path_s=_hops(phase, alone.tolist() if phase.pipelined else shared),
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

    def protocol(self, name: str) -> Protocol | None:
        """The protocol of that name; None without a library."""
        return self._protocols[name]

    def start_s(self, name: str) -> float:
        """What passes before anything moves: the launch, and the base latency of the protocol."""
        protocol = self._protocols[name]
        return self._launch_s + protocol.base_ns.value * 1e-9 if protocol else 0.0

    def _seconds(self, nbytes: float, name: str, protocol: Protocol | None) -> float:
        scaled = nbytes if protocol is None else nbytes / protocol.rate_share.value
        total, library = 0.0, self._network.library
        for terms in self._phases:
            if terms.stages:
                chunks = chunks_of(
                    terms.share, nbytes, library.tree_chunk_bytes.value if library else CHUNK_BYTES
                )
                behind = (terms.path_s - terms.move_s) / chunks
                total += terms.hops_s[name] + scaled * (terms.loaded_s + behind)
            else:
                path = terms.hops_s[name] + scaled * terms.path_s
                total += max(path, terms.hop_s[name] + scaled * terms.loaded_s * terms.steps)
        if protocol is None or library is None:
            return total
        last = self._phases[-1]
        if not last.stages:
            drained = max(library.drained(protocol, last.share * nbytes, route) for route in last.classes)
            total += scaled * last.loaded_s * drained
        return total + self.start_s(name)


def _protocols(schedule: Schedule, network: Network) -> dict[str, Protocol | None]:
    library = network.library
    if library is None:
        return {NONE: None}
    if schedule.kernel is not None:
        return {schedule.kernel: library.kernels[schedule.kernel]}
    return dict(library.protocols)


def _hops(phase: Phase, hops_s: list[float]) -> float:
    """Latency of a phase.

    Data that go round a ring cross one hop after the other: the dearest run of as many hops as there are steps counts, not
    the longest hop in every step.
    """
    if phase.ring:
        return max(_round(hops, phase.steps) for hops in _cycles(phase, hops_s))
    if not phase.pipelined:
        return phase.steps * max(hops_s)
    slowest: dict[int, dict[int, float]] = {}
    for move, hop in zip(phase.moves, hops_s):
        channel = slowest.setdefault(move.channel, {})
        channel[move.stage] = max(channel.get(move.stage, 0.0), hop)
    return max(sum(channel.values()) for channel in slowest.values())


def _cycles(phase: Phase, hops_s: list[float]) -> list[list[float]]:
    cycles: list[list[float]] = []
    last: Move | None = None
    for move, hop in zip(phase.moves, hops_s):
        if last is None or last.target != move.source or last.channel != move.channel:
            cycles.append([])
        cycles[-1].append(hop)
        last = move
    return cycles


def _round(hops: list[float], steps: int) -> float:
    rounds, rest = divmod(steps, len(hops))
    total = rounds * sum(hops)
    if rest:
        sums = np.cumsum([0.0, *hops, *hops])
        total += float((sums[rest : rest + len(hops)] - sums[: len(hops)]).max())
    return total
