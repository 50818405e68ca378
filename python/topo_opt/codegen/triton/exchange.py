"""Sums over devices inside of kernels: parts are given to the other ranks as they are made, and added up there or where the sum is read.

Each rank has a box in memory that the others can write, with a slice for each of them. The kernel that makes a part also stores it in
the slices that are its own in the boxes of the others; where it cannot, the kernel that reads the sum does so first. The reader
looks at the slices of its own box until nothing in them is `ABSENT` any more. No flags and no fences: elements arrive in any
order, each of them tells by itself that it is there.

A box has three sets of slices, used in turn. A launch of the reader empties the set of the launch before it, which is used again
two launches later: by then the others have heard from the launch in between, whose part was made after the set was empty.
Every program of the reader keeps whose turn it is (`TURNS`); nothing else has to be kept in step.

A product of few rows is maker and reader at once: the program that gives a block waits for the same block of the others. Programs
start in the order of their numbers on all devices, so that the first of those which wait never waits for one that cannot start.

    mover    the parts of a tensor that are for others to their slices; wait for theirs (`move`)
    both     v = acc            -->  store v to the others' slices; wait for theirs; v = v0 + v1 + ... in the order of the ranks
    maker    tl.store(out0 + i, v)  -->  tl.store(out0 + i, v); tl.store(<slice of this rank in the box of r> + i, v) for every other r
    reader   v = tl.load(in1 + i)   -->  wait for the slices of the others; v = v0 + v1 + ... in the order of the ranks

All ranks add in the same order in f32, so that all have the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from topo_opt.codegen.kernel_source import BOXES, TURNS, Param, Scratch
from topo_opt.codegen.triton.element_types import compute_type, storage_type
from topo_opt.codegen.triton.emit import Emitter
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.values import Scalar, Value
from topo_opt.codegen.triton.writer import Writer
from topo_opt.errors import UnsupportedError
from topo_opt.runtime.plan import Exchange
from topo_opt.structured.graph import element_bytes
from topo_opt.structured.index import Expr, contiguous_strides

SUMMED = "topo.summed"
"""Attribute of an op in a kernel whose result is a part of a sum over devices, and is read as the sum."""
SETS = 3
"""Sets of slices of a box. With two, a set would be emptied in the launch before the one that uses it."""
ALIGNED = 16
"""Bytes that a thread loads at once: slices start at multiples."""
ELEMENTS = ("f16", "bf16", "f32")
"""What can be exchanged: elements that can be no number."""
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
    """Source that finds slices, for a tensor of `numel` elements that a kernel gives or takes. Names are those of `begin` and `turn`."""

    def __init__(self, partners: Partners, element: str, numel: int):
        size = element_bytes(element)
        if element not in ELEMENTS:
            raise UnsupportedError(f"elements of type {element} are not exchanged inside of kernels")
        self.partners, self.unit, self.word = partners, size, _WORDS[size]
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

    def take(self, emitter: Emitter, bits: str | Sequence[str], offset: str, mask: str | None) -> list[str]:
        """Empties, and waits for what the others give; elements as they travel, by rank.

        Args:
            bits: what stands for this rank's own, the same for all ranks or one name for each.
        """
        writer, own = emitter.writer, self._of_ranks(bits)
        self.empty(writer, own[0], offset, mask)
        slices = [self.received(writer, rank) for rank in range(self.partners.ranks)]
        arrived = [writer.fresh("given") for _ in slices]

        def read() -> None:
            for rank, (name, slice_) in enumerate(zip(arrived, slices)):
                wanted = _both(f"(place != {rank})", mask)
                writer.line(
                    f"{name} = tl.load({slice_} + {offset}, mask={wanted}, other={own[rank]}, volatile=True)"
                )

        read()
        absent = " | ".join(f"({name} == {ABSENT})" for name in arrived)
        go_on = f"(tl.load({BOXES} + 1, volatile=True) == 0)"
        with emitter.scope(f"while (tl.max(({absent}).to(tl.int32)) != 0) & {go_on}:"):
            read()
        return arrived

    def add_up(
        self, emitter: Emitter, bits: str | Sequence[str], offset: str, mask: str | None, element: str
    ) -> str:
        """Adds what the others give to this rank's own; the sum in the type it is computed in."""
        arrived = self.take(emitter, bits, offset, mask)
        stored, computed = storage_type(element), compute_type(element)
        return emitter.writer.bind(
            " + ".join(f"{name}.to({stored}, bitcast=True).to({computed})" for name in arrived)
        )

    def end(self, writer: Writer, program: str) -> None:
        """Hands the turn on, of a kernel that takes."""
        writer.line(f"tl.store({TURNS} + {program}, (turn + 1) % {SETS})")

    def _of_ranks(self, bits: str | Sequence[str]) -> Sequence[str]:
        return [bits] * self.partners.ranks if isinstance(bits, str) else bits

    def _address(self, word: str) -> str:
        return f"tl.multiple_of(tl.load({BOXES} + {word}).to(tl.pointer_type({self.word})), {ALIGNED})"


