"""Tiles of the matrix form, by a model of waves: programs that share a core, what a tile costs, what hides behind what.

The constants are fitted to 613 timings of 30 products (700 to 12288 rows, k 768 to 8192) in bf16 on an H200 (Triton 3.6): the first tile
takes 2 % longer than the best of a shape in the mean, and times are off by 13 %. Shares of peak are relative, so they stand for other machines with tensor cores as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from topo_opt.codegen.triton import gemm_f32_tiles, gemm_splits
from topo_opt.codegen.triton.gemm_figures import Figures
from topo_opt.codegen.triton.kernel import Kernel, next_power_of_two
from topo_opt.codegen.triton.memory_model import Ranked

_GROUPS = (8, 4, 16)
"""Rows of tiles that are walked together; all fit in L2, so the first one mostly does."""

_CORE_RATE = 5.93e6
"""Operations a core does in a microsecond with the best tile."""
_LAUNCH = 2.5
"""Microseconds until the first tile runs and after the last one ends."""
_FILL, _NEXT_FILL, _PERSISTENT_FILL = 1.6, 0.5, 0.97
"""Microseconds to fill a tile's pipeline: the first on a core, one beside another, and one under the epilogue before it."""
_LATENCY = 0.88
"""Microseconds from asking for the operands of a step to having them: a program of s stages has s - 1 steps under way."""
_SEVERAL, _ENOUGH_STAGES = 1.08, 4
"""Factor on the work of a core's only program with several products, in fewer stages: gated ones of 700 to 8,192 rows took 4 to 14 % longer in
three stages than in four, those of one block of weights as long (H200; the longest replayed until the clock had settled)."""
_MATH = 1.03e-4
"""Microseconds an element of a tile takes for a math function of the epilogue, with at least 8 warps a 128 x 128 tile."""
_FEW_WARPS = 1.12
"""Factor on `_MATH` with fewer warps."""
_EXPOSED = 0.33
"""Part of that which does not hide behind the products of another program on the core."""
_THREADS = 32  # of a warp
_REGISTERS = 65536  # of a core
_OTHER_REGISTERS = 60  # of a thread beside its accumulators
_BARRIERS = 1024  # bytes of shared memory beside the operands


@dataclass(frozen=True)
class _Size:
    """Blocks of m, n and k, warps, stages to try, and the share of peak of a core that is full of such tiles."""

    m: int
    n: int
    k: int
    warps: int
    stages: tuple[int, ...]
    share: float


_SIZES = (
    _Size(128, 256, 64, 8, (3, 4), 1.0),
    _Size(256, 128, 64, 8, (3,), 0.91),
    _Size(64, 256, 64, 4, (4, 3), 0.94),
    _Size(128, 128, 64, 4, (4, 3), 0.88),
    _Size(128, 128, 64, 8, (3, 4), 0.92),
    _Size(64, 128, 64, 4, (3, 4), 0.85),
    _Size(128, 64, 64, 4, (3, 4), 0.71),
    _Size(64, 64, 64, 4, (4, 5), 0.77),
    _Size(64, 32, 128, 4, (4,), 0.37),
    _Size(32, 64, 128, 4, (5,), 0.25),
    _Size(16, 64, 128, 4, (5,), 0.17),
    _Size(16, 32, 128, 4, (5,), 0.125),
)


def ordered(kernel: Kernel, figures: Figures) -> list[dict[str, int]]:
    """Tiles, best first by the model."""
    if figures.element == "f32":
        return gemm_f32_tiles.ordered(kernel, figures)
    return gemm_splits.thinned(tile for _, tile in sorted(timed(kernel, figures), key=lambda t: t[0]))


