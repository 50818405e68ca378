"""What a tensor of integers or truth values holds at symbolic indices, as a formula of the indices and of what is loaded.

Masks of attention are computed from positions with comparisons and logic; followed back through the ops that compute them
they become conditions on indices. Anything that is not understood is a leaf: an element of a tensor at known indices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from topo_opt.structured.index import Div, Expr, Mod, Opaque, opaque

FAR = 1 << 62
"""Bound of an integer that is loaded."""


@dataclass(frozen=True)
class Leaf:
    """The element of tensor `value` at `indices`."""

    value: int
    indices: tuple[Expr, ...]

    @property
    def symbols(self) -> frozenset[str]:
        return frozenset().union(*(i.symbols for i in self.indices))


@dataclass(frozen=True)
class Truth:
    """A constant."""

    holds: bool


@dataclass(frozen=True)
class AtLeast:
    """`expr >= 0`."""

    expr: Expr


@dataclass(frozen=True)
class Zero:
    """`expr == 0`."""

    expr: Expr


@dataclass(frozen=True)
class Loaded:
    """A truth value in memory."""

    leaf: Leaf


@dataclass(frozen=True)
class Not:
    """`inner` does not hold."""

    inner: Formula


@dataclass(frozen=True)
class All:
    """All parts hold; never empty, no part is an `All` or a `Truth`."""

    parts: tuple[Formula, ...]


@dataclass(frozen=True)
class Either:
    """Some part holds; never empty, no part is an `Either` or a `Truth`."""

    parts: tuple[Formula, ...]


Formula = Truth | AtLeast | Zero | Loaded | Not | All | Either


@dataclass(frozen=True)
class Choice:
    """A number: `yes` where `test` holds, else `no`."""

    test: Formula
    yes: float
    no: float


@dataclass
class Leaves:
    """The integers in memory that formulas mention, by the name that stands for each in their expressions."""

    named: dict[str, Leaf] = field(default_factory=dict)
    truncated: dict[str, tuple[Expr, int]] = field(default_factory=dict)
    """Quotients that are rounded to zero, of integers whose sign is not known: name -> dividend and divisor."""

    def name(self, leaf: Leaf) -> str:
        """The name of a leaf; the same leaf has one name."""
        for name, known in self.named.items():
            if known == leaf:
                return name
        name = f"leaf{len(self.named)}"
        self.named[name] = leaf
        return name

    def quotient(self, dividend: Expr, divisor: int) -> Expr:
        """`dividend / divisor` rounded to zero; an integer that stands for it where the sign is not known."""
        if dividend.bounds[0] >= 0:
            return dividend // divisor
        name = f"quotient{len(self.truncated)}"
        for known, form in self.truncated.items():
            if form == (dividend, divisor):
                name = known
        self.truncated[name] = (dividend, divisor)
        return opaque(name, -FAR, FAR, dividend.symbols)

    def floored(self, test: Formula, lower: Expr, quotient: Expr) -> Expr | None:
        """The floor division that `remainder < 0 ? quotient - 1 : quotient` spells, None for anything else."""
        for name, (dividend, divisor) in self.truncated.items():
            same = opaque(name, -FAR, FAR, dividend.symbols)
            if quotient == same and lower == same - 1 and test == at_least(same * divisor - dividend - 1):
                return dividend // divisor
        return None


TRUE, FALSE = Truth(True), Truth(False)


def _bounds(expr: Expr) -> tuple[int, int]:
    """Bounds of an expression, which know that `e - c * (e // c)` is a remainder."""
    low, high = expr.bounds
    for atom, step in expr.terms:
        if isinstance(atom, Div) and step % atom.divisor == 0:
            whole = (atom.operand - atom.operand % atom.divisor) * (step // atom.divisor)
            other = (expr - Expr(((atom, step),)) + whole).bounds
            low, high = max(low, other[0]), min(high, other[1])
    return low, high


def at_least(expr: Expr) -> Formula:
    """`expr >= 0`, decided when the ranges decide it."""
    low, high = _bounds(expr)
    return TRUE if low >= 0 else FALSE if high < 0 else AtLeast(expr)


def zero(expr: Expr) -> Formula:
    """`expr == 0`, decided when the ranges decide it."""
    low, high = expr.bounds
    if low > 0 or high < 0:
        return FALSE
    return TRUE if low == high == 0 else Zero(expr)


def negation(formula: Formula) -> Formula:
    """The opposite, with the negation as far inside as it goes."""
    match formula:
        case Truth(holds=holds):
            return Truth(not holds)
        case AtLeast(expr=expr):
            return at_least(expr * -1 - 1)
        case Not(inner=inner):
            return inner
        case All(parts=parts):
            return either(*map(negation, parts))
        case Either(parts=parts):
            return both(*map(negation, parts))
    return Not(formula)


def both(*formulas: Formula) -> Formula:
    """All of them hold."""
    return _joined(formulas, All, TRUE, FALSE)


def either(*formulas: Formula) -> Formula:
    """At least one of them holds."""
    return _joined(formulas, Either, FALSE, TRUE)


def _joined(formulas, kind, neutral: Truth, absorbing: Truth) -> Formula:
    parts: dict[Formula, None] = {}
    for formula in formulas:
        if formula == absorbing:
            return absorbing
        if formula != neutral:
            parts.update(dict.fromkeys(formula.parts if isinstance(formula, kind) else [formula]))
    if any(negation(p) in parts for p in parts if not isinstance(p, All | Either)):
        return absorbing
    return neutral if not parts else next(iter(parts)) if len(parts) == 1 else kind(tuple(parts))


def same(a: Formula, b: Formula) -> Formula:
    """Both hold or neither does."""
    return either(both(a, b), both(negation(a), negation(b)))


def conjuncts(formula: Formula) -> tuple[Formula, ...]:
    """What must hold at once, none for a formula that always holds."""
    return () if formula == TRUE else formula.parts if isinstance(formula, All) else (formula,)


def symbols(formula: Formula) -> frozenset[str]:
    """The index symbols that a formula depends on."""
    match formula:
        case AtLeast(expr=expr) | Zero(expr=expr):
            return expr.symbols
        case Loaded(leaf=leaf):
            return leaf.symbols
        case Not(inner=inner):
            return symbols(inner)
        case All(parts=parts) | Either(parts=parts):
            return frozenset().union(*map(symbols, parts))
    return frozenset()


def loaded_names(formula: Formula) -> frozenset[str]:
    """The names of the run-time integers that a formula mentions."""
    match formula:
        case AtLeast(expr=expr) | Zero(expr=expr):
            return names_in(expr)
        case Loaded(leaf=leaf):
            return frozenset().union(*map(names_in, leaf.indices))
        case Not(inner=inner):
            return loaded_names(inner)
        case All(parts=parts) | Either(parts=parts):
            return frozenset().union(*map(loaded_names, parts))
    return frozenset()


def names_in(expr: Expr) -> frozenset[str]:
    """The names of the run-time integers in an expression."""
    found: set[str] = set()
    for atom, _ in expr.terms:
        if isinstance(atom, Opaque):
            found.add(atom.name)
        elif isinstance(atom, Div | Mod):
            found |= names_in(atom.operand)
    return frozenset(found)
