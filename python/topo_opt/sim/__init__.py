"""Native core: graph algorithms on plain arrays, without MLIR or torch.

`cluster` groups the nodes of a dataflow graph into kernels. Nodes are in topological order; an edge is a value that one
node computes and another reads, possibly through views.

Node kinds: pointwise (computes `rows` independent elements), reduction (`rows` results of `cols` elements each),
contraction and attention (`rows` results), update and scan (stand alone, an update takes its producers), fixed (never
merged: left to ATen).

Alignment of an edge: SAME, the reader's element i needs the producer's element i (row-major, rows x cols for a
reduction); PERMUTED, one-to-one by a permutation of dimensions; OTHER; ROW + k, the reader spans rows x cols and needs the
producer's element of its row, where k numbers the ways in which rows and columns can be laid out in the full tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from topo_opt.sim import _sim


class Kind(IntEnum):
    """What a node is, for fusion."""

    POINTWISE = 0
    REDUCTION = 1
    CONTRACTION = 2
    ATTENTION = 3
    UPDATE = 4
    SCAN = 5
    FIXED = 6


class Alignment(IntEnum):
    """How a reader's elements relate to the producer's."""

    SAME = 0
    PERMUTED = 1
    OTHER = 2
    ROW = 3


def cluster(
    kinds: Sequence[int],
    rows: Sequence[int],
    cols: Sequence[int],
    orders: Sequence[int],
    costs: Sequence[int],
    inputs: Sequence[int],
    held: Sequence[bool],
    edges: Sequence[tuple[int, int, int, int]],
    max_inputs: int,
    recompute: int,
) -> list[int]:
    """Groups nodes into kernels.

    Args:
        kinds, rows, cols: per node, see the module's docstring.
        orders: number of the row order of a reduction, 0 for others.
        costs: scalar ops per element, to weigh recomputation.
        inputs: values a node reads that no other node computes.
        held: whether a node's value must be in memory whoever reads it.
        edges: (source node, target node, alignment, bytes of the value).
        max_inputs: a kernel reads at most this many values from memory.
        recompute: scalar ops that a value may cost to be computed again by each reader instead of being stored.

    Returns:
        A cluster label per node; nodes of one label form one kernel, and the clusters form no cycle.

    Raises:
        ValueError: lengths differ, or an edge goes backwards.
    """
    sources, targets, alignments, sizes = ([e[i] for e in edges] for i in range(4))
    return _sim.cluster(
        kinds, rows, cols, orders, costs, inputs, list(map(int, held)),
        sources, targets, alignments, sizes, max_inputs, recompute,
    )  # fmt: skip
