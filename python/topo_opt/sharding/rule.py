"""What an operation allows to be split: factors of its iteration space, and where each tensor carries them.

The terms are those of GSPMD and Shardy: a factor is one loop of the operation; a dimension of a tensor is the product of
its factors, the major one first. Splitting a factor over a mesh axis splits every dimension that carries it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from topo_opt.sharding.spec import Combiner

FactorKind = Literal["parallel", "reduction", "replicated"]
DimFactors = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Factor:
    """One loop. A split `reduction` leaves partial results, joined by `combiner`; a `replicated` factor may not be split."""

    size: int
    kind: FactorKind
    combiner: Combiner = "add"


@dataclass(frozen=True)
class Rule:
    """The factors of an operation; for every operand and result the factors of each dimension, major to minor.

    A dimension of size one that is broadcast carries no factor. Operands that are no tensors have no dimensions.
    """

    factors: tuple[Factor, ...]
    operands: tuple[DimFactors, ...]
    results: tuple[DimFactors, ...]
