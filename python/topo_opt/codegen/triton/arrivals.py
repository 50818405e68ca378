"""Several programs on one result: partial results in memory, and the last program to arrive combines them.

Every program writes its part, then counts itself with an atomic that releases these writes and acquires those of the
programs before. Who sees the count complete reads all parts in their order, whatever the order of arrival was, so that the
result does not depend on it, and sets the counter back: counters are zero at every launch.
"""

from __future__ import annotations

from topo_opt.codegen.kernel_source import Scratch
from topo_opt.codegen.triton.writer import Writer

COUNTERS = "arrivals"
"""The scratch parameter with one counter a result."""


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
