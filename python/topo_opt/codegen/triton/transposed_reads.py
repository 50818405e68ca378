"""Pointwise kernels whose operands lie along another axis than their results: transposes, changes of layout.

A block along one axis reads the others' elements one a cache line. A block of two axes has runs of neighbours for every
operand, and Triton exchanges elements between threads through shared memory:

    y[n, h, w, c] = x[n, c, h, w]   -->   b: n;  y: h, w (neighbours of x);  x: c (neighbours of y)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from topo_opt.codegen.triton.emit import Axis, Emitter, Value
from topo_opt.codegen.triton.kernel import Kernel, next_power_of_two
from topo_opt.codegen.triton.writer import Writer
from topo_opt.errors import UnsupportedError
from topo_opt.structured.graph import Graph, element_bytes
from topo_opt.structured.index import (
    ZERO,
    Expr,
    const,
    contiguous_strides,
    delinearize,
    linearize,
    strided,
    symbol,
)

RUN = 64
"""Elements of a run that a block has along either axis."""
LEAST_BLOCK = 512
"""Elements of a block."""
SHORT_RUN = 8
"""Rows along x that a block of two axes is for: fewer streams are read well by a block of one axis."""
_SHARE = 8
"""An operand with less than this part of the results' elements is left to the caches."""
_THREAD_ELEMENTS = 16
_SIDES = (16, 32, 64, 128, 256)


class Probe(Emitter):
    """An emitter that records where loads go: number of elements, element type, place."""

    places: list[tuple[int, str, Expr]]

    def load(self, number: int, indices: Sequence[Expr]) -> Value:  # type: ignore[override]
        info = self.graph.values[number]
        shape = info.shape or ()
        self.places.append((prod(shape), info.element, strided(indices, contiguous_strides(shape))))
        return super().load(number, indices)  # type: ignore[return-value]


@dataclass(frozen=True)
class TwoAxes:
    """How the rows of a kernel are divided: the last `inner` dimensions along x, the `across` ones before them along y."""

    across: int
    inner: int
    x_count: int
    y_count: int

    def tile(self, x: int, y: int, warps: int) -> dict[str, int]:
        """A tile with blocks of these sizes."""
        return {"x": x, "y": y, "r": 1, "warps": warps, "across": self.across, "inner": self.inner}

    def default(self, rows: int, cores: int) -> dict[str, int]:
        """As square a block as the sizes allow, with a few vectors a thread; smaller where cores would stay idle."""
        x, y = (min(RUN, next_power_of_two(n)) for n in (self.x_count, self.y_count))
        # What a short axis leaves goes to the other one.
        x, y = (
            min(RUN * RUN // y, next_power_of_two(self.x_count), 4 * RUN),
            min(RUN * RUN // x, next_power_of_two(self.y_count), 4 * RUN),
        )
        while x * y > LEAST_BLOCK and rows < 2 * cores * x * y:
            x, y = (x // 2, y) if x > y else (x, y // 2)
        return self.tile(x, y, max(1, min(8, x * y // (32 * _THREAD_ELEMENTS))))

    def tiles(self) -> Iterator[dict[str, int]]:
        """Tiles that are worth measuring."""
        sides = [
            [s for s in _SIDES if s <= next_power_of_two(n)] or [next_power_of_two(n)]
            for n in (self.x_count, self.y_count)
        ]
        for x, y, warps in product(*sides, (2, 4, 8)):
            if 4 <= x * y // (32 * warps) <= 2 * _THREAD_ELEMENTS:
                yield self.tile(x, y, warps)


def two_axes(kernel: Kernel) -> TwoAxes | None:
    """The division of a pointwise kernel that gives every operand runs of neighbours; None where one axis does."""
    rows, graph = tuple(kernel.attributes["rows"]), kernel.graph
    if prod(kernel.attributes["cols"]) > 1 or any(n.has_reduction for n in graph.nodes):
        return None
    wide = [d for d, size in enumerate(rows) if size > 1]
    if len(wide) < 2:
        return None
    best: tuple[int, int, list[int]] | None = None
    for numel, element, place in read_places(graph, kernel, rows):
        strides = _strides(place, rows)
        size_bytes = numel * element_bytes(element)
        if numel * _SHARE < prod(rows) or abs(strides[wide[-1]]) <= 1:
            continue
        along = [d for d in wide if abs(strides[d]) == 1]
        if along and (best is None or size_bytes > best[0]):
            best = size_bytes, along[-1], strides
    if best is None:
        return None
    _, last, strides = best
    x_count = prod(rows[last + 1 :])
    if x_count < SHORT_RUN:
        return None
    first = last
    while first > 0 and prod(rows[first : last + 1]) % RUN and _joins(strides, rows, first):
        first -= 1
    return TwoAxes(last + 1 - first, len(rows) - last - 1, x_count, prod(rows[first : last + 1]))


def _joins(strides: Sequence[int], rows: Sequence[int], first: int) -> bool:
    """Whether the dimension before `first` continues the runs of an operand."""
    return rows[first - 1] == 1 or strides[first - 1] == strides[first] * rows[first]


def read_places(graph: Graph, kernel: Kernel, rows: Sequence[int]) -> list[tuple[int, str, Expr]]:
    """Where the results of a pointwise kernel read, at an index `d0`, `d1`, ... of every dimension."""
    indices = [symbol(f"d{d}", size) for d, size in enumerate(rows)]
    axes = {f"d{d}": Axis(f"d{d}", size, f"d{d}") for d, size in enumerate(rows)}
    used = {v for node in graph.nodes for v in node.operands} | set(graph.returns)
    probe = Probe(graph, Writer(), axes, kernel.pointer_params(used)[0])
    probe.places = []
    for value in graph.returns:
        try:
            probe.value(value, delinearize(linearize(indices, rows), graph.values[value].shape or ()))
        except UnsupportedError:  # lowering says it again, with all it knows
            return []
    return probe.places


def _strides(place: Expr, rows: Sequence[int]) -> list[int]:
    """How far the second index of every dimension is from the first, in elements; 0 for a dimension of size 1."""

    def at(dim: int) -> int:
        values = {f"d{d}": const(1) if d == dim else ZERO for d in range(len(rows))}
        return place.substitute(values).bounds[0]

    start = at(-1)
    return [at(d) - start if size > 1 else 0 for d, size in enumerate(rows)]
