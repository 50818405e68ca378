"""Which tiles a kernel can have. Every family's space stands beside its code; this is the way to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.tile_order import distance, neighbours
from topo_opt.codegen.triton import FAMILIES, gemm_tiles
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.tiles import default_tile
from topo_opt.errors import UnsupportedError

Tile = Mapping[str, int]

# Family -> module with `candidates(kernel)`, best first by the family's cost model.
SPACES = {
    "loops": "topo_opt.codegen.triton.loops_space",
    "update": "topo_opt.codegen.triton.loops_space",
    "scan": "topo_opt.codegen.triton.loops_space",
    "gemm": "topo_opt.codegen.triton.gemm_space",
    "attention": "topo_opt.codegen.triton.attention_space",
    "experts": "topo_opt.codegen.triton.grouped_tiles",
}


def candidates(kernel: Kernel) -> list[dict[str, int]]:
    """Tiles of a kernel, the cost model's choice first.

    A family without a space of its own has the neighbours of its default.
    """
    default = default_tile(kernel)
    module = SPACES.get(kernel.attributes["family"])
    found = import_module(module).candidates(kernel) if module else neighbours(default)
    return _first(default, found)


def slowdown(kernel: Kernel, tile: Tile) -> float | None:
    """Estimated time with a tile, of that with the best one; None for families whose tiles have no estimates."""
    return gemm_tiles.slowdown(kernel, tile) if kernel.attributes["family"] == "gemm" else None


def _first(default: Tile, found: Sequence[Tile]) -> list[dict[str, int]]:
    return [dict(default), *(dict(t) for t in found if dict(t) != dict(default))]


def fit(tile: Tile, space: Sequence[Tile]) -> dict[str, int] | None:
    """The tile of a space that is the nearest to one from another kernel; None when none has the same form."""
    same = [dict(t) for t in space if t.keys() == tile.keys()]
    return min(same, key=lambda t: (distance(tile, t), sorted(t.items())), default=None)


def lower(kernel: Kernel, tile: Tile) -> KernelSource:
    """The code of a kernel with one tile.

    Raises:
        UnsupportedError: the tile is not possible, for code generation or for a launch.
    """
    kernel.attributes = {**kernel.attributes, "tile": dict(tile)}
    source = import_module(FAMILIES[kernel.attributes["family"]]).lower(kernel)
    if faults := source.problems():
        raise UnsupportedError(f"the launch is not possible: {faults[0]}")
    return source
