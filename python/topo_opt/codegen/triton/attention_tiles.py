"""Default tiles of attention kernels, from shapes alone."""

from __future__ import annotations

from topo_opt.codegen.triton.attention_problem import Problem, read_problem
from topo_opt.codegen.triton.attention_range import interval
from topo_opt.codegen.triton.kernel import Kernel, next_power_of_two
from topo_opt.structured.graph import element_bytes
from topo_opt.structured.index import const

FEW_ROWS = 16
"""Up to so many query rows a head, the heads that share keys are packed into one tile."""
SPLIT_KEYS = 32
"""A program has at least so many keys to itself when keys are split."""
MOST_SPLITS = 64
BOUNDED_KEYS = 256
"""From so many keys on, a boolean mask is read first to find those that matter."""

Row = tuple[int, int, int]
"""Keys a block, warps, stages."""

# For (rows a block, depth block up to). From 64 rows on the products are wgmma's; below, the keys' bandwidth decides.
# The figures behind the choices are in benchmarks/results/attention-h200.md.
_HALF: dict[tuple[int, int], Row] = {
    (64, 64): (64, 4, 3),
    (64, 128): (64, 4, 3),
    (64, 256): (32, 4, 2),
    (64, 512): (32, 8, 2),
    (32, 128): (64, 4, 3),
    (32, 256): (32, 4, 3),
    (32, 512): (16, 4, 3),
    (16, 128): (64, 4, 3),
    (16, 256): (32, 4, 3),
    (16, 1024): (16, 4, 3),
}
# Few groups read keys in small blocks, by how deep they are: more of them wait for memory at once.
_FEW_GROUPS: dict[int, Row] = {64: (64, 2, 3), 128: (32, 2, 3)}
PROGRAMS_PER_CORE, _IN_F32 = 4, 2
"""Programs of split keys a core has at most: the best of eight decoders had 512 on 132 cores, or as many as have keys enough. In f32 one of
more than one a core was never searched for: as many as leave no core without."""
_DESCRIBED: dict[int, Row] = {64: (128, 4, 2), 128: (64, 4, 3), 256: (64, 4, 2)}
"""Through descriptors (`tma`), with rows enough for wgmma, by how deep blocks are at most. What matters is that two programs of 64 rows fit a core at depths
up to 128: with 128 keys and two stages at a depth of 128 only one does, which took 1.4 to 1.7 times as long (attention-h200.md)."""
_LONG_ROWS, _LONG_ROUNDS, _LONG_DEPTH = 1024, 3, 128
_LONG: Row = (64, 8, 2)
"""The same for blocks of 128 rows, which are faster at this depth (93.5 and 85.6 us for 2,048 rows, 1,234 and 1,062 for 8,192) where they come in so many rounds and rows
fill them: of 700 rows they take 24.1 us and blocks of 64 rows 16.6, of 257 rows 33.7 and 25.9 (H200, attention-h200.md)."""
# In f32, where every thread holds its operands in registers.
_SINGLE: dict[tuple[int, int], Row] = {
    (32, 64): (32, 4, 1),
    (32, 256): (16, 8, 1),
    (16, 64): (32, 4, 1),
    (16, 128): (32, 8, 1),
    (16, 1024): (16, 8, 1),
}
# The same where there is wgmma, which takes 64 rows: half the time and less (attention-h200.md). Compiled for A100 and B200 such blocks spill.
_SINGLE_BY_WARP_GROUPS: dict[tuple[int, int], Row] = {
    (128, 64): (64, 4, 1),
    (64, 64): (32, 4, 1),
    (64, 128): (64, 4, 1),
}


def default_tile(kernel: Kernel) -> dict[str, int]:
    """Block sizes, packing, splits, warps and stages."""
    problem, cores = read_problem(kernel), kernel.target.cores
    pack = problem.shared if problem.rows <= FEW_ROWS else 1
    rows, groups = pack * problem.rows, problem.batch * problem.heads // pack
    depth = next_power_of_two(max(problem.depth, problem.width, 16))
    table = _HALF
    if problem.element == "f32":
        table = _SINGLE | _SINGLE_BY_WARP_GROUPS if kernel.target.has_wgmma else _SINGLE

    # The largest block of rows that leaves no core without a program, else the smallest that the rows fill.
    fitting = sorted({m for m, limit in table if depth <= limit and (m == 16 or m < 2 * rows)}, reverse=True)
    tensor_cores = [m for m in fitting if m >= 64] or fitting[:1] or [16]
    m = next((m for m in tensor_cores if groups * -(-rows // m) >= cores), tensor_cores[-1])
    n, warps, stages = table[
        (m, min((limit for size, limit in table if size == m and depth <= limit), default=1024))
    ]
    half = problem.element != "f32"
    wanted = cores * (PROGRAMS_PER_CORE if half else _IN_F32)
    splits = choose_splits(problem, groups, wanted) if rows <= m else 1
    if m == 16 and groups < cores and half:
        n, warps, stages = next((row for d, row in _FEW_GROUPS.items() if depth <= d), (n, warps, stages))
    n = max(16, min(n, next_power_of_two(problem.keys // splits)))
    bounds = int(problem.mask_element == "i1" and problem.keys >= BOUNDED_KEYS)
    return {
        "m": m,
        "n": n,
        "warps": warps,
        "stages": stages,
        "pack": pack,
        "splits": splits,
        "bounds": bounds,
    }


def with_descriptors(kernel: Kernel, tile: dict[str, int]) -> dict[str, int] | None:
    """The tile that is best where keys and values are copied through descriptors; None where that is not known to be better."""
    problem, target = read_problem(kernel), kernel.target
    depth = next_power_of_two(max(problem.depth, problem.width, 16))
    row = next((row for most, row in _DESCRIBED.items() if depth <= most), None)
    if tile["m"] < 64 or problem.element == "f32" or row is None or not target.has_tma:
        return None
    m, (n, warps, stages) = tile["m"], row
    programs = problem.batch * problem.heads * -(-problem.rows // 128)
    long = problem.rows >= _LONG_ROWS and programs >= _LONG_ROUNDS * target.cores
    if depth == _LONG_DEPTH and tile["pack"] == 1 and long:
        m, (n, warps, stages) = 128, _LONG
    n = max(16, min(n, next_power_of_two(problem.keys // tile["splits"])))
    shared = (m + 2 * stages * n) * depth * element_bytes(problem.element)
    described = {**tile, "m": m, "n": n, "warps": warps, "stages": stages, "tma": 1}
    return described if shared <= target.shared_bytes else None


def most_keys(problem: Problem) -> int:
    """An upper bound of the keys that a row sees, from the bounds that do not depend on data."""
    if problem.positions is not None:
        return problem.keys
    rows, nowhere = (const(0), const(problem.rows - 1)), (const(0), const(0))
    ends = [interval(e, (rows, nowhere))[1].constant for e in problem.high]
    return max(1, min([problem.keys, *ends]))


def choose_splits(problem: Problem, programs: int, wanted: int) -> int:
    """Splits of the keys, a power of two: as many programs as are wanted, while each has keys enough to be worth combining."""
    keys = most_keys(problem)
    splits = 1
    while splits < MOST_SPLITS and 2 * programs * splits <= wanted and keys >= 2 * splits * SPLIT_KEYS:
        splits *= 2
    return splits
