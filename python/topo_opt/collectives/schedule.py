"""What a collective moves, and in which order: the common ground of the cost model and the simulation.

Bytes are parts of the collective's size, so that one schedule serves all sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from topo_opt.collectives.protocols import Kernel

Kind = str
KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


class Move(NamedTuple):
    """One transfer: `share` times the size of the collective from one device to another.

    `stage` orders the moves of a pipelined phase: a device passes on what reached it in lower stages. Moves of different
    channels carry different bytes and don't wait for each other.
    """

    source: str
    target: str
    share: float
    stage: int = 0
    channel: int = 0


@dataclass(frozen=True)
class Phase:
    """Moves that happen together, `steps` times.

    Without `pipelined` a device starts a step of a channel when its own moves of the step before have left, and those to it
    have arrived. With it the bytes are cut into chunks that follow each other through the stages. A phase starts on a device
    when all moves from and to it in the phase before have arrived. In a `ring` the moves of each channel of each group are a
    cycle, in its order.
    """

    moves: tuple[Move, ...]
    steps: int = 1
    pipelined: bool = False
    ring: bool = False

    @property
    def stages(self) -> int:
        """How many moves follow each other at most in a pipelined phase."""
        return 1 + max(move.stage for move in self.moves)

    def targets(self) -> dict[str, dict[str, None]]:
        """Where each device sends to, in the order of the moves."""
        out: dict[str, dict[str, None]] = {}
        for move in self.moves:
            out.setdefault(move.source, {})[move.target] = None
        return out


@dataclass(frozen=True)
class Schedule:
    """An algorithm, for all groups that run it at the same time. `kernel` names the one that runs it, if
    it is none of the library's protocols."""

    algorithm: str
    phases: tuple[Phase, ...]
    kernel: Kernel | None = None

    @property
    def steps(self) -> int:
        return sum(p.stages if p.pipelined else p.steps for p in self.phases)


def chunks_of(share: float, nbytes: float, chunk_bytes: int, most: int = 64) -> int:
    """Into how many chunks a pipelined move is cut: as many as needed for `chunk_bytes`, not more than `most`."""
    return max(1, min(most, -(-int(share * nbytes) // chunk_bytes)))


def merged(phases_of_groups: list[list[Phase]]) -> tuple[Phase, ...]:
    """The phases of equal groups side by side."""
    return tuple(
        Phase(
            tuple(m for phase in phases for m in phase.moves),
            phases[0].steps,
            phases[0].pipelined,
            phases[0].ring,
        )
        for phases in zip(*phases_of_groups, strict=True)
    )
