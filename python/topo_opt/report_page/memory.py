"""What a program keeps in the memory of one device, by kind, from its plan."""

from __future__ import annotations

from dataclasses import dataclass

from topo_opt.runtime.plan import Buffer, Plan

KINDS = {
    "param": "weights",
    "buffer": "state",
    "constant": "constants",
    "prepared": "repacked weights",
    "arena": "intermediates",
    "zeroed": "scratch",
    "boxes": "boxes for other devices",
    "io": "inputs and results",
}
"""Kind -> what the page calls it, in the order of the bar."""


@dataclass(frozen=True)
class Part:
    """A piece of a bar: `share` is of the device's memory."""

    kind: str
    label: str
    nbytes: int
    share: float


def parts(plan: Plan, capacity: int) -> list[Part]:
    """The memory of one device: weights and state once for all variants, the rest as the largest variant needs it.

    Args:
        capacity: bytes that the device has.
    """
    stored: dict[tuple[str, str], int] = {}
    arena = zeroed = io = 0
    for function in plan.functions.values():
        for variant in function.variants:
            for number, buffer in enumerate(variant.buffers):
                if buffer.kind in ("param", "buffer", "constant", "prepared"):
                    stored[buffer.kind, _identity(buffer, f"{variant.symbol}.{number}")] = buffer.nbytes
            arena = max(arena, variant.arena_bytes)
            zeroed = max(zeroed, variant.zeroed_bytes)
            io = max(io, sum(b.nbytes for b in variant.buffers if b.kind in ("input", "output")))
    boxes = sum(k.exchange.nbytes for k in plan.kernels.values() if k.exchange is not None)
    totals = {"arena": arena, "zeroed": zeroed, "io": io, "boxes": boxes}
    for (kind, _), nbytes in stored.items():
        totals[kind] = totals.get(kind, 0) + nbytes
    return [
        Part(kind, label, totals[kind], totals[kind] / capacity)
        for kind, label in KINDS.items()
        if totals.get(kind)
    ]


def _identity(buffer: Buffer, otherwise: str) -> str:
    return buffer.name or buffer.data or otherwise


def size_text(nbytes: float) -> str:
    """Bytes with a unit of 1000, three digits: 1.23 GB."""
    power = 0
    while nbytes >= 999.5 and power < 5:
        nbytes /= 1000
        power += 1
    return f"{nbytes:.3g} {('', 'k', 'M', 'G', 'T', 'P')[power]}B"
