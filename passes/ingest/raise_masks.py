"""`topo-raise-masks`: masks that are computed from positions become bounds of the keys that attention looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_mlir import ir

from topo_opt.passes.base import Pass
from topo_opt.passes.ingest.dead_ops import erase_dead, has_op, plan_functions
from topo_opt.passes.ingest.mask_bounds import KEY, ROW, Bounds, affine, split
from topo_opt.passes.ingest.mask_tensors import formula_tensor, leaf_tensor
from topo_opt.structured import formula as f
from topo_opt.structured.evaluate import Evaluator
from topo_opt.structured.graph import Graph, Node, read
from topo_opt.structured.index import Expr, symbol

MASKED_OUT = -3e4
"""A number at or below this, added to a score, leaves nothing of its exponential."""


@dataclass(frozen=True)
class RaiseMasks(Pass):
    """Follows the mask of every `topo.attention` back to the positions it is computed from.

    | mask | becomes |
    |---|---|
    | `n <= m`, `n <= m + start`, `n <= position[b, m]` | `high` (and `causal`), with `positions` |
    | `n > m - window`, `n // c == m // c` | `low` and `high` |
    | `n < length[b]` | `high`, with `positions` |
    | always true | no mask |
    | anything else, and what holds besides | a boolean mask of no more dimensions than it needs |

    Conditions may be combined with `and`; additive masks of 0 and a number that leaves nothing count as boolean where every
    row sees some key. Constant tensors are evaluated. What does not depend on the bounds alone stays a mask: padding, an image's
    tokens, a table.
    """

    name = "topo-raise-masks"

    def apply(self, module: Any) -> None:
        """Rewrites the attention ops of the module's functions."""
        with module.context:
            for function in plan_functions(module.operation):
                if has_op(function, "topo.attention"):
                    _raise(function)


@dataclass
class _Masks:
    """The masks of one function, each looked at once."""

    graph: Graph
    evaluator: Evaluator = field(init=False)
    known: dict[tuple[Any, ...], Bounds | None] = field(default_factory=dict)
    tensors: dict[tuple[Any, ...], ir.Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.evaluator = Evaluator(self.graph)

    def bounds(self, mask: int, sizes: Sequence[tuple[str, int]]) -> Bounds | None:
        """What a mask of attention over `sizes` (symbol and size of batch, head, row and key) says; None when it must stay."""
        key = (mask, tuple(sizes))
        if key not in self.known:
            self.known[key] = self._bounds(mask, sizes)
        return self.known[key]

    def _bounds(self, mask: int, sizes: Sequence[tuple[str, int]]) -> Bounds | None:
        shape, keys = self.graph.values[mask].shape or (), sizes[3][1]
        indices = [symbol(name, size) * (0 if have == 1 else 1) for have, (name, size) in zip(shape, sizes)]
        found = self.evaluator.at(mask, indices)
        exact = True
        if isinstance(found, f.Choice):
            found, exact = _boolean(found)
        if not isinstance(found, f.Formula):
            return None
        if f.loaded_names(found) & set(self.evaluator.leaves.truncated):
            return None
        bounds = split(found, self.evaluator.leaves.named, keys)
        if not exact and not bounds.never_empty(keys):
            return None
        unchanged = bounds.rest == [found] and isinstance(found, f.Loaded) and found.leaf.value == mask
        return None if unchanged else bounds


def _boolean(choice: f.Choice) -> tuple[f.Formula | None, bool]:
    """An additive mask as a condition, and whether rows without any key are the same under both."""
    for test, seen, hidden in (
        (choice.test, choice.yes, choice.no),
        (f.negation(choice.test), choice.no, choice.yes),
    ):
        if seen == 0.0 and hidden <= MASKED_OUT:
            return test, hidden == float("-inf")
    return (f.TRUE, True) if choice.yes == choice.no == 0.0 else (None, False)


def _raise(function: ir.Operation) -> None:
    graph = read(function)
    nodes = [n for n in graph.nodes if n.name == "topo.attention"]
    masks = _Masks(graph)
    changed = False
    for node in nodes:
        segments = list(ir.DenseI32ArrayAttr(node.op.attributes["operandSegmentSizes"]))
        if segments[3] and not segments[4] and not {"low", "high"} & set(node.op.attributes):
            changed |= _rewrite(masks, node)
    if changed:
        del graph, masks, nodes
        erase_dead(function)


def _rewrite(masks: _Masks, node: Node) -> bool:
    graph, op = masks.graph, node.op
    (batch, heads, rows, _), keys = (graph.values[node.operands[i]].shape or () for i in (0, 1))
    sizes = (("b", batch), ("h", heads), (ROW, rows), (KEY, keys[2]))
    bounds = masks.bounds(node.operands[3], sizes)
    if bounds is None:
        return False
    with ir.InsertionPoint(op), op.location:
        operands = [*list(op.operands)[:3]]
        rest = f.both(*bounds.rest)
        if rest != f.TRUE:
            operands.append(
                _shared(
                    masks,
                    (rest, sizes),
                    lambda: formula_tensor(graph, masks.evaluator.leaves.named, rest, sizes),
                )
            )
        if bounds.place is not None:
            leaf = masks.evaluator.leaves.named[bounds.place]
            operands.append(
                _shared(masks, (leaf, sizes), lambda: leaf_tensor(graph, leaf, (sizes[0], sizes[2])))
            )
        segments = [1, 1, 1, int(rest != f.TRUE), int(bounds.place is not None)]
        attributes = {name: op.attributes[name] for name in op.attributes} | _attributes(bounds, op)
        attributes["operandSegmentSizes"] = ir.DenseI32ArrayAttr.get(segments)
        made = ir.Operation.create(
            "topo.attention", results=[op.results[0].type], operands=operands, attributes=attributes
        )
    op.results[0].replace_all_uses_with(made.results[0])
    return True


def _shared(masks: _Masks, key: tuple[Any, ...], make) -> ir.Value:
    """A tensor that is made before the first attention that reads it."""
    if key not in masks.tensors:
        masks.tensors[key] = make()
    return masks.tensors[key]


def _attributes(bounds: Bounds, op: ir.Operation) -> dict[str, ir.Attribute]:
    """`low`, `high` and `causal` of the new op."""
    row, place = ir.AffineDimExpr.get(0), ir.AffineDimExpr.get(1)
    order: Expr = symbol(ROW, 2**30) + 1
    high = [h for h in bounds.high if h.source() != order.source()]
    found: dict[str, ir.Attribute] = {
        "causal": ir.BoolAttr.get(bool(op.attributes["causal"].value) or len(high) < len(bounds.high))
    }
    for name, exprs in (("low", bounds.low), ("high", high)):
        if exprs:
            results = [affine(e, row, place) for e in exprs]
            found[name] = ir.AffineMapAttr.get(ir.AffineMap.get(2, 0, results))
    return found
