"""Tiles for products that are launched together: side by side they fill the machine as one product of all their columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch_mlir import ir

from topo_opt.codegen.triton import gemm_matrix_tiles
from topo_opt.codegen.triton.gemm_figures import figures_of
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.target import Target

_KEPT = 5


def tiles(
    calls: Sequence[ir.Operation], members: Sequence[ir.Operation], target: Target
) -> list[list[dict[str, int]]]:
    """For every choice, best first, the tile of each member; empty where the members are not products of the same rows.

    Args:
        calls: the member function of each call of a pack.
        members: each of them once.
    """
    kernels = [Kernel(f, target) for f in members]
    if any(k.attributes["family"] != "gemm" or "m" not in k.attributes["tile"] for k in kernels):
        return []
    figures = [figures_of(k) for k in kernels]
    first = figures[0]
    if first.element == "f32" or len({(f.batch, f.m, f.k, f.element) for f in figures}) > 1:
        return []
    # Both parts of a product lie side by side in a tile: their columns count, and each is half of a block.
    parts = [k.attributes.get("parts", 1) for k in kernels]
    if any(f.products != p for f, p in zip(figures, parts)):
        return []
    position = {f: i for i, f in enumerate(members)}
    columns = sum(figures[i].columns * parts[i] for i in (position[c] for c in calls))
    alone = Kernel(members[0], target)
    alone.attributes = {k: v for k, v in alone.attributes.items() if k not in ("parts", "period")}
    found = []
    for tile in gemm_matrix_tiles.ordered(alone, replace(first, columns=columns, products=1)):
        split = [tile | {"n": tile["n"] // p} for p in parts]
        whole = all(
            t["n"] % k.attributes.get("period", 1) == 0
            for t, k in zip(split, kernels)
            if "parts" in k.attributes
        )
        if whole and not tile.keys() & {"persistent", "splits"}:
            found.append(split)
    return found[:_KEPT]