PARAMS = (Param(BOXES, "scratch", 0, "i64"), Param(TURNS, "scratch", 1, "i32"))
"""Of makers and readers, behind all others."""


class Giver:
    """A result that a kernel gives to the other ranks as it stores it: `topo.kernel` has `gives = {result, axes, ranks, memory}`."""

    def __init__(self, kernel: Kernel):
        said = kernel.attributes["gives"]
        self.result: int = said["result"]
        info = kernel.graph.values[kernel.graph.returns[self.result]]
        self.boxes = Boxes(Partners.of(said), info.element, info.numel)

    @staticmethod
    def of(kernel: Kernel) -> Giver | None:
        """That of a kernel, if it gives a result."""
        return Giver(kernel) if "gives" in kernel.attributes else None

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        """The reader's: its first program counts for all."""
        return (self.boxes.words, Scratch("i32", 1, role=TURNS))

    def give(self, writer: Writer, source: str, offset: str, masks: Sequence[str]) -> None:
        """Gives what is being stored: `source` at element `offset`."""
        mask = " & ".join(masks) or None
        self.boxes.give(writer, self.boxes.bits(writer, source), offset, mask)


class Taker:
    """An argument of a kernel that is added up over devices: `topo.kernel` has `exchange = {argument, axes, ranks, memory, given}`.

    `given`: the kernel that makes the argument gives it, too; else this one gives it first. A kernel of `programs` programs has one element of
    the argument for each of its tile's.

    Raises:
        UnsupportedError: elements of a type that is not summed in f32.
    """

    def __init__(self, kernel: Kernel, programs: int):
        said = kernel.attributes["exchange"]
        self.argument: int = said["argument"]
        self.value = kernel.graph.arguments[self.argument]
        self.programs, self.given = programs, bool(said["given"])
        info = kernel.graph.values[self.value]
        self.element, self.shape, self.numel = info.element, info.shape or (), info.numel
        self.boxes = Boxes(Partners.of(said), self.element, self.numel)

    @staticmethod
    def of(kernel: Kernel, programs: int) -> Taker | None:
        """That of a kernel, if it adds up an argument."""
        return Taker(kernel, programs) if "exchange" in kernel.attributes else None

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        """Words about the boxes, and whose turn it is for every program."""
        return (self.boxes.words, Scratch("i32", self.programs, role=TURNS))

    @property
    def described(self) -> Exchange:
        """What the memory behind the boxes has to be."""
        return described(self.boxes)

    def emit(self, emitter: Emitter, indices: Sequence[Expr], pointer: str) -> Value:
        """Gives where no other kernel has, waits and adds up; the sum at `indices` of the argument, rounded to its type.

        Args:
            pointer: the parameter of the argument.
        """
        writer, boxes = emitter.writer, self.boxes
        offset, depends = self.boxes.offset(emitter, indices, self.shape)
        mask = emitter.mask(depends)
        boxes.begin(writer, gives=not self.given, takes=True)
        boxes.turn(writer, "tl.program_id(0)")
        guard = f", mask={mask}, other=0.0" if mask else ""
        bits = boxes.bits(writer, writer.bind(f"tl.load({pointer} + {offset}{guard})", "a"))
        if not self.given:
            boxes.give(writer, bits, offset, mask)
        total = boxes.add_up(emitter, bits, offset, mask, self.element)
        boxes.end(writer, "tl.program_id(0)")
        return _rounded(writer, total, self.element, depends)


