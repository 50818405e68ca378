"""Values during emission: what a name in the generated source stands for."""

from __future__ import annotations

from dataclasses import dataclass

from topo_opt.structured.index import Expr


@dataclass(frozen=True)
class Axis:
    """One symbol of the tile: `source` is its variable, already shaped to broadcast; `mask` guards its last block.

    A `scalar` axis has one value a program (a batch index); its variable is no block.
    """

    name: str
    size: int
    source: str
    mask: str | None = None
    scalar: bool = False


@dataclass(frozen=True)
class Value:
    """A computed scalar per tile element. `source` is an identifier or a literal.

    `element` is the MLIR element type it stands for (halves are held in f32); `index` is set when the value is an index
    expression, `depends` names the axes it varies over. An empty source is bound on first use: from `index`, or by
    widening `narrow`.
    """

    source: str
    element: str
    depends: frozenset[str] = frozenset()
    index: Expr | None = None
    is_literal: bool = False
    narrow: str | None = None
    """The loaded value in its storage type, when it is half precision."""
    is_load: bool = False
    """Straight from memory: masked elements are zero."""


@dataclass(frozen=True)
class Complex:
    """A complex scalar per tile element."""

    real: Value
    imag: Value


Scalar = Value | Complex
