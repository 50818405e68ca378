"""Checks size expressions and guards of a model file with a grammar of their own, without evaluating them.

torch evaluates these strings (`sympy.sympify`, `exec`), so a file could carry any Python in them. What `torch.export`
writes needs little: numbers, symbols (`s77`, `u0`), arithmetic and comparisons, calls of functions on a list, and paths
into the inputs (`L['x'][0].size()[1]`).
"""

import re
from collections.abc import Callable
from functools import partial

MAX_LENGTH = 1 << 16
MAX_DEPTH = 100
MAX_BITS = 4096
MAX_EXPONENT = 64

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d{1,3})?)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<string>'[^'\"\\\x00-\x1f{}]*')|(?P<op>\*\*|//|<<|>>|<=|>=|==|!=|[-+*/%<>&|^~()\[\],.=]))"
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Symbols as torch names them, and the constants sympy prints.
_SYMBOL = re.compile(r"[a-z]{1,4}\d{1,6}")
_CONSTANTS = _words("true false True False oo zoo int_oo nan inf pi E None I")
_FUNCTIONS = _words("""Abs Add And BooleanFalse BooleanTrue CeilDiv CeilToInt CleanDiv Eq Equality ExprCondPair Float
FloatPow FloatTrueDiv FloorDiv FloorToInt Ge GreaterThan Gt ITE Identity IntTrueDiv Integer Infinity
IntInfinity IsNonOverlappingAndDenseIndicator LShift Le LessThan Lt Max Min Mod ModularIndexing Mul
NaN Ne NegativeInfinity NegativeIntInfinity NegativeOne Not One Or Piecewise Pow PowByNatural
PythonMod RShift Rational RoundDecimal RoundToInt StrictGreaterThan StrictLessThan Symbol ToFloat
TruncToFloat TruncToInt Tuple Unequality Where Xor Zero BitwiseFn_bitwise_and BitwiseFn_bitwise_or
BitwiseFn_bitwise_xor abs bool ceiling float floor int max min round sign sqrt
cast_symbool_to_symint_guardless sym_not sym_float sym_max sym_min log exp""")
_OPAQUE = re.compile(r"OpaqueUnaryFn_[a-z0-9]{1,10}")
_STRING_TAKERS = {
    "Symbol": re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}"),
    "Float": re.compile(r"[-+0-9.e]{1,64}"),
}
_KEYWORDS = _words(
    "positive integer real nonnegative negative nonzero finite evaluate precision zero commutative"
)
_POWERS = frozenset({"Pow", "PowByNatural", "FloatPow", "LShift"})
_METHODS = _words("size stride storage_offset dim numel")
_PATH_KEY = re.compile(r"[A-Za-z0-9_.\- ]{1,200}")

# Binary operators, weakest first.
_STRENGTH = {
    operator: strength
    for strength, row in enumerate(
        ("or", "and", "< > <= >= == !=", "|", "^", "&", "<< >>", "+ -", "* / // %")
    )
    for operator in row.split()
}


class BadExpression(ValueError):
    """The expression is not one that torch.export writes; the text says which part."""


def check_expression(text: str) -> None:
    """Accepts a size expression in either form torch writes: `Mul(Integer(2), Symbol('s0', ...))` or `2*s0`.

    Raises:
        BadExpression: anything else, or a constant too large to compute with.
    """
    _Parser(text, inputs=False).parse()


def check_guard(text: str) -> None:
    """Accepts a guard on the inputs, such as `(L['a'][0].size()[2] // 2) != 1`. Raises BadExpression for anything else."""
    _Parser(text, inputs=True).parse()


