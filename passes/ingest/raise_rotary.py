"""`topo-raise-rotary`: rotary embeddings spelled with slices become `topo.rotate_half`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch_mlir import ir

from topo_opt.passes.base import Pass
from topo_opt.passes.ingest.dead_ops import erase_dead, has_op, plan_functions
from topo_opt.passes.ingest.widening import widened
from topo_opt.structured.access import reassociation
from topo_opt.structured.graph import Graph, Node, read
from topo_opt.structured.index import Expr, const, symbol
from topo_opt.structured.trace import Origin, origins

_FARTHEST = 24
"""Steps that an element is followed back."""


@dataclass(frozen=True)
class RaiseRotary(Pass):
    """Replaces two halves that are put together again, one of them negated, by `topo.rotate_half`.

    | before | after |
    |---|---|
    | `concat(-x[..., D/2:], x[..., :D/2])` | `topo.rotate_half(x) {interleaved = false}` |
    | `collapse(concat(-x[..., 1::2, None], x[..., ::2, None]))` | `topo.rotate_half(x) {interleaved = true}` |

    Recognised by where elements come from, not by how the slices are spelled. When only the first elements of a tensor are
    turned (partial rotary), the op is on a slice of it.
    """

    name = "topo-raise-rotary"

    def apply(self, module: Any) -> None:
        """Raises every rotation of the module's functions."""
        with module.context:
            for function in plan_functions(module.operation):
                if has_op(function, "tensor.concat"):
                    _raise(function)


def _raise(function: ir.Operation) -> None:
    graph = read(function)
    found = [(node, turn) for node in graph.nodes if (turn := _turn(graph, node)) is not None]
    for node, turn in found:
        with ir.InsertionPoint(node.op), node.op.location:
            source = _sliced(graph.handles[turn.value], turn.offset, turn.size)
            made = ir.Operation.create(
                "topo.rotate_half",
                results=[source.type],
                operands=[source],
                attributes={"interleaved": ir.BoolAttr.get(turn.interleaved)},
            )
            turned = widened(made.results[0], ir.RankedTensorType(node.op.results[0].type).element_type)
        node.op.results[0].replace_all_uses_with(turned)
    if found:
        del graph
        erase_dead(function)


@dataclass(frozen=True)
class Turn:
    """A node is `rotate_half` of the `size` elements from `offset` on along the last dimension of `value`."""

    value: int
    offset: int
    size: int
    interleaved: bool


def _turn(graph: Graph, node: Node) -> Turn | None:
    """What a node rotates, None when it is no rotation."""
    interleaved = _pairing(graph, node)
    if interleaved is None:
        return None
    result = node.results[0]
    shape = graph.values[result].shape or ()
    half = shape[-1] // 2
    outer: list[Expr] = [symbol(f"d{axis}", size) for axis, size in enumerate(shape[:-1])]
    pair = symbol("pair", half)
    places = (pair * 2, pair * 2 + 1) if interleaved else (pair, pair + half)
    first = {o.value: o for o in _far(graph, result, [*outer, places[0]]) if o.negated}
    for second in _far(graph, result, [*outer, places[1]]):
        other = first.get(second.value)
        if other is None or second.negated or not _holds(graph, second.value, result):
            continue
        offset = _offset(graph, outer, places, other, second)
        if offset is not None:
            return Turn(second.value, offset, shape[-1], interleaved)
    return None


def _holds(graph: Graph, value: int, result: int) -> bool:
    """Whether the result has every number of `value` exactly: the same type, or a wider one."""
    source, target = graph.values[value].element, graph.values[result].element
    return source == target or (source in ("f16", "bf16") and target in ("f32", "f64"))


def _far(graph: Graph, value: int, indices: list[Expr]) -> Iterator[Origin]:
    return islice(origins(graph, value, indices, negations=True), _FARTHEST)


def _pairing(graph: Graph, node: Node) -> bool | None:
    """Whether a node puts two tensors together along the last dimension: False as halves, True alternating, else None."""
    shape = graph.values[node.results[0]].shape if node.results else None
    if not shape or shape[-1] % 2 or 0 in shape:
        return None
    if node.name == "tensor.concat":
        parts = [(graph.values[o].shape or ())[-1] for o in node.operands]
        axis = ir.IntegerAttr(node.op.attributes["dim"]).value
        return False if axis == len(shape) - 1 and parts == [shape[-1] // 2] * 2 else None
    if node.name != "tensor.collapse_shape":
        return None
    inner = graph.producer(node.operands[0])
    groups = reassociation(node)
    if inner is None or inner.name != "tensor.concat" or not groups or len(groups[-1]) < 2:
        return None
    source = graph.values[node.operands[0]].shape or ()
    axis = ir.IntegerAttr(inner.op.attributes["dim"]).value
    alternating = axis == len(source) - 1 and source[-1] == 2 and len(inner.operands) == 2
    return True if alternating and source[groups[-1][0]] * 2 == shape[-1] else None


def _offset(
    graph: Graph, outer: list[Expr], places: tuple[Expr, Expr], first: Origin, second: Origin
) -> int | None:
    """Where the turned elements start in the source, when both origins are each other's places there."""
    size = (graph.values[second.value].shape or (0,))[-1]
    if len(second.indices) != len(outer) + 1 or any(
        [*origin.indices[:-1]] != outer for origin in (first, second)
    ):
        return None
    start = second.indices[-1] - places[0]
    if not start.is_constant or first.indices[-1] - places[1] != const(start.constant):
        return None
    return start.constant if 0 <= start.constant < size else None


def _sliced(source: ir.Value, offset: int, size: int) -> ir.Value:
    """The elements of a tensor from `offset` on along its last dimension."""
    kind = ir.RankedTensorType(source.type)
    shape = list(kind.shape)
    if shape[-1] == size:
        return source
    whole = [*shape[:-1], size]
    attributes = {
        "static_offsets": ir.DenseI64ArrayAttr.get([0] * (len(shape) - 1) + [offset]),
        "static_sizes": ir.DenseI64ArrayAttr.get(whole),
        "static_strides": ir.DenseI64ArrayAttr.get([1] * len(shape)),
        "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 0, 0, 0]),
    }
    made = ir.Operation.create(
        "tensor.extract_slice",
        results=[ir.RankedTensorType.get(whole, kind.element_type)],
        operands=[source],
        attributes=attributes,
    )
    return made.results[0]
