"""Tiles of the vector form, by estimated time."""

from __future__ import annotations

from itertools import product
from math import ceil

from topo_opt.codegen.triton.contraction import VECTOR_ROWS
from topo_opt.codegen.triton.gemm_figures import Figures
from topo_opt.codegen.triton.gemm_vector import AHEAD_REGISTERS
from topo_opt.codegen.triton.kernel import next_power_of_two
from topo_opt.codegen.triton.memory_model import (
    CORE_BYTES_PER_NS,
    REGISTERS,
    SECTOR_BYTES,
    Ranked,
    core_rate,
    in_flight,
    resident,
    share,
)
from topo_opt.codegen.triton.target import Target

# Fitted to 76 kernels of 1 and 2 rows on an H200, launched dependently with weights cold. The first tile is within 6 % of the best
# measured one for products of 1 row, and up to 15 % off for 2 rows (128256 columns).
_START_NS = 780.0
"""A launch with its first load."""
_REDUCTION_NS = 110.0
"""Adding up a block of columns over the threads of a program."""
_EXCHANGE_NS = 60.0
"""Moving a block of a row between threads."""
_ISSUE_PER_NS = 3.0
"""Instructions of warps that a core issues, all its programs together."""
_ALONE_NS = 0.87
"""Between two instructions of one warp."""
_BESIDE = 0.16
"""The part of the shorter of waiting and working that is not hidden behind the longer."""
_FEWEST_WARPS = 4
"""Warps under which programs of long rows were never the fastest."""
_EARLIEST = 160.0
"""Registers of weights up to which the compiler moves their requests to the front."""
# Instructions: of an element of the weights beside one for each row, and of adding up a sum over a warp.
_WIDENING, _SHUFFLES = 2.2, 16.0


def ranked(figures: Figures, target: Target) -> Ranked:
    """(estimated ns, tile), unordered; empty where the form does not apply."""
    if figures.m > VECTOR_ROWS or figures.chunk > 1 or figures.row_parts > 1:
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
        if warps < _FEWEST_WARPS and widest >= 256 * _FEWEST_WARPS:
            continue
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
    each, per_core = resident(registers, warps), share(programs, target)
    # Weights whose neighbours in memory are columns are read in sectors that a narrow block does not use up.
    waste = 1.0
    if not figures.contiguous:
        waste = max(1.0, SECTOR_BYTES * figures.products / (n * figures.weight_bytes))
    useful = figures.k / (blocks * k)
    fetched = n * repeat * figures.k * figures.weight_bytes * waste
    again = figures.m * figures.k * figures.row_bytes
    flight = min(each, max(per_core, 1.0)) * ahead * n * k * figures.weight_bytes * useful
    memory = per_core * max(
        fetched / (core_rate(target) * in_flight(flight, target)), (fetched + again) / CORE_BYTES_PER_NS
    )
    instructions = (
        figures.products * n * repeat * figures.k / useful / (32 * warps) * (figures.m + _WIDENING)
        + figures.m * figures.k / useful / (32 * warps) * (3 if figures.statistics else 1)
        + figures.products * n * repeat * figures.m * _SHUFFLES
    )
    work = per_core * instructions * warps / _ISSUE_PER_NS
    # What is done after the last weights have come.
    last = min(1.0, ahead / (blocks * repeat))
    tail = last * (instructions * _ALONE_NS + repeat * _REDUCTION_NS)
    # Rows lie in other threads than the weights they meet, where a block of k has no work for all of them.
    if k < min(256 * warps, figures.k):
        tail += _EXCHANGE_NS * figures.m * min(blocks, ahead)
    return _START_NS + max(memory, work) + _BESIDE * min(memory, work) + tail


def _registers(figures: Figures, tile: dict[str, int], weights: float, ahead: int) -> float:
    """Registers of a thread, by regression over what ptxas gave 76 kernels (rms 20).

    Within a block of columns the compiler requests weights earlier than the source does.
    """
    n, k, warps, repeat = tile["n"], tile["k"], tile["warps"], tile.get("repeat", 1)
    blocks = ceil(figures.k / k)
    requested = max(min(blocks * weights, _EARLIEST), ahead * weights)
    if repeat > 1:
        requested = min(requested + ahead * weights, blocks * repeat * weights)
    results = figures.products * figures.m * n
    sums = results * k / (32 * warps) if blocks > 1 else 0.0
    row = figures.m * max(8, k / (32 * warps)) * (blocks if repeat > 1 else 1)
    return 25.0 + 0.67 * requested + 0.1 * sums + 0.73 * row + 2.1 * results
