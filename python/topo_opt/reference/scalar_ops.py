"""Table: `arith` and `math` ops as torch functions.

The functions work on tensors of any shape, so one row serves a scalar at function level and a whole iteration space.
Every row is `name -> prepare(op) -> function(*operands)`; the caller casts the result to the type of the op's result.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch_mlir import ir

from topo_opt.errors import InputError
from topo_opt.reference.constants import constant_tensor

ScalarFn = Callable[..., Tensor]
SCALAR_OPS: dict[str, Callable[[ir.Operation], ScalarFn]] = {}


def plain(functions: dict[str, ScalarFn]) -> None:
    """Adds rows that need nothing from the op's attributes."""
    for name, function in functions.items():
        SCALAR_OPS[name] = _always(function)


def _always(function: ScalarFn) -> Callable[[ir.Operation], ScalarFn]:
    return lambda _op: function


def row(*names: str) -> Callable[[Callable[[ir.Operation], ScalarFn]], Callable[[ir.Operation], ScalarFn]]:
    """Adds rows whose function depends on the op."""

    def add(prepare: Callable[[ir.Operation], ScalarFn]) -> Callable[[ir.Operation], ScalarFn]:
        for name in names:
            SCALAR_OPS[name] = prepare
        return prepare

    return add


def _signed(function: ScalarFn) -> ScalarFn:
    """i1 is the integer 0 or -1 for a signed op; the result keeps its lowest bit."""

    def evaluate(*operands: Tensor) -> Tensor:
        if operands[-1].dtype != torch.bool:
            return function(*operands)
        result = function(*(-x.to(torch.int8) for x in operands))
        return result if result.dtype == torch.bool else (result & 1).bool()

    return evaluate


UNSIGNED_OF_SIZE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGN_BIT = {1: -(2**7), 2: -(2**15), 4: -(2**31), 8: -(2**63)}


def _unsigned(function: Callable) -> ScalarFn:
    """Reinterprets signless integers as numpy's unsigned ones; i1 is 0 or 1."""

    def evaluate(*operands: Tensor) -> Tensor:
        dtype = operands[0].dtype
        if dtype == torch.bool:
            narrow = function(*(x.to(torch.uint8).numpy() for x in operands))
            return torch.as_tensor(np.asarray(narrow) & 1).bool()
        unsigned = UNSIGNED_OF_SIZE[dtype.itemsize]
        result = np.asarray(function(*(x.numpy().view(unsigned) for x in operands)), dtype=unsigned)
        return torch.from_numpy(result.view(result.dtype.str.replace("u", "i")).copy())

    return evaluate


def _unsigned_order(function: ScalarFn) -> ScalarFn:
    """Comparisons and extrema keep their meaning when the sign bit is flipped."""

    def evaluate(a: Tensor, b: Tensor) -> Tensor:
        if a.dtype == torch.bool:
            return function(a.to(torch.int8), b.to(torch.int8))
        flip = _SIGN_BIT[a.dtype.itemsize]
        result = function(a ^ flip, b ^ flip)
        return result if result.dtype == torch.bool else result ^ flip

    return evaluate


def _divide(mode: str) -> ScalarFn:
    def evaluate(a: Tensor, b: Tensor) -> Tensor:
        if bool((b == 0).any()):
            raise InputError("integer division by zero")
        return torch.div(a, b, rounding_mode=mode)

    return _signed(evaluate)


def _remainder(a: Tensor, b: Tensor) -> Tensor:
    if bool((b == 0).any()):
        raise InputError("integer remainder by zero")
    return torch.fmod(a, b)


def _bits(function: Callable[[np.ndarray, int], np.ndarray]) -> ScalarFn:
    """Bit counting, bit by bit: rare enough that clarity wins."""

    def evaluate(x: Tensor) -> Tensor:
        width = 8 * x.dtype.itemsize
        planes = np.stack([(x.numpy() >> bit) & 1 for bit in range(width)])
        return torch.as_tensor(function(planes.astype(bool), width)).to(x.dtype)

    return evaluate


