"""Tiles for products that are launched together: side by side they fill the machine as one product of all their columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch_mlir import ir

from topo_opt.codegen.triton import gemm_matrix_tiles, gemm_skinny_tiles
from topo_opt.codegen.triton.gemm_figures import Figures, figures_of
from topo_opt.codegen.triton.gemm_tiles import few_rows
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.target import Target

_KEPT = 32
_PLAIN = 16
"""Tiles that stand in front of those with more blocks ahead."""
_AHEAD = 5
"""Tiles that are tried with more blocks ahead."""


def tiles(
    calls: Sequence[ir.Operation], members: Sequence[ir.Operation], target: Target
) -> list[list[dict[str, int]]]:
    """For every choice, best first, the tile of each member; empty where the members are not products of the same rows.

    Args:
        calls: the member function of each call of a pack.
        members: each of them once.
    """
    kernels = [Kernel(f, target) for f in members]
    if any(k.attributes["family"] != "gemm" for k in kernels):
        return []
    forms = {"m" in k.attributes["tile"] for k in kernels}
    figures = [figures_of(k) for k in kernels]
    # Both parts of a product lie side by side in a tile: their columns count, and each is half of a block.
    parts = [k.attributes.get("parts", 1) for k in kernels]
    if (
        len(forms) > 1
        or len({_work(f) for f in figures}) > 1
        or any(f.products != p for f, p in zip(figures, parts))
    ):
        return []
    first, position = figures[0], {f: i for i, f in enumerate(members)}
    columns = sum(figures[i].columns * parts[i] for i in (position[c] for c in calls))
    alone = Kernel(members[0], target)
    alone.attributes = {k: v for k, v in alone.attributes.items() if k not in ("parts", "period")}
    each = first.weight_bytes / first.products
    joint = replace(first, columns=columns, products=1, weight_bytes=each, alike=False)
    if forms == {False}:
        streamed = [tile for _, tile in few_rows(alone, joint)]
        skinny = [tile for tile in streamed if "split" in tile]
        ahead = gemm_skinny_tiles.with_more_ahead(joint, skinny[:_AHEAD])
        streamed = [*streamed[:_PLAIN], *ahead, *streamed[_PLAIN:]]
        split = [[tile | {"n": tile["n"] // p} for p in parts] for tile in streamed]
        return [tiles for tiles in split if all(t["n"] >= _narrowest(t) for t in tiles)][:_KEPT]
    if first.element == "f32":
        return []
    found = []
    for tile in gemm_matrix_tiles.ordered(alone, joint):
        split_tile = [tile | {"n": tile["n"] // p} for p in parts]
        whole = all(
            t["n"] % k.attributes.get("period", 1) == 0
            for t, k in zip(split_tile, kernels)
            if "parts" in k.attributes
        )
        if whole and not tile.keys() & {"persistent", "splits"}:
            found.append(split_tile)
    return found[:_KEPT]


def _work(figures: Figures) -> tuple[object, ...]:
    """What products must have in common to be one product of all their columns."""
    f = figures
    each = f.weight_bytes / f.products
    return f.batch, f.m, f.k, f.element, each, f.contiguous, f.statistics, f.early_statistics


def _narrowest(tile: dict[str, int]) -> int:
    """Columns that a tile of a form for few rows has at least."""
    return 1 if "split" not in tile else 8 if "slices" in tile else 16
