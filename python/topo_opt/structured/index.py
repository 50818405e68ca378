"""Integer index expressions over ranged symbols, kept in a normal form that is simplified with the ranges.

An expression is a sum of `coefficient * atom` and a constant. An atom is a symbol, a floor division or a remainder by a
positive constant of another expression, or an opaque value (an index that was loaded). All divisions are floor divisions.
Because sizes are static, ranges decide most divisions: `(64*a + b) // 64 -> a` when `0 <= b < 64`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache


@dataclass(frozen=True)
class Symbol:
    """An index variable of a kernel: `0 <= symbol < size`. `name` is its identifier in the generated source."""

    name: str
    size: int

    @property
    def bounds(self) -> tuple[int, int]:
        return 0, self.size - 1

    def symbols(self) -> frozenset[str]:
        return frozenset((self.name,))


@dataclass(frozen=True)
class Opaque:
    """An index that is computed at run time (a gather): known only by its variable, its range and what it depends on."""

    name: str
    low: int
    high: int
    depends: frozenset[str]

    @property
    def bounds(self) -> tuple[int, int]:
        return self.low, self.high

    def symbols(self) -> frozenset[str]:
        return self.depends


@dataclass(frozen=True)
class Div:
    """`operand // divisor`, divisor > 1."""

    operand: Expr
    divisor: int

    @property
    def bounds(self) -> tuple[int, int]:
        low, high = self.operand.bounds
        return low // self.divisor, high // self.divisor

    def symbols(self) -> frozenset[str]:
        return self.operand.symbols


@dataclass(frozen=True)
class Mod:
    """`operand mod divisor`, in `[0, divisor)`."""

    operand: Expr
    divisor: int

    @property
    def bounds(self) -> tuple[int, int]:
        return 0, self.divisor - 1

    def symbols(self) -> frozenset[str]:
        return self.operand.symbols


Atom = Symbol | Opaque | Div | Mod


@dataclass(frozen=True)
class Expr:
    """`sum(coefficient * atom) + constant`, terms in a fixed order, no zero coefficients."""

    terms: tuple[tuple[Atom, int], ...]
    constant: int = 0

    @cached_property
    def _hash(self) -> int:
        return hash((self.terms, self.constant))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest value, from the ranges of the atoms alone."""
        low = high = self.constant
        for atom, coefficient in self.terms:
            ends = [coefficient * bound for bound in atom.bounds]
            low, high = low + min(ends), high + max(ends)
        return low, high

    @cached_property
    def symbols(self) -> frozenset[str]:
        """Names of the symbols (and dependencies of opaque values) in the expression."""
        return frozenset().union(*(atom.symbols() for atom, _ in self.terms))

    @property
    def is_constant(self) -> bool:
        return not self.terms

    def __add__(self, other: Expr | int) -> Expr:
        other = const(other) if isinstance(other, int) else other
        if not other.terms:
            return Expr(self.terms, self.constant + other.constant) if other.constant else self
        if not self.terms:
            return Expr(other.terms, self.constant + other.constant) if self.constant else other
        return _sum((*self.terms, *other.terms), self.constant + other.constant)

    def __sub__(self, other: Expr | int) -> Expr:
        return self + (other * -1 if isinstance(other, Expr) else -other)

    def __mul__(self, factor: int) -> Expr:
        if factor == 0:
            return ZERO
        return Expr(tuple((a, c * factor) for a, c in self.terms), self.constant * factor)

    def __floordiv__(self, divisor: int) -> Expr:
        return _floordiv(self, divisor)

    def __mod__(self, divisor: int) -> Expr:
        return _mod(self, divisor)

    def substitute(self, values: Mapping[str, Expr]) -> Expr:
        """The expression with the named symbols replaced."""
        result = const(self.constant)
        for atom, coefficient in self.terms:
            match atom:
                case Symbol(name=name):
                    value = values.get(name, Expr(((atom, 1),)))
                case Div(operand=operand, divisor=divisor):
                    value = operand.substitute(values) // divisor
                case Mod(operand=operand, divisor=divisor):
                    value = operand.substitute(values) % divisor
                case _:
                    value = Expr(((atom, 1),))
            result = result + value * coefficient
        return result

    def source(self, render: Callable[[str], str] = lambda name: name) -> str:
        """Python source of the expression; `render` maps a symbol's name to what stands in the source."""
        parts: list[str] = []
        for atom, coefficient in self.terms:
            text = _atom_source(atom, render)
            if coefficient == -1:
                text = f"-{text}"
            elif coefficient != 1:
                text = f"{text} * {coefficient}" if coefficient > 0 else f"{text} * ({coefficient})"
            parts.append(text)
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts).replace("+ -", "- ")

    def __str__(self) -> str:
        return self.source()