def timed(kernel: Kernel, figures: Figures) -> Ranked:
    """Tiles with their estimated times in microseconds, of halves."""
    math, period = _has_math(kernel), kernel.attributes.get("period", 0)
    neighbours = kernel.attributes.get("parts", 1) == 2 and period * 2 <= max(s.n for s in _SIZES)
    if neighbours or (figures.alike and kernel.target.has_tma):
        # One block of columns for both parts of a product, or for both products (`gemm_matrix`).
        joined = replace(figures, columns=2 * figures.columns, products=max(1, figures.products // 2))
        whole = 2 * period if neighbours else 2 * figures.chunk
        ways = [w for w in _ways(kernel, joined) if w.size.n % whole == 0 and (neighbours or w.splits == 1)]
        found = [(_time(kernel, joined, w, math), _tile(kernel, joined, w)) for w in ways]
        if found:
            return [(time, tile | {"n": tile["n"] // 2}) for time, tile in found]
    return [(_time(kernel, figures, w, math), _tile(kernel, figures, w)) for w in _ways(kernel, figures)]


def microseconds(kernel: Kernel, figures: Figures) -> float:
    """Estimated time of a launch with the best tile."""
    if figures.element == "f32":
        return gemm_f32_tiles.microseconds(kernel, figures)
    return min(time for time, _ in timed(kernel, figures))


def variants(kernel: Kernel, figures: Figures) -> list[dict[str, int]]:
    """Tiles to measure, best first: those of the model, then their walks and loads varied."""
    best = ordered(kernel, figures)
    walks = [t | {"group": g} for t in best[:4] for g in _GROUPS[1:]]
    pointers = [{k: v for k, v in t.items() if k not in ("tma", "persistent")} for t in best[:4]]
    unique = {tuple(sorted(t.items())): t for t in [*best[:24], *walks, *pointers, *best[24:]]}
    return list(unique.values())


@dataclass(frozen=True)
class _Way:
    """A size with its stages, whether programs walk over tiles, and how many programs share one."""

    size: _Size
    stages: int
    persistent: bool = False
    splits: int = 1


def _ways(kernel: Kernel, figures: Figures) -> Iterator[_Way]:
    found = 0
    for size in _SIZES:
        if size.m > max(16, next_power_of_two(figures.m)) or size.n > max(
            32, next_power_of_two(figures.columns)
        ):
            continue  # fmt: skip
        if size.n % figures.chunk:
            continue
        if _accumulators(size, figures) > 128:
            continue
        for stages in size.stages:
            if _shared_bytes(size, stages, figures) > kernel.target.shared_bytes:
                continue
            found += 1
            tiles = _tiles(figures, size)
            for splits in gemm_splits.choices(kernel, tiles, figures.k, size.k):
                yield _Way(size, stages, splits=splits)
            # ptxas waits for each of several products in such a loop (its remark C7515).
            if figures.products == 1 and tiles > kernel.target.cores:
                yield _Way(size, stages, persistent=True)
    if not found:
        yield _Way(_SIZES[-1], 2)


def _tile(kernel: Kernel, figures: Figures, way: _Way) -> dict[str, int]:
    size = way.size
    tile = {
        "m": size.m,
        "n": size.n,
        "k": max(16, min(size.k, next_power_of_two(figures.k))),
        "group": _GROUPS[0],
    }
    tile |= {"warps": size.warps, "stages": way.stages, "tma": 1}
    tile |= {"splits": way.splits} if way.splits > 1 else {}
    return tile | ({"persistent": kernel.target.cores} if way.persistent else {})


def _tiles(figures: Figures, size: _Size) -> int:
    return figures.batch * -(-figures.m // size.m) * -(-figures.columns // size.n)


def _accumulators(size: _Size, figures: Figures) -> int:
    """Registers of a thread that hold results."""
    return size.m * size.n * figures.products // (_THREADS * size.warps)


def _shared_bytes(size: _Size, stages: int, figures: Figures) -> int:
    return (size.m + size.n * figures.products) * size.k * 2 * stages + _BARRIERS


def _together(kernel: Kernel, figures: Figures, size: _Size, stages: int) -> int:
    """Programs that a core holds at a time."""
    registers = min(255, _accumulators(size, figures) + _OTHER_REGISTERS) * _THREADS * size.warps
    shared = _shared_bytes(size, stages, figures)
    return max(1, min(kernel.target.shared_bytes // shared, _REGISTERS // registers, 4))


def _time(kernel: Kernel, figures: Figures, way: _Way, math: bool) -> float:
    """Microseconds of a launch."""
    cores, size, persistent = kernel.target.cores, way.size, way.persistent
    together = 1 if persistent else _together(kernel, figures, size, way.stages)
    steps = -(-figures.k // (size.k * way.splits))
    length, waiting = min(figures.k, steps * size.k), steps * _LATENCY / (way.stages - 1)
    work = 2 * size.m * size.n * length * figures.products / (_CORE_RATE * size.share)
    if figures.products > 1 and together == 1 and way.stages < _ENOUGH_STAGES:
        work *= _SEVERAL
    few = size.m * size.n > 2048 * size.warps
    epilogue = size.m * size.n * _MATH * (_FEW_WARPS if few else 1.0) if math else 0.0

    def turn(programs: int) -> float:
        if programs == 0:
            return 0.0
        if persistent:
            return max(work, waiting) + epilogue + _PERSISTENT_FILL
        if programs == 1:
            return max(work, waiting) + epilogue + _FILL
        return max(programs * work, waiting) + programs * (epilogue * _EXPOSED + _NEXT_FILL)

    full, rest = divmod(_tiles(figures, size) * way.splits, cores * together)
    combined = gemm_splits.combining(size.m * size.n * figures.products, way.splits)
    return _LAUNCH + full * turn(together) + turn(-(-rest // cores)) + combined


def _has_math(kernel: Kernel) -> bool:
    """Whether a math function is part of the kernel."""
    return any(
        inner.operation.name.startswith("math.")
        for node in kernel.graph.nodes
        for region in node.op.regions
        for block in region.blocks
        for inner in block.operations
    )
