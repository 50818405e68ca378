"""Scalars inside the region of a loop nest: block arguments, constants, indices, arithmetic, gathers.

Integer arithmetic on loop indices stays symbolic as long as an index expression can hold it, so that `x[3 - i]` is plain
addressing and `i <= j` is a comparison of axis variables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from torch_mlir import ir

from topo_opt.codegen.triton import scalar_ops
from topo_opt.codegen.triton.element_types import NARROW_FLOATS
from topo_opt.codegen.triton.values import Complex, Scalar, Value
from topo_opt.errors import UnsupportedError
from topo_opt.structured.access import Condition
from topo_opt.structured.graph import Node
from topo_opt.structured.index import Expr, opaque

if TYPE_CHECKING:
    from topo_opt.codegen.triton.emit import Emitter


@dataclass
class Region:
    """One evaluation of a region at loop indices. Values are computed when they are asked for, once.

    `arguments` computes block arguments by hash; a Region without arguments evaluates scalars of the function body.
    """

    emitter: Emitter
    arguments: dict[int, Callable[[], Scalar]] = field(default_factory=dict)
    loop: Sequence[Expr] = ()
    known: dict[int, Scalar] = field(default_factory=dict)

    def scalar(self, value: ir.Value) -> Scalar:
        """A scalar SSA value inside the region, or one captured from the function."""
        key = hash(value)
        if key not in self.known:
            self.known[key] = self.arguments[key]() if key in self.arguments else self._outer(key, value)
        return self.known[key]

    def _outer(self, key: int, value: ir.Value) -> Scalar:
        captured = self.emitter.graph.numbers.get(key)
        if captured is not None and captured in self.emitter.pointers:
            return self.emitter.load(captured, ())
        return self._op(value.owner.operation)

    def _op(self, op: ir.Operation) -> Scalar:
        if op.name == "arith.constant":
            return self.emitter.constant(op.attributes["value"], str(op.results[0].type))
        if op.name == "linalg.index":
            return _lazy_index(self.loop[ir.IntegerAttr(op.attributes["dim"]).value])
        if op.name == "tensor.extract":
            return self._extract(op)
        operands = [self.scalar(o) for o in op.operands]
        if op.name.startswith("complex.") or any(isinstance(o, Complex) for o in operands):
            rule = _COMPLEX.get(op.name)
            if rule is None:
                raise UnsupportedError(
                    f"no Triton form for {op.name} of complex values", hint="the op is left to ATen"
                )
            return rule(self.emitter, op, operands)
        return self._apply(op, [o for o in operands if isinstance(o, Value)])

    def _extract(self, op: ir.Operation) -> Scalar:
        """A gather: indices that are not expressions are read as they are and tested against the tensor's size."""
        emitter = self.emitter
        number = emitter.graph.value_of(op.operands[0])
        shape = emitter.graph.values[number].shape or ()
        indices, tests = [], []
        depends: frozenset[str] = frozenset()
        for axis, operand in enumerate(list(op.operands)[1:]):
            found = self.scalar(operand)
            assert isinstance(found, Value)
            expr = found.index
            if expr is None:
                expr = opaque(found.source, 0, max(shape[axis] - 1, 0), found.depends)
                tests.append(emitter.inside(found.source, shape[axis], found.depends))
                depends = depends | found.depends
            elif Condition(expr, 0, shape[axis]).decided() is None:
                tests.extend(emitter.condition(Condition(expr, 0, shape[axis])))
                depends = depends | expr.symbols
            indices.append(expr)
        bound = [t if t.isidentifier() else emitter.writer.bind(t, "c") for t in tests]
        with emitter.predicate(bound, depends):
            return emitter.value(number, indices)

    def _apply(self, op: ir.Operation, operands: list[Value]) -> Value:
        """A scalar op on values; integer arithmetic on indices stays symbolic."""
        emitter, element = self.emitter, str(op.results[0].type)
        symbolic = _symbolic(op.name, operands, element)
        if symbolic is not None:
            return _lazy_index(symbolic, element)
        folded = _fold_boolean(op.name, operands)
        if folded is not None:
            return folded
        rule = scalar_ops.RULES.get(op.name)
        if rule is None:
            raise UnsupportedError(f"no Triton form for {op.name}", hint="the op is left to ATen")
        operands = [emitter.number(o) for o in operands]
        if op.name == "arith.select" and operands[0].is_literal:
            return operands[1] if operands[0].source == "True" else operands[2]
        literals = scalar_ops.takes_literals(op) and not all(o.is_literal for o in operands)
        texts = [o.source if literals else emitter.tensor(o) for o in operands]
        if op.name == "arith.select":
            texts[1:] = [emitter.tensor(o) for o in operands[1:]]
        context = scalar_ops.Context(tuple(o.element for o in operands), element, op, emitter.precision)
        source = rule(context, *texts)
        depends = frozenset().union(*(o.depends for o in operands))
        if op.name == "arith.truncf" and element in NARROW_FLOATS:
            return Value("", element, depends, narrow=emitter.writer.bind(source))
        if source in ("True", "False"):
            return Value(source, element, is_literal=True)
        return Value(source if source.isidentifier() else emitter.writer.bind(source), element, depends)


