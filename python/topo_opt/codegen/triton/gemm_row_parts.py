"""Reductions of rows in two parts: one kernel leaves a number for every chunk of columns, later ones combine those.

    p[m, c] = reduce over r of f(y[m, c * CHUNK + r])        in the epilogue of the product that makes y
    s[m]    = reduce over c of p[m, c]                       in the kernels that need it

What normalises the rows of a product can so be known by whoever reads them, without reading them (`topo-hand-over-norms`).
A result of a gemm kernel that is reduced is such a `p`; a reduction that is not over the k of the kernel is such an `s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from topo_opt.codegen.triton.emit import Axis, Value
from topo_opt.codegen.triton.kernel import next_power_of_two
from topo_opt.codegen.triton.reductions import Combiner, Recognised, recognise
from topo_opt.codegen.triton.regions import evaluate_region
from topo_opt.codegen.triton.rehearsal import Request
from topo_opt.errors import UnsupportedError
from topo_opt.structured.access import forward_indices, loop_at
from topo_opt.structured.graph import Graph, Node
from topo_opt.structured.index import Expr, linearize, symbol

if TYPE_CHECKING:
    from topo_opt.codegen.triton.gemm_base import Gemm

MOST_PARTS = 256
"""Parts of a row that a program combines in one step: they are in registers, for all of its rows."""


@dataclass(frozen=True)
class Chunks:
    """A result whose elements are reductions over `size` columns each."""

    node: Node
    size: int
    found: Recognised

    @property
    def combiner(self) -> Combiner:
        return self.found.combiner

    def at(self, gemm: Gemm, row: Expr, column: Expr) -> tuple[list[Expr], list[Expr]] | None:
        """Loop indices and result indices at a column of the product; None where no product is read element by element."""
        for contraction in gemm.contractions:
            indices = contraction.result_indices(gemm.batch_index, row, column)
            reached = forward_indices(gemm.kernel.graph, contraction.node.results[0], indices)
            for position, operand in enumerate(self.node.operands[: self.node.inputs]):
                loop = loop_at(self.node, position, reached[operand]) if operand in reached else None
                if loop is not None and None not in loop:
                    known = [i for i in loop if i is not None]
                    return known, self.node.output_map(0).apply(known)
        return None


def chunks_of(graph: Graph) -> dict[int, Chunks]:
    """The results of a gemm kernel that are reductions.

    Raises:
        UnsupportedError: one has a body that is no known combination, or they differ in the size of chunks.
    """
    found = {}
    for value in graph.returns:
        node = graph.producer(value)
        if node is None or node.name != "linalg.generic" or not node.has_reduction:
            continue
        recognised = recognise(node, 0, graph.values[value].element)
        if recognised is None or len(node.results) != 1:
            raise UnsupportedError("a reduced result of a gemm kernel whose body is no known combination")
        size = prod(s for s, reduced in zip(node.domain, node.reduction) if reduced)
        found[value] = Chunks(node, size, recognised)
    if len({c.size for c in found.values()}) > 1:
        raise UnsupportedError("reductions over chunks of several sizes in one gemm kernel")
    return found


def parts_of_rows(graph: Graph, k: int) -> int:
    """How many parts the reductions combine that are neither over k nor results; 1 where there are none.

    Raises:
        UnsupportedError: there are several such numbers, or more than `MOST_PARTS`.
    """
    sizes = {
        size
        for node in graph.nodes
        if node.name == "linalg.generic" and node.has_reduction and node.results[0] not in graph.returns
        if (size := prod(s for s, reduced in zip(node.domain, node.reduction) if reduced)) != k
    }
    if len(sizes) > 1 or max(sizes, default=1) > MOST_PARTS:
        raise UnsupportedError(
            f"reductions over {sorted(sizes)} in a gemm kernel with k = {k}",
            hint=f"one number of parts, at most {MOST_PARTS}",
        )
    return next(iter(sizes), 1)


@dataclass
class RowParts:
    """The reduced results of a gemm kernel by value, and how many `parts` of a row it combines itself (1: none)."""

    gemm: Gemm
    chunks: dict[int, Chunks] = field(init=False)
    parts: int = field(init=False)

    def __post_init__(self) -> None:
        graph = self.gemm.kernel.graph
        self.chunks, self.parts = chunks_of(graph), parts_of_rows(graph, self.gemm.k)

    @property
    def chunk(self) -> int:
        """Columns of a chunk; 1 where no result is reduced."""
        return next((c.size for c in self.chunks.values()), 1)

    @property
    def block(self) -> int:
        """Parts that a tile of them has."""
        return next_power_of_two(self.parts)

    def axes(self, columns: int) -> dict[str, Axis]:
        """The axes `c` of chunks and `s` of parts, for tiles of so many columns.

        Raises:
            UnsupportedError: a tile does not consist of whole chunks.
        """
        found = {}
        if self.chunks:
            if columns % self.chunk:
                raise UnsupportedError(f"{columns} columns a tile", hint=f"a multiple of {self.chunk}")
            found["c"] = self.gemm.axis("c", self.gemm.columns // self.chunk, columns // self.chunk)
        if self.parts > 1:
            found["s"] = self.gemm.axis("s", self.parts, self.block)
        return found

    def define(self, block: str, place: str) -> None:
        """Defines the axes; `block` is the number of the block of columns, `place` where columns (and parts) lie in a tile."""
        if self.chunks:
            few = f"BLOCK_N // {self.chunk}"
            self.gemm.define("c", f"{block}{self.gemm.cast} * ({few}) + tl.arange(0, {few}){place}")
        if self.parts > 1:
            self.gemm.define("s", f"tl.arange(0, {self.block}){place}")

    def is_sum(self, request: Request) -> bool:
        """Whether a reduction combines parts of rows, and does not run over k."""
        node = self.gemm.kernel.graph.nodes[request[0]]
        sizes = [s for s, reduced in zip(node.domain, node.reduction) if reduced]
        return self.parts > 1 and not self.gemm.is_product(request) and prod(sizes) == self.parts

    def indices(self, value: int, row: Expr) -> list[Expr]:
        """Indices of a reduced result at a row and at chunk `c` of the columns.

        Raises:
            UnsupportedError: a chunk is no block of neighbouring columns.
        """
        gemm, chunks, size = self.gemm, self.chunks[value], self.chunk
        n, c = symbol("n", gemm.columns), symbol("c", gemm.columns // size)
        start, inside = chunks.at(gemm, row, c * size), chunks.at(gemm, row, n)
        if gemm.parts > 1 or gemm.columns % size or start is None or inside is None:
            raise UnsupportedError("a reduced result of a gemm kernel that no block of columns holds")
        reduced = [d for d, r in enumerate(chunks.node.reduction) if r]
        step = linearize([inside[0][d] for d in reduced], [chunks.node.domain[d] for d in reduced])
        if step != n % size or [i.substitute({"c": n // size}) for i in start[1]] != inside[1]:
            raise UnsupportedError(
                "a reduced result of a gemm kernel whose chunks are not neighbouring columns"
            )
        return start[1]

    def seed(self, value: int, row: Expr, indices: Sequence[Expr], shape: str) -> str:
        """Makes the reductions over the chunks of a tile of `shape` known; the shape of their tile, as source.

        Raises:
            UnsupportedError: they start at something else than the identity of what combines them.
        """
        chunks, emitter = self.chunks[value], self.gemm.emitter
        found = chunks.at(self.gemm, row, symbol("n", self.gemm.columns))
        assert found is not None, "indices() has said so"
        term = evaluate_region(emitter, chunks.node, found[0], chunks.found.term)
        source = emitter.tensor(term)
        if not {"n", "m"} <= term.depends:
            source = f"tl.broadcast_to({source}, {shape})"
        sizes = shape.strip("()").split(", ")
        axis, few = sizes.index("BLOCK_N"), f"BLOCK_N // {chunks.size}"
        apart = ", ".join([*sizes[:axis], few, str(chunks.size), *sizes[axis + 1 :]])
        function = chunks.combiner.function
        reduced = "tl.sum({}, axis={})" if function is None else f"tl.reduce({{}}, {{}}, {function})"
        name = self.gemm.writer.bind(reduced.format(f"tl.reshape({source}, ({apart}))", axis + 1))
        node = chunks.node
        init = emitter.real(node.operands[node.inputs], list(indices))
        if not (init.is_literal and float(init.source) == float(chunks.combiner.identity)):
            raise UnsupportedError("a reduced result of a gemm kernel that does not start at nothing")
        element = self.gemm.kernel.graph.values[value].element
        emitter.seeds[(value, tuple(indices))] = Value(name, element, frozenset({"c", "m"}))
        return f"({', '.join([*sizes[:axis], few, *sizes[axis + 1 :]])})"
