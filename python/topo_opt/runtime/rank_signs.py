"""What the ranks of a program tell each other about themselves, and what follows when one of them does not come.

Every rank publishes a `Sign` twice a second. A rank that waits for the others judges them by theirs: one that has failed or left is
named at once; one that is silent, that does not come, or that comes to nothing is named after the time limit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

QUIET_S = 2.0
"""A rank that is silent for so long may not exist any more."""
WAITS = 2
"""Reports that stay published: nobody can be two agreements behind another rank."""


@dataclass(frozen=True)
class Sign:
    """One rank at one time.

    `beat` counts signs. `stage` counts the loads, agreements and calls that the rank has come to: all ranks come to the same ones in
    the same order. `moved` changes as long as the rank gets on with its work; one that only waits for others does not.
    """

    beat: int = 0
    stage: int = 0
    doing: str = "starting"
    busy: bool = False
    """Inside of a load, an agreement or a call."""
    waiting: bool = False
    """For other ranks."""
    moved: int = 0
    failed: str = ""
    """Why it has failed, with what it was doing."""
    hint: str | None = None
    left: bool = False
    """It needs the others no more."""
    reports: Mapping[str, str] = field(default_factory=dict)
    """Number of an agreement -> what this rank has to say there."""

    def to_bytes(self) -> bytes:
        """As the store holds it."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of_bytes(cls, data: bytes) -> Sign:
        """Reads what `to_bytes` made."""
        return cls(**json.loads(data))

    def reporting(self, number: int, report: str) -> Sign:
        """With one more report, without those that all ranks have read."""
        kept = {key: value for key, value in self.reports.items() if number - int(key) < WAITS}
        return replace(self, reports={**kept, str(number): report})


@dataclass
class Seen:
    """The last sign of another rank, and since when (seconds of this rank's clock) parts of it are as they are."""

    sign: Sign | None
    beat_at: float
    stage_at: float
    moved_at: float
    note: str = ""
    """Of a rank that has not come: what it tried last, and why that failed."""
    stale: int | None = None
    """The beat of a sign that may be of an earlier program: a rank has come when its beat has changed."""

    @classmethod
    def nothing(cls, now: float) -> Seen:
        """Of a rank that has not come yet."""
        return cls(None, now, now, now)

    def update(self, sign: Sign, now: float) -> None:
        """Takes a newer sign."""
        old = self.sign
        if old is None and self.stale in (None, sign.beat):
            self.stale, self.note = sign.beat, sign.failed or self.note
            return
        if old is None or sign.beat != old.beat:
            self.beat_at = now
        if old is None or sign.stage != old.stage:
            self.stage_at = now
        if old is None or (sign.moved, sign.stage) != (old.moved, old.stage):
            self.moved_at = now
        self.sign = sign

    def shift(self, seconds: float) -> None:
        """Leaves out a time in which this rank itself stood still."""
        self.beat_at += seconds
        self.stage_at += seconds
        self.moved_at += seconds


@dataclass(frozen=True)
class Fault:
    """Why a rank cannot go on: another rank, what it did or did not do, and what the user can do."""

    message: str
    hint: str | None = None


_GONE = (
    "that process was killed (dmesg tells of one that the kernel killed for memory), stopped, or its machine or network is gone; "
    "end it and start all ranks again"
)
_STUCK = "see what that process does (py-spy dump --pid PID); a longer limit is timeout_s= or --timeout"


def ended(seen: Mapping[int, Seen], stage: int) -> Fault | None:
    """A rank that has said that it failed, or that left before it came to `stage`: known at once."""
    for rank, about in seen.items():
        if about.sign is not None and about.sign.failed:
            return Fault(f"rank {rank} failed {about.sign.failed}", about.sign.hint)
    for rank, about in seen.items():
        if about.sign is not None and about.sign.left and about.sign.stage < stage:
            return Fault(
                f"rank {rank} has left: its process has ended, or has closed the program",
                "all ranks make the same calls",
            )
    return None


def silent(seen: Mapping[int, Seen], now: float, limit_s: float) -> Fault | None:
    """A rank that has come, and from which nothing is heard for so long."""
    for rank, about in seen.items():
        age = now - about.beat_at
        if about.sign is not None and age > limit_s:
            return Fault(
                f"rank {rank} has given no sign of life for {age:.0f} s; it was last {about.sign.doing}",
                _GONE,
            )
    return None


def absent(seen: Mapping[int, Seen], now: float, since: float, stage: int, limit_s: float) -> Fault | None:
    """A rank that does not come to what this rank has been waiting at since `since`, or gets nowhere on its way to the end of it."""
    circle: list[int] = []
    for rank, about in seen.items():
        sign = about.sign
        if sign is None:
            if now - max(since, about.beat_at) > limit_s:
                why = f"; what it tried last failed: {about.note}" if about.note else ""
                return Fault(
                    f"rank {rank} has not come to load the bundle within {limit_s:g} s{why}",
                    "every rank must be started and load the bundle; a longer limit is timeout_s= or --timeout",
                )
        elif now - about.beat_at > QUIET_S:
            # Nobody knows what it does; `silent` is about it.
            continue
        elif sign.stage < stage and not sign.busy:
            if now - max(since, about.stage_at) > limit_s:
                return Fault(
                    f"rank {rank} has not come within {limit_s:g} s; it was last {sign.doing}",
                    "all ranks make the same calls; a longer limit is timeout_s= or --timeout",
                )
        elif sign.busy and now - max(since, about.moved_at) > limit_s:
            if not sign.waiting:
                return Fault(f"rank {rank} has got nowhere for {limit_s:g} s; it is {sign.doing}", _STUCK)
            circle.append(rank)
    if len(circle) == len(seen) and circle:
        doing = "; ".join(f"rank {rank} {seen[rank].sign.doing}" for rank in circle if seen[rank].sign)  # type: ignore[union-attr]
        return Fault(f"all ranks wait for each other for {limit_s:g} s: {doing}", _STUCK)
    return None