class _Parser:
    """Recursive descent. Each rule returns the most bits a constant value may take, or None for what depends on sizes."""

    def __init__(self, text: str, inputs: bool):
        if len(text) > MAX_LENGTH:
            raise BadExpression(f"is longer than {MAX_LENGTH} characters")
        self.inputs = inputs
        self.tokens: list[tuple[str, str]] = []
        self.position = self.depth = 0
        end = len(text.rstrip())
        at = 0
        while at < end:
            match = _TOKEN.match(text, at)
            if match is None:
                raise BadExpression(f"has {text[at : at + 20].strip()!r} in it")
            self.tokens.append((str(match.lastgroup), match[str(match.lastgroup)]))
            at = match.end()

    def parse(self) -> None:
        try:
            self.expression()
        except RecursionError:
            raise BadExpression("is nested too deeply") from None
        if self.position != len(self.tokens):
            raise BadExpression(f"goes on with {self.peek()!r}")

    def peek(self) -> str:
        return self.tokens[self.position][1] if self.position < len(self.tokens) else ""

    def next(self) -> tuple[str, str]:
        if self.position >= len(self.tokens):
            raise BadExpression("ends too early")
        self.position += 1
        return self.tokens[self.position - 1]

    def expect(self, text: str) -> None:
        if self.next()[1] != text:
            raise BadExpression(f"lacks {text!r} before {self.tokens[self.position - 1][1]!r}")

    def expression(self, weakest: int = 0) -> int | None:
        """Operands joined by operators that bind at least as strongly as `weakest`."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise BadExpression(f"is nested deeper than {MAX_DEPTH}")
        bits = self.unary()
        while _STRENGTH.get(self.peek(), -1) >= weakest:
            operator = self.next()[1]
            stronger = _STRENGTH[operator] + 1
            if operator == "<<":
                right = self.power_operand(partial(self.expression, stronger))
                right = None if right is None else MAX_EXPONENT
            else:
                right = self.expression(stronger)
            bits = _sum_of_bits(bits, right)
        self.depth -= 1
        return bits

    def unary(self) -> int | None:
        while self.peek() in ("-", "+", "~", "not"):
            self.next()
        bits = self.atom()
        if self.peek() == "**":
            self.next()
            exponent = self.power_operand(self.unary)
            bits = None if bits is None or exponent is None else _checked(bits * MAX_EXPONENT)
        return bits

    def power_operand(self, rule: Callable[[], int | None]) -> int | None:
        """An exponent or shift: a small number, or something that depends on sizes."""
        start = self.position
        bits = rule()
        written = [text for _, text in self.tokens[start : self.position] if text not in "()+-"]
        if bits is not None and not (
            _is_small(written) or (_is_small(written[1:]) and written[:1] == ["Integer"])
        ):
            raise BadExpression("raises a constant to a large power")
        return bits

    def atom(self) -> int | None:
        kind, text = self.next()
        if kind == "number":
            return _checked(64 if any(c in ".eE" for c in text) else max(1, 4 * len(text)))
        if text == "(":
            bits = self.expression()
            self.expect(")")
            return bits
        if kind != "name":
            raise BadExpression(f"has {text!r} where a value is needed")
        if text == "L" and self.inputs:
            self.input_path()
            return None
        if text == "math" and self.peek() == ".":
            self.next()
            text = self.next()[1]
            if not re.fullmatch(r"[a-z0-9]{1,10}", text):
                raise BadExpression(f"calls math.{text}")
            return self.call(text) if self.peek() == "(" else 64
        if self.peek() == "(":
            if text not in _FUNCTIONS and not _OPAQUE.fullmatch(text):
                raise BadExpression(f"calls {text!r}")
            return self.call(text)
        if text in _CONSTANTS:
            return 64
        if _SYMBOL.fullmatch(text):
            return None
        raise BadExpression(f"names {text!r}")

    def call(self, function: str) -> int | None:
        self.expect("(")
        total: int | None = 1
        count = 0
        while self.peek() != ")":
            if count:
                self.expect(",")
                if self.peek() == ")":
                    break
            count += 1
            total = _sum_of_bits(total, self.argument(function, count))
        self.expect(")")
        if function == "Symbol":
            return None
        if function in _POWERS and total is not None:
            total = _checked(total * MAX_EXPONENT)
        return total

    def argument(self, function: str, number: int) -> int | None:
        kind, text = self.tokens[self.position] if self.position < len(self.tokens) else ("", "")
        if kind == "string":
            self.next()
            if function not in _STRING_TAKERS or not _STRING_TAKERS[function].fullmatch(text[1:-1]):
                raise BadExpression(f"gives {function} the text {text}")
            return 64
        if text in _KEYWORDS and self.tokens[self.position + 1 : self.position + 2] == [("op", "=")]:
            self.position += 2
            value = self.next()[1]
            if value not in ("True", "False", "None") and not (value.isdigit() and len(value) < 4):
                raise BadExpression(f"sets {text} to {value!r}")
            return 1
        if number == 2 and function in _POWERS:
            return self.power_operand(self.expression)
        return self.expression()

    def input_path(self) -> None:
        """`L['name'][0].size()[1]`: keys and indices, then perhaps a method without arguments and an index."""
        while self.peek() in ("[", "."):
            if self.next()[1] == "[":
                kind, text = self.next()
                if not (kind == "number" and text.isdigit()) and not (
                    kind == "string" and _PATH_KEY.fullmatch(text[1:-1])
                ):
                    raise BadExpression(f"has the index {text!r}")
                self.expect("]")
            else:
                name = self.next()[1]
                if name not in _METHODS:
                    raise BadExpression(f"uses .{name}")
                self.expect("(")
                self.expect(")")


def _sum_of_bits(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else _checked(left + right)


def _checked(bits: int) -> int:
    if bits > MAX_BITS:
        raise BadExpression(f"has a constant of more than {MAX_BITS} bits")
    return bits


def _is_small(written: list[str]) -> bool:
    return (
        len(written) == 1 and written[0].replace(".", "", 1).isdigit() and float(written[0]) <= MAX_EXPONENT
    )
