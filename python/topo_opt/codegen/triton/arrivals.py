"""Several programs on one result: parts in memory, and one of the programs combines them, in their order whoever is first.

By counting, every program writes its part and then counts itself with an atomic that releases these writes and acquires those of the
programs before. Who sees the count complete combines, and sets the counter back: counters are zero at every launch.

By waiting, the program with the highest number combines. It reads the parts until nothing in them is zero any more, and leaves
zeros: bits of elements are written inverted, so that each of them tells by itself that it is there. That saves a fence and the way to the
counter and back. Programs start in the order of their numbers, as GPUs start them, so that those which are waited for run already.
Threads that hold the same element have read it by themselves, and may have seen different things: they go on together (`anywhere`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from topo_opt.codegen.kernel_source import Scratch
from topo_opt.codegen.triton.writer import Writer
from topo_opt.errors import UnsupportedError

COUNTERS = "arrivals"
"""The scratch parameter with one counter a result."""
_WORDS = {"fp32": "i32"}
"""Elements of parts that can be waited for -> the type of their bits."""
_NEVER, _NAN = -1, 2**31 - 1
"""Bits that would be zero inverted, a NaN, and those of the NaN that stands for it."""


def anywhere(test: str, warps: int) -> str:
    """Source of a number that is above 0, for all threads of a program, where `test`, a number of 0 or 1, is 1 for any of them.

    A reduction of fewer elements than there are threads is done by some of them, or by several for themselves, which is the same only
    where they have the same elements.
    """
    return f"tl.max(tl.where(tl.arange(0, {32 * warps}) >= 0, {test}, 0))"


@dataclass(frozen=True)
class Part:
    """What a program leaves of some variable: `place`, source of pointers; `mask` of the access, where it has one; `again`: it is
    taken once more later."""

    name: str
    place: str
    mask: str | None = None
    again: bool = False


@dataclass(frozen=True)
class Meeting:
    """How the parts of `programs` programs of so many `warps` come together."""

    programs: int
    waits: bool
    warps: int

    def scratch(self, kind: str, numel: int) -> Scratch:
        """The buffer of one part of all programs.

        Raises:
            UnsupportedError: parts of this element type can't be waited for.
        """
        if self.waits and kind not in _WORDS:
            raise UnsupportedError(f"parts of type {kind} that are waited for", hint="count arrivals")
        return Scratch(_WORDS[kind], numel, zeroed=True) if self.waits else Scratch(kind, numel)

    def counters(self, results: int) -> dict[str, Scratch]:
        """The buffer behind `COUNTERS`, where there is one."""
        return {} if self.waits else {COUNTERS: counters(results)}

    def give(self, writer: Writer, parts: Sequence[Part]) -> None:
        """Writes this program's parts, which are the variables of their names."""
        for part in parts:
            value = part.name
            if self.waits:
                bits = writer.bind(f"{value}.to(tl.int32, bitcast=True)", "bits")
                value = f"tl.where({bits} == {_NEVER}, {_NAN}, {bits}) ^ -1"
            writer.line(f"tl.store({part.place}, {value}{_masked(part)})")

    def header(self, writer: Writer, slot: str, program: str) -> str:
        """Header of the block in which the parts of result `slot` are combined, which this program has written as number `program`."""
        if self.waits:
            return f"if {program} == {self.programs - 1}:"
        count_in(writer, slot)
        return f"if arrived == {self.programs - 1}:"

    def take(self, writer: Writer, parts: Sequence[Part]) -> None:
        """Defines variables of the parts' names from memory. What is masked is zero."""
        if not self.waits:
            for part in parts:
                writer.line(f'{part.name} = tl.load({part.place}{_masked(part, "0")}, cache_modifier=".cg")')
            return
        places = [writer.bind(part.place, "there") for part in parts]
        bits = [writer.fresh("bits") for _ in parts]

        def read() -> None:
            for part, place, name in zip(parts, places, bits):
                writer.line(f"{name} = tl.load({place}{_masked(part, str(_NEVER))}, volatile=True)")

        read()
        missing = " | ".join(f"tl.max(({name} == 0).to(tl.int32))" for name in bits)
        with writer.block(f"while {anywhere(missing, self.warps)} != 0:"):
            read()
        for part, place, name in zip(parts, places, bits):
            # Every thread has seen everything by now, and reads no more.
            if not part.again:
                writer.line(f"tl.store({place}, tl.zeros_like({name}){_masked(part)})")
            writer.line(f"{part.name} = ({name} ^ -1).to(tl.float32, bitcast=True)")

    def end(self, writer: Writer, slot: str) -> None:
        """Leaves the counter of result `slot` at zero; in the block of `header`."""
        if not self.waits:
            set_back(writer, slot)


def counters(results: int) -> Scratch:
    """The buffer behind `COUNTERS`."""
    return Scratch("i32", results, zeroed=True)


def count_in(writer: Writer, slot: str) -> None:
    """Defines `arrived`, the programs of result `slot` that were done before this one, whose part is written by now."""
    # The barrier puts the writes of all threads before the atomic of the one that counts.
    writer.line("tl.debug_barrier()")
    writer.line(f'arrived = tl.atomic_add({COUNTERS} + {slot}, 1, sem="acq_rel")')


def set_back(writer: Writer, slot: str) -> None:
    """Leaves the counter of result `slot` at zero; only the last program does."""
    writer.line(f"tl.store({COUNTERS} + {slot}, 0)")


def _masked(part: Part, other: str | None = None) -> str:
    if part.mask is None:
        return ""
    return f", mask={part.mask}" + (f", other={other}" if other else "")
