"""Tiles of the skinny form, by estimated time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import ceil

from topo_opt.codegen.triton.contraction import SMALL_ROWS
from topo_opt.codegen.triton.gemm_figures import Figures
from topo_opt.codegen.triton.gemm_skinny import padded_rows
from topo_opt.codegen.triton.kernel import next_power_of_two
from topo_opt.codegen.triton.memory_model import (
    CORE_BYTES_PER_NS,
    REGISTERS,
    Ranked,
    in_flight,
    resident,
    share,
)
from topo_opt.codegen.triton.target import Target

# Fitted to 740 timings of 34 kernels of 4 to 64 rows on an H200 (Triton 3.6), 355 of them with slices, launched dependently with weights cold:
# the first tile takes 9% longer than the best of a shape in the mean, and times are off by 11%.
_START_NS, _SPLIT_NS = 1950.0, 1470.0
"""A launch with its first block; writing a part, counting in and reading the parts."""
_READING = 0.96
"""The rate at which programs read on the way to tensor cores, of the machine's."""
_STEP_NS = 39.0
"""One step of k of a program after its data have come; half as much again where rows are computed."""
_LAST_NS = 0.65
"""Multiplying the last block, a byte of it for each thread."""
_SHARED_BYTES_PER_NS = 79.0
"""What a core writes to and reads from shared memory, with what depends on it."""
_SLICES_COPIED = 2.5
"""How often what is read passes through shared memory where slices change its layout."""
_SLICES_BYTES_PER_NS = 67.0
"""Of sums that slices have for themselves and that are added up in the end."""
_PARTS_BYTES_PER_NS = 30.5
"""What one core writes and reads of parts."""
_NARROW = 1.59
"""Blocks of fewer than 64 columns leave part of the tensor core instruction unused."""
_SLICE_STEPS = 3
"""Steps of k of programs with slices, at least: their blocks are then read ahead of their use. Others took up to five times as long."""
_FLAT = ((64, 64, 4), (64, 128, 4), (64, 256, 4), (128, 64, 4), (128, 128, 4), (128, 64, 8), (128, 128, 8), (32, 128, 4), (16, 128, 4), (16, 256, 4))  # fmt: skip
"""Columns, k and warps."""
_SLICED = tuple(product((8, 16, 32, 64), (256, 512, 1024), (4,)))
"""Columns, k and warps, which are as many as slices. A warp reads whole lines of memory then."""
_LESS_SHARED = tuple(product((8, 16, 32, 64), (256, 512, 1024), (4, 8)))
"""Those tried where nothing else fits: with few steps of k a program has fewer buffers."""
_SPLITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
_AHEAD_REGISTERS = 128
"""Registers of a thread that hold weights requested before the wait, at most."""
F32_ROWS = 16
"""Rows up to which factors in f32, each product of which is six, take this form."""


def ranked(figures: Figures, target: Target) -> Ranked:
    """(estimated ns, tile), unordered; empty where the form does not apply."""
    # One row takes this form only where there is no better.
    fewest, most = 2 if figures.contiguous else 1, SMALL_ROWS if figures.half else F32_ROWS
    if not fewest <= figures.m <= most or not (figures.half or figures.element == "f32"):
        return []
    found: dict[tuple[tuple[str, int], ...], tuple[float, dict[str, int]]] = {}
    for sliced, fewest_steps in ((_SLICED, _SLICE_STEPS), (_LESS_SHARED, 1)):
        for tile, steps in _tiles(figures, sliced, fewest_steps):
            time = _time(figures, target, tile, steps)
            if time is not None:
                found.setdefault(tuple(tile.items()), (time, tile))
        if found:
            break
    return list(found.values())


def _tiles(
    figures: Figures, sliced: Sequence[tuple[int, int, int]], fewest_steps: int
) -> Iterator[tuple[dict[str, int], int]]:
    """Tiles and the steps of k of a program."""
    widest, columns = next_power_of_two(figures.k), max(16, next_power_of_two(figures.columns))
    blocks = [(*block, 1) for block in _FLAT] + [(n, k, warps, warps) for n, k, warps in sliced]
    for (n, k, warps, slices), split, stages in product(blocks, _SPLITS, (3, 4, 5, 6)):
        block = max(16 * slices, min(k, widest))
        all_steps = ceil(figures.k / block)
        steps = ceil(all_steps / split)
        if (
            n > columns
            or n % figures.chunk
            or ceil(all_steps / steps) != split
            or steps < (fewest_steps if slices > 1 else 2 if split > 1 else 1)
        ):
            continue
        tile = {"split": split, "n": n, "k": block, "warps": warps, "stages": min(stages, max(steps - 1, 1))}
        yield (tile | {"slices": slices} if slices > 1 else tile), steps


