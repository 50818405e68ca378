"""How often k is split between programs of the matrix form, and what their sums cost until they are one."""

from __future__ import annotations

from collections.abc import Iterable

from topo_opt.codegen.triton.kernel import Kernel

_SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_FEWEST_STEPS = 4
"""Steps of k of a program: with fewer, filling its pipeline is most of its time."""
_ROUNDS = 2
"""Programs a core for which splits are tried; with more the machine is full."""
_COUNT_IN = 1.49
"""Microseconds for the barrier, the atomic and its answer."""
_CORE_BYTES = 4e4
"""Bytes one core moves to or from L2 in a microsecond."""
_KEPT = 2
"""Tiles to measure that differ in splits alone."""


def choices(kernel: Kernel, tiles: int, k: int, block: int) -> tuple[int, ...]:
    """Splits to try, 1 first, where `tiles` alone leave cores idle."""
    steps = -(-k // block)
    most = min(steps // _FEWEST_STEPS, _ROUNDS * kernel.target.cores // tiles)
    return (1, *(s for s in _SPLITS if s <= most and -(-steps // -(-steps // s)) == s))


def combining(elements: int, splits: int) -> float:
    """Microseconds to write a program's `elements` sums and, in the last program, to read those of all."""
    return 0.0 if splits == 1 else _COUNT_IN + elements * 4 * (1 + splits) / _CORE_BYTES


def thinned(tiles: Iterable[dict[str, int]]) -> list[dict[str, int]]:
    """Of tiles that differ in splits alone, the first few."""
    seen: dict[tuple[tuple[str, int], ...], int] = {}
    kept = []
    for tile in tiles:
        key = tuple((name, size) for name, size in tile.items() if name != "splits")
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= _KEPT:
            kept.append(tile)
    return kept
