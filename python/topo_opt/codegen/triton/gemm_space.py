"""Tiles of gemm kernels to measure, best first by the cost models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from topo_opt.codegen.triton import gemm_matrix_tiles, gemm_skinny_tiles
from topo_opt.codegen.triton.contraction import VECTOR_ROWS
from topo_opt.codegen.triton.gemm_figures import figures_of
from topo_opt.codegen.triton.gemm_tiles import few_rows
from topo_opt.codegen.triton.kernel import Kernel

LIMIT = 56
_AHEAD = 5
"""Skinny tiles that are tried with more blocks ahead."""
_MATRIX_SHARE = 4
"""Matrix tiles beside those of the forms for few rows."""
_STAGES_SHARE = 2
"""Tiles that differ in stages alone."""


def candidates(kernel: Kernel) -> list[dict[str, int]]:
    """Tiles of a kernel, best first, at most `LIMIT`."""
    figures = figures_of(kernel)
    streamed = _in_turn(_thinned([tile for _, tile in few_rows(kernel, figures)]))
    skinny = [tile for tile in streamed if "split" in tile]
    matrix = gemm_matrix_tiles.variants(kernel, figures)
    if not streamed:
        return matrix[:LIMIT]
    beside = matrix[:_MATRIX_SHARE] if figures.m > VECTOR_ROWS and not figures.statistics else []
    ahead = gemm_skinny_tiles.with_more_ahead(figures, skinny[:_AHEAD])
    return streamed[: LIMIT - len(beside) - len(ahead)] + ahead + beside


def _in_turn(tiles: Sequence[dict[str, int]]) -> list[dict[str, int]]:
    """The forms taking turns, best first: the models of two forms may be off by different factors."""
    forms: dict[tuple[str, ...], list[dict[str, int]]] = {}
    for tile in tiles:
        forms.setdefault(tuple(name for name in ("split", "slices") if name in tile), []).append(tile)
    return [tile for turn in zip_longest(*forms.values()) for tile in turn if tile is not None]


def _thinned(tiles: Sequence[dict[str, int]]) -> list[dict[str, int]]:
    """Of tiles that differ in stages alone, the first few."""
    seen: dict[tuple[tuple[str, int], ...], int] = {}
    kept = []
    for tile in tiles:
        key = tuple((name, size) for name, size in tile.items() if name != "stages")
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= _STAGES_SHARE:
            kept.append(tile)
    return kept
