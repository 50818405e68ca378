"""Default tiles of gemm kernels, from shapes alone."""

from __future__ import annotations

from topo_opt.codegen.triton.contraction import VECTOR_ROWS, find_all
from topo_opt.codegen.triton.kernel import Kernel, next_power_of_two

# Tiles (m, n, k, warps, stages) of tensor-core products and the share of peak that a full wave of them reaches.
_MATRIX_TILES = (
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
_VECTOR_COLUMNS = 2048


def default_tile(kernel: Kernel) -> dict[str, int]:
    """Block sizes, warps and stages."""
    contraction = find_all(kernel.graph)[0]
    batch, m, n, k = contraction.counts
    element = kernel.graph.values[contraction.operand("left")[1]].element
    if m <= VECTOR_ROWS:
        columns = min(next_power_of_two(k), _VECTOR_COLUMNS)
        rows = max(1, min(4, next_power_of_two(n)))
        return {"n": rows, "k": columns, "warps": 8 if columns * rows >= 4096 else 4, "stages": 2}
    if element == "f32":
        return dict(
            _F32_TILE, m=max(16, min(64, next_power_of_two(m))), n=max(16, min(64, next_power_of_two(n)))
        )
    cores = kernel.target.cores

    def time(tile: tuple[int, int, int, int, int, float]) -> float:
        programs = batch * -(-m // tile[0]) * -(-n // tile[1])
        return -(-programs // cores) * tile[0] * tile[1] / tile[5]

    # Accumulator registers of a thread: a math function in the epilogue needs some of its own.
    accumulator = 64 if _has_math(kernel) else 128
    fitting = [
        t
        for t in _MATRIX_TILES
        if t[0] <= max(16, next_power_of_two(m))
        and t[1] <= max(32, next_power_of_two(n))
        and t[0] * t[1] <= accumulator * _THREADS * t[3]
    ]
    bm, bn, bk, warps, stages, _ = min(fitting or _MATRIX_TILES[-1:], key=time)
    return {
        "m": bm,
        "n": bn,
        "k": max(16, min(bk, next_power_of_two(k))),
        "group": 8,
        "warps": warps,
        "stages": stages,
    }


def _has_math(kernel: Kernel) -> bool:
    """Whether a math function is part of the kernel."""
    return any(
        inner.operation.name.startswith("math.")
        for node in kernel.graph.nodes
        for region in node.op.regions
        for block in region.blocks
        for inner in block.operations
    )
