"""Native core: graph algorithms on plain arrays, without MLIR or torch.

`cluster` groups the nodes of a dataflow graph into kernels. Nodes are in topological order; an edge is a value that one
node computes and another reads, possibly through views.

Node kinds: pointwise (computes `rows` independent elements), reduction (`rows` results of `cols` elements each),
contraction (`rows` results that are sums over `cols`, in `height` = batch * m rows, which may be `few`), attention (`rows` results),
update (takes its producers), scan (takes what computes its elements and what is computed from its results), fixed (never
merged: left to ATen).

Alignment of an edge: SAME, the reader's element i needs the producer's element i (row-major, rows x cols for a
reduction); PERMUTED, one-to-one by a permutation of dimensions; PAIRED, as these two but at the partner of a rotation; LEFT
and RIGHT, through that operand of a contraction; OTHER; ROW + k, the reader spans rows x cols and needs the producer's
element of its row, where k numbers the ways in which rows and columns can be laid out in the full tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, IntFlag

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
    PAIRED = 3
    LEFT = 4
    RIGHT = 5
    ROW = 6


class Few(IntEnum):
    """How few rows m a contraction has."""

    MANY = 0
    FEW = 1
    """It waits for its weights: work on the other operand costs no time."""
    VECTOR = 2
    """So few that it may reduce its operand's rows in a loop of its own before it multiplies."""


class Rules(IntFlag):
    """What may join a contraction besides its pointwise epilogue, or a reduction besides ops on the same rows."""

    NONE = 0
    PROLOGUE = 1
    """Pointwise producers of its operands, and of what its epilogue reads."""
    STATISTIC = 2
    """Reductions over its columns k, one a row m."""
    PRODUCTS = 4
    """Contractions of equal shape that meet it in its epilogue."""
    ROTATION = 8
    """Readers at the partner of a rotation."""
    UPDATE = 16
    """The indexed update that stores its result."""
    TRANSPOSED = 32
    """What reads the rows of a reduction in another order, where all its readers do."""
    ALL = 63


Node = tuple[int, ...]
"""(kind, rows, cols, height, few, order, cost, inputs, input bytes, held); see `cluster`."""


def cluster(
    nodes: Sequence[Node],
    edges: Sequence[tuple[int, int, int, int]],
    rules: Rules,
    max_inputs: int,
    recompute: int,
) -> list[int]:
    """Groups nodes into kernels.

    Args:
        nodes: kind, rows, cols, height and few as in the module's docstring; order, the number of the row order of a
            reduction or of the shape of a contraction; cost, scalar ops per element, to weigh recomputation; inputs and
            input bytes, what it reads that no other node computes; held, whether its value must be in memory whoever
            reads it.
        edges: (source node, target node, alignment, bytes of the value).
        max_inputs: a kernel reads at most this many values from memory.
        recompute: scalar ops that a value may cost to be computed again by each reader instead of being stored.

    Returns:
        A cluster label per node; nodes of one label form one kernel, and the clusters form no cycle.

    Raises:
        ValueError: a node has another number of fields, or an edge goes backwards.
    """
    return _sim.cluster(nodes, edges, int(rules), max_inputs, recompute)
