"""What the model says of a collective: its time, the algorithm, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from topo_opt.collectives.cost import ScheduleCost
from topo_opt.collectives.network import Edge, Network
from topo_opt.collectives.protocols import Protocol
from topo_opt.collectives.schedule import Schedule


@dataclass(frozen=True)
class Call:
    """One call of a library: what it moves, of how many bytes, by which protocol, and what it takes before anything moves."""

    schedule: Schedule
    nbytes: float
    protocol: Protocol | None
    start_s: float


@dataclass(frozen=True)
class CollectiveCost:
    """What a collective takes, and why.

    `algorithm` names the best one, with its protocol where a library has several; `considered` has all of them with their
    seconds, the best first. `bottleneck` is the directed link that takes most of the time; with the kind "memory" it is the memory of
    (host, host), with "staged" the limit of a pair without peer access.
    """

    seconds: float
    algorithm: str
    steps: int
    bottleneck: Edge | None
    bottleneck_kind: str
    considered: tuple[tuple[str, float], ...]
    _loads: tuple[tuple[ScheduleCost, float], ...] = field(repr=False, compare=False)
    _network: Network = field(repr=False, compare=False)

    @cached_property
    def link_bytes(self) -> dict[Edge, float]:
        """Bytes over each directed link, all groups together."""
        out: dict[Edge, float] = {}
        for cost, nbytes in self._loads:
            for resource in cost.loads.nonzero()[0]:
                if self._network.resources[resource].is_link:
                    edge = self._network.resources[resource].edge
                    out[edge] = out.get(edge, 0.0) + float(cost.loads[resource]) * nbytes
        return out

    @cached_property
    def link_kinds(self) -> tuple[str, ...]:
        """The kinds of the links that it loads, sorted."""
        loaded = {r for cost, _ in self._loads for r in cost.loads.nonzero()[0]}
        resources = [self._network.resources[r] for r in loaded]
        return tuple(sorted({r.kind for r in resources if r.is_link}))

    @property
    def calls(self) -> tuple[Call, ...]:
        """What the algorithm moves, call by call."""
        out = []
        for cost, nbytes in self._loads:
            name = cost.at(nbytes).protocol
            out.append(Call(cost.schedule, nbytes, cost.protocol(name), cost.start_s(name)))
        return tuple(out)

    def why(self) -> str:
        """One line: the choice, what bounds it, and the runner-up."""
        bound = (
            f"bound by {self.bottleneck_kind} {'->'.join(self.bottleneck)}"
            if self.bottleneck
            else "bound by latency"
        )
        others = [f"{name} {seconds * 1e6:.1f} us" for name, seconds in self.considered[1:2]]
        return f"{self.algorithm} {self.seconds * 1e6:.1f} us, {bound}" + (
            f"; next {others[0]}" if others else ""
        )
