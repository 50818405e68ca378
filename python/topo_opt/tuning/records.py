"""What is known about the tiles of one kernel on one device, as data: in the cache, in bundles and in the package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from topo_opt.tuning.key import Key

SCHEMA = 1
DEPTHS = ("short", "full")
MAX_ENTRIES = 100_000

Tile = Mapping[str, int]


@dataclass(frozen=True)
class Timed:
    """A tile that passed the checks, and the median time of one launch in microseconds."""

    tile: Tile
    us: float


@dataclass(frozen=True)
class Rejected:
    """A tile that must not be used, or was not tried, and why."""

    tile: Tile
    reason: str


@dataclass(frozen=True)
class Entry:
    """One tuned kernel. `timed` is sorted by time, its first is the choice."""

    key: Key
    device: str
    versions: Mapping[str, str]
    depth: str
    """ "short" or "full": which search was made."""
    timed: tuple[Timed, ...]
    rejected: tuple[Rejected, ...] = ()
    kernel: str = ""
    """The symbol it had, for readers."""

    @property
    def best(self) -> Timed:
        return self.timed[0]

    def as_json(self, *, brief: bool = False) -> dict[str, Any]:
        """Plain data; `brief` keeps the choice alone, for data that is shipped."""
        timed = self.timed[:1] if brief else self.timed
        rejected = () if brief else self.rejected
        return {
            "kernel": self.kernel,
            "text": self.key.text,
            "structure": self.key.structure,
            "sizes": list(self.key.sizes),
            "device": self.device,
            "versions": dict(sorted(self.versions.items())),
            "depth": self.depth,
            "timed": [{"tile": dict(t.tile), "us": t.us} for t in timed],
            "rejected": [{"tile": dict(r.tile), "reason": r.reason} for r in rejected],
        }

    @classmethod
    def of_json(cls, data: Any) -> Entry:
        """The entry in plain data.

        Raises:
            ValueError: it is something else.
        """
        try:
            timed = tuple(Timed(_tile(t["tile"]), _time(t["us"])) for t in data["timed"])
            rejected = tuple(Rejected(_tile(r["tile"]), _text(r["reason"])) for r in data["rejected"])
            key = Key(_text(data["text"]), _text(data["structure"]), tuple(_whole(n) for n in data["sizes"]))
            versions = {_text(k): _text(v) for k, v in data["versions"].items()}
            entry = cls(
                key,
                _text(data["device"]),
                versions,
                _text(data["depth"]),
                timed,
                rejected,
                _text(data["kernel"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a tuning entry: {error!r}") from None
        if not timed or entry.depth not in DEPTHS:
            raise ValueError("not a tuning entry: no time, or an unknown depth")
        return entry


@dataclass(frozen=True)
class Choice:
    """The tile of one kernel and the figure that it rests on."""

    symbol: str
    tile: Tile
    basis: str
    """ "measured", "cache", "data", "transfer" or "model"."""
    us: float | None = None
    """Time of one launch that was measured with this tile; of the other sizes for a transfer."""
    default_us: float | None = None
    """The same for the tile that the cost model puts first."""
    tried: int = 0
    rejected: tuple[Rejected, ...] = ()
    note: str = ""
    """Where the figure comes from, or why there is none."""
    entry: Entry | None = field(default=None, compare=False)

    def as_json(self) -> dict[str, Any]:
        """For report.json: everything but the entry."""
        return {
            "basis": self.basis,
            "tile": dict(self.tile),
            "us": self.us,
            "default_us": self.default_us,
            "tried": self.tried,
            "rejected": [{"tile": dict(r.tile), "reason": r.reason} for r in self.rejected],
            "note": self.note,
        }


def file_content(entries: Sequence[Entry], *, brief: bool = False) -> dict[str, Any]:
    """A file of several entries, in an order that does not depend on how they were found."""
    ordered = sorted(entries, key=lambda e: (e.device, e.key.structure, e.key.sizes, e.key.text))
    return {"schema": SCHEMA, "entries": [e.as_json(brief=brief) for e in ordered]}


def read_content(data: Any) -> list[Entry]:
    """The entries of such a file.

    Raises:
        ValueError: it is something else.
    """
    if (
        not isinstance(data, dict)
        or data.get("schema") != SCHEMA
        or not isinstance(data.get("entries"), list)
    ):
        raise ValueError(f"not a tuning file of schema {SCHEMA}")
    if len(data["entries"]) > MAX_ENTRIES:
        raise ValueError(f"{len(data['entries'])} entries, at most {MAX_ENTRIES}")
    return [Entry.of_json(e) for e in data["entries"]]


def _tile(data: Any) -> dict[str, int]:
    if not isinstance(data, dict):
        raise TypeError("a tile is a dictionary")
    return {_text(k): _whole(v) for k, v in data.items()}


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 4000:
        raise TypeError("expected text")
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > 2**60:
        raise TypeError("expected a whole number")
    return value


def _time(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e12:
        raise TypeError("expected a time in microseconds")
    return float(value)
