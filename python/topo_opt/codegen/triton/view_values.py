"""Values of ops that only move data: which operand a result's element is, and under which tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from topo_opt.codegen.triton.regions import Region
from topo_opt.codegen.triton.values import Scalar, Value
from topo_opt.structured.access import is_movement, view_sources
from topo_opt.structured.graph import Node
from topo_opt.structured.index import Expr

if TYPE_CHECKING:
    from topo_opt.codegen.triton.emit import Emitter

_IN_EVERY_TYPE = ("0.0", "float('inf')", "float('-inf')")
"""Of what models pad with, the numbers that all of `_ELEMENTS` have; not every type of 8 bits has an infinity."""
_ELEMENTS = ("f64", "f32", "f16", "bf16")


def view(emitter: Emitter, node: Node, indices: Sequence[Expr], position: int) -> Scalar:
    """A result of an op that moves data at indices."""
    pieces: list[tuple[list[str], frozenset[str], Scalar]] = []
    for source in view_sources(emitter.graph, node, indices, position):
        decided = [c.decided() for c in source.conditions]
        if False in decided:
            continue
        found = [t for c, d in zip(source.conditions, decided) if d is None for t in emitter.condition(c)]
        depends = frozenset().union(*(c.index.symbols for c in source.conditions))
        around = _number_around(emitter, node, source.value) if found else None
        with emitter.predicate(found, depends):
            if around is not None:
                return _filled(emitter, source.value, source.indices, around)
            pieces.append((found, depends, emitter.value(source.value, source.indices)))
        if not found:
            break
    else:
        if node.name == "tensor.pad":
            pieces.append(([], frozenset(), _pad_value(emitter, node)))
    result = pieces[-1][2]
    for found, depends, piece in reversed(pieces[:-1]):
        result = emitter.choose(" & ".join(found), depends, piece, result)
    return result


def _pad_value(emitter: Emitter, node: Node) -> Scalar:
    block = node.op.regions[0].blocks[0]
    return Region(emitter).scalar(block.operations[len(block.operations) - 1].operation.operands[0])


def _number_around(emitter: Emitter, node: Node, source: int) -> str | None:
    """The literal that surrounds a padded tensor in memory, which masked loads give without a choice; None for others."""
    if node.name != "tensor.pad":
        return None
    producer = emitter.graph.producer(source)
    widened = source not in emitter.pointers and producer is not None and is_movement(producer)
    read = producer.operands[0] if widened and producer is not None else source
    if read not in emitter.pointers or emitter.graph.values[read].element not in _ELEMENTS:
        return None
    value = _pad_value(emitter, node)
    if not isinstance(value, Value) or not value.is_literal:
        return None
    # Not every number of a wider type is one of the type in memory.
    return value.source if not widened or value.source in _IN_EVERY_TYPE else None


def _filled(emitter: Emitter, number: int, indices: Sequence[Expr], around: str) -> Scalar:
    with emitter.filling(around):
        found = emitter.value(number, indices)
    return replace(found, is_load=False) if isinstance(found, Value) else found
