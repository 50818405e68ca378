"""Pointwise kernels some of whose operands have one element for many neighbouring results: a mean, a scale of a channel.

A block that spans rows divides every index by the length of a row, and loads the same element in every thread, in another
layout than its neighbours are loaded in. A program that stays within a row has one element, in a scalar:

    y[n, c, h, w] = x[n, c, h, w] * s[c]   -->   b: n, c;  x: h, w
"""

from __future__ import annotations

from math import prod

from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.recorded_loads import ALIGNMENT
from topo_opt.codegen.triton.transposed_reads import read_places
from topo_opt.structured.graph import element_bytes

LEAST_BLOCK = 512
"""Elements of a block: a vector of f32 for each thread of four warps. Launching smaller programs takes longer than their work."""
IDLE = 1.15
"""Elements of the blocks of a row to those of the row, at most."""


def within_rows(kernel: Kernel, block: int) -> dict[str, int]:
    """The block size and the dimensions along it (`inner`) that make some operand one element a program; empty where none does.

    Args:
        block: elements of a block that spans all dimensions.
    """
    rows, graph = tuple(kernel.attributes["rows"]), kernel.graph
    sizes = [graph.values[v].numel for v in graph.arguments]
    if block < LEAST_BLOCK or not any(1 < n <= prod(rows) // LEAST_BLOCK for n in sizes):
        return {}
    stored = [element_bytes(graph.values[v].element) for v in graph.returns]
    divisor = ALIGNMENT // min(ALIGNMENT, *stored)
    read = [place.symbols for _, _, place in read_places(graph, kernel, rows) if place.symbols]
    best: dict[str, int] = {}
    for inner in range(1, len(rows)):
        outer = {f"d{d}" for d in range(len(rows) - inner)}
        count = prod(rows[len(rows) - inner :])
        if count % divisor or not any(symbols <= outer for symbols in read):
            continue
        size = block
        while size > LEAST_BLOCK and -(-count // size) * size > IDLE * count:
            size //= 2
        if -(-count // size) * size <= IDLE * count and size > best.get("x", 0):
            best = {"x": size, "inner": inner}
    return best