plain(
    {
        "arith.addf": torch.add,
        "arith.subf": torch.sub,
        "arith.mulf": torch.mul,
        "arith.divf": torch.div,
        "arith.remf": torch.fmod,
        "arith.negf": torch.neg,
        "arith.maximumf": torch.maximum,
        "arith.minimumf": torch.minimum,
        "arith.maxnumf": torch.fmax,
        "arith.minnumf": torch.fmin,
        "arith.addi": _signed(torch.add),
        "arith.subi": _signed(torch.sub),
        "arith.muli": _signed(torch.mul),
        "arith.divsi": _divide("trunc"),
        "arith.floordivsi": _divide("floor"),
        "arith.ceildivsi": _signed(lambda a, b: -torch.div(-a, b, rounding_mode="floor")),
        "arith.remsi": _signed(_remainder),
        "arith.divui": _unsigned(np.floor_divide),
        "arith.remui": _unsigned(np.remainder),
        "arith.ceildivui": _unsigned(lambda a, b: a // b + (a % b != 0)),
        "arith.maxsi": _signed(torch.maximum),
        "arith.minsi": _signed(torch.minimum),
        "arith.maxui": _unsigned_order(torch.maximum),
        "arith.minui": _unsigned_order(torch.minimum),
        "arith.andi": torch.bitwise_and,
        "arith.ori": torch.bitwise_or,
        "arith.xori": torch.bitwise_xor,
        "arith.shli": _signed(torch.bitwise_left_shift),
        "arith.shrsi": _signed(torch.bitwise_right_shift),
        "arith.shrui": _unsigned(np.right_shift),
        "arith.select": torch.where,
        "math.absf": torch.abs,
        "math.absi": _signed(torch.abs),
        "math.acos": torch.acos,
        "math.acosh": torch.acosh,
        "math.asin": torch.asin,
        "math.asinh": torch.asinh,
        "math.atan": torch.atan,
        "math.atan2": torch.atan2,
        "math.atanh": torch.atanh,
        "math.cbrt": lambda x: torch.copysign(torch.pow(x.abs().double(), 1.0 / 3.0), x.double()),
        "math.ceil": torch.ceil,
        "math.clampf": lambda x, low, high: torch.minimum(torch.maximum(x, low), high),
        "math.copysign": torch.copysign,
        "math.cos": torch.cos,
        "math.cosh": torch.cosh,
        "math.ctlz": _bits(lambda p, width: np.where(p.any(0), p[::-1].argmax(0), width)),
        "math.ctpop": _bits(lambda p, width: p.sum(0)),
        "math.cttz": _bits(lambda p, width: np.where(p.any(0), p.argmax(0), width)),
        "math.erf": torch.erf,
        "math.erfc": torch.erfc,
        "math.exp": torch.exp,
        "math.exp2": torch.exp2,
        "math.expm1": torch.expm1,
        "math.floor": torch.floor,
        "math.fma": lambda a, b, c: torch.addcmul(c.double(), a.double(), b.double()),
        "math.fpowi": torch.pow,
        "math.ipowi": torch.pow,
        "math.isfinite": torch.isfinite,
        "math.isinf": torch.isinf,
        "math.isnan": torch.isnan,
        "math.isnormal": lambda x: torch.isfinite(x) & (x.abs() >= torch.finfo(x.dtype).tiny),
        "math.log": torch.log,
        "math.log10": torch.log10,
        "math.log1p": torch.log1p,
        "math.log2": torch.log2,
        "math.powf": torch.pow,
        "math.round": lambda x: torch.copysign(torch.floor(x.abs().double() + 0.5), x.double()),
        "math.roundeven": torch.round,
        "math.rsqrt": torch.rsqrt,
        "math.sin": torch.sin,
        "math.sinh": torch.sinh,
        "math.sqrt": torch.sqrt,
        "math.tan": torch.tan,
        "math.tanh": torch.tanh,
        "math.trunc": torch.trunc,
    }
)

_FLOAT_PREDICATES: tuple[ScalarFn, ...] = (
    lambda a, b: torch.zeros_like(a == b),
    torch.eq,
    torch.gt,
    torch.ge,
    torch.lt,
    torch.le,
    lambda a, b: (a < b) | (a > b),
    lambda a, b: (a == a) & (b == b),
    lambda a, b: ~((a < b) | (a > b)),
    lambda a, b: ~(a <= b),
    lambda a, b: ~(a < b),
    lambda a, b: ~(a >= b),
    lambda a, b: ~(a > b),
    torch.ne,
    lambda a, b: (a != a) | (b != b),
    lambda a, b: torch.ones_like(a == b),
)
"""In the order of `arith::CmpFPredicate`: false, ordered eq gt ge lt le ne ord, unordered eq gt ge lt le ne uno, true."""

_INT_PREDICATES: tuple[ScalarFn, ...] = (
    torch.eq,
    torch.ne,
    _signed(torch.lt),
    _signed(torch.le),
    _signed(torch.gt),
    _signed(torch.ge),
    _unsigned_order(torch.lt),
    _unsigned_order(torch.le),
    _unsigned_order(torch.gt),
    _unsigned_order(torch.ge),
)
"""In the order of `arith::CmpIPredicate`: eq ne, signed lt le gt ge, unsigned lt le gt ge."""


@row("arith.cmpf")
def compare_floats(op: ir.Operation) -> ScalarFn:
    """Ordered predicates are false on NaN, unordered ones true."""
    return _FLOAT_PREDICATES[op.attributes["predicate"].value]


@row("arith.cmpi")
def compare_integers(op: ir.Operation) -> ScalarFn:
    """Signless integers under the predicate's signedness."""
    return _INT_PREDICATES[op.attributes["predicate"].value]


@row("arith.constant", "complex.constant")
def constant(op: ir.Operation) -> ScalarFn:
    """Read once, when the program is prepared."""
    value = constant_tensor(op)
    return lambda: value


@row("cf.assert")
def check(op: ir.Operation) -> ScalarFn:
    """A bounds check of the model; the message is the one torch-mlir wrote."""
    message = op.attributes["msg"].value

    def evaluate(condition: Tensor) -> Tensor:
        if not bool(condition.all()):
            raise InputError(f"the model's own check failed: {message}", hint="an index is out of range")
        return condition

    return evaluate
