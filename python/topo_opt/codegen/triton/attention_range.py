"""Which keys a block of query rows sees by the bounds of `topo.attention`: where its loops start and end, and what they test.

A row m at position p sees key n when `max(low) <= n < min(high)`, affine expressions of m and p. For a block of rows the
interval of every expression gives three regions: keys that no row sees (skipped), keys that every row sees (no test), and
those in between (tested against each row's own bounds).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from torch_mlir import ir

from topo_opt.codegen.triton.emit import Emitter, Value
from topo_opt.errors import UnsupportedError
from topo_opt.structured.graph import evaluate
from topo_opt.structured.index import ZERO, Expr, const, opaque

FARTHEST = 1 << 24
"""Positions are clamped to this magnitude, so that sums with rows and windows fit 32 bits. No key is that far."""

Interval = tuple[Expr, Expr]


def interval(expr: ir.AffineExpr, dims: Sequence[Interval]) -> Interval:
    """Bounds of an affine expression whose dimensions are somewhere in the given intervals.

    Raises:
        UnsupportedError: an expression that is no sum of multiples, divisions and remainders of dimensions.
    """
    match expr:
        case ir.AffineConstantExpr():
            return const(expr.value), const(expr.value)
        case ir.AffineDimExpr():
            return dims[expr.position]
        case ir.AffineAddExpr():
            (a, b), (c, d) = interval(expr.lhs, dims), interval(expr.rhs, dims)
            return a + c, b + d
        case ir.AffineMulExpr() if isinstance(expr.rhs, ir.AffineConstantExpr):
            low, high = interval(expr.lhs, dims)
            ends = (low * expr.rhs.value, high * expr.rhs.value)
            return ends if expr.rhs.value >= 0 else ends[::-1]
        case ir.AffineFloorDivExpr() if isinstance(expr.rhs, ir.AffineConstantExpr):
            low, high = interval(expr.lhs, dims)
            return low // expr.rhs.value, high // expr.rhs.value
        case ir.AffineModExpr() if isinstance(expr.rhs, ir.AffineConstantExpr):
            return ZERO, const(expr.rhs.value - 1)
    raise UnsupportedError(f"a bound of attention that is {expr}")


@dataclass
class KeyRange:
    """The bounds of one attention kernel. `low` and `high` are expressions of a row and its position.

    `positions` gives the place of a row as an emitted value, None where there is no such operand.
    """

    low: tuple[ir.AffineExpr, ...]
    high: tuple[ir.AffineExpr, ...]
    keys: int
    rows: int
    row: Expr
    first_row: Expr
    last_row: Expr
    positions: Callable[[], Value] | None
    _place: Expr = ZERO
    _places: Interval = (ZERO, ZERO)

    @property
    def is_bounded(self) -> bool:
        return bool(self.low or self.high)

    @property
    def may_be_empty(self) -> bool:
        """Whether some row may see no key at all, or none of the first block that is looked at."""
        if self.low:
            return True
        if self.positions is not None and self.high:
            return True
        rows = (ZERO, const(self.rows - 1))
        return any(interval(e, (rows, (ZERO, ZERO)))[0].constant < 1 for e in self.high)

    def define(self, emitter: Emitter, row_mask: str | None) -> None:
        """Writes `position`, where rows stand, and `row_low` and `row_high`, the bounds of every row."""
        line = emitter.writer.line
        if self.positions is not None:
            found = self.positions()
            clamped = f"tl.minimum(tl.maximum({emitter.tensor(found)}, {-FARTHEST}), {FARTHEST})"
            line(f"position = {clamped}.to(tl.int32) + tl.zeros((1, 1), tl.int32)")
            self._place = opaque("position", -FARTHEST, FARTHEST, found.depends)
            masked = row_mask if "row" in found.depends else None
            for name, choose, neutral in (("nearest", "min", FARTHEST), ("farthest", "max", -FARTHEST)):
                places = f"tl.where({masked}, position, {neutral})" if masked else "position"
                line(f"{name} = tl.{choose}({places})")
            nearest, farthest = (
                opaque(name, -FARTHEST, FARTHEST, frozenset()) for name in ("nearest", "farthest")
            )
            self._places = (nearest, farthest)
        at = (self.row, self._place)
        if self.low:
            line(f"row_low = {_folded(emitter, [evaluate(e, at) for e in self.low], 'maximum', 0)}")
        if self.high:
            line(f"row_high = {_folded(emitter, [evaluate(e, at) for e in self.high], 'minimum', self.keys)}")

    def first(self, emitter: Emitter) -> str:
        """Source of a key before which no row of the block sees any."""
        return _folded(emitter, self._ends(self.low, 0), "maximum", 0)

    def last(self, emitter: Emitter) -> str:
        """Source of a key from which on no row of the block sees any."""
        return _folded(emitter, self._ends(self.high, 1), "minimum", self.keys)

    def all_from(self, emitter: Emitter) -> str:
        """Source of a key from which on every row is past its lower bounds."""
        return _folded(emitter, self._ends(self.low, 1), "maximum", 0)

    def all_before(self, emitter: Emitter) -> str:
        """Source of a key before which no row has reached an upper bound."""
        return _folded(emitter, self._ends(self.high, 0), "minimum", self.keys)

    def _ends(self, exprs: Sequence[ir.AffineExpr], end: int) -> list[Expr]:
        dims = ((self.first_row, self.last_row), self._places)
        return [interval(e, dims)[end] for e in exprs]


def _folded(emitter: Emitter, exprs: Sequence[Expr], choose: str, limit: int) -> str:
    """Source of the smallest (or largest) of the expressions and a limit; what the ranges decide is left out."""
    ends = [e.bounds for e in exprs]
    if choose == "minimum":
        kept = [e for e, (low, _) in zip(exprs, ends) if low < limit]
        needs_limit = not any(high <= limit for _, high in ends)
    else:
        kept = [e for e, (_, high) in zip(exprs, ends) if high > limit]
        needs_limit = not any(low >= limit for low, _ in ends)
    sources = [emitter.index(e) for e in kept] + ([str(limit)] if needs_limit or not kept else [])
    return reduce(lambda a, b: f"tl.{choose}({a}, {b})", sources)
