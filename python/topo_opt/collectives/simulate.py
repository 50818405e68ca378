"""Simulates collectives: every transfer as a flow over the links, event by event.

It takes the schedule of transfers from the cost model, and nothing else: who shares which link when, and what waits for
what, comes out of the events. Plans are judged by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from topo_opt.collectives.cost import CHUNK_BYTES
from topo_opt.collectives.flows import FairFlows
from topo_opt.collectives.model import CollectiveModel, Groups
from topo_opt.collectives.network import Edge, Network
from topo_opt.collectives.protocols import Protocol
from topo_opt.collectives.schedule import Kind, Phase, Schedule, chunks_of

# Arrivals this close to each other, as a part of the time, are one event.
TOGETHER = 1e-9


@dataclass(frozen=True)
class Simulated:
    """What a simulation gives: the time of all calls, of each, the number of transfers, and the bytes over each link."""

    seconds: float
    algorithm: str
    calls: tuple[float, ...]
    transfers: int
    link_bytes: dict[Edge, float]


def simulate(
    model: CollectiveModel, kind: Kind, nbytes: float, groups: Groups, algorithm: str | None = None
) -> Simulated:
    """Simulates a collective with the algorithm that the model takes, or with the one that is named.

    Arguments and errors are those of `CollectiveModel.cost`. Measured curves have no part in it.
    """
    cost = model.cost(kind, nbytes, groups, algorithm)
    times: list[float] = []
    transfers = 0
    link_bytes: dict[Edge, float] = {}
    for call in cost.calls:
        run = _Run(model.network, call.schedule, call.nbytes, call.protocol)
        times.append(run.seconds() + call.start_s)
        transfers += run.transfers
        for edge, carried in run.link_bytes().items():
            link_bytes[edge] = link_bytes.get(edge, 0.0) + carried
    return Simulated(sum(times), cost.algorithm, tuple(times), transfers, link_bytes)


@dataclass
class _Transfer:
    phase: int
    move: int
    part: int  # step of a phase, or chunk of a pipelined one
    started: float = 0.0


class _Run:
    """One call of the library."""

    def __init__(
        self, network: Network, schedule: Schedule, nbytes: float, protocol: Protocol | None
    ) -> None:
        self._network, self._schedule, self._nbytes, self._protocol = network, schedule, nbytes, protocol
        self._phases = schedule.phases
        pairs = sorted({(m.source, m.target) for phase in self._phases for m in phase.moves})
        self._pairs = {pair: i for i, pair in enumerate(pairs)}
        routes = [network.route(*pair) for pair in pairs]
        self._links = sorted({r for route in routes for r in route.resources})
        column = {link: i for i, link in enumerate(self._links)}
        crossings = np.zeros((len(routes), len(self._links)))
        for i, route in enumerate(routes):
            for resource, weight in zip(route.resources, route.weights):
                crossings[i, column[resource]] = weight
        self._crossings = crossings
        share = protocol.rate_share.value if protocol else 1.0
        self._flows = FairFlows(crossings, network.capacities[self._links] * share)
        self._hop_s = [network.hop_s(route, protocol) for route in routes]
        self._list: list[_Transfer] = []
        self._arrivals: list[tuple[float, int]] = []
        self._now = 0.0
        self._last_sending_s = 0.0
        self._prepare()

    @property
    def transfers(self) -> int:
        return len(self._list)

    def link_bytes(self) -> dict[Edge, float]:
        """Bytes over each link."""
        carried = self._flows.carried @ self._crossings
        out: dict[Edge, float] = {}
        for link, nbytes in zip(self._links, carried):
            if self._network.resources[link].is_link:
                out[self._network.resources[link].edge] = float(nbytes)
        return out

    def _prepare(self) -> None:
        """Counts what each device waits for, and how transfers follow each other."""
        self._touching: list[dict[str, int]] = []  # phase -> device -> transfers not yet arrived
        self._sends: list[dict[tuple[str, int], list[int]]] = []  # phase -> (device, channel) -> moves
        self._moves_of: list[dict[str, list[int]]] = []  # phase -> device -> moves
        self._in_step: list[dict[tuple[str, int], int]] = []  # phase -> moves of a step that touch it
        self._chunks: list[int] = []
        self._feeds: list[
            dict[int, list[int]]
        ] = []  # pipelined phase -> move -> moves that pass its chunks on
        self._needs: list[list[int]] = []  # pipelined phase -> move -> moves that each chunk waits for
        for phase in self._phases:
            library = self._network.library
            chunk = library.tree_chunk_bytes.value if library else CHUNK_BYTES
            most = max(move.share for move in phase.moves)
            parts = chunks_of(most, self._nbytes, chunk) if phase.pipelined else phase.steps
            self._chunks.append(parts)
            touching: dict[str, int] = {}
            sends: dict[tuple[str, int], list[int]] = {}
            in_step: dict[tuple[str, int], int] = {}
            moves_of: dict[str, list[int]] = {}
            for i, move in enumerate(phase.moves):
                sends.setdefault((move.source, move.channel), []).append(i)
                moves_of.setdefault(move.source, []).append(i)
                for device in (move.source, move.target):
                    touching[device] = touching.get(device, 0) + parts
                    in_step[device, move.channel] = in_step.get((device, move.channel), 0) + 1
            self._touching.append(touching)
            self._sends.append(sends)
            self._moves_of.append(moves_of)
            self._in_step.append(in_step)
            feeds, needs = _pipeline(phase) if phase.pipelined else ({}, [])
            self._feeds.append(feeds)
            self._needs.append(needs)
        self._step_left: dict[tuple[int, int, str, int], int] = {}
        self._chunk_left: dict[tuple[int, int, int], int] = {}
        self._chunk_next: dict[tuple[int, int], int] = {}
        self._busy: set[tuple[int, int]] = set()
        self._released: set[tuple[int, str]] = set()

    def seconds(self) -> float:
        """Runs to the end; the time of the last arrival and of the way out of the library's buffers."""
        for device in sorted(
            {d for phase in self._phases for m in phase.moves for d in (m.source, m.target)}
        ):
            self._release(0, device)
        while True:
            sending = self._flows.until_next()
            arriving = self._arrivals[0][0] - self._now if self._arrivals else float("inf")
            step = min(sending, max(arriving, 0.0))
            if step == float("inf"):
                break
            self._now += step
            for number in self._flows.advance(step):
                self._sent(number)
            limit = self._now * (1 + TOGETHER)
            while self._arrivals and self._arrivals[0][0] <= limit:
                self._arrived(heappop(self._arrivals)[1])
        return self._now + self._drain_s()

    def _drain_s(self) -> float:
        library, last = self._network.library, self._phases[-1]
        protocol = self._protocol
        if library is None or protocol is None or last.pipelined:
            return 0.0
        classes = {self._network.route(m.source, m.target).route_class for m in last.moves}
        nbytes = max(move.share for move in last.moves) * self._nbytes
        return self._last_sending_s * max(library.drained(protocol, nbytes, name) for name in classes)

    def _release(self, phase: int, device: str) -> None:
        """A device may start a phase: everything that it had to do with in the phase before has arrived."""
        if phase >= len(self._phases) or (phase, device) in self._released:
            return
        self._released.add((phase, device))
        for move in self._moves_of[phase].get(device, ()):
            if self._phases[phase].pipelined:
                self._feed(phase, move)
            else:
                self._start(phase, move, 0)
        if not self._touching[phase].get(device):
            self._release(phase + 1, device)

    def _start(self, phase: int, move: int, part: int) -> None:
        found = self._phases[phase].moves[move]
        parts = self._chunks[phase] if self._phases[phase].pipelined else 1
        self._list.append(_Transfer(phase, move, part, self._now))
        route = self._pairs[found.source, found.target]
        self._flows.start(len(self._list) - 1, route, found.share * self._nbytes / parts)

    def _feed(self, phase: int, move: int) -> None:
        """Starts the next chunk of a pipelined move when the one before has left and what it passes on is there."""
        source = self._phases[phase].moves[move].source
        chunk = self._chunk_next.get((phase, move), 0)
        if (
            (phase, move) in self._busy
            or chunk >= self._chunks[phase]
            or (phase, source) not in self._released
        ):
            return
        if self._chunk_left.get((phase, move, chunk), self._needs[phase][move]) > 0:
            return
        self._busy.add((phase, move))
        self._chunk_next[phase, move] = chunk + 1
        self._start(phase, move, chunk)

    def _sent(self, number: int) -> None:
        transfer = self._list[number]
        move = self._phases[transfer.phase].moves[transfer.move]
        self._last_sending_s = self._now - transfer.started
        heappush(self._arrivals, (self._now + self._hop_s[self._pairs[move.source, move.target]], number))
        if self._phases[transfer.phase].pipelined:
            self._busy.discard((transfer.phase, transfer.move))
            self._feed(transfer.phase, transfer.move)
        else:
            self._in_step_done(transfer.phase, transfer.part, move.source, move.channel)

    def _arrived(self, number: int) -> None:
        transfer = self._list[number]
        phase, part = transfer.phase, transfer.part
        move = self._phases[phase].moves[transfer.move]
        if self._phases[phase].pipelined:
            for follower in self._feeds[phase].get(transfer.move, ()):
                left = self._chunk_left.get((phase, follower, part), self._needs[phase][follower])
                self._chunk_left[phase, follower, part] = left - 1
                self._feed(phase, follower)
        else:
            self._in_step_done(phase, part, move.target, move.channel)
        for device in (move.source, move.target):
            self._touching[phase][device] -= 1
            if not self._touching[phase][device]:
                self._release(phase + 1, device)

    def _in_step_done(self, phase: int, part: int, device: str, channel: int) -> None:
        """One of a device's own moves of a step has left, or one to it has arrived; behind the last the next step starts."""
        if part + 1 >= self._chunks[phase]:
            return
        key = (phase, part, device, channel)
        left = self._step_left.get(key, self._in_step[phase][device, channel]) - 1
        self._step_left[key] = left
        if not left:
            del self._step_left[key]
            for follower in self._sends[phase].get((device, channel), ()):
                self._start(phase, follower, part + 1)


def _pipeline(phase: Phase) -> tuple[dict[int, list[int]], list[int]]:
    """For each move the later moves of its target on the same channel, and how many earlier ones each waits for."""
    by_source: dict[tuple[str, int], list[int]] = {}
    for i, move in enumerate(phase.moves):
        by_source.setdefault((move.source, move.channel), []).append(i)
    feeds: dict[int, list[int]] = {}
    needs = [0] * len(phase.moves)
    for i, move in enumerate(phase.moves):
        for follower in by_source.get((move.target, move.channel), ()):
            if phase.moves[follower].stage > move.stage:
                feeds.setdefault(i, []).append(follower)
                needs[follower] += 1
    return feeds, needs
