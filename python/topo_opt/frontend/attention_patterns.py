"""Attention that a model spells out, `softmax(q @ k^T * scale + mask) @ v`, as one `topo::attention`.

Found from the softmax: upwards through what is done to scores (scale, soft cap, masks, casts) to a product, downwards through
what is done to weights (casts, dropout of inference) to another. A softmax between two products that is not raised is a near
miss, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import fx

from topo_opt.frontend.attention import attention, can_attend
from topo_opt.frontend.attention_masks import Mask, combined
from topo_opt.frontend.graph_builder import Argument, GraphBuilder

aten = torch.ops.aten
Env = Mapping[fx.Node, Argument]

MASKED_OUT = -3e4
"""A number at or below this in place of a score leaves nothing of its exponential."""

_PRODUCTS = (aten.matmul.default, aten.bmm.default)
_SOFTMAX = (aten.softmax.int, aten._softmax.default)
_CASTS = (aten._to_copy.default,)
_COPIES = (aten.clone.default, aten.alias.default)
_RESHAPES = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
_FILLS = {aten.full.default: 1, aten.full_like.default: 1, aten.scalar_tensor.default: 0}
_NEARBY = 8
"""Steps within which a product counts as the source of scores."""


@dataclass
class Attentions:
    """A rule for the second product of every attention, and near misses: softmax node -> reason."""

    found: dict[fx.Node, Scores] = field(default_factory=dict)
    misses: dict[fx.Node, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Scores:
    """What happens to `product`, q @ k^T, on its way to the softmax: `cap(scale * product) + masks`.

    `shape` is that of the softmax.
    """

    product: fx.Node
    shape: tuple[int, ...]
    scale: float = 1.0
    softcap: float | None = None
    masks: tuple[Mask, ...] = ()


class _Missed(Exception):
    """Why a softmax between two products is no attention that has a kernel."""


def find(graph: fx.Graph, extern: Mapping[str, str]) -> Attentions:
    """Attention in a static graph.

    Args:
        extern: names of nodes that are left to ATen; attention with one of them stays as it is.
    """
    result = Attentions()
    for node in graph.nodes:
        if node.target not in _SOFTMAX or not _is_along_last(node):
            continue
        second = _weighted_sum(node)
        if second is None or second.name in extern or node.name in extern:
            continue
        try:
            scores = _scores(node)
            if scores is not None:
                _check(node, second, scores)
                result.found[second] = scores
        except _Missed as missed:
            result.misses[node] = str(missed)
    return result


def lower(b: GraphBuilder, node: fx.Node, env: Env, scores: Scores) -> Argument:
    """The attention in place of `node`, its second product."""
    query, keys, values = _operands(node, scores)
    lead = scores.shape[:-2]
    raised = scores.product.meta["val"].shape[:-2]
    folded = [
        _placed(b, _unwrapped(b, env, query), raised, lead),
        _placed(b, b.emit(aten.transpose.int, _unwrapped(b, env, keys), -2, -1), raised, lead),
        _placed(b, _unwrapped(b, env, values), node.meta["val"].shape[:-2], lead),
    ]
    mask = combined(b, env, scores.masks, scores.shape)
    q, k, v = folded
    result = attention(b, q, k, v, mask, scale=scores.scale, softcap=scores.softcap)
    shape = list(node.meta["val"].shape)
    return result if list(result.meta["val"].shape) == shape else b.emit(aten.reshape.default, result, shape)


def _unwrapped(b: GraphBuilder, env: Env, place: _Operand) -> fx.Node:
    """The value of an operand without the cast that widened it."""
    value = env[place.node]
    for dims in place.transposed:
        value = b.emit(aten.transpose.int, value, *dims)
    return value


@dataclass(frozen=True)
class _Operand:
    """`node`, transposed by each of `transposed` in turn."""

    node: fx.Node
    transposed: tuple[tuple[int, int], ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["val"].dtype


def _operands(second: fx.Node, scores: Scores) -> tuple[_Operand, _Operand, _Operand]:
    """q, k^T and v. q and k that were widened for their product are taken as they were when v is half: the product
    accumulates in f32 in any case."""
    q, kt, v = _Operand(scores.product.args[0]), _Operand(scores.product.args[1]), _Operand(second.args[1])
    if v.dtype in (torch.float16, torch.bfloat16):
        narrow = (_unwidened(q), _unwidened(kt))
        if all(n.dtype == v.dtype for n in narrow):
            q, kt = narrow
    return q, kt, v


def _unwidened(place: _Operand) -> _Operand:
    node, transposed = place.node, list(place.transposed)
    while True:
        if (swapped := _swapped(node)) is not None:
            transposed.insert(0, swapped)
            node = node.args[0]
        elif _widens(node):
            return _unwidened(_Operand(node.args[0], tuple(transposed)))
        else:
            return _Operand(node, tuple(transposed)) if place.dtype != node.meta["val"].dtype else place


def _swapped(node: fx.Node) -> tuple[int, int] | None:
    """The two dims that a node exchanges, None when it does something else."""
    if node.target is aten.transpose.int:
        return node.args[1], node.args[2]
    if node.target is not aten.permute.default:
        return None
    rank = node.meta["val"].dim()
    moved = [d for d, source in enumerate(node.args[1]) if source % rank != d]
    return (moved[0], moved[1]) if len(moved) == 2 else None


def _widens(node: fx.Node) -> bool:
    if node.target not in _CASTS:
        return False
    source, target = node.args[0].meta["val"].dtype, node.meta["val"].dtype
    return target == torch.float32 and source in (torch.float16, torch.bfloat16)


def _placed(b: GraphBuilder, value: fx.Node, own: tuple[int, ...], lead: tuple[int, ...]) -> fx.Node:
    """An operand of a product with leading dims `own`, broadcast to them and then seen under `lead`."""
    rows = list(value.meta["val"].shape[-2:])
    if tuple(value.meta["val"].shape[:-2]) != tuple(own):
        value = b.emit(aten.expand.default, value, [*own, *rows])
    return value if tuple(own) == tuple(lead) else b.emit(aten.reshape.default, value, [*lead, *rows])


def _is_along_last(node: fx.Node) -> bool:
    rank = node.meta["val"].dim()
    return rank >= 2 and node.args[1] % rank == rank - 1


def _weighted_sum(softmax: fx.Node) -> fx.Node | None:
    """The product that the weights go to, as its left operand."""
    node = softmax
    while True:
        users = [u for u in _uses(node) if u.op == "call_function"]
        following = [u for u in users if _passes(u) or (u.target in _PRODUCTS and u.args[0] is node)]
        if not following:
            return None
        node = following[0]
        if node.target in _PRODUCTS:
            return node


def _passes(node: fx.Node) -> bool:
    """Whether an op keeps scores or weights as they are, but for their type and how dimensions are folded."""
    if node.target in (*_CASTS, *_COPIES):
        return node.meta["val"].dtype.is_floating_point
    if node.target is aten.dropout.default:
        return node.args[2] is False
    if node.target is aten.permute.default:
        return _moves_ones(node)
    return node.target in _RESHAPES and node.args[0].meta["val"].numel() == node.meta["val"].numel()


def _moves_ones(permute: fx.Node) -> bool:
    """Whether a permutation moves only dimensions of size 1, so that it is a reshape."""
    shape = permute.args[0].meta["val"].shape
    kept = [d % len(shape) for d in permute.args[1] if shape[d] != 1]
    return kept == sorted(kept)


def _uses(node: fx.Node) -> list[fx.Node]:
    """Who reads a node, without checks of its type."""
    return [u for u in node.users if u.target is not aten._assert_tensor_metadata.default]


def _scores(softmax: fx.Node) -> Scores | None:
    """What the softmax is of, None when no product is near.

    Raises:
        _Missed: a product is near, with something in between that attention has no place for.
    """
    factor, node = 1.0, softmax.args[0]
    found = Scores(node, tuple(softmax.meta["val"].shape))
    while node.target not in _PRODUCTS:
        if _passes(node):
            node = node.args[0]
            continue
        step = _RULES.get(node.target)
        taken = None if step is None else step(node)
        if taken is None:
            if _near_product(node, _NEARBY):
                _miss(f"scores pass through {node.target}")
            return None
        node, change = taken
        match change:
            case float():
                factor *= change
            case "tanh":
                if found.softcap is not None or found.scale != 1.0:
                    _miss("scores are capped twice")
                found, factor = replace(found, softcap=factor), 1.0
            case Mask():
                if factor != 1.0 or found.softcap is not None:
                    _miss("scores are scaled or capped after they are masked")
                found = replace(found, masks=(*found.masks, change))
    if found.softcap is not None:
        factor *= found.softcap
    return replace(found, product=node, scale=factor)


Taken = tuple[fx.Node, Any] | None


def _miss(reason: str) -> NoReturn:
    raise _Missed(reason)


def _scaled(node: fx.Node) -> Taken:
    """`x * number` or `x / number`."""
    a, other = node.args[:2]
    if isinstance(a, int | float):
        a, other = other, a
    if not isinstance(a, fx.Node) or not isinstance(other, int | float) or other == 0:
        return None
    return a, (1.0 / other if node.target in (aten.div.Tensor, aten.div.Scalar) else float(other))


def _added(node: fx.Node) -> Taken:
    """Scores plus a mask."""
    a, other = node.args[:2]
    if not (isinstance(a, fx.Node) and isinstance(other, fx.Node)) or node.kwargs.get("alpha", 1) != 1:
        return None
    if not _near_product(a, _NEARBY, strict=True) and _near_product(other, _NEARBY, strict=True):
        a, other = other, a
    if tuple(a.meta["val"].shape) != tuple(node.meta["val"].shape):
        return None
    return a, Mask(other, None, tuple(node.meta["val"].shape))


def _filled(node: fx.Node) -> Taken:
    """`masked_fill(scores, hidden, number)`."""
    a, hidden, number = node.args[:3]
    value = _constant(number)
    if value is None or value > MASKED_OUT or a.meta["val"].shape != node.meta["val"].shape:
        return None
    return a, Mask(hidden, False, tuple(node.meta["val"].shape), finite=math.isfinite(value))


def _chosen(node: fx.Node) -> Taken:
    """`where(keep, scores, number)` or `where(hidden, number, scores)`."""
    test, yes, no = node.args[:3]
    for scores, other, keeps in ((yes, no, True), (no, yes, False)):
        value = _constant(other)
        if value is None or value > MASKED_OUT or not isinstance(scores, fx.Node):
            continue
        if scores.meta["val"].shape == node.meta["val"].shape:
            return scores, Mask(test, keeps, tuple(node.meta["val"].shape), finite=math.isfinite(value))
    return None


def _constant(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, fx.Node) and value.target in _FILLS:
        number = value.args[_FILLS[value.target]]
        return float(number) if isinstance(number, int | float) else None
    if isinstance(value, fx.Node) and value.target in (*_CASTS, *_COPIES):
        return _constant(value.args[0])
    return None


_RULES = {
    aten.mul.Tensor: _scaled,
    aten.mul.Scalar: _scaled,
    aten.div.Tensor: _scaled,
    aten.div.Scalar: _scaled,
    aten.add.Tensor: _added,
    aten.masked_fill.Scalar: _filled,
    aten.masked_fill.Tensor: _filled,
    aten.where.self: _chosen,
    aten.where.ScalarOther: _chosen,
    aten.where.ScalarSelf: _chosen,
    aten.tanh.default: lambda node: (node.args[0], "tanh"),
}


def _near_product(node: Any, steps: int, *, strict: bool = False) -> bool:
    """Whether a product of two tensors is among what a node is computed from, within some steps.

    Args:
        strict: only through ops that scores may pass.
    """
    if not isinstance(node, fx.Node) or node.op != "call_function" or steps == 0:
        return False
    if node.target in _PRODUCTS:
        return True
    if strict and not (_passes(node) or node.target in _RULES):
        return False
    return any(_near_product(n, steps - 1, strict=strict) for n in node.all_input_nodes)


def _check(softmax: fx.Node, second: fx.Node, scores: Scores) -> None:
    """Refuses attention whose weights or scores are needed elsewhere, or that no kernel takes."""
    plane = scores.shape[-2:]
    planes = [
        scores.product.meta["val"].shape,
        second.args[0].meta["val"].shape,
        *(m.shape for m in scores.masks),
    ]
    if any(tuple(shape[-2:]) != plane for shape in planes):
        _miss("rows and keys are folded into other dimensions")
    node = softmax
    while node is not second:
        if len(_uses(node)) > 1:
            _miss("its weights are used elsewhere too")
        if (node := _uses(node)[0]) is second:
            break
    q, k, v = (o.node for o in _operands(second, scores))
    reason = can_attend(q, k, v)
    if reason is not None:
        _miss(reason)
    if second.meta["val"].dtype != v.meta["val"].dtype:
        _miss("its result has another type than its values")
