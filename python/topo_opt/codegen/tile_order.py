"""Tiles as points: how far they are from each other, and which are next to one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import log2

# Entries of a tile and how they vary: by factors of two, or by one. Others name a form, which a neighbour keeps.
_POWERS = ("m", "n", "k", "x", "y", "r", "parts", "split", "splits", "warps")
_COUNTS = ("stages",)
_LIMITS = {"warps": (1, 16), "stages": (1, 8), "parts": (1, 1024), "split": (1, 64), "splits": (1, 64)}
_MOST = 1 << 20


def nearest_first(tile: Mapping[str, int], tiles: Iterable[Mapping[str, int]]) -> list[dict[str, int]]:
    """A tile, then others by how far they are from it, each once."""
    ordered = sorted((dict(t) for t in tiles), key=lambda t: (distance(tile, t), sorted(t.items())))
    return list(_once([dict(tile), *ordered]))


def distance(a: Mapping[str, int], b: Mapping[str, int]) -> float:
    """The sum of the ratios of two tiles' entries, as powers of two."""
    return sum(abs(log2(max(v, 1) / max(a.get(k, 1), 1))) for k, v in b.items())


def _once(tiles: Iterable[dict[str, int]]) -> Iterator[dict[str, int]]:
    seen: set[tuple[tuple[str, int], ...]] = set()
    for tile in tiles:
        entry = tuple(sorted(tile.items()))
        if entry not in seen:
            seen.add(entry)
            yield tile


def neighbours(tile: Mapping[str, int]) -> list[dict[str, int]]:
    """Tiles that differ in one entry, or in a block and the warps together."""
    found: list[dict[str, int]] = []
    for key in (k for k in _POWERS if k in tile):
        found += [{**tile, key: tile[key] * 2}, {**tile, key: tile[key] // 2}]
    for key in (k for k in _COUNTS if k in tile):
        found += [{**tile, key: tile[key] + 1}, {**tile, key: tile[key] - 1}]
    for key in (k for k in ("m", "n", "x", "y") if k in tile and "warps" in tile):
        found.append({**tile, key: tile[key] * 2, "warps": tile["warps"] * 2})
        found.append({**tile, key: tile[key] // 2, "warps": tile["warps"] // 2})
    return nearest_first(tile, [t for t in found if _within_limits(t)])[1:]


def _within_limits(tile: Mapping[str, int]) -> bool:
    return all(
        low <= value <= high
        for key, value in tile.items()
        for low, high in [_LIMITS.get(key, (int(key in _POWERS), _MOST))]
    )
