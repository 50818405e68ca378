"""Ops whose element is written from its indices alone: fills, constants, and the partner of a rotated one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch_mlir import ir

from topo_opt.codegen.triton import scalar_ops
from topo_opt.codegen.triton.regions import Region
from topo_opt.codegen.triton.values import Complex, Scalar, Value
from topo_opt.errors import UnsupportedError
from topo_opt.structured.access import Condition, rotation_partner
from topo_opt.structured.graph import Node
from topo_opt.structured.index import Expr, linearize

if TYPE_CHECKING:
    from topo_opt.codegen.triton.emit import Emitter


def _fill(emitter: Emitter, node: Node, indices: Sequence[Expr]) -> Scalar:
    return Region(emitter).scalar(node.op.operands[0])


def _empty(emitter: Emitter, node: Node, indices: Sequence[Expr]) -> Scalar:
    element = emitter.graph.values[node.results[0]].element
    if element.startswith("complex<"):
        zero = Value("0.0", element[8:-1], is_literal=True)
        return Complex(zero, zero)
    return Value(scalar_ops.literal(0, element), element, is_literal=True)


def _constant(emitter: Emitter, node: Node, indices: Sequence[Expr]) -> Scalar:
    info = emitter.graph.values[node.results[0]]
    attribute = node.op.attributes["value"]
    if info.shape is None:
        return emitter.constant(attribute, info.element)
    dense = ir.DenseElementsAttr(attribute)
    if not dense.is_splat:
        raise UnsupportedError(
            "a constant tensor inside a kernel must be a splat; others are kernel arguments"
        )
    return emitter.constant(dense.get_splat_value(), info.element)


def _from_elements(emitter: Emitter, node: Node, indices: Sequence[Expr]) -> Scalar:
    shape = emitter.graph.values[node.results[0]].shape or ()
    position = linearize(indices, shape)
    values = [Region(emitter).scalar(o) for o in node.op.operands]
    result = values[-1]
    for number in range(len(values) - 2, -1, -1):
        test = emitter.condition(Condition(position, number, number + 1))
        result = (
            emitter.choose(" & ".join(test), position.symbols, values[number], result)
            if test
            else values[number]
        )
    return result


def _rotate_half(emitter: Emitter, node: Node, indices: Sequence[Expr]) -> Scalar:
    """One value at the partner's index; its sign is chosen where the ranges leave it open."""
    partner, negated = rotation_partner(emitter.graph, node, indices)
    value = emitter.real(node.operands[0], partner)
    decided = negated.decided()
    if decided is False:
        return value
    minus = emitter.formula("-{}", value)
    if decided:
        return minus
    test = " & ".join(emitter.condition(negated))
    return emitter.choose(test, negated.index.symbols, minus, value)


ELEMENT_RULES: dict[str, Callable[[Emitter, Node, Sequence[Expr]], Scalar]] = {
    "linalg.fill": _fill,
    "tensor.empty": _empty,
    "arith.constant": _constant,
    "tensor.from_elements": _from_elements,
    "topo.rotate_half": _rotate_half,
}
