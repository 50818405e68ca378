"""Tensors of integers that depend on no argument, evaluated while compiling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from torch_mlir import ir

from topo_opt.structured import formula
from topo_opt.structured.graph import Graph, Node
from topo_opt.structured.index import Expr, const

if TYPE_CHECKING:
    import torch  # imported where a tensor is evaluated: seconds that a module without such does not need

LARGEST = 1 << 20
"""Elements of a tensor that is evaluated, and of every tensor on the way to it."""


@dataclass
class Constants:
    """Values of one function that are known without its arguments."""

    graph: Graph
    _values: dict[int, torch.Tensor | None] = field(default_factory=dict)
    _free: set[int] = field(default_factory=set)
    """Values that depend on no argument and are cheap to compute."""

    def affine(self, value: int, indices: Sequence[Expr]) -> Expr | formula.Truth | None:
        """The element at `indices` of a constant tensor that is affine in its indices, else None.

        A tensor of truth values must be all true or all false.
        """
        import torch

        found = self._value(value)
        if found is None:
            return None
        if found.dtype == torch.bool:
            return (
                formula.Truth(bool(found.flatten()[0]))
                if bool(found.all()) or not bool(found.any())
                else None
            )
        coefficients = _affine_fit(found)
        if coefficients is None:
            return None
        offset, steps = coefficients
        return sum((index * step for index, step in zip(indices, steps, strict=True)), const(offset))

    def _value(self, value: int) -> torch.Tensor | None:
        info = self.graph.values[value]
        whole = info.element.startswith("i") and info.shape is not None and 0 < prod(info.shape) <= LARGEST
        if value not in self._values:
            self._values[value] = self._run(value) if whole and value in self._free else None
        return self._values[value]

    def __post_init__(self) -> None:
        small = [prod(v.shape or ()) <= LARGEST for v in self.graph.values]
        for node in self.graph.nodes:
            free = node.name != "func.call" and all(o in self._free for o in node.operands)
            self._free.update(r for r in node.results if free and small[r])

    def _run(self, value: int) -> torch.Tensor:
        from topo_opt import reference

        nodes = _closure(self.graph, value)
        with self.graph.func.context, ir.Location.unknown():
            module = ir.Module.create()
            kind = ir.FunctionType.get([], [self.graph.handles[value].type])
            with ir.InsertionPoint(module.body):
                function = ir.Operation.create(
                    "func.func",
                    attributes={
                        "sym_name": ir.StringAttr.get("main"),
                        "function_type": ir.TypeAttr.get(kind),
                    },
                    regions=1,
                )
            block = function.regions[0].blocks.append()
            with ir.InsertionPoint(block):
                copies = cloned(self.graph, nodes)
                ir.Operation.create("func.return", operands=[copies[value]])
            return reference.run(module, "main", [])[0]


def _closure(graph: Graph, value: int) -> list[Node]:
    """The nodes that a value needs, in order."""
    needed: set[int] = set()
    waiting = [value]
    while waiting:
        node = graph.producer(waiting.pop())
        if node is not None and node.id not in needed:
            needed.add(node.id)
            waiting.extend(node.operands)
    return [graph.nodes[i] for i in sorted(needed)]


def cloned(graph: Graph, nodes: Sequence[Node]) -> dict[int, ir.Value]:
    """Copies of nodes at the insertion point; the value numbers of their results -> the copies' results."""
    made: dict[int, ir.Value] = {}
    for node in nodes:
        copy = node.op.clone().operation
        _redirect(graph, copy, made)
        made.update(zip(node.results, copy.results))
    return made


def _redirect(graph: Graph, op: ir.Operation, made: dict[int, ir.Value]) -> None:
    for position, operand in enumerate(op.operands):
        number = graph.numbers.get(hash(operand))
        if number in made:
            op.operands[position] = made[number]
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                _redirect(graph, inner.operation, made)


def _affine_fit(tensor: torch.Tensor) -> tuple[int, list[int]] | None:
    """Offset and one step a dimension of a tensor that is affine in its indices."""
    import torch

    values = tensor.to(torch.int64)
    origin = (0,) * values.dim()
    offset = int(values[origin])
    steps, fitted = [], torch.full((1,) * values.dim(), offset, dtype=torch.int64)
    for axis, size in enumerate(values.shape):
        along = tuple(int(axis == a) for a in range(values.dim()))
        steps.append(int(values[along]) - offset if size > 1 else 0)
        shape = [size if a == axis else 1 for a in range(values.dim())]
        fitted = fitted + torch.arange(size).reshape(shape) * steps[-1]
    return (offset, steps) if torch.equal(fitted.expand(values.shape), values) else None
