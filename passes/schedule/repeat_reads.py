"""`topo-repeat-reads`: cheap functions of a tensor in memory are computed by each of their readers, in the order that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from torch_mlir import ir

from topo_opt.passes.base import Pass
from topo_opt.passes.ingest.dead_ops import plan_functions
from topo_opt.structured.access import RESHAPES

_MOST_COST = 8
"""Scalar ops for each element: less than one transcendental function."""
_SMALL = 16
"""Other operands have at most one element for so many of the result."""
_EXPENSIVE = ("math.", "tensor.extract", "linalg.index", "arith.div", "complex.", "cf.")


@dataclass(frozen=True)
class RepeatReads(Pass):
    """Gives every reader its own copy of a transposed tensor that is cheap to make from one in memory.

    `%t = transpose(call @aten.0(%x) + %bias); mean(%t); sub(%t, ...)`
      -->  `%t = transpose(...); %u = transpose(...); mean(%t); sub(%u, ...)`, each from the result of the call

    Such a tensor is one large operand that is in memory anyway (an argument, or what ATen computes), seen through views and
    loop nests over elements that read little else. Readers then read as many bytes as they would of the transposed tensor,
    which is neither written nor, as clustering can't fuse a transpose into more than one kernel, a launch of its own. Copies
    that did not become part of a kernel are computed once (`topo-form-kernels`); no CSE may follow.
    """

    name = "topo-repeat-reads"

    def apply(self, module: Any) -> None:
        """Repeats such tensors in every plan function."""
        with module.context:
            for function in plan_functions(module.operation):
                _Repeater(function).run()


@dataclass(frozen=True)
class _Light:
    """How a value follows from memory: the operand that it is made of (None: it is there), its cost, whether that is transposed."""

    source: ir.Value | None
    cost: int = 0
    moved: bool = False


class _Repeater:
    def __init__(self, function: ir.Operation):
        block = function.regions[0].blocks[0]
        self.ops = [view.operation for view in block.operations]
        self.light: dict[ir.Value, _Light] = {
            a: _Light(None) for a in block.arguments if isinstance(a.type, ir.RankedTensorType)
        }
        for op in self.ops:
            found = self.described(op)
            if found is not None:
                self.light[op.results[0]] = found

    def run(self) -> None:
        for op in reversed(self.ops):
            if len(op.results) != 1:
                continue
            value = op.results[0]
            light = self.light.get(value)
            if light is None or light.source is None or not light.moved:
                continue
            # The list of uses has the latest first; the first reader keeps what is there.
            readers = list(dict.fromkeys(use.owner.operation for use in value.uses))
            for reader in readers[:-1]:
                with ir.InsertionPoint(reader):
                    copy = self.repeated(value)
                for position, operand in enumerate(reader.operands):
                    if operand == value:
                        reader.operands[position] = copy

    def repeated(self, value: ir.Value) -> ir.Value:
        """The value made again from what is in memory, at the insertion point."""
        light = self.light[value]
        if light.source is None:
            return value
        source = self.repeated(light.source)
        copy = value.owner.clone().operation
        for position, operand in enumerate(copy.operands):
            if operand == light.source:
                copy.operands[position] = source
        return copy.results[0]

    def described(self, op: ir.Operation) -> _Light | None:
        """How the only result of an op follows from memory; None where it does not, or at more cost."""
        if len(op.results) != 1 or not isinstance(op.results[0].type, ir.RankedTensorType):
            return None
        if op.name == "func.call":
            return _Light(None)
        if op.name in RESHAPES or op.name == "topo.demote":
            source = self.light.get(op.operands[0])
            return source and _Light(op.operands[0], source.cost, source.moved)
        return self.nest(op) if op.name == "linalg.generic" else None

    def nest(self, op: ir.Operation) -> _Light | None:
        maps = [ir.AffineMapAttr(a).value for a in ir.ArrayAttr(op.attributes["indexing_maps"])]
        body = [o.operation.name for o in op.regions[0].blocks[0].operations]
        if any("parallel" not in str(i) for i in ir.ArrayAttr(op.attributes["iterator_types"])):
            return None
        if not maps[-1].is_permutation or any(name.startswith(_EXPENSIVE) for name in body):
            return None
        count = _numel(op.results[0])
        inputs = list(op.operands)[: len(maps) - 1]
        large = [i for i, v in enumerate(inputs) if _SMALL * _numel(v) > count]
        if len(large) != 1 or not maps[large[0]].is_permutation:
            return None
        source = self.light.get(inputs[large[0]])
        if source is None:
            return None
        cost = source.cost + sum("constant" not in name and "yield" not in name for name in body)
        moved = source.moved or maps[large[0]] != maps[-1]
        return _Light(inputs[large[0]], cost, moved) if cost <= _MOST_COST else None


def _numel(value: ir.Value) -> int:
    kind = value.type
    return prod(ir.RankedTensorType(kind).shape) if isinstance(kind, ir.RankedTensorType) else 1
