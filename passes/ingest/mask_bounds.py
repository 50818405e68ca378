"""Splitting the condition under which attention looks at a key into bounds of the key and a rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch_mlir import ir

from topo_opt.structured import formula as f
from topo_opt.structured.index import Div, Expr, Mod, Opaque, Symbol, const

ROW, KEY = "m", "n"


@dataclass
class Bounds:
    """`low[i] <= n < high[i]` for all i, in terms of the row and of what is loaded, and `rest`, which must hold too.

    `place` names the one loaded integer that bounds may depend on: where a row stands.
    """

    low: list[Expr] = field(default_factory=list)
    high: list[Expr] = field(default_factory=list)
    rest: list[f.Formula] = field(default_factory=list)
    place: str | None = None

    def never_empty(self, keys: int) -> bool:
        """Whether every row surely sees a key."""
        if self.rest:
            return False
        lows, highs = [*self.low, const(0)], [*self.high, const(keys)]
        return all((high - low).bounds[0] >= 1 for high in highs for low in lows)


def split(condition: f.Formula, leaves: Mapping[str, f.Leaf], keys: int) -> Bounds:
    """The bounds that a condition puts on the key.

    Args:
        leaves: what the names of loaded integers stand for.
        keys: number of keys; bounds that exclude none are dropped.
    """
    found = Bounds()
    for part in f.conjuncts(condition):
        sides = [part.expr] if isinstance(part, f.AtLeast) else []
        if isinstance(part, f.Zero):
            sides = [part.expr, part.expr * -1]
        solved = [_solved(side) for side in sides]
        if not solved or not all(s is not None and _fits(found, s[1], leaves) for s in solved):
            found.rest.append(part)
            continue
        for upper, bound in (s for s in solved if s is not None):
            found.place = found.place or _loaded(bound)
            if upper and bound.bounds[0] < keys:
                found.high.append(bound)
            elif not upper and bound.bounds[1] > 0:
                found.low.append(bound)
    found.low, found.high = list(dict.fromkeys(found.low)), list(dict.fromkeys(found.high))
    return found


def _solved(expr: Expr) -> tuple[bool, Expr] | None:
    """`expr >= 0` as a bound of the key: (True, u) for `n < u`, (False, l) for `n >= l`."""
    terms = [(a, c) for a, c in expr.terms if KEY in a.symbols()]
    if len(terms) != 1:
        return None
    (atom, step), rest = terms[0], Expr(tuple(t for t in expr.terms if t not in terms), expr.constant)
    width = 1
    if isinstance(atom, Div) and abs(step) == 1:  # n // w
        width, inner = atom.divisor, atom.operand
        if len(inner.terms) != 1 or inner.terms[0][1] != 1 or inner.constant:
            return None
        atom = inner.terms[0][0]
    if not isinstance(atom, Symbol) or KEY in rest.symbols:
        return None
    if step < 0:
        return True, (rest // -step + 1) * width
    return False, (rest // step) * -width


def _fits(found: Bounds, bound: Expr, leaves: Mapping[str, f.Leaf]) -> bool:
    """Whether a bound depends on the row and on at most the one loaded integer that others depend on."""
    names = f.names_in(bound)
    symbols = frozenset().union(*(i.symbols for n in names for i in leaves[n].indices))
    direct = {n for n in bound.symbols if n not in symbols}
    return (
        len(names) <= 1
        and names <= {found.place or next(iter(names), "")}
        and direct <= {ROW}
        and symbols <= {"b", ROW}
    )


def _loaded(expr: Expr) -> str | None:
    return next(iter(f.names_in(expr)), None)


def affine(expr: Expr, row: ir.AffineExpr, place: ir.AffineExpr) -> ir.AffineExpr:
    """A bound as an MLIR expression of the row and its position."""
    result = ir.AffineConstantExpr.get(expr.constant)
    for atom, step in expr.terms:
        match atom:
            case Symbol():
                term = row
            case Opaque():
                term = place
            case Div(operand=operand, divisor=divisor):
                term = ir.AffineExpr.get_floor_div(affine(operand, row, place), divisor)
            case Mod(operand=operand, divisor=divisor):
                term = ir.AffineExpr.get_mod(affine(operand, row, place), divisor)
        result = ir.AffineExpr.get_add(result, ir.AffineExpr.get_mul(term, step))
    return result
