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


def _gemm(kernel: Kernel) -> dict[str, int]:
    from topo_opt.codegen.triton.gemm_tiles import default_tile

    return default_tile(kernel)


def _attention(kernel: Kernel) -> dict[str, int]:
    from topo_opt.codegen.triton.attention_tiles import default_tile

    return default_tile(kernel)


def _experts(kernel: Kernel) -> dict[str, int]:
    from topo_opt.codegen.triton.grouped_tiles import default_experts

    return default_experts(kernel)


def _group_rows(kernel: Kernel) -> dict[str, int]:
    from topo_opt.codegen.triton.grouped_tiles import default_group_rows

    return default_group_rows(kernel)


def _top_k(kernel: Kernel) -> dict[str, int]:
    from topo_opt.codegen.triton.grouped_tiles import default_top_k

    return default_top_k(kernel)


DEFAULTS: dict[str, Callable[[Kernel], dict[str, int]]] = {
    "loops": _loops,
    "update": _update,
    "scan": _scan,
    "gemm": _gemm,
    "attention": _attention,
    "experts": _experts,
    "group_rows": _group_rows,
    "top_k": _top_k,
}


def default_tile(kernel: Kernel) -> dict[str, int]:
    """Block sizes, warps and stages for a kernel of any family."""
    return DEFAULTS[kernel.attributes["family"]](kernel)
