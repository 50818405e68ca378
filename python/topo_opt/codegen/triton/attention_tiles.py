"""Default tiles of attention kernels, from shapes alone."""

from __future__ import annotations

from topo_opt.codegen.triton.attention_problem import Problem, read_problem
from topo_opt.codegen.triton.kernel import Kernel, next_power_of_two

FEW_ROWS = 16
"""Up to so many query rows a head, the heads that share keys are packed into one tile."""
SPLIT_KEYS = 64
"""A program has at least so many keys to itself when keys are split."""
MOST_SPLITS = 64

# Depth block (up to) -> keys a block, warps, stages of 128 rows in half precision.
_PREFILL = {64: (64, 4, 3), 128: (64, 8, 3), 256: (64, 8, 2)}
# Depth block (up to) -> keys a block, stages of few rows in half precision.
_DECODE = {64: (64, 3), 128: (64, 3), 256: (32, 3)}


def default_tile(kernel: Kernel) -> dict[str, int]:
    """Block sizes, packing, splits, warps and stages."""
    problem = read_problem(kernel)
    block = next_power_of_two(max(problem.depth, problem.width, 16))
    pack = problem.shared if problem.rows <= FEW_ROWS else 1
    rows = pack * problem.rows
    m = max(16, min(next_power_of_two(rows), 128))
    if problem.element == "f32":
        # No tensor cores: every thread holds its operands in registers.
        tile = {
            "m": min(m, 32),
            "n": 32 if block <= 128 else 16,
            "warps": 4 if block <= 64 else 8,
            "stages": 1,
        }
    elif m >= 64:
        n, warps, stages = _row_of(_PREFILL, block)
        tile = {"m": m, "n": n, "warps": warps if m == 128 else 4, "stages": stages}
    else:
        n, stages = _row_of(_DECODE, block)
        tile = {"m": m, "n": n, "warps": 4, "stages": stages}
    tile["n"] = max(16, min(tile["n"], next_power_of_two(problem.keys)))
    programs = problem.batch * (problem.heads // pack) * -(-rows // tile["m"])
    return {**tile, "pack": pack, "splits": choose_splits(problem, programs, kernel.target.cores)}


def choose_splits(problem: Problem, programs: int, cores: int) -> int:
    """Splits of the keys, a power of two: enough programs for every core, while each has keys enough to be worth combining."""
    keys = min(problem.keys, problem.rows) if problem.causal else problem.keys
    splits = 1
    while splits < MOST_SPLITS and programs * splits < cores and keys >= 2 * splits * SPLIT_KEYS:
        splits *= 2
    return splits


def _row_of(table: dict[int, tuple[int, ...]], block: int) -> tuple[int, ...]:
    return table[next((limit for limit in table if block <= limit), max(table))]
