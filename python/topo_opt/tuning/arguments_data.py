"""The arguments and results of a kernel as plain data: what the process that measures must know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Argument:
    """One kernel argument. `fill`: "normal", "true", "small" (integers that are data), "index" (below `bound`) or "ends" (from 0
    to `bound` in equal steps, the groups of so many rows)."""

    shape: tuple[int, ...]
    dtype: str
    """torch name."""
    fill: str
    bound: int = 0
    cold: bool = True
    """Whether it comes from memory: weights and states do, what the kernel before has just written lies in L2."""


@dataclass(frozen=True)
class Result:
    """One kernel result; `argument` is the one that it rewrites, or None."""

    shape: tuple[int, ...]
    dtype: str
    argument: int | None = None


@dataclass(frozen=True)
class Signature:
    """All that a launch needs besides the kernel."""

    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data for a worker."""
        return asdict(self)

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Signature:
        """The signature in plain data."""
        return cls(
            tuple(Argument(**{**a, "shape": tuple(a["shape"])}) for a in data["arguments"]),
            tuple(Result(**{**r, "shape": tuple(r["shape"])}) for r in data["results"]),
        )
