"""Tiles of the vector form, by estimated time."""

from __future__ import annotations

from itertools import product
from math import ceil

from topo_opt.codegen.triton.contraction import VECTOR_ROWS
from topo_opt.codegen.triton.gemm_figures import Figures
from topo_opt.codegen.triton.gemm_vector import AHEAD_REGISTERS
from topo_opt.codegen.triton.kernel import next_power_of_two
from topo_opt.codegen.triton.memory_model import (
    CACHED,
    REGISTERS,
    SECTOR_BYTES,
    Ranked,
    in_flight,
    resident,
    share,
)
from topo_opt.codegen.triton.target import Target

# Times of one program in ns: a launch with its first load, and waiting once more where programs follow each other on a core.
_START_NS, _NEXT_NS = 1500.0, 900.0
_EXCHANGE_NS = 60.0
"""Moving a block of a row between threads."""
_OPERATIONS_PER_NS = 220.0
"""Multiply-adds of a core."""


def ranked(figures: Figures, target: Target) -> Ranked:
    """(estimated ns, tile), unordered; empty where the form does not apply."""
    if figures.m > VECTOR_ROWS:
        return []
    found: Ranked = []
    widest = max(32, next_power_of_two(figures.k))
    for n, k, warps, repeat in product(
        (1, 2, 4, 8, 16), (256, 512, 1024, 2048, 4096), (1, 2, 4, 8), (1, 2, 4)
    ):
        block, elements = min(k, widest), n * min(k, widest) / (32 * warps)
        if (k > 256 and k >= 2 * widest) or n * repeat > next_power_of_two(figures.columns):
            continue
        # A thread reads 16 bytes at a time along k, and has work in every block.
        if not 8 <= elements <= 64 or block > 512 * warps or block < min(128 * warps, widest):
            continue
        tile = {"n": n, "k": block, "warps": warps, "stages": 1} | ({"repeat": repeat} if repeat > 1 else {})
        time = _time(figures, target, tile)
        if time is not None:
            found.append((time, tile))
    return found or [(_START_NS, _smallest(figures, widest))]


def _smallest(figures: Figures, widest: int) -> dict[str, int]:
    """A tile for what is less than a program's work."""
    n, k = min(4, next_power_of_two(figures.columns)), min(widest, 1024)
    return {"n": n, "k": k, "warps": max(1, min(4, k // 256)), "stages": 1}


def _time(figures: Figures, target: Target, tile: dict[str, int]) -> float | None:
    n, k, warps, repeat = tile["n"], tile["k"], tile["warps"], tile.get("repeat", 1)
    blocks = ceil(figures.k / k)
    elements = n * k / (32 * warps)
    weights = elements * figures.weight_bytes / 4  # registers of a block of weights
    ahead = max(1, min(int(AHEAD_REGISTERS / max(weights, 1)), blocks * repeat))
    registers = _registers(figures, tile, weights, ahead)
    if registers > REGISTERS:
        return None
    programs = figures.batch * ceil(figures.columns / (n * repeat))
    each = resident(registers, warps)
    per_core, rounds = share(programs, target), ceil(programs / (target.cores * each))
    # Weights whose neighbours in memory are columns are read in sectors that a narrow block does not use up.
    waste = 1.0
    if not figures.contiguous:
        waste = max(1.0, SECTOR_BYTES * figures.products / (n * figures.weight_bytes))
    useful = figures.k / (blocks * k)
    fetched = n * repeat * figures.k * figures.weight_bytes * waste
    shared = figures.m * figures.k * figures.row_bytes * CACHED
    rate = target.memory_bytes_per_s / target.cores / 1e9
    flight = min(each, per_core) * ahead * n * k * figures.weight_bytes * useful
    memory = per_core * (fetched + shared) / (rate * in_flight(flight, target))
    arithmetic = figures.products * n * repeat * figures.k / useful * (figures.m + 1.5) / _OPERATIONS_PER_NS
    reductions = 40.0 * figures.products * figures.m * repeat * warps / 8
    # Rows lie in other threads than the weights they meet, where a block of k has no work for all of them.
    exchange = _EXCHANGE_NS * figures.m * blocks if k < 256 * warps else 0.0
    work = per_core * (arithmetic + reductions)
    return (
        _START_NS
        + max(memory, work)
        + 0.1 * work
        + per_core * exchange / each
        + (rounds - 1) * _NEXT_NS / each
    )


def _registers(figures: Figures, tile: dict[str, int], weights: float, ahead: int) -> float:
    """Registers of a thread. Within a block of columns the compiler requests weights earlier than the source does."""
    n, k, warps, repeat = tile["n"], tile["k"], tile["warps"], tile.get("repeat", 1)
    blocks = ceil(figures.k / k)
    moving = min(blocks * repeat, max(ahead + 1, min(blocks, 2 * ahead + 2)))
    sums = 1.25 * figures.products * figures.m * n * k / (32 * warps) if blocks > 1 else 0.0
    row = figures.m * max(8, k / (32 * warps))
    return 20 + moving * weights + sums + row * (max(1.5, 0.5 * blocks) if repeat > 1 else 1.5)