def with_more_ahead(figures: Figures, tiles: Sequence[dict[str, int]]) -> list[dict[str, int]]:
    """The tiles with more blocks requested before the wait, as far as registers go: what that brings is up to the kernel before."""
    found = []
    for ahead in (2, 3, 4, 6):
        for tile in tiles:
            steps = ceil(ceil(figures.k / tile["k"]) / tile["split"])
            held = ahead * tile["n"] * tile["k"] * max(figures.weight_bytes, figures.products * figures.width)
            if ahead <= steps and held / (4 * 32 * tile["warps"]) <= _AHEAD_REGISTERS:
                found.append(tile | {"ahead": ahead})
    return found


def _time(figures: Figures, target: Target, tile: dict[str, int], steps: int) -> float | None:
    n, k, split, warps, stages = (tile[x] for x in ("n", "k", "split", "warps", "stages"))
    rows, slices = padded_rows(figures.m), tile.get("slices", 1)
    shared, registers = _resources(figures, tile, steps)
    if shared > target.shared_bytes or registers > REGISTERS:
        return None
    programs = figures.batch * ceil(figures.columns / n) * split
    each, per_core = resident(registers, warps, shared, target.shared_bytes), share(programs, target)
    weights, moved = n * k * figures.weight_bytes, k * rows * figures.width
    flight = min(each, max(per_core, 1.0)) * weights * min(steps, stages)
    computed = bool(figures.statistics)
    memory = steps * weights / (_READING * target.memory_bytes_per_s / target.cores / 1e9)
    cached = steps * (weights + moved) / CORE_BYTES_PER_NS
    # Rows that are computed go through registers.
    copied = steps * (weights * (_SLICES_COPIED if slices > 1 else 0.5) + moved * (4 if computed else 2))
    serial = steps * _STEP_NS * (1.5 if computed else 1.0) / min(each, max(per_core, 1.0))
    work = per_core * max(memory / in_flight(flight, target), cached, copied / _SHARED_BYTES_PER_NS, serial)
    last = (weights + moved * (3 if computed else 1)) / (32 * warps) * _LAST_NS
    time = _START_NS + work * (_NARROW if slices == 1 and n < 64 else 1.0) + last
    if figures.early_statistics:
        time += per_core * figures.k * rows * figures.width / CORE_BYTES_PER_NS
    if slices > 1:
        sums = slices * figures.products * n * rows * 4
        time += sums / _SLICES_BYTES_PER_NS * max(1.0, per_core / each)
    if split > 1:
        time += _SPLIT_NS + figures.products * n * figures.m * 4 * (1 + split) / _PARTS_BYTES_PER_NS
    return time


def _resources(figures: Figures, tile: dict[str, int], steps: int) -> tuple[int, float]:
    """Bytes of shared memory, and registers of a thread."""
    n, k, warps, stages, slices = (tile.get(x, 1) for x in ("n", "k", "warps", "stages", "slices"))
    rows, threads = padded_rows(figures.m), 32 * warps
    factor, moved = n * k * figures.width, k * rows * figures.width
    loaded = max(figures.products * factor, int(n * k * figures.weight_bytes))
    first = loaded / (4 * threads)
    row = moved / (4 * threads) * (3 if figures.statistics else 1)
    sums = figures.products * n * rows / threads
    if slices > 1:
        # A block of weights is in the registers of its threads, and changes its layout through shared memory.
        buffers = stages * (loaded + moved) if steps > 1 else factor + moved
        return buffers, 30 + first + row + slices * sums * (2 if steps > 1 else 1)
    # Triton keeps one block of weights more than of rows: the product of the step before still reads it.
    buffers = stages * loaded + (stages - 1) * moved if steps > 1 else 0
    return buffers + loaded + 2 * moved, 40 + first / 2 + row + 1.5 * sums
