"""Following one element of a tensor back through what leaves numbers as they are: views, widening casts, negations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from topo_opt.structured.access import VIEWS, domain_indices, view_sources
from topo_opt.structured.graph import Graph, Node
from topo_opt.structured.index import Expr

EXACT = ("arith.extf",)
"""Scalar ops that keep a number."""


@dataclass(frozen=True)
class Origin:
    """The element is `value` at `indices`, with the other sign when `negated`."""

    value: int
    indices: tuple[Expr, ...]
    negated: bool = False


def origins(
    graph: Graph, value: int, indices: Sequence[Expr], *, negations: bool = False
) -> Iterator[Origin]:
    """Everything that the element of `value` at `indices` is a copy of, itself first, then ever further back.

    Stops at an op that computes, at a function argument, and where the indices leave open which source is read.

    Args:
        negations: go through negations too.
    """
    at: Origin | None = Origin(value, tuple(indices))
    while at is not None:
        yield at
        at = _before(graph, at, negations)


def _before(graph: Graph, at: Origin, negations: bool) -> Origin | None:
    node = graph.producer(at.value)
    if node is None:
        return None
    position = graph.values[at.value].position
    if node.name in VIEWS:
        for source in view_sources(graph, node, at.indices, position):
            decided = [c.decided() for c in source.conditions]
            if False in decided:
                continue
            return None if None in decided else Origin(source.value, tuple(source.indices), at.negated)
        return None
    negates = _copied_operand(node, negations)
    if negates is None:
        return None
    loop = domain_indices(node, position, at.indices)
    return Origin(node.operands[0], tuple(node.maps[0].apply(loop)), at.negated ^ negates)


def _copied_operand(node: Node, negations: bool) -> bool | None:
    """Whether a loop nest copies its one operand (False) or negates it (True); None when it does neither."""
    if node.name != "linalg.generic" or node.inputs != 1 or len(node.results) != 1 or node.has_reduction:
        return None
    if not node.output_map(0).is_projected_permutation:
        return None
    block = node.op.regions[0].blocks[0]
    current = hash(block.arguments[0])
    negated = False
    *body, terminator = [o.operation for o in block.operations]
    for op in body:
        if hash(op.operands[0] if len(op.operands) == 1 else None) != current:
            return None
        if op.name == "arith.negf" and negations:
            negated = not negated
        elif op.name not in EXACT:
            return None
        current = hash(op.results[0])
    return negated if hash(terminator.operands[0]) == current else None
