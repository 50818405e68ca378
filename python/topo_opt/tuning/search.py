"""The search: which candidates are measured, in which order, and which one wins.

A *short* search measures the best candidates by the cost model and the one that other sizes suggest; a *full* one measures
the whole space and then climbs from the best through its neighbours. Both measure the finalists once more, longer. A
candidate must beat the default by more than the noise to replace it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.tile_order import neighbours
from topo_opt.errors import UnsupportedError
from topo_opt.tuning.key import Key
from topo_opt.tuning.measure import Case, Job, Measurer, Outcome
from topo_opt.tuning.records import Rejected, Tile, Timed

SHORT = 10
"""Candidates of a short search."""
ROUNDS = 3
"""Climbs of a full search at most."""
FINALISTS = 3
NOISE = 0.01
"""A candidate counts as faster than the default from this share of its time on."""
_TURN = 4  # candidates of one kernel before the next one's turn, so that a time limit hits all alike


@dataclass(frozen=True)
class Problem:
    """A kernel to tune. `candidates`: the default first; `weight`: its part of the model's time."""

    symbol: str
    key: Key
    case: Case
    candidates: Sequence[Tile]
    lower: Callable[[Tile], KernelSource]
    """Raises UnsupportedError for a tile that is not possible."""
    weight: float = 1.0


@dataclass
class Found:
    """What a search found for one kernel; `skipped` candidates were left out when time ran out."""

    timed: dict[tuple[tuple[str, int], ...], Timed] = field(default_factory=dict)
    rejected: dict[tuple[tuple[str, int], ...], Rejected] = field(default_factory=dict)
    final: set[tuple[tuple[str, int], ...]] = field(default_factory=set)
    """Those that were measured the second, longer time."""
    skipped: int = 0
    default_us: float | None = None

    def ordered(self, default: Tile) -> tuple[Timed, ...]:
        """The finalists by time, then the others; the default goes first when nothing beats it by more than the noise."""
        times = sorted(
            self.timed.values(),
            key=lambda t: (_identity(t.tile) not in self.final, t.us, _identity(t.tile)),
        )
        own = self.timed.get(_identity(default))
        if own is not None and times[0].us > own.us * (1 - NOISE):
            times.remove(own)
            times.insert(0, own)
        return tuple(times)


def _identity(tile: Tile) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(tile.items()))


@dataclass
class Search:
    """One search over several kernels within a time limit in seconds."""

    measurer: Measurer
    depth: str
    limit_s: float
    climbs: bool = True
    """Whether a full search may ask for tiles that no problem lists."""
    clock: Callable[[], float] = time.monotonic

    def run(self, problems: Sequence[Problem]) -> dict[str, Found]:
        """Symbol -> what was found, the heaviest kernels first in line."""
        ordered = sorted(problems, key=lambda p: (-p.weight, p.symbol))
        found = {p.symbol: Found() for p in ordered}
        deadline = self.clock() + self.limit_s
        first = {p.symbol: p.candidates[: SHORT if self.depth == "short" else None] for p in ordered}
        self._measure(ordered, first, found, deadline)
        if self.depth == "full" and self.climbs:
            self._climb(ordered, found, deadline)
        finalists = {p.symbol: self._finalists(p, found[p.symbol]) for p in ordered}
        self._measure(ordered, finalists, found, deadline, careful=True)
        for problem in ordered:
            own = found[problem.symbol].timed.get(_identity(problem.candidates[0]))
            found[problem.symbol].default_us = own.us if own else None
        return found

    def _climb(self, problems: Sequence[Problem], found: Mapping[str, Found], deadline: float) -> None:
        moving = list(problems)
        for _ in range(ROUNDS):
            before = {p.symbol: self._best(found[p.symbol]) for p in moving}
            steps = {}
            for p in moving:
                best, known = before[p.symbol], found[p.symbol]
                near = neighbours(best.tile) if best else []
                steps[p.symbol] = [t for t in near if _identity(t) not in {*known.timed, *known.rejected}]
            self._measure(moving, steps, found, deadline)
            moving = [p for p in moving if self._best(found[p.symbol]) != before[p.symbol]]
            if not moving:
                return

    def _best(self, found: Found) -> Timed | None:
        return min(found.timed.values(), key=lambda t: (t.us, _identity(t.tile)), default=None)

    def _finalists(self, problem: Problem, found: Found) -> list[Tile]:
        times = sorted(found.timed.values(), key=lambda t: (t.us, _identity(t.tile)))
        tiles = [t.tile for t in times[:FINALISTS]]
        default = problem.candidates[0]
        if (
            len(times) > 1
            and dict(default) not in [dict(t) for t in tiles]
            and _identity(default) in found.timed
        ):
            tiles.append(default)
        return tiles if len(times) > 1 else []

    def _measure(
        self,
        problems: Sequence[Problem],
        tiles: Mapping[str, Sequence[Tile]],
        found: Mapping[str, Found],
        deadline: float,
        *,
        careful: bool = False,
    ) -> None:
        jobs = self._jobs(problems, tiles, found, careful)
        for job, outcome in self.measurer.run(jobs, deadline):
            self._take(found[job.case.id], job, outcome)

    def _jobs(
        self,
        problems: Sequence[Problem],
        tiles: Mapping[str, Sequence[Tile]],
        found: Mapping[str, Found],
        careful: bool,
    ) -> Iterator[Job]:
        longest = max((len(t) for t in tiles.values()), default=0)
        for start in range(0, longest, _TURN):
            for problem in problems:
                for tile in tiles.get(problem.symbol, ())[start : start + _TURN]:
                    try:
                        source = problem.lower(tile)
                    except UnsupportedError as error:
                        rejected = Rejected(tile, f"no code for it: {error.message}")
                        found[problem.symbol].rejected[_identity(tile)] = rejected
                        continue
                    yield Job(problem.case, tile, source, careful)

    def _take(self, found: Found, job: Job, outcome: Outcome) -> None:
        identity = _identity(job.tile)
        if not outcome.tried:
            found.skipped += not job.careful
        elif outcome.reason:
            # A finalist that fails the second time is no finalist, however fast it was.
            found.timed.pop(identity, None)
            found.final.discard(identity)
            found.rejected[identity] = Rejected(job.tile, outcome.reason)
        else:
            found.timed[identity] = Timed(job.tile, round(outcome.us, 4))
            if job.careful:
                found.final.add(identity)
