"""Tiles of the skinny form, by estimated time."""

from __future__ import annotations

from itertools import product
from math import ceil

from topo_opt.codegen.triton.contraction import SMALL_ROWS
from topo_opt.codegen.triton.gemm_figures import Figures
from topo_opt.codegen.triton.gemm_skinny import padded_rows
from topo_opt.codegen.triton.kernel import next_power_of_two
from topo_opt.codegen.triton.memory_model import CACHED, REGISTERS, Ranked, in_flight, resident, share
from topo_opt.codegen.triton.target import Target

_START_NS, _SPLIT_NS = 2000.0, 900.0
"""A launch with its first block; writing a part, counting in and reading the parts."""
_CORE_BYTES_PER_NS = 50.0
"""What one core alone reads from L2."""
_BLOCKS = ((64, 64, 4), (64, 128, 4), (64, 256, 4), (128, 64, 4), (128, 128, 4), (128, 64, 8), (128, 128, 8), (32, 128, 4), (16, 128, 4), (16, 256, 4))  # fmt: skip
"""Columns, k and warps."""
_SPLITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


def ranked(figures: Figures, target: Target) -> Ranked:
    """(estimated ns, tile), unordered; empty where the form does not apply."""
    # One row, and factors in f32, take this form only where there is no better.
    fewest = 2 if figures.contiguous else 1
    if not fewest <= figures.m <= SMALL_ROWS or not figures.half:
        return []
    found: dict[tuple[tuple[str, int], ...], tuple[float, dict[str, int]]] = {}
    for (n, k, warps), split, stages in product(_BLOCKS, _SPLITS, (3, 4, 5, 6)):
        block = max(16, min(k, next_power_of_two(figures.k)))
        if n > max(16, next_power_of_two(figures.columns)):
            continue
        all_steps = ceil(figures.k / block)
        steps = ceil(all_steps / split)
        if ceil(all_steps / steps) != split or (split > 1 and steps < 2):
            continue
        tile = {"split": split, "n": n, "k": block, "warps": warps, "stages": min(stages, max(steps - 1, 1))}
        time = _time(figures, target, tile, steps)
        if time is not None:
            found.setdefault(tuple(tile.items()), (time, tile))
    return list(found.values())


def _time(figures: Figures, target: Target, tile: dict[str, int], steps: int) -> float | None:
    n, k, split, warps, stages = (tile[x] for x in ("n", "k", "split", "warps", "stages"))
    rows = padded_rows(figures.m)
    weights, moved = n * k * figures.weight_bytes, k * rows * 2
    # Triton keeps one block more than it has stages: the product of the step before still reads it.
    blocks = stages + 1 if stages > 1 else 1
    shared = blocks * int(max(weights, figures.products * n * k * 2) + moved) + 2 * moved
    held = figures.products * n * rows / (32 * warps)
    first = figures.products * n * k * 2 / (32 * warps * 4)
    registers = 44 + 1.5 * held + first / 2
    if shared > target.shared_bytes or registers > REGISTERS:
        return None
    programs = figures.batch * ceil(figures.columns / n) * split
    each = resident(registers, warps, shared, target.shared_bytes)
    per_core = share(programs, target)
    rate = target.memory_bytes_per_s / target.cores / 1e9
    flight = min(each, per_core) * max(stages - 1, 1) * weights
    # Blocks of fewer than 64 columns leave part of the tensor core instruction unused.
    narrow = 1.0 if n >= 64 else 1.3
    memory = per_core * steps * (weights + moved * CACHED) * narrow / (rate * in_flight(flight, target))
    if figures.early_statistics:
        memory += per_core * figures.k * rows * 2 / _CORE_BYTES_PER_NS
    if split == 1:
        return _START_NS + memory
    part = figures.products * n * figures.m * 4
    combining = part * (1 + split) / _CORE_BYTES_PER_NS
    return _START_NS + memory + _SPLIT_NS + per_core * part / _CORE_BYTES_PER_NS + combining
