"""Tiles of the matrix form, by waves of programs and the share of peak that a tile reaches."""

from __future__ import annotations

from topo_opt.codegen.triton.gemm_figures import Figures
from topo_opt.codegen.triton.kernel import Kernel, next_power_of_two

# Tiles (m, n, k, warps, stages) of tensor-core products and the share of peak that a full wave of them reaches.
_TILES = (
    (128, 256, 64, 8, 3, 1.0),
    (128, 128, 64, 8, 4, 0.88),
    (128, 64, 64, 4, 4, 0.72),
    (64, 128, 64, 4, 4, 0.70),
    (64, 64, 64, 4, 5, 0.52),
    (64, 32, 128, 4, 4, 0.36),
    (32, 64, 128, 4, 5, 0.30),
    (16, 64, 128, 4, 5, 0.16),
    (16, 32, 128, 4, 5, 0.12),
)
_THREADS = 32  # of a warp
_F32_TILE = {"m": 64, "n": 64, "k": 32, "group": 8, "warps": 4, "stages": 3}


def ordered(kernel: Kernel, figures: Figures) -> list[dict[str, int]]:
    """Tiles, best first, one of each size."""
    m, n = figures.m, figures.columns
    if figures.element == "f32":
        block = {"m": max(16, min(64, next_power_of_two(m))), "n": max(16, min(64, next_power_of_two(n)))}
        return [_F32_TILE | block]
    cores = kernel.target.cores

    def time(tile: tuple[int, int, int, int, int, float]) -> float:
        programs = figures.batch * -(-m // tile[0]) * -(-n // tile[1])
        return -(-programs // cores) * tile[0] * tile[1] / tile[5]

    # Accumulator registers of a thread: a math function in the epilogue needs some of its own.
    accumulator = (64 if _has_math(kernel) else 128) // figures.products
    fitting = [
        t
        for t in _TILES
        if t[0] <= max(16, next_power_of_two(m))
        and t[1] <= max(32, next_power_of_two(n))
        and t[0] * t[1] <= accumulator * _THREADS * t[3]
    ]
    return [
        {
            "m": bm,
            "n": bn,
            "k": max(16, min(bk, next_power_of_two(figures.k))),
            "group": 8,
            "warps": warps,
            "stages": stages,
        }
        for bm, bn, bk, warps, stages, _ in sorted(fitting or _TILES[-1:], key=time)
    ]


def variants(kernel: Kernel, figures: Figures) -> list[dict[str, int]]:
    """Tiles to measure, best first: sizes with their loads and walks varied."""
    found = []
    for tile in ordered(kernel, figures):
        programs = figures.batch * -(-figures.m // tile["m"]) * -(-figures.columns // tile["n"])
        many = programs > kernel.target.cores
        ways = [{}, {"tma": 1}, *([{"tma": 1, "persistent": kernel.target.cores}] if many else [])]
        found += [tile | way | {"stages": s} for way in ways for s in (tile["stages"], tile["stages"] - 1)]
    return found


def _has_math(kernel: Kernel) -> bool:
    """Whether a math function is part of the kernel."""
    return any(
        inner.operation.name.startswith("math.")
        for node in kernel.graph.nodes
        for region in node.op.regions
        for block in region.blocks
        for inner in block.operations
    )
