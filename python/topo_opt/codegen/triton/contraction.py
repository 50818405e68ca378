"""The dimensions of a `linalg.contract` by what they do: batch, m, n, k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from topo_opt.errors import UnsupportedError
from topo_opt.structured.access import domain_indices
from topo_opt.structured.graph import Graph, Node
from topo_opt.structured.index import ZERO, Expr, delinearize, linearize

VECTOR_ROWS = 4
"""Products of up to so many rows stream their weights instead of using tensor cores."""
SMALL_ROWS = 64
"""Products of up to so many rows are bound by reading their weights: beyond `VECTOR_ROWS`, or where a norm is handed over, they take the skinny form."""


@dataclass(frozen=True)
class Contraction:
    """`out[batch, m, n] = sum over k of left[batch, m, k] * right[batch, k, n]`; each group may be several dimensions.

    `dims` are positions in the op's loop nest, `sizes` their extents; groups keep the order of the result.
    """

    node: Node
    batch: tuple[int, ...]
    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    swapped: bool = False
    """The op's second operand is `left`."""

    def sizes(self, dims: Sequence[int]) -> list[int]:
        return [self.node.domain[d] for d in dims]

    @cached_property
    def counts(self) -> tuple[int, int, int, int]:
        """Extents of batch, m, n and k."""
        batch, m, n, k = (prod(self.sizes(d)) for d in (self.batch, self.m, self.n, self.k))
        return batch, m, n, k

    def loop(self, batch: Expr, m: Expr, n: Expr, k: Expr) -> list[Expr]:
        """Loop indices at row-major positions in the four groups."""
        loop: list[Expr] = [Expr(())] * len(self.node.domain)
        for dims, position in ((self.batch, batch), (self.m, m), (self.n, n), (self.k, k)):
            for dim, index in zip(dims, delinearize(position, self.sizes(dims))):
                loop[dim] = index
        return loop

    def operand(self, side: str) -> tuple[int, int]:
        """(position of the operand "left" or "right", its value number)."""
        position = int((side == "right") != self.swapped)
        return position, self.node.operands[position]

    def result_indices(self, batch: Expr, m: Expr, n: Expr) -> list[Expr]:
        """Indices of the op's result at row-major positions in batch, m and n."""
        return self.node.output_map(0).apply(self.loop(batch, m, n, ZERO))

    def position(self, indices: Sequence[Expr]) -> tuple[Expr, Expr, Expr]:
        """Row-major positions in batch, m and n at which the op's result has the given indices."""
        loop = domain_indices(self.node, 0, indices)
        batch, m, n = (linearize([loop[d] for d in g], self.sizes(g)) for g in (self.batch, self.m, self.n))
        return batch, m, n


def analyse(graph: Graph, node: Node) -> Contraction:
    """Groups the dimensions of a contraction; the side with more columns is `right`."""
    left, right, out = ({p for p in m.positions() if p is not None} for m in node.maps)
    order = [p for p in node.maps[2].positions() if p is not None]
    rest = [d for d in range(len(node.domain)) if d not in out]
    batch = tuple(d for d in order if d in left and d in right)
    m = tuple(d for d in order if d in left and d not in right)
    n = tuple(d for d in order if d in right and d not in left)
    k = tuple(d for d in rest if d in left or d in right)
    if len(batch) + len(m) + len(n) != len(order) or any(d not in left or d not in right for d in k):
        raise UnsupportedError("a contraction with a dimension that only one side reduces")
    found = Contraction(node, batch, m, n, k)
    _, rows, columns, _ = found.counts
    # Few columns and many rows is a matrix-vector product from the other side.
    return Contraction(node, batch, n, m, k, swapped=True) if columns < rows and columns <= 16 else found


def find_all(graph: Graph) -> tuple[Contraction, ...]:
    """The contractions of a gemm kernel, in order.

    Raises:
        UnsupportedError: there is none, or they differ in batch, m, n or k.
    """
    found = tuple(analyse(graph, node) for node in graph.nodes if node.name == "linalg.contract")
    if not found:
        raise UnsupportedError("a gemm kernel without linalg.contract")
    different = next((c for c in found if c.counts != found[0].counts), None)
    if different is not None:
        raise UnsupportedError(
            f"contractions of {different.counts} and {found[0].counts} (batch, m, n, k) in one gemm kernel",
            hint="contractions of one kernel have equal batch, m, n and k",
        )
    return found
