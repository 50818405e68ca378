"""Default tiles of the kernels of a mixture of experts, and the candidates that a search tries."""

from __future__ import annotations

from topo_opt.codegen.triton.group_rows import op_of
from topo_opt.codegen.triton.grouped_base import Problem, read_problem
from topo_opt.codegen.triton.grouped_matrix import most_blocks
from topo_opt.codegen.triton.kernel import Kernel, next_power_of_two
from topo_opt.codegen.triton.top_k import anchor_of
from topo_opt.structured.graph import element_bytes

Tile = dict[str, int]

_ROWS_AT_A_TIME = 4096
_STREAMED_ELEMENTS = 8192
"""Weights of a program of the streaming form: 256 threads hold 32 each."""
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


# Tiles (m, n, k, swap, warps, stages) and the share of peak that a full wave of them reaches; few rows swap operands.
_SWAPPED = (
    (16, 64, 128, 1, 4, 4),
    (16, 32, 128, 1, 4, 4),
    (16, 128, 64, 1, 4, 4),
    (16, 64, 64, 1, 4, 5),
    (32, 64, 128, 1, 4, 3),
    (32, 64, 64, 1, 4, 4),
)
_PLAIN = (
    (128, 128, 64, 0, 8, 3),
    (64, 128, 64, 0, 4, 3),
    (128, 64, 64, 0, 4, 4),
    (64, 64, 64, 0, 4, 4),
    (128, 256, 64, 0, 8, 3),
    (64, 256, 64, 0, 8, 3),
    (128, 128, 32, 0, 8, 4),
)


def _matrix_tiles(kernel: Kernel, problem: Problem) -> list[Tile]:
    names = ("m", "n", "k", "swap", "warps", "stages")
    if problem.element == "f32":
        return [dict(_F32_TILE), dict(_F32_TILE, n=64), dict(_F32_TILE, m=64, n=64)]
    share = problem.rows / problem.groups
    accumulators = 2 if accumulates_pairs(kernel, problem) else 1
    table = (*_SWAPPED, *_PLAIN) if share < 32 else (*_PLAIN, *_SWAPPED[:0])
    tiles = [dict(zip(names, row)) for row in table]
    fitting = [t for t in tiles if _fits(kernel, problem, t, accumulators)]
    fitting = [
        dict(
            t,
            k=max(16, min(t["k"], next_power_of_two(problem.inner))),
            n=max(16, min(t["n"], next_power_of_two(problem.columns))),
        )
        for t in fitting or tiles[-1:]
    ]
    unique = [t for i, t in enumerate(fitting) if t not in fitting[:i]]
    return sorted(unique, key=lambda t: _cost(kernel, problem, t, accumulators))


def accumulates_pairs(kernel: Kernel, problem: Problem) -> bool:
    """Whether two columns of the product make one of the results."""
    weights = kernel.graph.values[problem.node.operands[1]].shape or (0, 0, 0)
    return weights[2] > problem.columns


def _fits(kernel: Kernel, problem: Problem, tile: Tile, accumulators: int) -> bool:
    """Accumulators in registers and stages in shared memory."""
    registers = tile["m"] * tile["n"] * accumulators / (32 * tile["warps"])
    shared = (
        (tile["m"] + tile["n"] * accumulators) * tile["k"] * tile["stages"] * element_bytes(problem.element)
    )
    return registers <= 128 and shared <= kernel.target.shared_bytes


def _cost(kernel: Kernel, problem: Problem, tile: Tile, accumulators: int) -> float:
    """Time in operations of one core: waves of programs, each of its rows and columns, with what a small tile loses."""
    blocks = most_blocks(problem.rows, problem.groups, tile["m"])
    share = problem.rows / problem.groups
    if share >= 1:  # evenly spread rows
        blocks = problem.groups * -(-int(share) // tile["m"])
    programs = blocks * -(-problem.columns // tile["n"])
    area = tile["m"] * tile["n"] * accumulators
    efficiency = area / (area + 4096)
    waves = max(programs / kernel.target.cores, 1.0)
    return waves * area / efficiency
