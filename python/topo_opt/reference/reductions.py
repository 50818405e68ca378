"""Recognising what a body does with its accumulators.

Each result of a loop nest is one of a few shapes. A shape that is not recognised is still evaluated, one reduction step
after the other; recognition is only about speed, so a rule here must be exact or not match.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from topo_opt.reference.body import Body
from topo_opt.reference.scalar_ops import SCALAR_OPS


@dataclass(frozen=True)
class Map:
    """The yielded value is the result; with reduction loops, that of the last iteration."""

    value: int


@dataclass(frozen=True)
class Fold:
    """`acc = combine(acc, value)` with an associative and commutative `combine`."""

    combine: Callable[[Tensor, Tensor], Tensor]
    value: int


@dataclass(frozen=True)
class Contract:
    """`acc = acc + lhs * rhs`."""

    lhs: int
    rhs: int


@dataclass(frozen=True)
class Extremum:
    """`best = better(value, best) ? value : best` with payloads chosen by the same comparison (argmax and the like).

    Valid only without NaN: then the best value is the extremum, and each payload is the one of the first (strict
    comparison) or last (otherwise) iteration that reaches it, provided it beats the initial value.
    """

    largest: bool
    strict: bool
    best: int  # the result that holds the best value; that result itself has no payload
    value: int
    payload: int | None


Reduction = Map | Fold | Contract | Extremum

_FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "arith.addf": torch.add,
    "arith.addi": torch.add,
    "arith.mulf": torch.mul,
    "arith.muli": torch.mul,
    "arith.maximumf": torch.maximum,
    "arith.minimumf": torch.minimum,
    "arith.maxnumf": torch.fmax,
    "arith.minnumf": torch.fmin,
    "arith.maxsi": torch.maximum,
    "arith.minsi": torch.minimum,
    "arith.andi": torch.bitwise_and,
    "arith.ori": torch.bitwise_or,
    "arith.xori": torch.bitwise_xor,
    "complex.add": torch.add,
    "complex.mul": torch.mul,
}
_FOLDS_OF_I1 = {
    "arith.addi": torch.bitwise_xor,
    "arith.muli": torch.bitwise_and,
    "arith.maxsi": torch.bitwise_and,
    "arith.minsi": torch.bitwise_or,
}
_UNSIGNED_FOLDS = ("arith.maxui", "arith.minui")  # SCALAR_OPS has the functions, which know the sign bit
_PRODUCTS = {"arith.addf": "arith.mulf", "arith.addi": "arith.muli", "complex.add": "complex.mul"}

# predicate of `value ? accumulator` -> (largest, strict); ordered and unordered agree without NaN
_FLOAT_ORDER = {2: (True, True), 9: (True, True), 3: (True, False), 10: (True, False)}
_FLOAT_ORDER |= {4: (False, True), 11: (False, True), 5: (False, False), 12: (False, False)}
_INT_ORDER = {4: (True, True), 5: (True, False), 2: (False, True), 3: (False, False)}
_LARGEST = {"arith.maximumf": True, "arith.maxnumf": True, "arith.maxsi": True}
_LARGEST |= {"arith.minimumf": False, "arith.minnumf": False, "arith.minsi": False}


def recognise(
    body: Body, inputs: int, reduced: Sequence[bool], dtypes: Sequence[torch.dtype]
) -> list[Reduction] | None:
    """How each yielded value is to be computed, or None when only step by step is right.

    Args:
        body: its first `inputs` arguments are operands, the rest accumulators.
        reduced: per result, whether some loop is absent from its map.
        dtypes: per result, the dtype of the accumulator.
    """
    accumulators = frozenset(range(inputs, body.rank_of_arguments))
    found: list[Reduction | None] = []
    for k, slot in enumerate(body.yields):
        own = inputs + k
        behind = body.arguments_behind(slot) & accumulators
        if not behind or (not reduced[k] and behind <= {own}):
            found.append(Map(slot))
        else:
            found.append(_fold(body, slot, own, accumulators, dtypes[k]) if behind == {own} else None)
    if None in found:
        _extrema(body, inputs, found)
    return None if None in found else found  # type: ignore[return-value]


def _fold(
    body: Body, slot: int, own: int, accumulators: frozenset[int], dtype: torch.dtype
) -> Reduction | None:
    node = body.producer.get(slot)
    if node is None or node.name not in {*_FOLDS, *_UNSIGNED_FOLDS} or own not in node.inputs:
        return None
    value = node.inputs[1] if node.inputs[0] == own else node.inputs[0]
    if body.arguments_behind(value) & accumulators:
        return None
    product = body.producer.get(value)
    if product is not None and product.name == _PRODUCTS.get(node.name) and dtype != torch.bool:
        return Contract(*product.inputs)
    table = _FOLDS_OF_I1 if dtype == torch.bool and node.name in _FOLDS_OF_I1 else _FOLDS
    return Fold(table.get(node.name) or SCALAR_OPS[node.name](node.op), value)


def _extrema(body: Body, inputs: int, found: list[Reduction | None]) -> None:
    """Fills in the results that one comparison `value ? best` decides."""
    accumulators = frozenset(range(inputs, body.rank_of_arguments))
    for best in range(len(found)):
        order = _order(body, inputs, best, accumulators)
        if order is None:
            continue
        largest, strict, value, condition = order
        for k, slot in enumerate(body.yields):
            if k == best:
                found[k] = Extremum(largest, strict, best, value, None)
                continue
            node = body.producer.get(slot)
            if (
                found[k] is None
                and node is not None
                and node.name == "arith.select"
                and node.inputs[0] == condition
            ):
                payload, kept = node.inputs[1:]
                if kept == inputs + k and not body.arguments_behind(payload) & accumulators:
                    found[k] = Extremum(largest, strict, best, value, payload)


def _order(
    body: Body, inputs: int, best: int, accumulators: frozenset[int]
) -> tuple[bool, bool, int, int] | None:
    """(largest, strict, value slot, condition slot) when result `best` is a running extremum."""
    own = inputs + best
    node = body.producer.get(body.yields[best])
    if node is None:
        return None
    for compare in body.nodes:
        table = {"arith.cmpf": _FLOAT_ORDER, "arith.cmpi": _INT_ORDER}.get(compare.name)
        order = table.get(compare.op.attributes["predicate"].value) if table else None
        if order is None or own not in compare.inputs:
            continue
        largest, strict = order
        value = compare.inputs[0]
        if value == own:  # written as `best ? value`: the comparison is mirrored
            value, largest = compare.inputs[1], not largest
        if body.arguments_behind(value) & accumulators:
            continue
        selected = node.name == "arith.select" and node.inputs == (compare.outputs[0], value, own)
        extremum = _LARGEST.get(node.name) == largest and set(node.inputs) == {value, own}
        if selected or extremum:
            return largest, strict, value, compare.outputs[0]
    return None
