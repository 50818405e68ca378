"""Attention whose keys are split over programs: partial results in memory, and the last program to arrive combines them.

The part of a program is its running maximum, sum of weights and weighted sum of values; `arrivals` says who combines them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from topo_opt.codegen.kernel_source import Scratch
from topo_opt.codegen.triton import arrivals
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

    NAMES: ClassVar = ("part_acc", "part_best", "part_total", arrivals.COUNTERS)

    @property
    def rows_block(self) -> int:
        """Rows the combining program holds: without the padding that `tl.dot` needs."""
        return min(self.block_m, next_power_of_two(self.rows))

    @property
    def at_once(self) -> int:
        """Splits whose partial results are held at a time."""
        return max(1, min(self.splits, COMBINED_ELEMENTS // (self.rows_block * self.block_e)))

    def scratch(self, blocks: int) -> tuple[Scratch, ...]:
        """Buffers for `blocks` blocks of rows, in the order of `NAMES`."""
        lines = blocks * self.splits * self.rows_block
        return (
            Scratch("fp32", lines * self.block_e),
            Scratch("fp32", lines),
            Scratch("fp32", lines),
            arrivals.counters(blocks),
        )

    def store(self, writer: Writer) -> None:
        """Writes this program's `best`, `total` and `acc` and defines `arrived`, the programs that were done before."""
        line, rows, masked = writer.line, self.rows_block, self.rows_block < self.block_m
        line(f"slot = (pid * {self.splits} + tl.program_id(1)) * {rows}")
        line("lane = tl.arange(0, BLOCK_M)")
        line(f"tl.store(part_best + slot + lane, best{f', mask=lane < {rows}' if masked else ''})")
        line(f"tl.store(part_total + slot + lane, total{f', mask=lane < {rows}' if masked else ''})")
        place = "(slot + lane[:, None]) * BLOCK_E + e"
        line(f"tl.store(part_acc + {place}, acc{f', mask=lane[:, None] < {rows}' if masked else ''})")
        arrivals.count_in(writer, "pid")

    def combine(self, writer: Writer) -> None:
        """Defines `sum_acc` and `sum_total` from all partial results, in the order of the splits."""
        line, rows, splits = writer.line, self.rows_block, self.splits
        line(f"first_line = pid * {splits * rows}")
        whole = self.at_once == splits
        self._load(writer, "0", splits, "all", with_parts=whole)
        line('all_totals = tl.load(part_total + all_lines, cache_modifier=".cg")')
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
        arrivals.set_back(writer, "pid")

    def _load(self, writer: Writer, start: str, count: int, name: str, *, with_parts: bool) -> None:
        """Defines `name`_bests and `name`_parts, maxima and weighted sums of `count` splits from `start` on."""
        line, rows = writer.line, self.rows_block
        split = f"tl.arange(0, {count})[:, None]"
        split = split if start == "0" else f"({start} + {split})"
        line(f"{name}_lines = first_line + {split} * {rows} + tl.arange(0, {rows})[None, :]")
        if with_parts:
            line(f"{name}_places = {name}_lines[:, :, None] * BLOCK_E + tl.arange(0, BLOCK_E)[None, None, :]")
            line(f'{name}_parts = tl.load(part_acc + {name}_places, cache_modifier=".cg")')
        line(f'{name}_bests = tl.load(part_best + {name}_lines, cache_modifier=".cg")')