def evaluate_region(emitter: Emitter, node: Node, loop: Sequence[Expr], wanted: ir.Value) -> Value:
    """A real scalar of a loop nest's region at loop indices.

    Raises:
        UnsupportedError: it is complex.
    """
    block = node.op.regions[0].blocks[0]
    bound: dict[int, Callable[[], Scalar]] = {
        hash(argument): partial(emitter.operand, operand, index_map, loop)
        for argument, operand, index_map in zip(block.arguments, node.operands, node.maps)
    }
    found = Region(emitter, bound, loop).scalar(wanted)
    if isinstance(found, Complex):
        raise UnsupportedError("a reduction of complex values")
    return found


def _lazy_index(expr: Expr, element: str = "index") -> Value:
    """An index as a value; its source is only bound when it is used as a number."""
    if expr.is_constant:
        return Value(str(expr.constant), element, index=expr, is_literal=True)
    return Value("", element, expr.symbols, expr)


def _symbolic(name: str, operands: Sequence[Value], element: str) -> Expr | None:
    """The result as an index expression, when the op is integer arithmetic that expressions can hold."""
    if not operands or any(o.index is None for o in operands) or element not in ("index", "i64"):
        return None
    indices = [o.index for o in operands if o.index is not None]
    if name in ("arith.index_cast", "arith.index_castui", "arith.extsi", "arith.extui"):
        return indices[0]
    if len(indices) != 2:
        return None
    left, right = indices
    match name:
        case "arith.addi":
            return left + right
        case "arith.subi":
            return left - right
        case "arith.muli" if right.is_constant:
            return left * right.constant
        case "arith.muli" if left.is_constant:
            return right * left.constant
        case "arith.divsi" | "arith.floordivsi" | "arith.divui" if (
            right.is_constant and right.constant > 0 and left.bounds[0] >= 0
        ):
            return left // right.constant
        case "arith.remsi" | "arith.remui" if (
            right.is_constant and right.constant > 0 and left.bounds[0] >= 0
        ):
            return left % right.constant
    return None


def _fold_boolean(name: str, operands: Sequence[Value]) -> Value | None:
    """`true & x -> x` and the like: the masks of models are full of them."""
    if name not in ("arith.andi", "arith.ori") or len(operands) != 2 or operands[0].element != "i1":
        return None
    for literal, other in (operands, operands[::-1]):
        if literal.is_literal:
            neutral = literal.source == ("True" if name == "arith.andi" else "False")
            return other if neutral else literal
    return None


def _pair(value: Scalar) -> Complex:
    assert isinstance(value, Complex)
    return value


def _complex_create(e: Emitter, op: ir.Operation, operands: list[Scalar]) -> Scalar:
    real, imag = operands
    assert isinstance(real, Value) and isinstance(imag, Value)
    return Complex(real, imag)


def _complex_elementwise(symbol: str) -> Callable:
    def emit(e: Emitter, op: ir.Operation, operands: list[Scalar]) -> Scalar:
        a, b = map(_pair, operands)
        return Complex(e.binary(symbol, a.real, b.real), e.binary(symbol, a.imag, b.imag))

    return emit


def _complex_mul(e: Emitter, op: ir.Operation, operands: list[Scalar]) -> Scalar:
    a, b = map(_pair, operands)
    real = e.binary("-", e.binary("*", a.real, b.real), e.binary("*", a.imag, b.imag))
    imag = e.binary("+", e.binary("*", a.real, b.imag), e.binary("*", a.imag, b.real))
    return Complex(real, imag)


def _complex_negated(real: bool) -> Callable:
    def emit(e: Emitter, op: ir.Operation, operands: list[Scalar]) -> Scalar:
        pair = _pair(operands[0])
        return Complex(e.formula("-{}", pair.real) if real else pair.real, e.formula("-{}", pair.imag))

    return emit


def _complex_constant(e: Emitter, op: ir.Operation, operands: list[Scalar]) -> Scalar:
    element = str(op.results[0].type)[8:-1]
    parts = [e.constant(a, element) for a in ir.ArrayAttr(op.attributes["value"])]
    return Complex(parts[0], parts[1])


_COMPLEX: dict[str, Callable[[Emitter, ir.Operation, list[Scalar]], Scalar]] = {
    "complex.create": _complex_create,
    "complex.constant": _complex_constant,
    "complex.re": lambda e, op, v: _pair(v[0]).real,
    "complex.im": lambda e, op, v: _pair(v[0]).imag,
    "complex.abs": lambda e, op, v: e.formula("libdevice.hypot({}, {})", _pair(v[0]).real, _pair(v[0]).imag),
    "complex.neg": _complex_negated(real=True),
    "complex.conj": _complex_negated(real=False),
    "complex.add": _complex_elementwise("+"),
    "complex.sub": _complex_elementwise("-"),
    "complex.mul": _complex_mul,
}
