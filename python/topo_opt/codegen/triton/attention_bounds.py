"""Which keys a block of rows looks at, found from a boolean mask before the loop over keys.

Exported models hand causal order, padding and the unused end of a key cache to attention as one boolean tensor. Reading
the mask alone first costs a fraction of reading keys and values and multiplying: the loop then starts at the first key that
any row of the block may see and ends after the last one. Skipped blocks would not have changed any result.
"""

from __future__ import annotations

from collections.abc import Callable

from topo_opt.codegen.triton.emit import Emitter
from topo_opt.codegen.triton.kernel import next_power_of_two

SCANNED_ELEMENTS = 16384
"""Elements of the mask that are held at a time."""
ONE_LOAD = 8192
"""A mask without rows is read at once up to so many keys."""


def scan_block(rows: int, keys: int) -> int:
    """Keys that are looked at at a time, for a mask with `rows` different rows in a block."""
    return min(next_power_of_two(keys), ONE_LOAD if rows == 1 else max(16, SCANNED_ELEMENTS // rows))


def emit(emitter: Emitter, allowed: Callable[[], str], block: int, keys: int, *, wide: bool) -> None:
    """Defines `first`, a lower bound of the keys seen, and `last`, one more than the largest.

    Args:
        allowed: writes the mask over the key axis `ns`, whose block starts at `at`, and returns its source.
        wide: `ns` has 64 bits.
    """
    line = emitter.writer.line
    narrow = ".to(tl.int32)" if wide else ""
    if block >= keys:
        line("at = 0")
        seen = allowed()
        line(f"last = tl.max(tl.where({seen}, ns + 1, 0)){narrow}")
        line(f"first = tl.min(tl.where({seen}, ns, {keys})){narrow}")
        return
    line("last = 0")
    line(f"at = {-(-keys // block) * block}")
    with emitter.scope("while (at > 0) & (last == 0):"):
        line(f"at -= {block}")
        line(f"last = tl.max(tl.where({allowed()}, ns + 1, 0)){narrow}")
    line(f"first = {keys}")
    line("at = 0")
    with emitter.scope(f"while (at < last) & (first == {keys}):"):
        line(f"first = tl.min(tl.where({allowed()}, ns, {keys})){narrow}")
        line(f"at += {block}")
