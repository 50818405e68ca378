"""Splits that were asked for and do not reach an operation, as remarks: what is gathered, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence

from topo_opt.pipeline import remarks
from topo_opt.pipeline.diagnostics import place_of
from topo_opt.sharding.annotate import Annotations
from topo_opt.sharding.rule import Rule
from topo_opt.sharding.rule_assignment import factor_axes
from topo_opt.sharding.signature import slots
from topo_opt.sharding.spec import Mesh
from topo_opt.structured.graph import Graph, Node

KIND = "not-split"


_VIEWS = ("tensor.expand_shape", "tensor.collapse_shape", "tensor.extract_slice")


def tell(graph: Graph, rules: Sequence[Rule], found: Annotations, asked: set[int], mesh: Mesh) -> None:
    """Remarks on arguments that are split and that every reader takes whole, and on dimensions of which
    parts are taken, or that are taken apart where parts of devices are no whole pieces.

    Args:
        found: how everything lies and is taken.
        asked: values whose sharding the user gave.
    """
    for node in graph.nodes:
        if node.name in _VIEWS and node.operands[0] not in asked:
            _tell_view(graph, node, rules[node.id], found, mesh)
    names = [slot.name for slot in slots(graph.func, "arguments")]
    for value, name in zip(graph.arguments, names, strict=True):
        lies = found.values.get(value)
        if value not in asked or lies is None or lies.is_replicated:
            continue
        readers = [n for n in graph.nodes if value in n.operands]
        taken = [found.uses.get((n.id, p)) for n in readers for p, v in enumerate(n.operands) if v == value]
        if readers and value not in graph.returns and all(use is None or use.is_replicated for use in taken):
            reason = f"nothing that reads it can be computed in parts ({', '.join(sorted({n.name for n in readers}))}), so every device gathers it"
            remarks.emit(KIND, str(name), reason, _where(readers[0]))


def _tell_view(graph: Graph, node: Node, rule: Rule, found: Annotations, mesh: Mesh) -> None:
    value = node.operands[0]
    lies, taken = found.values.get(value), found.uses.get((node.id, 0))
    if lies is None or taken is None:
        return
    for dim, (carried, have, took) in enumerate(zip(rule.operands[0], lies.dims, taken.dims, strict=True)):
        fitting = sum(len(axes) for axes in factor_axes(rule, carried, have, mesh).values())
        if fitting >= len(have) or len(took) >= len(have):
            continue
        pieces, parts = [rule.factors[f].size for f in carried], mesh.size(have)
        over = f"over {'+'.join(have)} ({parts} devices)"
        if not pieces:
            size = (graph.values[value].shape or ())[dim]
            reason = f"a part of a dimension of {size} is taken, which is split {over}, so every device gathers all of it"
        else:
            nearest = max(n for n in range(1, parts + 1) if pieces[0] % n == 0)
            reason = (
                f"{' x '.join(map(str, pieces))} {over} are no whole pieces of the first, so every device gathers all of it; "
                f"the nearest number of devices is {nearest}"
            )
        remarks.emit(KIND, _name(node), reason, _where(node))


def _name(node: Node) -> str:
    """What the model calls it, layers not told apart."""
    named = re.match(r'loc\("(?:fxnode:)?([^"]*)"(?!:\d)', str(node.op.location))
    return re.sub(r"\d+", "*", named[1]) if named else node.name


def _where(node: Node) -> str | None:
    """The line of the model's source."""
    file, line, _ = place_of(node.op.location)
    return f"{file}:{line}" if file else None
