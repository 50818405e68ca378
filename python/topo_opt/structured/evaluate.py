"""Evaluating tensors of integers and truth values at symbolic indices (`formula`), op by op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from torch_mlir import ir

from topo_opt.structured import formula as f
from topo_opt.structured.access import VIEWS, domain_indices, view_sources
from topo_opt.structured.constants import Constants
from topo_opt.structured.graph import Graph, Node
from topo_opt.structured.index import Expr, const, opaque

Known = Expr | f.Formula | f.Choice | float
"""An integer, a truth value, a number that depends on a test, or a number."""
Scalars = dict[int, "Known | None"]


@dataclass
class Evaluator:
    """Evaluates values of one function. `leaves` collects what stays in memory."""

    graph: Graph
    leaves: f.Leaves = field(default_factory=f.Leaves)
    _known: dict[tuple[int, tuple[Expr, ...]], Known | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._constants = Constants(self.graph)

    def at(self, value: int, indices: Sequence[Expr]) -> Known | None:
        """The element of a tensor: a formula, a leaf when it is an integer or truth value not understood, else None."""
        key = (value, tuple(indices))
        if key not in self._known:
            found = self._computed(value, key[1])
            if found is None:
                found = self._constants.affine(value, key[1])
            self._known[key] = self._leaf(value, key[1]) if found is None else found
        return self._known[key]

    def _leaf(self, value: int, indices: tuple[Expr, ...]) -> Known | None:
        element = self.graph.values[value].element
        leaf = f.Leaf(value, indices)
        if element == "i1":
            return f.Loaded(leaf)
        if element in ("i64", "i32", "i16", "i8"):
            return opaque(self.leaves.name(leaf), -f.FAR, f.FAR, leaf.symbols)
        return None

    def _computed(self, value: int, indices: tuple[Expr, ...]) -> Known | None:
        node = self.graph.producer(value)
        if node is None:
            return None
        position = self.graph.values[value].position
        if node.name in VIEWS:
            return self._viewed(node, indices, position)
        if node.name == "linalg.fill":
            return self._scalar(node.op.operands[0], {})
        if node.name == "arith.constant":
            dense = ir.DenseElementsAttr(node.op.attributes["value"])
            return _number(dense.get_splat_value()) if dense.is_splat else None
        if node.name == "linalg.generic" and not node.has_reduction:
            return self._body(node, position, indices)
        return None

    def _viewed(self, node: Node, indices: Sequence[Expr], position: int) -> Known | None:
        if node.name == "tensor.pad":
            return None
        for source in view_sources(self.graph, node, indices, position):
            decided = [c.decided() for c in source.conditions]
            if False in decided:
                continue
            return None if None in decided else self.at(source.value, source.indices)
        return None

    def _body(self, node: Node, position: int, indices: Sequence[Expr]) -> Known | None:
        if not node.output_map(position).is_projected_permutation:
            return None
        loop = domain_indices(node, position, indices)
        block = node.op.regions[0].blocks[0]
        scalars: Scalars = {}
        for argument, operand, index_map in zip(block.arguments, node.operands, node.maps):
            if any(True for _ in argument.uses):
                scalars[hash(argument)] = self.at(operand, index_map.apply(loop))
        for view in block.operations:
            op = view.operation
            if op.name == "linalg.yield":
                return self._scalar(op.operands[position], scalars)
            if len(op.results) == 1:
                scalars[hash(op.results[0])] = self._op(op, scalars, loop)
        return None

    def _scalar(self, value: ir.Value, scalars: Scalars) -> Known | None:
        """A scalar of a body or of the function."""
        if hash(value) in scalars:
            return scalars[hash(value)]
        number = self.graph.numbers.get(hash(value))
        node = None if number is None else self.graph.producer(number)
        if node is None:
            return None
        if node.name == "tensor.extract":
            return self._extracted(node.op, {})
        return self._op(node.op, {}, ())

    def _op(self, op: ir.Operation, scalars: Scalars, loop: Sequence[Expr]) -> Known | None:
        if op.name == "arith.constant":
            return _number(op.attributes["value"])
        if op.name == "linalg.index":
            return loop[ir.IntegerAttr(op.attributes["dim"]).value]
        if op.name == "tensor.extract":
            return self._extracted(op, scalars)
        rule = _RULES.get(op.name)
        found = [self._scalar(o, scalars) for o in op.operands]
        operands = [o for o in found if o is not None]
        if len(operands) < len(found):
            return None
        if op.name == "arith.divsi":
            return self._quotient(*operands)
        if op.name == "arith.select" and (floored := self._floored(*operands)) is not None:
            return floored
        if rule is None:
            return None
        return rule(op, *operands)

    def _quotient(self, a: Known, b: Known) -> Known | None:
        if not (isinstance(a, Expr) and isinstance(b, Expr) and b.is_constant and b.constant > 0):
            return None
        return self.leaves.quotient(a, b.constant)

    def _floored(self, test: Known, a: Known, b: Known) -> Expr | None:
        if isinstance(test, f.Formula) and isinstance(a, Expr) and isinstance(b, Expr):
            return self.leaves.floored(test, a, b)
        return None

    def _extracted(self, op: ir.Operation, scalars: Scalars) -> Known | None:
        tensor, *places = op.operands
        indices = [self._scalar(p, scalars) for p in places]
        number = self.graph.numbers.get(hash(tensor))
        if number is None or not all(isinstance(i, Expr) for i in indices):
            return None
        return self.at(number, [i for i in indices if isinstance(i, Expr)])


def _number(attribute: ir.Attribute) -> Known:
    if isinstance(attribute, ir.BoolAttr):
        return f.Truth(bool(attribute.value))
    if isinstance(attribute, ir.IntegerAttr):
        boolean = str(attribute.type) == "i1"
        return f.Truth(bool(attribute.value)) if boolean else const(int(attribute.value))
    return float(ir.FloatAttr(attribute).value)


def _formula(value: Known) -> TypeGuard[f.Formula]:
    return isinstance(value, f.Formula)


def _keep(op: ir.Operation, a: Known) -> Known | None:
    return a if isinstance(a, Expr | float | f.Choice) else None


def _logic(join: Callable[..., f.Formula]) -> Callable[..., Known | None]:
    return lambda op, a, b: join(a, b) if _formula(a) and _formula(b) else None


def _differ(a: f.Formula, b: f.Formula) -> f.Formula:
    return f.negation(f.same(a, b))


def _integers(combine: Callable[[Expr, Expr], Expr | None]) -> Callable[..., Known | None]:
    return lambda op, a, b: combine(a, b) if isinstance(a, Expr) and isinstance(b, Expr) else None


def _product(a: Expr, b: Expr) -> Expr | None:
    return a * b.constant if b.is_constant else b * a.constant if a.is_constant else None


def _floor(a: Expr, b: Expr) -> Expr | None:
    return a // b.constant if b.is_constant and b.constant > 0 else None


def _remainder(a: Expr, b: Expr) -> Expr | None:
    return a % b.constant if b.is_constant and b.constant > 0 and a.bounds[0] >= 0 else None


def _smaller(a: Expr, b: Expr) -> Expr | None:
    low, high = (a - b).bounds
    return a if high <= 0 else b if low >= 0 else None


def _larger(a: Expr, b: Expr) -> Expr | None:
    low, high = (a - b).bounds
    return b if high <= 0 else a if low >= 0 else None


# `arith.cmpi` predicates by number: eq, ne, slt, sle, sgt, sge.
_COMPARISONS: dict[int, Callable[[Expr, Expr], f.Formula]] = {
    0: lambda a, b: f.zero(a - b),
    1: lambda a, b: f.negation(f.zero(a - b)),
    2: lambda a, b: f.at_least(b - a - 1),
    3: lambda a, b: f.at_least(b - a),
    4: lambda a, b: f.at_least(a - b - 1),
    5: lambda a, b: f.at_least(a - b),
}


def _compare(op: ir.Operation, a: Known, b: Known) -> Known | None:
    predicate = ir.IntegerAttr(op.attributes["predicate"]).value
    if isinstance(a, Expr) and isinstance(b, Expr) and predicate in _COMPARISONS:
        return _COMPARISONS[predicate](a, b)
    if _formula(a) and _formula(b) and predicate in (0, 1):
        return f.same(a, b) if predicate == 0 else _differ(a, b)
    return None


def _select(op: ir.Operation, test: Known, a: Known, b: Known) -> Known | None:
    if isinstance(test, f.Truth):
        return a if test.holds else b
    if not _formula(test):
        return None
    if _formula(a) and _formula(b):
        return f.either(f.both(test, a), f.both(f.negation(test), b))
    if isinstance(a, float) and isinstance(b, float):
        return f.Choice(test, a, b)
    return a if a == b else None


def _as_float(op: ir.Operation, a: Known) -> Known | None:
    if _formula(a):
        return f.Choice(a, 1.0, 0.0)
    return float(a.constant) if isinstance(a, Expr) and a.is_constant else None


def _floats(combine: Callable[[float, float], float]) -> Callable[..., Known | None]:
    def rule(op: ir.Operation, a: Any, b: Any) -> Known | None:
        if isinstance(a, f.Choice) and isinstance(b, float):
            return f.Choice(a.test, combine(a.yes, b), combine(a.no, b))
        if isinstance(a, float) and isinstance(b, f.Choice):
            return f.Choice(b.test, combine(a, b.yes), combine(a, b.no))
        return combine(a, b) if isinstance(a, float) and isinstance(b, float) else None

    return rule


def _as_integer(op: ir.Operation, a: Known) -> Known | None:
    """`extui` of a truth value that is decided, or a wider integer."""
    return const(int(a.holds)) if isinstance(a, f.Truth) else _keep(op, a)


_RULES: dict[str, Callable[..., Known | None]] = {
    "arith.index_cast": _keep,
    "arith.extsi": _keep,
    "arith.extui": _as_integer,
    "arith.extf": _keep,
    "arith.truncf": _keep,
    "arith.sitofp": _as_float,
    "arith.uitofp": _as_float,
    "arith.addi": _integers(lambda a, b: a + b),
    "arith.subi": _integers(lambda a, b: a - b),
    "arith.muli": _integers(_product),
    "arith.floordivsi": _integers(_floor),
    "arith.remsi": _integers(_remainder),
    "arith.minsi": _integers(_smaller),
    "arith.maxsi": _integers(_larger),
    "arith.andi": _logic(f.both),
    "arith.ori": _logic(f.either),
    "arith.xori": _logic(_differ),
    "arith.cmpi": _compare,
    "arith.select": _select,
    "arith.addf": _floats(lambda a, b: a + b),
    "arith.subf": _floats(lambda a, b: a - b),
    "arith.mulf": _floats(lambda a, b: a * b),
}
