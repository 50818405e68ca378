"""Sums over devices inside of kernels: parts are given to the other ranks as they are made, and added up there or where the sum is read.

The kernel that makes a part also stores it in the slices that are its own in the boxes of the others (`exchange_boxes`); where it cannot,
the kernel that reads the sum does so first. The reader looks at the slices of its own box until all elements are there.

A product of few rows is maker and reader at once: the program that gives a block waits for the same block of the others. Programs
start in the order of their numbers on all devices, so that the first of those which wait never waits for one that cannot start.

    both     v = acc            -->  store v to the others' slices; wait for theirs; v = v0 + v1 + ... in the order of the ranks
    maker    tl.store(out0 + i, v)  -->  tl.store(out0 + i, v); tl.store(<slice of this rank in the box of r> + i, v) for every other r
    reader   v = tl.load(in1 + i)   -->  wait for the slices of the others; v = v0 + v1 + ... in the order of the ranks

All ranks add in the same order in f32, so that all have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from topo_opt.codegen.kernel_source import TURNS, Scratch
from topo_opt.codegen.triton.element_types import compute_type, storage_type
from topo_opt.codegen.triton.emit import Emitter
from topo_opt.codegen.triton.exchange_boxes import PARAMS, Boxes, Partners, described
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.values import Scalar, Value
from topo_opt.codegen.triton.writer import Writer
from topo_opt.errors import UnsupportedError
from topo_opt.runtime.plan import Exchange
from topo_opt.structured.index import Expr

SUMMED = "topo.summed"
"""Attribute of an op in a kernel whose result is a part of a sum over devices, and is read as the sum."""


class Giver:
    """A result that a kernel gives to the other ranks as it stores it: `topo.kernel` has `gives = {result, axes, ranks, memory}`."""

    def __init__(self, kernel: Kernel):
        said = kernel.attributes["gives"]
        self.result: int = said["result"]
        info = kernel.graph.values[kernel.graph.returns[self.result]]
        self.boxes = Boxes(Partners.of(said), info.element, info.numel, _warps(kernel))

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

    def __init__(self, kernel: Kernel, programs: int, warps: int):
        said = kernel.attributes["exchange"]
        self.argument: int = said["argument"]
        self.value = kernel.graph.arguments[self.argument]
        self.programs, self.given = programs, bool(said["given"])
        info = kernel.graph.values[self.value]
        self.element, self.shape, self.numel = info.element, info.shape or (), info.numel
        self.boxes = Boxes(Partners.of(said), self.element, self.numel, warps)

    @staticmethod
    def of(kernel: Kernel, programs: int, warps: int) -> Taker | None:
        """That of a kernel, if it adds up an argument."""
        return Taker(kernel, programs, warps) if "exchange" in kernel.attributes else None

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
        own = writer.bind(f"tl.load({pointer} + {offset}{guard})", "a")
        looked = boxes.look(writer, offset, mask)
        bits = boxes.bits(writer, own)
        if not self.given:
            boxes.give(writer, bits, offset, mask)
        total = boxes.add_up(emitter, bits, offset, mask, self.element, looked)
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
        self.boxes = Boxes(
            Partners.of(kernel.attributes["exchange"]), self.element, info.numel, _warps(kernel)
        )

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


def _warps(kernel: Kernel) -> int:
    """Of a program; of a kernel that has no tile yet no source is made."""
    return int(kernel.attributes.get("tile", {}).get("warps", 1))


def _rounded(writer: Writer, total: str, element: str, depends: frozenset[str]) -> Value:
    """A sum in the type of its parts."""
    stored = storage_type(element)
    if compute_type(element) == stored:
        return Value(total, element, depends)
    return Value("", element, depends, narrow=writer.bind(f"{total}.to({stored})"))
