"""Tiles worth measuring for pointwise kernels, reductions, updates and scans: those around the default."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from math import prod

from topo_opt.codegen.tile_order import nearest_first
from topo_opt.codegen.triton.kernel import Kernel, next_power_of_two
from topo_opt.codegen.triton.tiles import default_tile
from topo_opt.codegen.triton.transposed_reads import two_axes

MOST = 40
MOST_ELEMENTS = 64
"""Elements of a tile that one thread holds: 64 f32 values are a quarter of its registers."""
ONE_BLOCK = 2048
"""Columns up to which a row is always held in one block: a loop would only read it twice."""
_THREADS = 32  # of a warp
_WARPS = (1, 2, 4, 8, 16)


def candidates(kernel: Kernel) -> list[dict[str, int]]:
    """Tiles, the default first, then the others by how far they are from it."""
    default = default_tile(kernel)
    rows, cols = _sizes(kernel, default)
    if "y" in default and (both := two_axes(kernel)) is not None:
        return nearest_first(default, both.tiles())[:MOST]
    if "inner" in default:  # blocks along the inner dimensions: no larger than they are
        rows = prod(kernel.attributes["rows"][-default["inner"] :])
    found = [
        default | {"x": x, "r": r, "warps": warps} | parts
        for x, r, warps, parts in product(
            _around(default["x"], 3, rows), _columns(kernel, default, cols), _WARPS, _parts(default)
        )
        if warps * _THREADS <= max(x * r, _THREADS) <= MOST_ELEMENTS * warps * _THREADS
    ]
    if "inner" in default:
        found += [
            {k: v for k, v in tile.items() if k != "inner"} for tile in found if tile["x"] == default["x"]
        ]
    found = nearest_first(default, found)[:MOST]
    if "inner_cols" in default:
        found[1:1] = [{"x": x, "r": 1, "warps": 8} for x in (256, 512)]
    return found


def _sizes(kernel: Kernel, default: Mapping[str, int]) -> tuple[int, int]:
    """Rows and columns; where a family does not name them, its default is a block of all of them at most."""
    attributes = kernel.attributes
    if "rows" in attributes:
        return prod(attributes["rows"]), prod(attributes["cols"])
    written = max((kernel.graph.values[v].numel for v in kernel.graph.returns), default=1)
    return max(written // default["r"], 1), default["r"]


def _columns(kernel: Kernel, default: Mapping[str, int], cols: int) -> Iterable[int]:
    if (
        kernel.attributes["family"] != "loops"
        or "inner_cols" in default
        or (default["r"] >= cols and cols <= ONE_BLOCK)
    ):
        return [default["r"]]
    return _around(default["r"], 2, cols)


def _parts(default: Mapping[str, int]) -> list[dict[str, int]]:
    """How many programs share a row, where the default splits rows."""
    if "parts" not in default:
        return [{}]
    return [{"parts": parts} for parts in _around(default["parts"], 1, 2 * default["parts"])]


def _around(value: int, steps: int, limit: int) -> list[int]:
    """Powers of two from `value` down and up, no larger than what `limit` needs."""
    most = max(next_power_of_two(max(limit, 1)), value)
    return [v for s in range(-steps, steps + 1) if 1 <= (v := int(value * 2.0**s)) <= most]
