"""Strategies: every way to put the axes of a mesh on the factors of an operation, and the layouts that follow.

An axis splits one factor, or none (every device along it computes the same), or carries terms (`Terms`). A factor is split
only into equal parts; what does not divide is left out and the reason kept. Axes are numbers here, the major one first, and
an axis that stands on a factor with others stands in that order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from topo_opt.sharding.plan_graph import PlanOp, TermsKind
from topo_opt.sharding.rule import DimFactors, Rule
from topo_opt.sharding.spec import Combiner

Axes = tuple[int, ...]

WHOLE = -1
TERMS = -2


class Layout(NamedTuple):
    """Axes of every dimension; axes of partial results; axes over which elements have owners, with zeros or with anything elsewhere."""

    dims: tuple[Axes, ...]
    partial: Axes = ()
    owned: Axes = ()
    loose: Axes = ()
    combiner: Combiner = "add"

    @property
    def pending(self) -> Axes:
        """Axes over which a device's part is not yet the tensor's."""
        return tuple(sorted(self.partial + self.owned + self.loose))

    def parts(self, sizes: Sequence[int]) -> int:
        """How many parts the tensor is split into."""
        return math.prod(sizes[a] for axes in self.dims for a in axes)


def replicated(rank: int) -> Layout:
    return Layout(((),) * rank)


@dataclass(frozen=True)
class Strategy:
    """`axes[a]` is the factor that axis a splits, or `WHOLE` or `TERMS`; layouts of operands and results, None where there is none."""

    axes: tuple[int, ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]


@dataclass(frozen=True)
class Excluded:
    """Why a factor is not split over an axis."""

    factor: int
    size: int
    parts: int

    def __str__(self) -> str:
        return f"{self.size} does not divide into {self.parts} parts"


def strategies(op: PlanOp, sizes: Sequence[int]) -> list[Strategy]:
    """All strategies of `op` on a mesh with axes of these sizes; the first one splits nothing."""
    choices = [WHOLE, *(f for f, factor in enumerate(op.rule.factors) if factor.kind != "replicated")]
    if op.terms is not None and op.owns < 0:
        choices.append(TERMS)
    found = []
    for axes in itertools.product(choices, repeat=len(sizes)):
        made = strategy(op, sizes, axes)
        if made is not None:
            found.append(made)
    return found


def divisibility(rule: Rule, sizes: Sequence[int]) -> tuple[object, ...]:
    """All that the strategies of a rule depend on but its dimensions: of every factor what divides it, and what splits it up."""
    parts = sorted(
        {math.prod(some) for n in range(len(sizes) + 1) for some in itertools.combinations(sizes, n)}
    )
    return tuple((f.kind, f.combiner, *((f.size % p == 0, f.size == p) for p in parts)) for f in rule.factors)


def exclusions(rule: Rule, sizes: Sequence[int]) -> list[Excluded]:
    """Factors that some axis does not divide, with the numbers."""
    return [
        Excluded(f, factor.size, size)
        for f, factor in enumerate(rule.factors)
        for size in sorted(set(sizes))
        if factor.kind != "replicated" and factor.size > 1 and factor.size % size
    ]


def strategy(op: PlanOp, sizes: Sequence[int], axes: tuple[int, ...]) -> Strategy | None:
    """The strategy with these axes; None when a factor does not divide, or a dimension would not be split into blocks."""
    rule = op.rule
    split: list[Axes] = [()] * len(rule.factors)
    for axis, factor in enumerate(axes):
        if factor >= 0:
            split[factor] = (*split[factor], axis)
    parts = [math.prod(sizes[a] for a in on) for on in split]
    if any(factor.size % count for factor, count in zip(rule.factors, parts)):
        return None
    if not all(_in_blocks(rule, dims, parts) for dims in (*rule.operands, *rule.results)):
        return None
    through = tuple(a for a, factor in enumerate(axes) if factor == TERMS)
    operands = [Layout(_dims(dims, split)) for dims in rule.operands]
    # What owns elements by its own split takes rows of which only its own matter.
    foreign = through if op.owns < 0 else split[op.owns]
    if op.terms is not None and foreign:
        for position, kind in op.terms.operands:
            operands[position] = _with_terms(operands[position], kind, foreign)
    results = tuple(Layout(_dims(dims, split), *_pending(op, split, through)) for dims in rule.results)
    return Strategy(axes, tuple(operands), results)


def _with_terms(layout: Layout, kind: TermsKind, axes: Axes) -> Layout:
    if kind == "zero":
        return layout._replace(owned=axes)
    return layout._replace(loose=axes) if kind == "any" else layout._replace(partial=axes)


_FIELD = {"zero": "owned", "any": "loose", "sum": "partial"}


def _pending(op: PlanOp, split: Sequence[Axes], through: Axes) -> tuple[Axes, Axes, Axes, Combiner]:
    """Partial, owned and loose axes of the results, and how the partial ones are combined."""
    held: dict[str, Axes] = {"owned": (), "partial": (), "loose": ()}
    combiner: Combiner = "add"
    for f, factor in enumerate(op.rule.factors):
        if factor.kind == "reduction" and split[f]:
            combiner = factor.combiner
            name = "owned" if f == op.owns else "partial"
            held[name] = tuple(sorted(held[name] + split[f]))
    if through and op.terms is not None:
        name = _FIELD[op.terms.result]
        held[name] = tuple(sorted(held[name] + through))
    return held["partial"], held["owned"], held["loose"], combiner


def _dims(dims: DimFactors, split: Sequence[Axes]) -> tuple[Axes, ...]:
    return tuple(tuple(a for f in factors for a in split[f]) for factors in dims)


def _in_blocks(rule: Rule, dims: DimFactors, parts: Sequence[int]) -> bool:
    """Whether every device's part of every dimension is one block: a minor factor is split only when all major ones are split up."""
    for factors in dims:
        if len(factors) < 2:
            continue
        open_major = False
        for f in factors:
            if open_major and parts[f] > 1:
                return False
            open_major = open_major or parts[f] < rule.factors[f].size
    return True
