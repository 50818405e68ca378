"""Default tiles: block sizes from a kernel's shape alone, used when no tuning result says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from torch_mlir import ir

from topo_opt.codegen.triton.kernel import Kernel, next_power_of_two
from topo_opt.structured.graph import evaluate
from topo_opt.structured.index import const, contiguous_strides, delinearize, strided, symbol

PERSISTENT_COLUMNS = 8192
"""Rows up to this many elements are held in one block: 8 warps of 32 threads hold 32 f32 values each."""
ELEMENTS = 1024
"""Elements a program of a pointwise kernel computes."""
LOOP_COLUMNS = 2048


def _loops(kernel: Kernel) -> dict[str, int]:
    attributes = kernel.attributes
    rows, cols = prod(attributes["rows"]), prod(attributes["cols"])
    if cols == 1:
        block = min(next_power_of_two(max(rows, 1)), ELEMENTS)
        return {"x": block, "r": 1, "warps": 4 if block >= 512 else 1}
    if not _columns_are_contiguous(attributes):
        x = min(next_power_of_two(rows), 64)
        r = min(next_power_of_two(cols), 64)
        return {"x": x, "r": r, "warps": 4}
    if cols <= PERSISTENT_COLUMNS:
        r = next_power_of_two(cols)
        x = max(1, min(next_power_of_two(rows), ELEMENTS // r))
        return {"x": x, "r": r, "warps": 8 if r * x >= 4096 else 4}
    return {"x": 1, "r": LOOP_COLUMNS, "warps": 8}


def _columns_are_contiguous(attributes: Mapping[str, Any]) -> bool:
    """Whether neighbouring columns are neighbours in the full tensor."""
    rows, cols, shape = attributes["rows"], attributes["cols"], attributes["full_shape"]
    indices = [const(0) for _ in rows] + delinearize(symbol("r", prod(cols)), cols)
    affine = ir.AffineMapAttr(attributes["full_map"]).value
    position = strided([evaluate(e, indices) for e in affine.results], contiguous_strides(shape))
    inner = next((c for a, c in reversed(position.terms)), 1)
    return abs(inner) == 1


def _update(kernel: Kernel) -> dict[str, int]:
    from topo_opt.codegen.triton.update import written

    block = min(next_power_of_two(max(prod(written(kernel)[1]), 1)), ELEMENTS)
    return {"x": block, "r": 1, "warps": 4 if block >= 512 else 1}


def _scan(kernel: Kernel) -> dict[str, int]:
    from topo_opt.codegen.triton.scan import anchor_of

    node, axis = anchor_of(kernel)
    shape = kernel.graph.values[node.operands[0]].shape or ()
    columns = min(next_power_of_two(shape[axis]), ELEMENTS)
    rows = prod(shape) // max(shape[axis], 1)
    return {"x": max(1, min(next_power_of_two(rows), ELEMENTS // columns)), "r": columns, "warps": 4}


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


def _gemm(kernel: Kernel) -> dict[str, int]:
    from topo_opt.codegen.triton.contraction import VECTOR_ROWS, find

    contraction = find(kernel.graph)
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


def _attention(kernel: Kernel) -> dict[str, int]:
    from topo_opt.codegen.triton.attention_tiles import default_tile

    return default_tile(kernel)


DEFAULTS: dict[str, Callable[[Kernel], dict[str, int]]] = {
    "loops": _loops,
    "update": _update,
    "scan": _scan,
    "gemm": _gemm,
    "attention": _attention,
}


def default_tile(kernel: Kernel) -> dict[str, int]:
    """Block sizes, warps and stages for a kernel of any family."""
    return DEFAULTS[kernel.attributes["family"]](kernel)
