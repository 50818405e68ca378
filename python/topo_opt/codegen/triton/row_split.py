"""Rows whose columns are split over programs: columns of partial results in memory, the last program to arrive combines.

Every program writes what its part of the row came to, then counts itself with an atomic that releases these writes and
acquires those of the programs before. Who sees the count complete reads all parts in their order, whatever the order of
arrival was, and sets the counter back for the next launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from topo_opt.codegen.kernel_source import Param, Scratch
from topo_opt.codegen.triton.accumulators import Accumulator, State
from topo_opt.codegen.triton.element_types import NARROW_FLOATS, compute_type, signature_type, storage_type
from topo_opt.codegen.triton.emit import Emitter
from topo_opt.codegen.triton.writer import Writer

COMBINED = 16
"""Parts that a thread holds of every value at once when it puts them together."""


@dataclass
class RowSplit:
    """`parts` programs for each of `blocks` blocks of `x_block` rows; `program` is the source of a program's block.

    `lanes`: parts that the last program holds at a time, a power of two.
    """

    parts: int
    blocks: int
    x_block: int
    lanes: int
    program: str
    params: list[Param] = field(default_factory=list)
    scratch: list[Scratch] = field(default_factory=list)

    def _buffer(self, name: str, dtype: str, numel: int, zeroed: bool = False) -> str:
        self.params.append(Param(name, "scratch", len(self.scratch), dtype))
        self.scratch.append(Scratch(dtype, numel, zeroed))
        return name

    def store(self, writer: Writer, found: Sequence[tuple[Accumulator, list[str]]]) -> list[list[str]]:
        """Writes the columns of all accumulators and defines `arrived`; returns the buffers they lie in."""
        lines = self.blocks * self.parts * self.x_block
        writer.line(f"lane = tl.arange(0, {self.x_block})[:, None]")
        writer.line(f"line = ({self.program} * {self.parts} + tl.program_id(1)) * {self.x_block} + lane")
        buffers = []
        for accumulator, columns in found:
            names = []
            for state, column in zip(accumulator.states, columns):
                name = self._buffer(f"part{len(self.scratch)}", signature_type(_kept(state)), lines)
                value = f"tl.broadcast_to({column}, ({self.x_block}, 1)).to({storage_type(_kept(state))})"
                writer.line(f"tl.store({name} + line, {value})")
                names.append(name)
            buffers.append(names)
        counter = self._buffer("arrivals", "i32", self.blocks, zeroed=True)
        # The barrier puts the writes of all threads before the atomic of the one that counts.
        writer.line("tl.debug_barrier()")
        writer.line(f'arrived = tl.atomic_add({counter} + {self.program}, 1, sem="acq_rel")')
        return buffers

    @property
    def last(self) -> str:
        """Header of the block that the last program runs."""
        return f"if arrived == {self.parts - 1}:"

    def combine(
        self, emitter: Emitter, found: Sequence[tuple[Accumulator, Sequence[str]]]
    ) -> list[list[str]]:
        """Lanes of every accumulator, from its buffers, that stand for all parts: a lane a part, or every `lanes`-th."""
        writer = emitter.writer
        if self.parts <= self.lanes:
            return [self._load(writer, *f, first=None) for f in found]
        kept = []
        for accumulator, _ in found:
            names = [writer.fresh("all") for _ in accumulator.states]
            for name, state in zip(names, accumulator.states):
                tile, kind = f"({self.x_block}, {self.lanes})", compute_type(state.element)
                writer.line(f"{name} = tl.full({tile}, {state.identity}, {kind})")
            kept.append(names)
        first = writer.fresh("first")
        with emitter.scope(f"for {first} in range(0, {self.parts}, {self.lanes}):"):
            for (accumulator, buffers), names in zip(found, kept):
                merged = accumulator.merge(names, self._load(writer, accumulator, buffers, first=first))
                fresh = [writer.bind(source, "both") for source in merged]
                for name, source in zip(names, fresh):
                    writer.line(f"{name} = {source}")
        return kept

    def _load(
        self, writer: Writer, accumulator: Accumulator, buffers: Sequence[str], first: str | None
    ) -> list[str]:
        """The parts of every row side by side, from the part `first` on; lanes past the last part change nothing."""
        width = min(1 << (self.parts - 1).bit_length(), self.lanes)
        masked = self.parts % width > 0
        start = f"{first} + " if first else ""
        part = writer.bind(f"{start}tl.arange(0, {width})[None, :]", "part")
        row = f"({self.program} * {self.parts} + {part}) * {self.x_block} + tl.arange(0, {self.x_block})[:, None]"
        place = writer.bind(row, "place")
        loaded = []
        for buffer, state in zip(buffers, accumulator.states):
            tile, kind = f"({self.x_block}, {width})", compute_type(state.element)
            mask = f" mask=tl.broadcast_to({part} < {self.parts}, {tile})," if masked else ""
            value = writer.bind(
                f'tl.load({buffer} + {place},{mask} cache_modifier=".cg").to({kind})', "parts"
            )
            if masked:
                value = writer.bind(f"tl.where({part} < {self.parts}, {value}, {state.identity})", "parts")
            loaded.append(value)
        return loaded

    def reset(self, writer: Writer) -> None:
        """Leaves the counter zero for the next launch."""
        writer.line(f"tl.store(arrivals + {self.program}, 0)")


def _kept(state: State) -> str:
    """The element type of parts in memory: that of the computation."""
    return "f32" if state.element in NARROW_FLOATS else state.element
