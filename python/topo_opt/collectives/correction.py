"""What measured collectives say about the model: a factor for every kind, size and number of devices.

The logarithm of measured over modelled time is a smooth function of the bytes that a device sends. A part of it is common to
all-reduce, all-gather and reduce-scatter over the same links (the library runs the same rings), a smaller part belongs to one
kind; other kinds have only their own. It fades with the number of devices, so that curves of two devices also say something
about eight.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from topo_opt.collectives.kriging import Array, Kriging, matern32
from topo_opt.collectives.schedule import KINDS, Kind

Signature = tuple[str, ...]
"""The kinds of links that a collective uses, and "staged"."""

# Standard deviations of the logarithm of measured over modelled time, and lengths in doublings. The model is off by up to 20%
# where it is off (benchmarks/collectives.py prints it uncalibrated), medians of 20 repeats scatter by a few per cent, and
# protocols change over a few doublings of the size.
COMMON, OF_KIND, NOISE = 0.2, 0.06, 0.04
RINGS = ("all_reduce", "all_gather", "reduce_scatter")
LENGTH, LENGTH_OF_KIND, LENGTH_OF_DEVICES = 1.2, 6.0, 3.0


@dataclass(frozen=True)
class Observation:
    """One measured point beside the model's time for it."""

    kind: Kind
    curve: str
    signature: Signature
    devices: int
    nbytes: float
    measured_s: float
    modelled_s: float


def sent_bytes(kind: Kind, devices: int, nbytes: float) -> float:
    """What each device sends in an algorithm that sends as little as possible."""
    part = (devices - 1) / devices
    if kind == "all_reduce":
        return 2 * part * nbytes
    return nbytes if kind in ("broadcast", "send") else part * nbytes


class Correction:
    """Factors from observations."""

    def __init__(self, observations: Sequence[Observation]) -> None:
        sets: dict[tuple[str, Signature], list[Observation]] = {}
        for seen in observations:
            sets.setdefault((seen.curve, seen.signature), []).append(seen)
        self._fits = {key: _fit(members) for key, members in sets.items()}
        self._ranges: dict[tuple[str, Signature, Kind], tuple[float, float]] = {}
        for seen in observations:
            place = (seen.curve, seen.signature, RINGS[0] if seen.kind in RINGS else seen.kind)
            sent = sent_bytes(seen.kind, seen.devices, seen.nbytes)
            low, high = self._ranges.get(place, (sent, sent))
            self._ranges[place] = min(low, sent), max(high, sent)

    def measured_range(
        self, curve: str, signature: Signature, kind: Kind, devices: int
    ) -> tuple[float, float] | None:
        """The smallest and largest size of a collective that measurements speak about; None when there are none."""
        bounds = self._ranges.get((curve, signature, kind if kind not in RINGS else RINGS[0]))
        if bounds is None:
            return None
        one = sent_bytes(kind, devices, 1.0)
        return bounds[0] / one, bounds[1] / one

    def log_factor(self, curve: str, signature: Signature, kind: Kind, devices: int, nbytes: Array) -> Array:
        """The logarithm of the factor at each size."""
        sent = np.log2(sent_bytes(kind, devices, 1.0) * nbytes)
        rest = np.tile(_coordinates(kind, devices), (len(sent), 1))
        return self._fits[curve, signature](np.column_stack([sent, rest]))


def _coordinates(kind: Kind, devices: int) -> tuple[float, float, float]:
    """Of an observation beside its bytes: the kind, what it shares a part with, doublings of the number of devices."""
    family = RINGS[0] if kind in RINGS else kind
    return KINDS.index(kind), KINDS.index(family), math.log2(devices)


def _fit(members: Sequence[Observation]) -> Kriging:
    places = [
        (math.log2(sent_bytes(o.kind, o.devices, o.nbytes)), *_coordinates(o.kind, o.devices))
        for o in members
    ]
    values = [math.log(o.measured_s / o.modelled_s) for o in members]
    return Kriging(_covariance, np.array(places, dtype=float), np.array(values), NOISE)


def _covariance(a: Array, b: Array) -> Array:
    distance = a[:, None, 0] - b[None, :, 0]
    same = a[:, None, 1] == b[None, :, 1]
    related = a[:, None, 2] == b[None, :, 2]
    fade = np.exp(-np.abs(a[:, None, 3] - b[None, :, 3]) / LENGTH_OF_DEVICES)
    common = COMMON**2 * related * matern32(distance / LENGTH)
    own = OF_KIND**2 * same * matern32(distance / LENGTH_OF_KIND)
    out: Array = (common + own) * fade
    return out


def _isotonic(values: Array) -> Array:
    """The nearest sequence that never falls, least squares: neighbours in the wrong order are given their mean.

    Pool adjacent violators, Barlow, Bartholomew, Bremner and Brunk, "Statistical inference under order restrictions" (1972).
    """
    pools: list[tuple[float, int]] = []
    for value in values.tolist():
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (left, before), (right, behind) = pools[-2:]
            pools[-2:] = [((left * before + right * behind) / (before + behind), before + behind)]
    return np.repeat([mean for mean, _ in pools], [count for _, count in pools])


class Table:
    """Corrected times of one collective on given groups: never less for more bytes.

    Between sizes it is straight in logarithms; outside of what was measured the factor of the nearest measured size holds.
    """

    PER_DOUBLING = 4

    def __init__(self, sizes: Array, seconds: Array, first: float, last: float) -> None:
        self._sizes, self._seconds = np.log(sizes).tolist(), np.log(seconds).tolist()
        self._first, self._last = first, last

    @classmethod
    def of(
        cls,
        correction: Correction,
        curve: str,
        signature: Signature,
        kind: Kind,
        devices: int,
        modelled_s: Callable[[float], float],
    ) -> Table | None:
        """The table over what was measured; None when nothing was."""
        bounds = correction.measured_range(curve, signature, kind, devices)
        if bounds is None:
            return None
        steps = max(2, round(math.log2(bounds[1] / bounds[0]) * cls.PER_DOUBLING) + 1)
        sizes = np.geomspace(bounds[0], bounds[1], steps)
        modelled = np.array([modelled_s(float(size)) for size in sizes])
        if not np.isfinite(modelled).all():
            return None
        raw = modelled * np.exp(correction.log_factor(curve, signature, kind, devices, sizes))
        seconds = np.exp(_isotonic(np.log(raw)))
        return cls(sizes, seconds, float(seconds[0] / modelled[0]), float(seconds[-1] / modelled[-1]))

    def factor(self, nbytes: float, modelled_s: float) -> float:
        """Corrected over modelled time."""
        place = math.log(nbytes)
        if place <= self._sizes[0]:
            return self._first
        if place >= self._sizes[-1]:
            return self._last
        right = bisect_right(self._sizes, place)
        left = right - 1
        part = (place - self._sizes[left]) / (self._sizes[right] - self._sizes[left])
        return (
            math.exp(self._seconds[left] + part * (self._seconds[right] - self._seconds[left])) / modelled_s
        )
