"""Tiles of the matrix form for f32: every factor is taken apart into three bf16 pieces before tensor cores see it.

A step of k costs a tile six products of bf16, and work on general cores that grows with its two sides and not with its area.
Products and that work take turns within a program; a second program on the core fills the gaps. Sizes are those that
compile for Hopper without spills: the sums of a block need as many registers as the accumulators. Blocks of 16 along k are for
short sums, of which longer blocks would leave much empty.
The constants follow from 146 timings of eight products of 256 to 8192 rows on an H200 (2026-12-01), those of fast tiles counted most: of the
best tiles of each they are off by 10 % at most, and what they choose is slower than the best by 2 % at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from topo_opt.codegen.triton import gemm_splits
from topo_opt.codegen.triton.gemm_figures import Figures
from topo_opt.codegen.triton.kernel import Kernel, next_power_of_two

_GROUP = 8
_BEST = 12
"""Tiles that are offered with descriptors as well."""
_PIECES = 6
"""Products of pieces for a product of factors."""
_PRODUCTS = 2.8e6
"""Multiplications of pieces that a core does in a microsecond."""
_FEW_ROWS = 0.5
"""Part of that with fewer rows than the wide instruction of tensor cores has."""
_WIDE_ROWS = 64
_TAKING_APART = 2e-5
"""Microseconds a core takes for an element of a factor."""
_ONE_BY_ONE = 1.3e-4
"""The same to load an element of a factor by itself."""
_ALONE = 0.4
"""Microseconds that a step of k waits when no other program is on the core."""
_START, _FILL = 3.3, 0.5
"""Microseconds of a launch, and to fill the pipeline of a program."""
_THREADS = 32  # of a warp
_REGISTERS = 65536  # of a core
_MOST_REGISTERS = 255  # of a thread
_OTHER_REGISTERS = 45  # of a thread, beside sums and factors
_BARRIERS = 1024  # bytes of shared memory beside the factors


@dataclass(frozen=True)
class _Size:
    """Blocks of m, n and k, warps and stages."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


_SIZES = (
    _Size(128, 128, 32, 8, 3),
    _Size(128, 128, 32, 8, 2),
    _Size(64, 128, 32, 4, 3),
    _Size(128, 64, 32, 4, 3),
    _Size(256, 64, 32, 8, 3),
    _Size(256, 64, 16, 8, 4),
    _Size(128, 64, 16, 4, 4),
    _Size(128, 128, 16, 8, 4),
    _Size(64, 64, 32, 4, 4),
    _Size(64, 64, 64, 4, 3),
    _Size(128, 32, 32, 4, 4),
    _Size(256, 32, 32, 8, 4),
    _Size(256, 32, 16, 8, 4),
    _Size(32, 128, 32, 4, 4),
    _Size(64, 32, 64, 4, 3),
    _Size(32, 64, 32, 4, 4),
    _Size(32, 32, 32, 4, 4),
    _Size(16, 64, 32, 4, 4),
    _Size(16, 32, 64, 4, 3),
    _Size(64, 16, 64, 4, 3),
    _Size(16, 16, 64, 4, 3),
)


def ordered(kernel: Kernel, figures: Figures) -> list[dict[str, int]]:
    """Tiles, best first by the model; those with descriptors after those without, before them where masks would cost vectors."""
    ways = list(_ways(kernel, figures))
    ways.sort(key=lambda way: _time(kernel, figures, *way))
    plain = gemm_splits.thinned(_tile(figures, *way) for way in ways)
    described = [t | {"tma": 1} for t in plain[:_BEST]]
    first, second = (described, plain[:_BEST]) if figures.ragged else (plain[:_BEST], described)
    return [*first, *second, *plain[_BEST:]]


def microseconds(kernel: Kernel, figures: Figures) -> float:
    """Estimated time of a launch with the best tile."""
    return min(_time(kernel, figures, *way) for way in _ways(kernel, figures))


def _ways(kernel: Kernel, figures: Figures) -> Iterator[tuple[_Size, int]]:
    fitting = [s for s in _SIZES if _fits(kernel, figures, s)] or [_SIZES[-1]]
    for size in fitting:
        for splits in gemm_splits.choices(kernel, _tiles(figures, size), figures.k, size.k):
            yield size, splits


def _fits(kernel: Kernel, figures: Figures, size: _Size) -> bool:
    return (
        size.m <= max(16, next_power_of_two(figures.m))
        and size.n <= max(16, next_power_of_two(figures.columns))
        and _registers(figures, size) <= _MOST_REGISTERS
        and _shared_bytes(figures, size) <= kernel.target.shared_bytes
    )


def _tile(figures: Figures, size: _Size, splits: int) -> dict[str, int]:
    block = max(16, min(size.k, next_power_of_two(figures.k)))
    tile = {"m": size.m, "n": size.n, "k": block, "group": _GROUP, "warps": size.warps, "stages": size.stages}
    return tile | ({"splits": splits} if splits > 1 else {})


def _tiles(figures: Figures, size: _Size) -> int:
    return figures.batch * -(-figures.m // size.m) * -(-figures.columns // size.n)


def _registers(figures: Figures, size: _Size) -> float:
    """Of a thread: accumulators, the sums of the smaller products of one of them, and the factors."""
    held = size.m * size.n * (figures.products + 1) + (size.m + size.n) * size.k
    return held / (_THREADS * size.warps) + _OTHER_REGISTERS


def _shared_bytes(figures: Figures, size: _Size) -> int:
    """Factors on their way, and one block of pieces of the right one."""
    width = size.n * figures.products
    return ((size.m + width) * size.stages + width) * size.k * 4 + _BARRIERS


def _time(kernel: Kernel, figures: Figures, size: _Size, splits: int) -> float:
    """Microseconds of a launch."""
    cores = kernel.target.cores
    programs = _tiles(figures, size) * splits
    registers = _registers(figures, size) * _THREADS * size.warps
    together = max(
        1, min(kernel.target.shared_bytes // _shared_bytes(figures, size), int(_REGISTERS // registers), 4)
    )
    rate = _PRODUCTS * (1.0 if size.m >= _WIDE_ROWS else _FEW_ROWS)
    products = size.m * size.n * figures.products * _PIECES / rate
    apart = (size.m + size.n * figures.products) * _TAKING_APART
    if figures.scattered:
        apart += size.m * _ONE_BY_ONE
    steps = -(-figures.k // (size.k * splits))

    def turn(count: int) -> float:
        """Time of so many programs of a core, side by side."""
        if count == 0:
            return 0.0
        waiting = _ALONE / count
        return count * steps * (size.k * (products + apart) + waiting) + _FILL

    full, rest = divmod(programs, cores * together)
    combined = gemm_splits.combining(size.m * size.n * figures.products, splits)
    return _START + full * turn(together) + turn(-(-rest // cores)) + combined