def _atom_source(atom: Atom, render: Callable[[str], str]) -> str:
    match atom:
        case Symbol(name=name) | Opaque(name=name):
            return render(name)
        case Div(operand=operand, divisor=divisor):
            shift = _shift(operand, divisor)
            quotient = f"{_grouped(operand + shift * divisor, render)} // {divisor}"
            return f"({quotient} - {shift})" if shift else f"({quotient})"
        case Mod(operand=operand, divisor=divisor):
            return f"({_grouped(operand + _shift(operand, divisor) * divisor, render)} % {divisor})"


def _shift(operand: Expr, divisor: int) -> int:
    """Multiples of the divisor that make the operand non-negative: Triton's `//` and `%` truncate, ours are floor divisions."""
    low, _ = operand.bounds
    return max(0, -(low // divisor))


def _grouped(expr: Expr, render: Callable[[str], str]) -> str:
    text = expr.source(render)
    simple = len(expr.terms) == 1 and expr.constant == 0 and expr.terms[0][1] == 1
    return text if simple else f"({text})"


def const(value: int) -> Expr:
    """The constant expression."""
    return Expr((), value)


ZERO = const(0)


@lru_cache(maxsize=1 << 12)
def symbol(name: str, size: int) -> Expr:
    """A variable in `[0, size)`; a variable of size one is the constant 0."""
    return ZERO if size <= 1 else Expr(((Symbol(name, size), 1),))


def opaque(name: str, low: int, high: int, depends: frozenset[str]) -> Expr:
    """A run-time value in `[low, high]` held by the variable `name`."""
    return Expr(((Opaque(name, low, high, depends), 1),))


def _order(term: tuple[Atom, int]) -> tuple[int, int, str]:
    atom, coefficient = term
    return -abs(coefficient), (Symbol, Opaque, Div, Mod).index(type(atom)), _atom_source(atom, str)


def _sum(terms: Iterable[tuple[Atom, int]], constant: int) -> Expr:
    merged: dict[Atom, int] = {}
    for atom, coefficient in terms:
        merged[atom] = merged.get(atom, 0) + coefficient
    merged = {a: c for a, c in merged.items() if c}
    joined = _join_quotient_and_remainder(merged)
    if joined is not None:
        return _sum(joined.terms, joined.constant + constant)
    return Expr(tuple(sorted(merged.items(), key=_order)), constant)


def _join_quotient_and_remainder(merged: dict[Atom, int]) -> Expr | None:
    """`k*c*(e // c) + k*(e mod c) -> k*e` and `k*c*((e // c) mod d) + k*(e mod c) -> k*(e mod c*d)`; None when nothing joins."""
    for atom, coefficient in merged.items():
        if not isinstance(atom, Mod):
            continue
        quotient = atom.operand // atom.divisor
        rest = {a: c for a, c in merged.items() if a is not atom}
        if len(quotient.terms) == 1 and not quotient.constant and quotient.terms[0][1] == 1:
            partner = quotient.terms[0][0]
            if rest.get(partner) == coefficient * atom.divisor:
                del rest[partner]
                return atom.operand * coefficient + Expr(tuple(rest.items()))
        for other, factor in rest.items():
            if isinstance(other, Mod) and other.operand == quotient and factor == coefficient * atom.divisor:
                del rest[other]
                return (atom.operand % (atom.divisor * other.divisor)) * coefficient + Expr(
                    tuple(rest.items())
                )
    return None


@lru_cache(maxsize=1 << 16)
def _floordiv(expr: Expr, divisor: int) -> Expr:
    if divisor <= 0:
        raise ValueError(f"index division by {divisor}: a divisor must be positive")
    if divisor == 1:
        return expr
    whole, rest = _split_multiples(expr, divisor)
    low, high = rest.bounds
    if low // divisor == high // divisor:
        return whole + low // divisor
    reduced = _divide_common_factor(rest, divisor)
    if reduced is not None:
        return whole + reduced
    if len(rest.terms) == 1 and rest.constant == 0 and rest.terms[0][1] == 1:
        atom = rest.terms[0][0]
        if isinstance(atom, Div):  # (e // a) // b -> e // (a*b)
            return whole + atom.operand // (atom.divisor * divisor)
        if isinstance(atom, Mod) and atom.divisor % divisor == 0:  # (e mod ab) // a -> (e // a) mod b
            return whole + (atom.operand // divisor) % (atom.divisor // divisor)
    return whole + Expr(((Div(rest, divisor), 1),))


@lru_cache(maxsize=1 << 16)
def _mod(expr: Expr, divisor: int) -> Expr:
    if divisor <= 0:
        raise ValueError(f"index remainder by {divisor}: a divisor must be positive")
    if divisor == 1:
        return ZERO
    _, rest = _split_multiples(expr, divisor)
    low, high = rest.bounds
    if low // divisor == high // divisor:
        return rest - divisor * (low // divisor)
    for factor in _common_factors(rest, divisor):
        part, small = _split_small(rest, factor)
        if small is not None:  # (g*t + s) mod (g*c) -> g*(t mod c) + s when 0 <= s < g
            return (part % (divisor // factor)) * factor + small
    if len(rest.terms) == 1 and rest.constant == 0 and rest.terms[0][1] == 1:
        atom = rest.terms[0][0]
        if isinstance(atom, Mod) and atom.divisor % divisor == 0:
            return atom.operand % divisor
    return Expr(((Mod(rest, divisor), 1),))


def _split_multiples(expr: Expr, divisor: int) -> tuple[Expr, Expr]:
    """`expr = divisor * first + second` with every multiple of the divisor moved into `first`."""
    whole = tuple((a, c // divisor) for a, c in expr.terms if c % divisor == 0)
    rest = tuple((a, c) for a, c in expr.terms if c % divisor)
    return (
        Expr(tuple(sorted(whole, key=_order)), expr.constant // divisor),
        Expr(rest, expr.constant % divisor),
    )


def _common_factors(expr: Expr, divisor: int) -> list[int]:
    factors = {math.gcd(coefficient, divisor) for _, coefficient in expr.terms}
    return sorted((f for f in factors if 1 < f < divisor), reverse=True)


def _split_small(expr: Expr, factor: int) -> tuple[Expr, Expr | None]:
    """`expr = factor * first + second` with `0 <= second < factor`, or None as second where that can't be shown."""
    part = tuple((a, c // factor) for a, c in expr.terms if c % factor == 0)
    small = Expr(tuple((a, c) for a, c in expr.terms if c % factor), expr.constant % factor)
    low, high = small.bounds
    if not part or low < 0 or high >= factor:
        return ZERO, None
    return Expr(tuple(sorted(part, key=_order)), expr.constant // factor), small


def _divide_common_factor(expr: Expr, divisor: int) -> Expr | None:
    """`(g*t + s) // (g*c) -> t // c` when `0 <= s < g`."""
    for factor in _common_factors(expr, divisor):
        part, small = _split_small(expr, factor)
        if small is not None:
            return part // (divisor // factor)
    return None


def linearize(indices: Sequence[Expr], shape: Sequence[int]) -> Expr:
    """Row-major position of `indices` in a tensor of `shape`."""
    return _linearize(tuple(indices), tuple(shape))


@lru_cache(maxsize=1 << 14)
def _linearize(indices: tuple[Expr, ...], shape: tuple[int, ...]) -> Expr:
    position = ZERO
    for index, size in zip(indices, shape, strict=True):
        position = position * size + index
    return position


def delinearize(position: Expr, shape: Sequence[int]) -> list[Expr]:
    """Indices of the row-major `position` in a tensor of `shape` (no dimension of size 0)."""
    return list(_delinearize(position, tuple(shape)))


@lru_cache(maxsize=1 << 14)
def _delinearize(position: Expr, shape: tuple[int, ...]) -> tuple[Expr, ...]:
    indices: list[Expr] = []
    inner = 1
    for axis in range(len(shape) - 1, -1, -1):
        index = position // inner
        if axis > 0:
            index = index % shape[axis]
        indices.append(index if shape[axis] > 1 else ZERO)
        inner *= shape[axis]
    return tuple(indices[::-1])


def strided(indices: Sequence[Expr], strides: Sequence[int]) -> Expr:
    """`sum(index * stride)`: the element offset in a strided tensor."""
    offset = ZERO
    for index, stride in zip(indices, strides, strict=True):
        offset = offset + index * stride
    return offset


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Row-major strides in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]
