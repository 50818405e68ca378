"""Default tiles: block sizes from a kernel's shape alone, used when no tuning result says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from topo_opt.codegen.triton.kernel import Kernel, next_power_of_two
from topo_opt.errors import UnsupportedError

ELEMENTS = 1024
"""Elements a program of a pointwise kernel computes."""


def _loops(kernel: Kernel) -> dict[str, int]:
    from topo_opt.codegen.triton.loops_tiles import default_tile as of_loops

    return of_loops(kernel)


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
    from topo_opt.codegen.triton.attention import lower
    from topo_opt.codegen.triton.attention_tiles import default_tile, with_descriptors

    plain = default_tile(kernel)
    described = with_descriptors(kernel, plain)
    if described is None:
        return plain
    trial = Kernel(kernel.func, kernel.target)
    trial.attributes = {**kernel.attributes, "tile": described}
    try:
        lower(trial)
    except UnsupportedError:  # keys or values do not lie in memory as descriptors say
        return plain
    return described


def _experts(kernel: Kernel) -> dict[str, int]:
    from topo_opt.codegen.triton.grouped_tiles import default_experts

    return default_experts(kernel)


def _group_rows(kernel: Kernel) -> dict[str, int]:
    from topo_opt.codegen.triton.grouped_tiles import default_group_rows

    return default_group_rows(kernel)


def _top_k(kernel: Kernel) -> dict[str, int]:
    from topo_opt.codegen.triton.grouped_tiles import default_top_k

    return default_top_k(kernel)


def _move(kernel: Kernel) -> dict[str, int]:
    from topo_opt.codegen.triton.move import default_tile as of_moves

    return of_moves(kernel)


DEFAULTS: dict[str, Callable[[Kernel], dict[str, int]]] = {
    "loops": _loops,
    "update": _update,
    "scan": _scan,
    "gemm": _gemm,
    "attention": _attention,
    "experts": _experts,
    "group_rows": _group_rows,
    "top_k": _top_k,
    "move": _move,
}


def default_tile(kernel: Kernel) -> dict[str, int]:
    """Block sizes, warps and stages for a kernel of any family."""
    return DEFAULTS[kernel.attributes["family"]](kernel)
