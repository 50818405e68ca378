"""What gemm kernels are put together from: products, statistics of rows, and where results go."""

from __future__ import annotations

from dataclasses import dataclass

from topo_opt.codegen.triton.contraction import Contraction
from topo_opt.codegen.triton.emit import Value
from topo_opt.codegen.triton.reductions import Combiner, Recognised
from topo_opt.codegen.triton.rehearsal import Request
from topo_opt.structured.graph import Node
from topo_opt.structured.index import Expr


@dataclass(frozen=True)
class Accumulator:
    """A product that the epilogue reads: a contraction at a row and at a column expression."""

    request: Request
    contraction: Contraction
    row: Expr
    column: Expr


@dataclass(frozen=True)
class Statistic:
    """A reduction over k of a row."""

    request: Request
    node: Node
    recognised: Recognised

    @property
    def combiner(self) -> Combiner:
        return self.recognised.combiner


@dataclass(frozen=True)
class Place:
    """Where the value of a tile column goes: result `position`, whose value `value` is computed at `indices`."""

    position: int
    value: int
    indices: tuple[Expr, ...]
    columns: int = 1
    """Columns of the tile that one element stands for (`gemm_row_parts`)."""


@dataclass(frozen=True)
class Block:
    """The shape of a block of weights, as source, and which of its dimensions is k."""

    shape: tuple[str, ...]
    k: int

    def of(self, packed: int) -> str:
        """Source of the shape where `packed` steps of k are one."""
        sizes = [f"{s} // {packed}" if i == self.k and packed > 1 else s for i, s in enumerate(self.shape)]
        return f"({', '.join(sizes)})"


def is_identity(init: Value, combiner: Combiner) -> bool:
    """Whether a literal changes nothing when it is combined."""
    names = {"True": "1", "False": "0"}
    left, right = (
        names.get(t, t).removeprefix("float('").removesuffix("')") for t in (init.source, combiner.identity)
    )
    return float(left) == float(right)
