"""Curves measured on the machine: optional parts of a topology that take the place of figures from datasheets."""

from collections.abc import Callable
from typing import Literal, Self

from pydantic import Field, model_validator

from topo_opt.topology.figures import Count, DType, Identifier, Strict, Text

MAX_POINTS = 4096
MAX_CURVES = 1024
Seconds = float
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]


class Timing(Strict):
    """Median time of one operation; `low_s` and `high_s` are the quartiles where they were kept."""

    seconds: Seconds = Field(gt=0, le=1e4)
    low_s: Seconds | None = Field(default=None, gt=0, le=1e4)
    high_s: Seconds | None = Field(default=None, gt=0, le=1e4)

    @model_validator(mode="after")
    def _quartiles_enclose_the_median(self) -> Self:
        if (self.low_s or 0.0) > self.seconds or (self.high_s or self.seconds) < self.seconds:
            raise ValueError("the median lies outside of its quartiles")
        return self


class BytesTiming(Timing):
    """Time of an operation on so many bytes."""

    bytes: Count


class GemmTiming(Timing):
    """Time of `C[m, n] = A[m, k] @ B[k, n]`."""

    m: Count
    n: Count
    k: Count


class CollectiveCurve(Strict):
    """Times of one collective among `participants`, in the order of ranks.

    Bytes count the whole tensor: all_reduce, broadcast, send: the buffer; all_gather: the result; reduce_scatter: the
    operand; all_to_all: the local buffer.
    """

    kind: CollectiveKind
    algorithm: Literal["library", "one_shot", "two_shot"] = Field(
        description="library: what NCCL or RCCL chose; the others: kernels on symmetric memory"
    )
    participants: tuple[Identifier, ...] = Field(min_length=2, max_length=1024)
    points: tuple[BytesTiming, ...] = Field(min_length=1, max_length=MAX_POINTS)
    source: Text


class GemmCurve(Strict):
    """Times of matrix products on one device."""

    device: Identifier
    dtype: DType
    points: tuple[GemmTiming, ...] = Field(min_length=1, max_length=MAX_POINTS)
    source: Text


class CopyCurve(Strict):
    """Times of copies of so many bytes; from a device to itself it is a copy inside of its memory."""

    ends: tuple[Identifier, Identifier]
    points: tuple[BytesTiming, ...] = Field(min_length=1, max_length=MAX_POINTS)
    source: Text


class Measurements(Strict):
    """All curves of a machine, with the versions of the software that they were measured with."""

    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")
    versions: dict[Identifier, Text] = Field(default_factory=dict)
    collectives: tuple[CollectiveCurve, ...] = Field(default=(), max_length=MAX_CURVES)
    gemms: tuple[GemmCurve, ...] = Field(default=(), max_length=MAX_CURVES)
    copies: tuple[CopyCurve, ...] = Field(default=(), max_length=MAX_CURVES)

    def renamed(self, name: Callable[[str], str]) -> Self:
        """The same curves with other ids of devices."""
        collectives = tuple(
            curve.model_copy(update={"participants": tuple(map(name, curve.participants))})
            for curve in self.collectives
        )
        gemms = tuple(curve.model_copy(update={"device": name(curve.device)}) for curve in self.gemms)
        copies = tuple(
            curve.model_copy(update={"ends": (name(curve.ends[0]), name(curve.ends[1]))})
            for curve in self.copies
        )
        return self.model_copy(update={"collectives": collectives, "gemms": gemms, "copies": copies})
