"""`topo-bubble-up-slices`: what only slices read is computed for these slices alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any

from torch_mlir import ir

from topo_opt.passes.base import Pass
from topo_opt.passes.ingest.dead_ops import erase_dead, plan_functions
from topo_opt.passes.ingest.mask_tensors import reshaped
from topo_opt.passes.schedule.boxes import Box
from topo_opt.passes.schedule.narrowing import RULES, Narrowed, sized, slice_box
from topo_opt.structured.access import RESHAPES
from topo_opt.structured.graph import Graph, Node, read

_SLICE = "tensor.extract_slice"
_VIEWS = (*RESHAPES, _SLICE)
_LEAST_SAVING = 2
"""Slices of at most one part in this many are moved: little is saved by the others, and rows that no longer follow each other
in memory may cost a product more than that."""


@dataclass(frozen=True)
class BubbleUpSlices(Pass):
    """Moves slices of contiguous elements above the ops that compute what they read, as far as every reader takes the same elements.

    `contract(x, W)[:, -1:]`  -->  `contract(x[:, -1:], W)`

    A decoder that keeps the logits of its last token, an encoder whose pooler reads the first one: all that stands row by row
    above the slice is computed for that row. Residual streams pass, since all their readers end in the same slice. Products
    are narrowed along rows, columns and batch, `topo.attention` along rows, heads and batch: bounds of its keys are moved so
    that a row sees what it saw. Slices stop where readers differ, at strides, at ATen calls, scans and checks of elements, and
    where nothing is computed above them. Slices that keep more than half of a tensor stay where they are.
    """

    name = "topo-bubble-up-slices"

    def apply(self, module: Any) -> None:
        """Narrows the ops of the module's functions."""
        with module.context:
            for function in plan_functions(module.operation):
                if any(_may_move(v.operation) for v in function.regions[0].blocks[0].operations):
                    erase_dead(function)
                    _bubble(function)


def _may_move(op: ir.Operation) -> bool:
    """Whether an op is a slice of something that is computed: what tells without more analysis that there is nothing to do."""
    if op.name != _SLICE:
        return False
    source = op
    while source.name in _VIEWS:
        value = source.operands[0]
        if isinstance(value, ir.BlockArgument):
            return False
        source = value.owner.operation
    return source.name in RULES and _saves(_numel(op.results[0]), _numel(value))


def _numel(value: ir.Value) -> int:
    return prod(ir.RankedTensorType(value.type).shape)


def _saves(kept: int, of: int) -> bool:
    return 0 < kept * _LEAST_SAVING <= of


def _bubble(function: ir.Operation) -> None:
    graph = read(function)
    plan = _planned(graph)
    if plan.narrowed:
        _Rewriter(graph, plan).run()
        del graph, plan
        erase_dead(function)


class _Whole(Enum):
    """More than one box of a value is read, or all of it."""

    WHOLE = 0


WHOLE = _Whole.WHOLE


@dataclass
class Plan:
    """`reads`: what is read of every value (None: nothing); `narrowed`: the ops, by node, that are computed for what is read of them."""

    reads: list[Box | _Whole | None]
    narrowed: dict[int, Narrowed] = field(default_factory=dict)

    def read(self, graph: Graph, value: int, box: Box | None) -> None:
        """Adds a reader of a box of a value, None of all of it."""
        shape = graph.values[value].shape
        wanted = WHOLE if box is None or shape is None or box.is_whole(shape) else box
        if self.reads[value] not in (None, wanted):
            wanted = WHOLE
        self.reads[value] = wanted


def _planned(graph: Graph) -> Plan:
    """In one walk from the results: every reader of a value has been seen before the op that computes it."""
    plan, costs = Plan([None] * len(graph.values)), _computed(graph)
    for value in graph.returns:
        plan.read(graph, value, None)
    for node in reversed(graph.nodes):
        step = _step(graph, plan, costs, node)
        if step is not None:
            plan.narrowed[node.id] = step
        operands: Sequence[Box | None] = step.operands if step is not None else [None] * len(node.operands)
        if node.name == _SLICE:
            operands = [_source_box(graph, plan, costs, node, step)]
        for value, box in zip(node.operands, operands, strict=True):
            if box is None or box.numel:
                plan.read(graph, value, box)
    return plan


def _step(graph: Graph, plan: Plan, costs: Sequence[bool], node: Node) -> Narrowed | None:
    """How a node is computed for what is read of it; None when all of it is."""
    reads = [plan.reads[r] for r in node.results]
    wants = [r for r in reads if not isinstance(r, _Whole)]
    if len(wants) < len(reads) or not any(wants) or node.name not in RULES:
        return None
    moves_only = node.name in RESHAPES and not costs[node.operands[0]]
    return None if moves_only else RULES[node.name](graph, node, wants)


