"""The factors of calls that are left to ATen: what each op computes of every element of a dimension by itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from torch_mlir import ir

from topo_opt.sharding.rule import DimFactors, Factor, Rule
from topo_opt.structured.graph import Graph, Node

Shapes = Sequence[tuple[int, ...]]
Derivation = Callable[[list[Any], Shapes, Shapes], Rule | None]
"""Arguments of the call as the template has them, shapes of operands and of results -> the rule; None where nothing may be split."""


def declaration(func: ir.Operation, call: ir.Operation) -> ir.Operation:
    """What a call of a function of the same module calls."""
    symbols = ir.SymbolTable(func.parent.operation)
    return symbols[ir.FlatSymbolRefAttr(call.attributes["callee"]).value].operation


def aten_rule(graph: Graph, node: Node) -> Rule:
    """By the table `ATEN`; ops without a row are computed whole on every device."""
    operands, results = (
        [graph.values[v].shape or () for v in values] for values in (node.operands, node.results)
    )
    whole = Rule((), tuple(map(_open, operands)), tuple(map(_open, results)))
    callee = declaration(graph.func, node.op)
    if "topo.aten" not in callee.attributes or "topo.call" not in callee.attributes:
        return whole
    derive = ATEN.get(ir.StringAttr(callee.attributes["topo.aten"]).value.split(".")[1])
    call = json.loads(ir.StringAttr(callee.attributes["topo.call"]).value)
    if derive is None or call["kwargs"]:
        return whole
    return derive(call["args"], operands, results) or whole


def _open(shape: Sequence[int]) -> DimFactors:
    return ((),) * len(shape)


def _convolution(args: list[Any], operands: Shapes, results: Shapes) -> Rule | None:
    """Images, and channels of the result where they are in one group.

    Channels that are added up stay together: their sum would be rounded to the result's type first. Of transposed convolutions the
    channels of the result are the second dimension of the weight.
    """
    if [a for a in args[:3] if a is not None] != [{"operand": i} for i in range(len(operands))]:
        return None
    image, weight, transposed, groups = operands[0], operands[1], args[6], args[8]
    batch, channels = Factor(image[0], "parallel"), Factor(results[0][1], "parallel")
    if len(image) != len(weight) or groups != 1:
        channels = Factor(channels.size, "replicated")
    inner: DimFactors = ((),) * (len(image) - 2)
    of_weight: DimFactors = ((), (1,), *inner) if transposed else ((1,), (), *inner)
    if groups != 1:
        of_weight = _open(weight)
    bias: tuple[DimFactors, ...] = (((1,) if groups == 1 else (),),) * (len(operands) - 2)
    return Rule((batch, channels), (((0,), (), *inner), of_weight, *bias), (((0,), (1,), *inner),))


def _along_rows(args: list[Any], operands: Shapes, results: Shapes) -> Rule | None:
    """All dimensions but the one along which an op of one tensor works, `args[1]` or the last one."""
    shape = operands[0]
    if len(operands) != 1 or any(result != shape for result in results) or args[:1] != [{"operand": 0}]:
        return None
    axis = next((a for a in args[1:] if type(a) is int), -1) % max(len(shape), 1)
    free = [d for d in range(len(shape)) if d != axis]
    dims: DimFactors = tuple((free.index(d),) if d != axis else () for d in range(len(shape)))
    return Rule(tuple(Factor(shape[d], "parallel") for d in free), (dims,), (dims,) * len(results))


ATEN: dict[str, Derivation] = {"convolution": _convolution, "sort": _along_rows, "argsort": _along_rows}
"""Name of the op, whatever its overload -> its rule."""
