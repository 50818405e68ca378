"""Tiles for the reduction of an outer axis with few columns in memory: its rows are neighbours, long, and shared by programs.

Every program reads a part of the columns for a block of rows; the parts are put together by the last program of a block.
Blocks are narrow where padding or many parts would cost more than short runs of neighbouring elements do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from topo_opt.codegen.triton.kernel import next_power_of_two
from topo_opt.codegen.triton.memory_model import (
    CORE_BYTES_PER_NS,
    LATENCY_NS,
    Ranked,
    core_rate,
    in_flight,
    resident,
    share,
)
from topo_opt.codegen.triton.row_split import COMBINED
from topo_opt.codegen.triton.target import Target

SHORTEST_RUN_BYTES = 64
"""Of neighbours in a block: memory hands out two sectors at a time."""
MOST_ROWS = 128
"""Of a block."""
_END_BYTES = 16
"""Time for a run of neighbours that ends, as bytes of further neighbours; assumed."""
_SPLIT_NS = 700.0
"""Writing a part and counting in, as for products (`gemm_skinny_tiles`)."""
_PROGRAMS_PER_CORE = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class Shared:
    """A reduction over rows that are neighbours in memory.

    `element_bytes`: of an element that is read; `words`: of 4 bytes, kept for every element of a tile.
    """

    rows: int
    cols: int
    element_bytes: int
    words: int

    def cost(self, tile: dict[str, int], target: Target) -> float:
        """Estimated ns of a launch with the tile."""
        x, warps, parts = tile["x"], tile["warps"], tile["parts"]
        programs = -(-self.rows // x) * parts
        blocks = -(-self.cols // tile["r"])
        steps = -(-blocks // parts)
        run = min(x, self.rows) * self.element_bytes
        short = 1.0 if x >= self.rows else 1.0 + _END_BYTES / run
        bytes_each = steps * tile["r"] * run * short
        together = resident(self._registers(x * tile["r"] // (32 * warps)), warps)

        def turn(count: int) -> float:
            """Time of programs that run at once."""
            flight = max(count / target.cores, 1.0) * run * tile["r"]
            return share(count, target) * bytes_each / (core_rate(target) * in_flight(flight, target))

        full, rest = divmod(programs, target.cores * together)
        reading = full * turn(target.cores * together) + (turn(rest) if rest else 0.0)
        rounds = -(-parts * x // (COMBINED * 32 * warps))
        combining = _SPLIT_NS + rounds * LATENCY_NS / 2 + parts * x * self.words * 4 / CORE_BYTES_PER_NS
        return LATENCY_NS + reading + (combining if parts > 1 else 0.0)

    def _registers(self, elements: int) -> float:
        """Of a thread, for so many elements: lanes and a step's loads, and more where it keeps more than a sum."""
        return 16.0 + elements * (1.6 if self.words == 1 else 4.8)

    def tiles(self, target: Target) -> Iterator[dict[str, int]]:
        """What is worth a thought."""
        most = min(next_power_of_two(self.rows), MOST_ROWS)
        x = min(most, max(1, SHORTEST_RUN_BYTES // self.element_bytes))
        while x <= most:
            for warps in (4, 8):
                for elements in (16, 32):
                    r = max(1, min(elements * 32 * warps // x, next_power_of_two(self.cols)))
                    steps, blocks = -(-self.cols // r), -(-self.rows // x)
                    wanted = {min(steps, max(1, n * target.cores // blocks)) for n in _PROGRAMS_PER_CORE}
                    for parts in sorted(wanted):
                        yield {"x": x, "r": r, "warps": warps, "parts": parts}
            x *= 2


def ranked(shared: Shared, target: Target) -> Ranked:
    """Tiles with estimated ns, the fastest first."""
    return sorted(((shared.cost(t, target), t) for t in shared.tiles(target)), key=lambda item: item[0])