class Summer:
    """A value inside of a product that is added up over devices where it is made: its op has `topo.summed = {axes, ranks, memory}`.

    `topo.kernel` says so too, under `exchange`. Every program keeps whose turn it is, whether it makes a block of the value or not.

    Raises:
        UnsupportedError: elements of a type that is not summed in f32, or programs of several batches.
    """

    def __init__(self, kernel: Kernel):
        node = next(n for n in kernel.graph.nodes if SUMMED in n.op.attributes)
        self.value = node.results[0]
        info = kernel.graph.values[self.value]
        self.element, self.shape = info.element, info.shape or ()
        self.boxes = Boxes(Partners.of(kernel.attributes["exchange"]), self.element, info.numel)

    @staticmethod
    def of(kernel: Kernel) -> Summer | None:
        """That of a kernel, if it adds up a value."""
        return Summer(kernel) if "exchange" in kernel.attributes else None

    def scratch(self, programs: int) -> tuple[Scratch, ...]:
        """Words about the boxes, and whose turn it is for every program."""
        return (self.boxes.words, Scratch("i32", programs, role=TURNS))

    def sum(self, emitter: Emitter, part: Value, indices: Sequence[Expr]) -> Value:
        """The sum of this rank's part at some indices and those of the others, rounded to its type."""
        writer = emitter.writer
        offset, depends = self.boxes.offset(emitter, indices, self.shape)
        if not part.depends <= depends:
            raise UnsupportedError("a part of a sum over devices that varies over more than the sum")
        mask = emitter.mask(depends)
        stored = part.narrow if part.narrow and part.element == self.element else None
        bits = self.boxes.bits(writer, stored or f"{emitter.tensor(part)}.to({storage_type(self.element)})")
        self.boxes.give(writer, bits, offset, mask)
        total = self.boxes.add_up(emitter, bits, offset, mask, self.element)
        return _rounded(writer, total, self.element, depends)


class InProduct:
    """What a product's kernel exchanges, if anything: it gives a result, or adds up what it makes."""

    def __init__(self, kernel: Kernel, emitter: Emitter):
        self.giver, self.summer = Giver.of(kernel), Summer.of(kernel)
        if self.giver is not None:
            emitter.gifts[f"out{self.giver.result}"] = self.giver.give
        if self.summer is not None:
            emitter.changed[self.summer.value] = partial(self._sum, self.summer, emitter)

    @staticmethod
    def _sum(summer: Summer, emitter: Emitter, part: Scalar, indices: Sequence[Expr]) -> Value:
        if not isinstance(part, Value):
            raise UnsupportedError("a sum over devices of complex numbers")
        return summer.sum(emitter, part, indices)

    def begin(self, writer: Writer) -> None:
        """What is known before the kernel in front has ended."""
        if self.giver is not None:
            self.giver.boxes.begin(writer, gives=True, takes=False)
        if self.summer is not None:
            self.summer.boxes.begin(writer, gives=True, takes=True)

    def turn(self, writer: Writer) -> None:
        """Which launch this is, after what ran before has ended. The reader's first program counts for a giver."""
        if self.giver is not None:
            self.giver.boxes.turn(writer, "0")
        if self.summer is not None:
            self.summer.boxes.turn(writer, "tl.program_id(0)")

    def end(self, writer: Writer, programs: int) -> list[tuple[str, Scratch]]:
        """Hands the turn on; the scratch of the exchange, by parameter."""
        scratch = self.giver.scratch if self.giver is not None else ()
        if self.summer is not None:
            self.summer.boxes.end(writer, "tl.program_id(0)")
            scratch = self.summer.scratch(programs)
        return [(p.name, s) for p, s in zip(PARAMS, scratch)]

    @property
    def described(self) -> Exchange | None:
        """What the memory behind the boxes of this kernel has to be; a giver uses its reader's."""
        return described(self.summer.boxes) if self.summer is not None else None


def described(boxes: Boxes) -> Exchange:
    """What the memory behind boxes has to be."""
    p = boxes.partners
    return Exchange(p.axes, p.ranks, boxes.nbytes, p.memory)


def _rounded(writer: Writer, total: str, element: str, depends: frozenset[str]) -> Value:
    """A sum in the type of its parts."""
    stored = storage_type(element)
    if compute_type(element) == stored:
        return Value(total, element, depends)
    return Value("", element, depends, narrow=writer.bind(f"{total}.to({stored})"))


def _both(condition: str, mask: str | None) -> str:
    return f"{condition} & {mask}" if mask else condition
