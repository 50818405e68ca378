"""Attention whose keys are split over programs: partial results in memory, and one of the programs combines them (`arrivals`).

The part of a program is its running maximum, sum of weights and weighted sum of values.
"""

from __future__ import annotations

from dataclasses import dataclass

from topo_opt.codegen.kernel_source import Scratch
from topo_opt.codegen.triton.arrivals import Meeting, Part
from topo_opt.codegen.triton.kernel import next_power_of_two
from topo_opt.codegen.triton.writer import Writer

COMBINED_ELEMENTS = 8192
"""Elements of partial results that are held at a time."""


def exponential(difference: str, factor: str) -> str:
    """Source of two to the power of a difference, times a factor (source such as `* 1.44`, or empty)."""
    return f"tl.exp2(({difference}){factor})" if factor else f"tl.exp2({difference})"


@dataclass(frozen=True)
class Split:
    """`splits` programs for a block of `block_m` rows (of `rows` in all) and `block_e` columns."""

    splits: int
    block_m: int
    block_e: int
    rows: int
    after: str
    """What a difference of maxima is multiplied with to be an exponent of two, as source."""
    warps: int
    """Of a program."""
    waits: bool = False
    """Whether the last program waits for the parts of the others; else programs count their arrivals."""

    @property
    def meeting(self) -> Meeting:
        return Meeting(self.splits, self.waits, self.warps)

    @property
    def rows_block(self) -> int:
        """Rows the combining program holds: without the padding that `tl.dot` needs."""
        return min(self.block_m, next_power_of_two(self.rows))

    @property
    def at_once(self) -> int:
        """Splits whose partial results are held at a time."""
        return max(1, min(self.splits, COMBINED_ELEMENTS // (self.rows_block * self.block_e)))

    def scratch(self, blocks: int) -> dict[str, Scratch]:
        """Buffers for `blocks` blocks of rows, by parameter."""
        lines = blocks * self.splits * self.rows_block
        sizes = {"part_acc": lines * self.block_e, "part_best": lines, "part_total": lines}
        parts = {name: self.meeting.scratch("fp32", size) for name, size in sizes.items()}
        return parts | self.meeting.counters(blocks)

    def store(self, writer: Writer) -> str:
        """Writes this program's `best`, `total` and `acc`; header of the block in which the parts are combined."""
        rows, masked = self.rows_block, self.rows_block < self.block_m
        writer.line(f"slot = (pid * {self.splits} + tl.program_id(1)) * {rows}")
        writer.line("lane = tl.arange(0, BLOCK_M)")
        row, block = (f"{lane} < {rows}" if masked else None for lane in ("lane", "lane[:, None]"))
        parts = [
            Part("best", "part_best + slot + lane", row),
            Part("total", "part_total + slot + lane", row),
            Part("acc", "part_acc + (slot + lane[:, None]) * BLOCK_E + e", block),
        ]
        self.meeting.give(writer, parts)
        return self.meeting.header(writer, "pid", "tl.program_id(1)")

    def combine(self, writer: Writer) -> None:
        """Defines `sum_acc` and `sum_total` from all partial results, in the order of the splits."""
        line, rows, splits = writer.line, self.rows_block, self.splits
        line(f"first_line = pid * {splits * rows}")
        whole = self.at_once == splits
        self._load(writer, "0", splits, "all", with_parts=whole, with_totals=True)
        line("peak = tl.max(all_bests, 0)[None, :]")
        line('peak = tl.where(peak == float("-inf"), 0.0, peak)')
        line(f"shares = {exponential('all_bests - peak', self.after)}")
        line("sum_total = tl.sum(all_totals * shares, 0)")
        if whole:
            line("sum_acc = tl.sum(all_parts * shares[:, :, None], 0)")
        else:
            line(f"sum_acc = tl.zeros(({rows}, BLOCK_E), tl.float32)")
            with writer.block(f"for s0 in range(0, {splits}, {self.at_once}):"):
                self._load(writer, "s0", self.at_once, "some", with_parts=True)
                line(f"some_shares = {exponential('some_bests - peak', self.after)}")
                line("sum_acc += tl.sum(some_parts * some_shares[:, :, None], 0)")
        self.meeting.end(writer, "pid")

    def _load(
        self,
        writer: Writer,
        start: str,
        count: int,
        name: str,
        *,
        with_parts: bool,
        with_totals: bool = False,
    ) -> None:
        """Defines `name`_bests, `name`_totals and `name`_parts: maxima and sums of `count` splits from `start` on."""
        line, rows = writer.line, self.rows_block
        split = f"tl.arange(0, {count})[:, None]"
        split = split if start == "0" else f"({start} + {split})"
        line(f"{name}_lines = first_line + {split} * {rows} + tl.arange(0, {rows})[None, :]")
        taken = [Part(f"{name}_bests", f"part_best + {name}_lines", again=not with_parts)]
        if with_parts:
            line(f"{name}_places = {name}_lines[:, :, None] * BLOCK_E + tl.arange(0, BLOCK_E)[None, None, :]")
            taken.insert(0, Part(f"{name}_parts", f"part_acc + {name}_places"))
        if with_totals:
            taken.append(Part(f"{name}_totals", f"part_total + {name}_lines"))
        self.meeting.take(writer, taken)
