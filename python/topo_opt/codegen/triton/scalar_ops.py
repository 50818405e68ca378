"""Table of scalar ops: `arith`, `math` op name -> Triton source of the result from the sources of the operands.

Operands are f32, f64, integers or booleans (halves were widened when loaded). Where Triton's default is an approximation
that is worse than eager PyTorch, the exact form is used unless the kernel only stores half-precision results (`Precision`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir

from topo_opt.codegen.triton.element_types import NARROW_FLOATS, compute_type, storage_type
from topo_opt.codegen.triton.exact_division import exact_reciprocal
from topo_opt.codegen.triton.target import Precision
from topo_opt.errors import UnsupportedError


@dataclass(frozen=True)
class Context:
    """What a rule may look at beside its operands: element types and the op itself."""

    operands: tuple[str, ...]
    """MLIR element types of the operands."""
    result: str
    """MLIR element type of the result."""
    op: ir.Operation
    precision: Precision


Rule = Callable[..., str]
RULES: dict[str, Rule] = {}
_LITERAL_FRIENDLY: set[str] = set()


def rule(*names: str, literals: bool = False) -> Callable[[Rule], Rule]:
    """Registers `fn(context, *operands) -> source` for the named ops."""

    def register(fn: Rule) -> Rule:
        for name in names:
            RULES[name] = fn
            if literals:
                _LITERAL_FRIENDLY.add(name)
        return fn

    return register


def takes_literals(op: ir.Operation) -> bool:
    """Whether operands may stand as Python literals beside one that is none."""
    divides = op.name == "arith.divf" and exact_reciprocal(op.operands[1]) is not None
    return op.name in _LITERAL_FRIENDLY or divides


def _infix(symbol: str) -> Rule:
    return lambda ctx, a, b: f"{a} {symbol} {b}"


for _names, _symbol in {
    ("arith.addf", "arith.addi"): "+",
    ("arith.subf", "arith.subi"): "-",
    ("arith.mulf", "arith.muli"): "*",
    ("arith.andi",): "&",
    ("arith.ori",): "|",
    ("arith.xori",): "^",
    ("arith.shli",): "<<",
    ("arith.shrsi",): ">>",
}.items():
    rule(*_names, literals=True)(_infix(_symbol))


@rule("arith.divf")
def _divf(ctx: Context, a: str, b: str) -> str:
    reciprocal = exact_reciprocal(ctx.op.operands[1])
    if reciprocal is not None:
        return f"{a} * {reciprocal!r}"
    if ctx.precision >= Precision.HALF or ctx.result == "f64":
        return f"{a} / {b}"
    return f"tl.div_rn({a}, {b})"


@rule("arith.divsi")
def _divsi(ctx: Context, a: str, b: str) -> str:
    return f"{a} // {b}"


@rule("arith.remsi")
def _remsi(ctx: Context, a: str, b: str) -> str:
    return f"{a} % {b}"


@rule("arith.floordivsi")
def _floordivsi(ctx: Context, a: str, b: str) -> str:
    return (
        f"{a} // {b} - ((({a} % {b}) != 0) & ((({a} % {b}) < 0) != ({b} < 0))).to({compute_type(ctx.result)})"
    )


@rule("arith.ceildivsi")
def _ceildivsi(ctx: Context, a: str, b: str) -> str:
    return (
        f"{a} // {b} + ((({a} % {b}) != 0) & ((({a} % {b}) < 0) == ({b} < 0))).to({compute_type(ctx.result)})"
    )


def _unsigned(element: str) -> str:
    return "tl.uint64" if element == "index" else f"tl.uint{element[1:]}"


@rule("arith.divui", "arith.remui", "arith.shrui")
def _unsigned_infix(ctx: Context, a: str, b: str) -> str:
    kind, symbol = (
        _unsigned(ctx.result),
        {"arith.divui": "//", "arith.remui": "%", "arith.shrui": ">>"}[ctx.op.name],
    )
    return f"({a}.to({kind}, bitcast=True) {symbol} {b}.to({kind}, bitcast=True)).to({compute_type(ctx.result)}, bitcast=True)"


@rule("arith.remf")
def _remf(ctx: Context, a: str, b: str) -> str:
    return f"libdevice.fmod({a}, {b})"


@rule("arith.negf")
def _negf(ctx: Context, a: str) -> str:
    return f"-{a}"


@rule("arith.maximumf")
def _maximumf(ctx: Context, a: str, b: str) -> str:
    return f"tl.maximum({a}, {b}, propagate_nan=tl.PropagateNan.ALL)"


@rule("arith.minimumf")
def _minimumf(ctx: Context, a: str, b: str) -> str:
    return f"tl.minimum({a}, {b}, propagate_nan=tl.PropagateNan.ALL)"


@rule("arith.maxnumf", "arith.maxsi")
def _maxnum(ctx: Context, a: str, b: str) -> str:
    return f"tl.maximum({a}, {b})"


@rule("arith.minnumf", "arith.minsi")
def _minnum(ctx: Context, a: str, b: str) -> str:
    return f"tl.minimum({a}, {b})"


@rule("arith.maxui", "arith.minui")
def _unsigned_extreme(ctx: Context, a: str, b: str) -> str:
    kind = _unsigned(ctx.result) if ctx.result != "i1" else None
    if kind is None:
        return f"{a} | {b}" if ctx.op.name == "arith.maxui" else f"{a} & {b}"
    name = "tl.maximum" if ctx.op.name == "arith.maxui" else "tl.minimum"
    return f"{name}({a}.to({kind}, bitcast=True), {b}.to({kind}, bitcast=True)).to({compute_type(ctx.result)}, bitcast=True)"


# arith.cmpi predicates by number: symbol, unsigned.
_CMPI = {0: ("==", False), 1: ("!=", False), 2: ("<", False), 3: ("<=", False), 4: (">", False), 5: (">=", False),
         6: ("<", True), 7: ("<=", True), 8: (">", True), 9: (">=", True)}  # fmt: skip


@rule("arith.cmpi", literals=True)
def _cmpi(ctx: Context, a: str, b: str) -> str:
    symbol, unsigned = _CMPI[ir.IntegerAttr(ctx.op.attributes["predicate"]).value]
    if unsigned and ctx.operands[0] != "i1":
        kind = _unsigned(ctx.operands[0])
        tensors = [
            t if not _is_literal(t) else f"tl.full((1, 1), {t}, {compute_type(ctx.operands[0])})"
            for t in (a, b)
        ]
        return f"{tensors[0]}.to({kind}, bitcast=True) {symbol} {tensors[1]}.to({kind}, bitcast=True)"
    return f"{a} {symbol} {b}"


def _is_literal(text: str) -> bool:
    return text[0] in "-0123456789" or text.startswith("float(") or text in ("True", "False")


# arith.cmpf predicates by number. Ordered comparisons are what Triton's operators do, apart from `!=`.
_CMPF = {1: "==", 2: ">", 3: ">=", 4: "<", 5: "<="}
_CMPF_UNORDERED = {8: "==", 9: ">", 10: ">=", 11: "<", 12: "<="}


@rule("arith.cmpf", literals=True)
def _cmpf(ctx: Context, a: str, b: str) -> str:
    predicate = ir.IntegerAttr(ctx.op.attributes["predicate"]).value
    if predicate in _CMPF:
        return f"{a} {_CMPF[predicate]} {b}"
    if predicate == 13:
        return f"{a} != {b}"
    unordered = " | ".join(f"({t} != {t})" for t in (a, b) if not _is_literal(t)) or "False"
    if predicate == 6:
        return f"({a} != {b}) & (({unordered}) == 0)"
    if predicate == 7:
        return f"({unordered}) == 0"
    if predicate == 14:
        return unordered
    if predicate in _CMPF_UNORDERED:
        return f"({a} {_CMPF_UNORDERED[predicate]} {b}) | {unordered}"
    return "True" if predicate == 15 else "False"


@rule("arith.select", literals=True)
def _select(ctx: Context, c: str, a: str, b: str) -> str:
    return f"tl.where({c}, {a}, {b})"


@rule("arith.extf")
def _extf(ctx: Context, a: str) -> str:
    return (
        a
        if compute_type(ctx.result) == compute_type(ctx.operands[0])
        else f"{a}.to({compute_type(ctx.result)})"
    )


@rule("arith.truncf")
def _truncf(ctx: Context, a: str) -> str:
    if ctx.result in NARROW_FLOATS:
        return (
            f"{a}.to({storage_type(ctx.result)})"  # kept narrow: the emitter widens where a number is needed
        )
    return f"{a}.to({compute_type(ctx.result)})"


@rule("arith.extsi")
def _extsi(ctx: Context, a: str) -> str:
    widened = f"{a}.to({compute_type(ctx.result)})"
    return f"-{widened}" if ctx.operands[0] == "i1" else widened


@rule("arith.extui", "arith.index_castui")
def _extui(ctx: Context, a: str) -> str:
    source = ctx.operands[0]
    if source in ("i1", "index", "i64"):
        return f"{a}.to({compute_type(ctx.result)})"
    return f"{a}.to({_unsigned(source)}, bitcast=True).to({compute_type(ctx.result)})"


@rule("arith.trunci")
def _trunci(ctx: Context, a: str) -> str:
    return f"({a} & 1) != 0" if ctx.result == "i1" else f"{a}.to({compute_type(ctx.result)})"


@rule("arith.sitofp")
def _sitofp(ctx: Context, a: str) -> str:
    converted = f"{a}.to({compute_type(ctx.result)})"
    return f"-{converted}" if ctx.operands[0] == "i1" else converted


@rule("arith.uitofp")
def _uitofp(ctx: Context, a: str) -> str:
    source = ctx.operands[0]
    unsigned = a if source == "i1" else f"{a}.to({_unsigned(source)}, bitcast=True)"
    return f"{unsigned}.to({compute_type(ctx.result)})"


@rule("arith.fptosi", "arith.index_cast")
def _convert(ctx: Context, a: str) -> str:
    return f"{a}.to({compute_type(ctx.result)})"


@rule("arith.fptoui")
def _fptoui(ctx: Context, a: str) -> str:
    if ctx.result == "i1":
        return f"{a} != 0"
    return f"{a}.to(tl.int64).to({compute_type(ctx.result)})"


@rule("arith.bitcast")
def _bitcast(ctx: Context, a: str) -> str:
    return f"{a}.to({compute_type(ctx.result)}, bitcast=True)"


_UNROLLED_POWERS = 8


def _power_by_products(base: str, exponent: int) -> str:
    """`base ** exponent` for a small exponent, by repeated multiplication as eager PyTorch does for squares and cubes."""
    product = " * ".join([base] * abs(exponent)) or f"({base} * 0 + 1)"
    return product if exponent >= 0 else f"1.0 / ({product})"


@rule("math.fpowi", literals=True)
def _fpowi(ctx: Context, a: str, b: str) -> str:
    base = a if not _is_literal(a) else f"tl.full((1, 1), {a}, {compute_type(ctx.result)})"
    if _is_literal(b) and abs(int(b)) <= _UNROLLED_POWERS:
        return _power_by_products(base, int(b))
    exponent = (
        f"tl.full((1, 1), {b}, {compute_type(ctx.result)})"
        if _is_literal(b)
        else f"{b}.to({compute_type(ctx.result)})"
    )
    return f"libdevice.pow({base}, {exponent})"


_EXACT_POWERS = {0.5: "tl.sqrt_rn({0})", -0.5: "libdevice.rsqrt({0})", -1.0: "1.0 / {0}", 1.0: "{0}"}


@rule("math.powf", literals=True)
def _powf(ctx: Context, a: str, b: str) -> str:
    """As eager: squares, cubes, roots and reciprocals are what they say, other powers go to the library."""
    base, exponent = (
        f"tl.full((1, 1), {v}, {compute_type(ctx.result)})" if _is_literal(v) else v for v in (a, b)
    )
    power = float(b) if _is_literal(b) and b[0] in "-0123456789" else None
    if power in (2.0, 3.0, -2.0):
        return _power_by_products(base, int(power))
    if power in _EXACT_POWERS and ctx.result != "f64":
        return _EXACT_POWERS[power].format(base)
    return f"libdevice.pow({base}, {exponent})"


@rule("math.ipowi", literals=True)
def _ipowi(ctx: Context, a: str, b: str) -> str:
    if _is_literal(b) and 0 <= int(b) <= _UNROLLED_POWERS and not _is_literal(a):
        return _power_by_products(a, int(b))
    raise UnsupportedError(
        "an integer power with an exponent that is not a small constant", hint="the op is left to ATen"
    )


def _call(name: str) -> Rule:
    return lambda ctx, *args: f"{name}({', '.join(args)})"


for _op, _function in {
    "math.log": "libdevice.log", "math.log2": "libdevice.log2", "math.log10": "libdevice.log10",
    "math.log1p": "libdevice.log1p", "math.expm1": "libdevice.expm1", "math.sin": "libdevice.sin",
    "math.cos": "libdevice.cos", "math.tan": "libdevice.tan",
    "math.asin": "libdevice.asin", "math.acos": "libdevice.acos", "math.atan": "libdevice.atan",
    "math.sinh": "libdevice.sinh", "math.cosh": "libdevice.cosh", "math.asinh": "libdevice.asinh",
    "math.acosh": "libdevice.acosh", "math.atanh": "libdevice.atanh", "math.atan2": "libdevice.atan2",
    "math.erfc": "libdevice.erfc", "math.cbrt": "libdevice.cbrt",
    "math.round": "libdevice.round", "math.roundeven": "libdevice.rint",
    "math.trunc": "libdevice.trunc", "math.copysign": "libdevice.copysign", "math.ceil": "tl.ceil",
    "math.floor": "tl.floor", "math.absf": "tl.abs", "math.absi": "tl.abs", "math.fma": "tl.fma",
    "math.rsqrt": "libdevice.rsqrt",
}.items():  # fmt: skip
    rule(_op)(_call(_function))


@rule("math.exp")
def _exp(ctx: Context, a: str) -> str:
    return f"tl.exp({a})" if ctx.precision >= Precision.HALF else f"libdevice.exp({a})"


@rule("math.erf", "math.tanh")
def _own_function(ctx: Context, a: str) -> str:
    name = ctx.op.name.removeprefix("math.")
    if ctx.result != "f32" or ctx.precision == Precision.EXACT:
        return f"libdevice.{name}({a})"
    return f"_{name}_bf16({a})" if ctx.precision == Precision.BF16 else f"_{name}({a})"


@rule("math.exp2")
def _exp2(ctx: Context, a: str) -> str:
    return f"tl.exp2({a})" if ctx.precision >= Precision.HALF else f"libdevice.exp2({a})"


@rule("math.sqrt")
def _sqrt(ctx: Context, a: str) -> str:
    return f"tl.sqrt_rn({a})" if ctx.result != "f64" else f"tl.sqrt({a})"


@rule("math.isnan")
def _isnan(ctx: Context, a: str) -> str:
    return f"{a} != {a}"


@rule("math.isinf")
def _isinf(ctx: Context, a: str) -> str:
    return f"tl.abs({a}) == float('inf')"


@rule("math.isfinite")
def _isfinite(ctx: Context, a: str) -> str:
    return f"tl.abs({a}) < float('inf')"


@rule("math.ctpop")
def _ctpop(ctx: Context, a: str) -> str:
    return f"libdevice.popc({a}).to({compute_type(ctx.result)})"


def literal(value: Any, element: str) -> str:
    """Source of a constant of an MLIR element type."""
    if element == "i1":
        return "True" if value else "False"
    if element.startswith(("i", "index")):
        return str(int(value))
    number = float(value)
    if number != number or number in (float("inf"), float("-inf")):
        return f"float('{number}')"
    return repr(number)