def _source_box(
    graph: Graph, plan: Plan, costs: Sequence[bool], node: Node, step: Narrowed | None
) -> Box | None:
    """What a slice reads of its source; None for all of it where the slice stays."""
    want = plan.reads[node.results[0]] if step is not None else None
    box = slice_box(graph, node, None if isinstance(want, _Whole) else want)
    source = node.operands[0]
    if box is None or not costs[source]:
        return None
    producer = graph.producer(source)
    # A slice of a slice is one slice: what it saves is told there.
    merges = producer is not None and producer.name == _SLICE
    return box if merges or _saves(box.numel, graph.values[source].numel) else None


def _computed(graph: Graph) -> list[bool]:
    """For every value whether an op that can be narrowed computes it, perhaps with views behind it."""
    found = [False] * len(graph.values)
    for node in graph.nodes:
        computed = found[node.operands[0]] if node.name in _VIEWS else node.name in RULES
        for result in node.results:
            found[result] = computed
    return found


@dataclass
class _Rewriter:
    """Carries a plan out, operands before their readers."""

    graph: Graph
    plan: Plan
    current: dict[int, ir.Value] = field(default_factory=dict)
    """The values that were narrowed."""
    pieces: dict[tuple[Any, ...], ir.Value] = field(default_factory=dict)

    def run(self) -> None:
        for node in self.graph.nodes:
            step = self.plan.narrowed.get(node.id)
            source = node.operands[0] if node.name == _SLICE else None
            if source is not None and source in self.current:
                self._take(node, self.current[source], step)
            elif step is not None:
                with ir.InsertionPoint(node.op), node.op.location:
                    operands = [self._piece(v, b) for v, b in zip(node.operands, step.operands)]
                    results = step.build(node.op, operands[: len(list(node.op.operands))])
                self.current.update(zip(node.results, results, strict=True))

    def _take(self, node: Node, source: ir.Value, step: Narrowed | None) -> None:
        """A slice whose source is now what it takes."""
        result = node.results[0]
        box = self.plan.reads[result]
        kind = ir.RankedTensorType(node.op.results[0].type)
        shape = box.sizes if step is not None and isinstance(box, Box) else list(kind.shape)
        with ir.InsertionPoint(node.op), node.op.location:
            taken = reshaped(source, shape)
        if step is not None:
            self.current[result] = taken
        else:
            node.op.results[0].replace_all_uses_with(taken)

    def _piece(self, value: int, box: Box | None) -> ir.Value | None:
        """A box of a value at the insertion point: narrowed already, made again, or as a slice."""
        if box is not None and not box.numel:
            return None
        if value in self.current:
            return self.current[value]
        handle = self.graph.handles[value]
        if box is None or box.is_whole(self.graph.values[value].shape or ()):
            return handle
        producer = self.graph.producer(value)
        remake = None if producer is None else _REMADE.get(producer.name)
        made = None if remake is None or producer is None else remake(self, producer, box)
        return made if made is not None else self._slice(value, box)

    def _slice(self, value: int, box: Box) -> ir.Value:
        key = (value, box)
        if key not in self.pieces:
            handle, i64 = self.graph.handles[value], ir.DenseI64ArrayAttr.get
            attributes = {
                "static_offsets": i64(box.offsets),
                "static_sizes": i64(box.sizes),
                "static_strides": i64([1] * len(box.sizes)),
                "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 0, 0, 0]),
            }
            made = ir.Operation.create(
                _SLICE, results=[sized(handle, box)], operands=[handle], attributes=attributes
            )
            self.pieces[key] = made.results[0]
        return self.pieces[key]

    def _empty(self, node: Node, box: Box) -> ir.Value:
        kind = sized(node.op.results[0], box)
        key = (node.name, kind)
        if key not in self.pieces:
            self.pieces[key] = ir.Operation.create(node.name, results=[kind]).results[0]
        return self.pieces[key]

    def _fill(self, node: Node, box: Box) -> ir.Value | None:
        scalar, target = node.operands[:2]
        into = self.graph.producer(target)
        if into is None or into.name != "tensor.empty":
            return None
        kind = sized(node.op.results[0], box)
        key = (node.name, scalar, kind)
        if key not in self.pieces:
            empty = self._empty(into, box)
            copy = node.op.clone().operation
            copy.operands[1] = empty
            copy.results[0].set_type(kind)
            self.pieces[key] = copy.results[0]
        return self.pieces[key]

    def _constant(self, node: Node, box: Box) -> ir.Value | None:
        attribute = node.op.attributes["value"]
        if not isinstance(attribute, ir.DenseElementsAttr) or not attribute.is_splat:
            return None
        kind = sized(node.op.results[0], box)
        key = (node.name, node.id, kind)
        if key not in self.pieces:
            value = ir.DenseElementsAttr.get_splat(kind, attribute.get_splat_value())
            made = ir.Operation.create(node.name, results=[kind], attributes={"value": value})
            self.pieces[key] = made.results[0]
        return self.pieces[key]


# Inits and constants: of another shape rather than a part of.
_REMADE = {
    "tensor.empty": _Rewriter._empty,
    "linalg.fill": _Rewriter._fill,
    "arith.constant": _Rewriter._constant,
}
