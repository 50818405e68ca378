"""Boxes: memory in which ranks leave elements for one another, as source of kernels (`exchange`, `move`).

Each rank has a box in memory that the others can write, with a slice for each of them. Who takes looks at the slices of its own box until
nothing in them is `ABSENT` any more. No flags and no fences: elements arrive in any order, each of them tells by itself that it is there.

A box has three sets of slices, used in turn. A launch of the kernel that takes empties the set of the launch before it, which is used again
two launches later: by then the others have heard from the launch in between, whose part was made after the set was empty.
Every program of that kernel keeps whose turn it is (`TURNS`); nothing else has to be kept in step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from topo_opt.codegen.kernel_source import BOXES, TURNS, Param, Scratch
from topo_opt.codegen.triton.element_types import compute_type, storage_type
from topo_opt.codegen.triton.emit import Emitter
from topo_opt.codegen.triton.writer import Writer
from topo_opt.errors import UnsupportedError
from topo_opt.runtime.plan import Exchange
from topo_opt.structured.graph import element_bytes
from topo_opt.structured.index import Expr, contiguous_strides

SETS = 3
"""Sets of slices of a box. With two, a set would be emptied in the launch before the one that uses it."""
ALIGNED = 16
"""Bytes that a thread loads at once: slices start at multiples."""
ELEMENTS = ("f16", "bf16", "f32")
"""What can be exchanged: elements that can be no number."""
LOOKED_AT = 1 << 16
"""Bytes of a slice up to which all sets are read at once: a kernel that takes so little waits for memory, one access after the other."""
_WORDS = {2: "tl.int16", 4: "tl.int32"}
"""Bytes of an element -> the integer that its bits are."""
ABSENT = -1
"""Bits of an element that has not arrived: a NaN that no sender gives, since it is replaced by another one."""


@dataclass(frozen=True)
class Partners:
    """Who exchanges: the `ranks` places that differ on `axes` only, with boxes in the `memory` of GPUs ("peers") or of the host."""

    axes: tuple[str, ...]
    ranks: int
    memory: Literal["peers", "host"]

    @staticmethod
    def of(said: Mapping[str, Any]) -> Partners:
        """What `topo.kernel` says."""
        return Partners(tuple(said["axes"]), said["ranks"], said["memory"])


class Boxes:
    """Source that finds slices, for a tensor of `numel` elements that a kernel of so many `warps` gives or takes. Names are those of `begin` and `turn`."""

    def __init__(self, partners: Partners, element: str, numel: int, warps: int):
        size = element_bytes(element)
        if element not in ELEMENTS:
            raise UnsupportedError(f"elements of type {element} are not exchanged inside of kernels")
        self.partners, self.unit, self.word, self.warps = partners, size, _WORDS[size], warps
        self.pitch = -(-numel * size // ALIGNED) * ALIGNED // size
        self.set = (partners.ranks - 1) * self.pitch

    @property
    def nbytes(self) -> int:
        """Of the box of one rank."""
        return SETS * self.set * self.unit

    @property
    def words(self) -> Scratch:
        """The place of this rank, whether to stop waiting, and the address of every rank's box."""
        return Scratch("i64", 2 + self.partners.ranks, role=BOXES)

    def begin(self, writer: Writer, *, gives: bool, takes: bool) -> None:
        """Reads what stays the same for as long as the program is loaded: this rank's place, the boxes to give to, and its own."""
        writer.line(f"place = tl.load({BOXES}).to(tl.int32)")
        for rank in range(self.partners.ranks if gives else 0):
            writer.line(f"box{rank} = {self._address(str(2 + rank))}")
        if takes:
            writer.line(f"own_box = {self._address('2 + place')}")

    def turn(self, writer: Writer, program: str) -> None:
        """Reads whose turn it is among the sets in this launch of the reader, after what ran before has ended."""
        writer.line(f"turn = tl.load({TURNS} + {program})")
        writer.line(f"set_of_turn = turn * {self.set}")

    def bits(self, writer: Writer, source: str) -> str:
        """An element as it travels."""
        bits = writer.bind(f"{source}.to({self.word}, bitcast=True)", "bits")
        return writer.bind(f"tl.where({bits} == {ABSENT}, {2 ** (8 * self.unit - 1) - 1}, {bits})", "bits")

    def offset(
        self, emitter: Emitter, indices: Sequence[Expr], shape: tuple[int, ...]
    ) -> tuple[str, frozenset[str]]:
        """Source of the element offset of indices, never a scalar, and the axes it varies over."""
        found, depends = emitter.offset(indices, contiguous_strides(shape))
        return (
            (found, depends)
            if depends
            else (emitter.writer.bind(f"tl.full((1, 1), {found}, tl.int32)", "k"), depends)
        )

    def give(self, writer: Writer, bits: str | Sequence[str], offset: str, mask: str | None) -> None:
        """Stores elements at `offset` of this rank's slices; `bits` are the same for all ranks, or one name for each."""
        for rank, source in enumerate(self._of_ranks(bits)):
            sender = f"(place - (place > {rank}).to(tl.int32))"
            slice_ = writer.bind(f"box{rank} + set_of_turn + {sender} * {self.pitch}", "slice")
            writer.line(f"tl.store({slice_} + {offset}, {source}, mask={_both(f'(place != {rank})', mask)})")

    def received(self, writer: Writer, rank: int) -> str:
        """The slice of another rank in this rank's box."""
        sender = f"({rank} - (place < {rank}).to(tl.int32))"
        return writer.bind(f"own_box + set_of_turn + {sender} * {self.pitch}", "slice")

    def empty(self, writer: Writer, bits: str, offset: str, mask: str | None) -> None:
        """Empties the set of the launch before, of the elements that `bits` stands for."""
        before = writer.bind(f"own_box + (turn + {SETS - 1}) % {SETS} * {self.set}", "before")
        nothing = writer.bind(f"{bits} | {ABSENT}", "k")
        for sender in range(self.partners.ranks - 1):
            guard = f", mask={mask}" if mask else ""
            writer.line(f"tl.store({before} + {sender * self.pitch} + {offset}, {nothing}{guard})")

    def look(self, writer: Writer, offset: str, mask: str | None) -> list[str]:
        """A first look at the slices of the others in all sets, before it is known whose turn it is: what is found, by rank, and behind it
        whether to stop.

        Nothing where the slices are large, or the way to them is narrow. Elements of this rank and masked ones are undefined.
        """
        if self.partners.memory == "host" or self.pitch * self.unit > LOOKED_AT:
            return []
        stop = writer.bind(self._stop, "stop")
        found = []
        for rank in range(self.partners.ranks):
            sender, wanted = f"({rank} - (place < {rank}).to(tl.int32))", _both(f"(place != {rank})", mask)
            sets = [
                writer.bind(
                    f"tl.load(own_box + {number * self.set} + {sender} * {self.pitch} + {offset}, mask={wanted}, volatile=True)",
                    "seen",
                )
                for number in range(SETS)
            ]
            found.append(sets)
        return [
            *(
                writer.bind(f"tl.where(turn == 0, {x}, tl.where(turn == 1, {y}, {z}))", "seen")
                for x, y, z in found
            ),
            stop,
        ]

    def take(
        self,
        emitter: Emitter,
        bits: str | Sequence[str],
        offset: str,
        mask: str | None,
        looked: Sequence[str] = (),
    ) -> list[str]:
        """Empties, and waits for what the others give; elements as they travel, by rank.

        Args:
            bits: what stands for this rank's own, the same for all ranks or one name for each.
            looked: of `look`.
        """
        writer, own = emitter.writer, self._of_ranks(bits)
        self.empty(writer, own[0], offset, mask)
        slices = [self.received(writer, rank) for rank in range(self.partners.ranks)]
        arrived, stop = [writer.fresh("given") for _ in slices], writer.fresh("stop")
        wanted = [_both(f"(place != {rank})", mask) for rank in range(self.partners.ranks)]

        def read(found: Sequence[str]) -> None:
            # Own elements are put in behind the loads, which would wait for them otherwise.
            loads = [
                f"tl.load({s} + {offset}, mask={test}, volatile=True)" for s, test in zip(slices, wanted)
            ]
            for name, load in zip([*arrived, stop], found or [*loads, self._stop]):
                writer.line(f"{name} = {load}")
            for name, test, mine in zip(arrived, wanted, own):
                writer.line(f"{name} = tl.where({test}, {name}, {mine})")

        read(looked)
        absent = " | ".join(f"({name} == {ABSENT})" for name in arrived)
        # A thread that is told to stop goes on with all others.
        missing = f"tl.max(({absent}).to(tl.int32)) * ({stop} == 0).to(tl.int32)"
        with emitter.scope(f"while {_anywhere(missing, self.warps)} != 0:"):
            read(())
        return arrived

    def add_up(
        self,
        emitter: Emitter,
        bits: str | Sequence[str],
        offset: str,
        mask: str | None,
        element: str,
        looked: Sequence[str] = (),
    ) -> str:
        """Adds what the others give to this rank's own; the sum in the type it is computed in."""
        arrived = self.take(emitter, bits, offset, mask, looked)
        stored, computed = storage_type(element), compute_type(element)
        return emitter.writer.bind(
            " + ".join(f"{name}.to({stored}, bitcast=True).to({computed})" for name in arrived)
        )

    def end(self, writer: Writer, program: str) -> None:
        """Hands the turn on, of a kernel that takes."""
        writer.line(f"tl.store({TURNS} + {program}, (turn + 1) % {SETS})")

    @property
    def _stop(self) -> str:
        """Source of the word that says whether to wait no longer."""
        return f"tl.load({BOXES} + 1, volatile=True)"

    def _of_ranks(self, bits: str | Sequence[str]) -> Sequence[str]:
        return [bits] * self.partners.ranks if isinstance(bits, str) else bits

    def _address(self, word: str) -> str:
        return f"tl.multiple_of(tl.load({BOXES} + {word}).to(tl.pointer_type({self.word})), {ALIGNED})"


PARAMS = (Param(BOXES, "scratch", 0, "i64"), Param(TURNS, "scratch", 1, "i32"))
"""Of makers and readers, behind all others."""


def described(boxes: Boxes) -> Exchange:
    """What the memory behind boxes has to be."""
    p = boxes.partners
    return Exchange(p.axes, p.ranks, boxes.nbytes, p.memory)


def _both(condition: str, mask: str | None) -> str:
    return f"{condition} & {mask}" if mask else condition


def _anywhere(test: str, warps: int) -> str:
    """Source of a number that is above 0, for all threads of a program, where `test`, a number of 0 or 1, is 1 for any of them.

    A reduction of fewer elements than there are threads is done by some of them, or by several for themselves, which is the same only
    where they have the same elements.
    """
    return f"tl.max(tl.where(tl.arange(0, {32 * warps}) >= 0, {test}, 0))"
