"""The iteration space of a loops kernel and which of its dimensions a program's block spans.

    rows d0 ... dn:   [ b: one index a program ][ y: `across` dims, a block ][ x: `inner` dims, a block ]
    cols d0 ... dm:   [ q: one index a step ][ r: `inner_cols` dims, a block ]

Without `inner` in the tile, `x` spans all rows. Where it spans the last ones only, neighbours along `x` are neighbours in
memory whatever the sizes are: Triton sees no runs through a division. `y` is for pointwise kernels, some of whose operands
lie along other dimensions than their results. `q` is for windows whose lines are runs of neighbours: a block has a line each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from torch_mlir import ir

from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.structured.graph import evaluate
from topo_opt.structured.index import Expr, delinearize, linearize, symbol


@dataclass(frozen=True)
class Space:
    """The iteration space of a loops kernel and its blocks."""

    rows: tuple[int, ...]
    cols: tuple[int, ...]
    full_shape: tuple[int, ...]
    full: Expr
    """Row-major position in `full_shape` in terms of the axes."""
    x: Expr
    """Row-major position among the rows in terms of the axes."""
    r: Expr
    x_block: int
    r_block: int
    parts: int = 1
    """Programs that share the columns of a block of rows."""
    y_block: int = 0
    """0: there is no axis y."""
    across: int = 0
    """Dimensions along y, in front of those along x."""
    inner: int = 0
    """Dimensions along x."""
    inner_cols: int = 0
    """Dimensions along r."""

    @property
    def row_count(self) -> int:
        return prod(self.rows)

    @property
    def x_count(self) -> int:
        """Rows along x."""
        return prod(self.rows[len(self.rows) - self.inner :])

    @property
    def y_count(self) -> int:
        """Rows along y; 1 without that axis."""
        last = len(self.rows) - self.inner
        return prod(self.rows[last - self.across : last])

    @property
    def x_blocks(self) -> int:
        return -(-self.x_count // self.x_block)

    @property
    def y_blocks(self) -> int:
        return -(-self.y_count // self.y_block) if self.y_block else 1

    @property
    def outer_count(self) -> int:
        """Rows along the dimensions of which a program has one index each."""
        return prod(self.rows[: len(self.rows) - self.inner - self.across])

    @property
    def blocks(self) -> int:
        """Blocks of rows: programs, if none shares its rows."""
        return self.outer_count * self.y_blocks * self.x_blocks

    @property
    def col_count(self) -> int:
        return prod(self.cols)

    @property
    def r_count(self) -> int:
        """Columns along r."""
        return prod(self.cols[len(self.cols) - self.inner_cols :])

    @property
    def q_count(self) -> int:
        """Columns along the dimensions that are walked one index at a time."""
        return self.col_count // self.r_count if self.cols else 1

    @property
    def persistent(self) -> bool:
        return self.r_block >= self.col_count and self.parts == 1 and self.q_count == 1

    @property
    def part_columns(self) -> int:
        """Columns a program reads, a multiple of the block."""
        steps = -(-self.col_count // self.r_block)
        return -(-steps // self.parts) * self.r_block


def read_space(kernel: Kernel, tile: Mapping[str, int]) -> Space:
    """The iteration space from the kernel's attributes and a tile."""
    attributes = kernel.attributes
    rows, cols = tuple(attributes["rows"]), tuple(attributes["cols"])
    inner, across = tile.get("inner", len(rows)), tile.get("across", 0)
    first, last = len(rows) - inner - across, len(rows) - inner
    places = [
        place
        for name, sizes in (("b", rows[:first]), ("y", rows[first:last]), ("x", rows[last:]))
        for place in delinearize(symbol(name, prod(sizes)), sizes)
    ]
    inner_cols = tile.get("inner_cols", len(cols))
    outer_cols = cols[: len(cols) - inner_cols]
    columns = delinearize(symbol("q", prod(outer_cols)), outer_cols)
    columns += delinearize(symbol("r", prod(cols[len(outer_cols) :])), cols[len(outer_cols) :])
    full_shape = tuple(attributes["full_shape"])
    affine = ir.AffineMapAttr(attributes["full_map"]).value
    indices = places + columns
    full = linearize([evaluate(e, indices) for e in affine.results], full_shape)
    steps = -(-prod(cols) // tile["r"])
    parts = -(-steps // -(-steps // tile.get("parts", 1)))
    return Space(
        rows,
        cols,
        full_shape,
        full,
        linearize(places, rows),
        linearize(columns, cols),
        tile["x"],
        tile["r"],
        parts,
        tile.get("y", 0),
        across,
        inner,
        inner_cols,
    )
