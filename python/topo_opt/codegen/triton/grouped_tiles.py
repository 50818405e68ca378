"""Default tiles of the kernels of a mixture of experts, and the candidates that a search tries."""

from __future__ import annotations

from topo_opt.codegen.triton.group_rows import op_of
from topo_opt.codegen.triton.grouped_base import Problem, read_problem
from topo_opt.codegen.triton.grouped_matrix import GroupedMatrix
from topo_opt.codegen.triton.kernel import Kernel, next_power_of_two
from topo_opt.codegen.triton.top_k import anchor_of
from topo_opt.errors import UnsupportedError
from topo_opt.structured.graph import element_bytes

Tile = dict[str, int]

_ROWS_AT_A_TIME = 4096
_F32_TILE: Tile = {"m": 32, "n": 32, "k": 32, "swap": 0, "warps": 4, "stages": 3}


def default_group_rows(kernel: Kernel) -> Tile:
    """All rows at a time where they fit in registers."""
    (count,) = kernel.graph.values[op_of(kernel.graph).operands[0]].shape or (1,)
    block = min(next_power_of_two(count), _ROWS_AT_A_TIME)
    return {"x": block, "warps": max(1, min(8, block // 256))}


def default_top_k(kernel: Kernel) -> Tile:
    """A warp a row of up to 512 elements, four rows a program."""
    shape = kernel.graph.values[anchor_of(kernel.graph).operands[0]].shape or (1,)
    columns = next_power_of_two(shape[-1])
    rows = 1
    for size in shape[:-1]:
        rows *= size
    if columns > 512:
        return {"x": 1, "warps": 4}
    block = min(4, next_power_of_two(rows))
    return {"x": block, "warps": block}


def default_experts(kernel: Kernel) -> Tile:
    """The first of the candidates."""
    return candidates(kernel)[0]


def candidates(kernel: Kernel) -> list[Tile]:
    """Tiles of a grouped product, best first by the model."""
    problem = read_problem(kernel.graph)
    return _matrix_tiles(kernel, problem) if problem.is_sorted else _stream_tiles(problem)


def _block_of_inner(inner: int, most: int) -> int:
    """The largest block of k up to `most` that divides k, if it is at least a quarter of what fits; else one that covers it."""
    fits = min(next_power_of_two(inner), most)
    divides = inner & -inner
    return min(divides, fits) if min(divides, fits) * 4 >= fits else fits


def _stream_tiles(problem: Problem) -> list[Tile]:
    found = []
    for most, elements, warps in (
        (2048, 8192, 8),
        (1024, 4096, 4),
        (2048, 16384, 8),
        (512, 4096, 4),
        (1024, 2048, 4),
    ):
        k = _block_of_inner(problem.inner, most)
        whole = min(next_power_of_two(problem.inner), 2048)
        n = max(1, min(elements // whole, next_power_of_two(problem.columns), 32))
        tile = {"n": n, "k": k, "warps": warps}
        if tile not in found:
            found.append(tile)
    return found


# Tiles (m, n, k, warps, stages). With few rows a group operands are swapped, and weights stream through shared memory.
_SWAPPED = (
    (16, 64, 128, 4, 3),
    (16, 64, 128, 4, 4),
    (16, 64, 64, 4, 4),
    (16, 64, 64, 4, 6),
    (16, 128, 64, 4, 4),
    (16, 32, 128, 4, 4),
    (16, 32, 256, 4, 3),
    (16, 128, 128, 4, 2),
    (32, 64, 128, 4, 3),
    (32, 64, 64, 4, 4),
)
_PLAIN = (
    (128, 128, 64, 8, 3),
    (128, 256, 64, 8, 3),
    (128, 128, 64, 8, 4),
    (128, 64, 64, 4, 4),
    (128, 64, 64, 4, 3),
    (64, 256, 64, 8, 3),
    (64, 128, 64, 4, 3),
    (64, 128, 64, 4, 4),
    (64, 64, 64, 4, 4),
    (32, 128, 64, 4, 4),
)
_FEW_FORMS: tuple[Tile, ...] = ({"swap": 1}, {"swap": 1, "tma": 1})
_MANY_FORMS: tuple[Tile, ...] = ({"swap": 0, "tma": 1}, {"swap": 0})
_NAMES = ("m", "n", "k", "warps", "stages")
SWAPPED_BELOW = 24
"""Rows a group, on average, below which the weights are the first operand."""
_FULL_RATE = 85
"""Products for each element of an operand that a tile must do for full speed: a tile of 128 x 256 does."""


def _matrix_tiles(kernel: Kernel, problem: Problem) -> list[Tile]:
    if problem.element == "f32":
        return [dict(_F32_TILE), dict(_F32_TILE, n=64), dict(_F32_TILE, m=64, n=64)]
    few = problem.rows / problem.groups < SWAPPED_BELOW
    known = _FEW_FORMS if few else _MANY_FORMS
    forms = [f for f in known if not f.get("tma") or _described(kernel, f)]
    pairs = 2 if _accumulates_pairs(kernel, problem) else 1
    sized = [
        {
            **dict(zip(_NAMES, row)),
            "k": max(16, min(row[2], next_power_of_two(problem.inner))),
            "n": max(16, min(row[1], next_power_of_two(problem.columns))),
        }
        for row in (_SWAPPED if few else _PLAIN)
    ]
    fitting = [t for t in sized if _fits(kernel, problem, t, pairs)] or sized[-1:]
    found = [{**t, **form} for form in forms for t in fitting]
    if not few:
        # A group's last rows as a block of half the size, where that is one that tensor cores take whole.
        found += [{**t, "tail": t["m"] // 2} for t in found if t["m"] >= 128]
        found.sort(key=lambda t: (not t.get("tma", 0), _cost(problem, t, pairs)))
    return [t for i, t in enumerate(found) if t not in found[:i]]


def _described(kernel: Kernel, form: Tile) -> bool:
    """Whether the weights lie in memory as a tensor descriptor can say."""
    saved = kernel.attributes
    kernel.attributes = {**saved, "tile": {"m": 16, "n": 16, "k": 16, "warps": 4, "stages": 1, **form}}
    try:
        GroupedMatrix(kernel).lower()
    except UnsupportedError:
        return False
    finally:
        kernel.attributes = saved
    return True


def _accumulates_pairs(kernel: Kernel, problem: Problem) -> bool:
    """Whether two columns of the product make one of the results."""
    weights = kernel.graph.values[problem.node.operands[1]].shape or (0, 0, 0)
    return weights[2] > problem.columns


def _fits(kernel: Kernel, problem: Problem, tile: Tile, pairs: int) -> bool:
    """Accumulators in registers and stages in shared memory."""
    registers = tile["m"] * tile["n"] * pairs / (32 * tile["warps"])
    shared = (tile["m"] + tile["n"] * pairs) * tile["k"] * tile["stages"] * element_bytes(problem.element)
    return registers <= 128 and shared <= kernel.target.shared_bytes


def _cost(problem: Problem, tile: Tile, pairs: int) -> float:
    """Relative time: rows with those that fill up the last block of a group, by how fast a tile of the size multiplies."""
    rows = problem.rows / problem.groups + tile.get("tail", tile["m"]) / 2
    columns = -(-problem.columns // tile["n"]) * tile["n"]
    wide = tile["n"] * pairs
    rate = min(1.0, tile["m"] * wide / (tile["m"] + wide) / _FULL_RATE)
    return rows * columns / rate
