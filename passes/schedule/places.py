"""Where the elements of a kernel's values stand, relative to one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from topo_opt.passes.schedule.outline import closure
from topo_opt.passes.schedule.roles import Roles
from topo_opt.structured.access import (
    VIEWS,
    domain_indices,
    forward_indices,
    is_movement,
    shows_windows,
    view_sources,
)
from topo_opt.structured.graph import Graph, Node
from topo_opt.structured.index import Expr


@dataclass(frozen=True)
class Place:
    """The element of `value` at `indices`."""

    value: int
    indices: tuple[Expr, ...]


def find_place(roles: Roles, nodes: Sequence[Node], known: Place, wanted: int) -> tuple[Expr, ...] | None:
    """Indices of the element of `wanted` that comes, one to one, from what the element `known` comes from as well.

    Only through the given nodes and the views between them. None when there is no such element.
    """
    needed, _ = closure(roles, nodes)
    inside = replace(roles.graph, nodes=needed)
    kept = {n.id for n in needed}
    for place in _sources(roles.graph, kept, known):
        found = forward_indices(inside, place.value, place.indices).get(wanted)
        if found is not None:
            return tuple(found)
    return None


def _sources(graph: Graph, kept: set[int], place: Place) -> list[Place]:
    """The place and, after it, what it is computed from element by element."""
    found = [place]
    for current in found:
        node = graph.producer(current.value)
        if node is None or node.id not in kept:
            continue
        size = graph.values[current.value].numel
        found.extend(p for p in _operands(graph, node, current) if graph.values[p.value].numel == size)
    return found


def _operands(graph: Graph, node: Node, place: Place) -> list[Place]:
    position = graph.values[place.value].position
    if shows_windows(node):
        return []
    if node.name in VIEWS or is_movement(node):
        sources = view_sources(graph, node, place.indices, position)
        plain = len(sources) == 1 and not sources[0].conditions
        return [Place(sources[0].value, tuple(sources[0].indices))] if plain else []
    if node.name != "linalg.generic" or node.has_reduction:
        return []
    loop = domain_indices(node, position, place.indices)
    operands = zip(node.operands[: node.inputs], node.maps)
    return [Place(o, tuple(m.apply(loop))) for o, m in operands if m.is_projected_permutation]
