"""`aten.scaled_dot_product_attention` as `topo::attention`, whose operands have rank 4."""

import math
from typing import Any

import torch
from torch import fx

from topo_opt.frontend.casts import cast
from topo_opt.frontend.contractions import contract
from topo_opt.frontend.graph_builder import GraphBuilder
from topo_opt.frontend.topo_ops import ATTENTION

aten = torch.ops.aten

WIDEST = 256
"""Elements of a head up to which a program of the attention kernel holds its rows of the result in registers."""
_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def attention(
    b: GraphBuilder,
    q: fx.Node,
    k: fx.Node,
    v: fx.Node,
    mask: fx.Node | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
) -> fx.Node:
    """The attention of `q` [..., M, D], `k` [..., N, D], `v` [..., N, E], and a mask that broadcasts to [..., M, N].

    Leading dims are folded to two (batch, heads); `k` and `v` may have fewer heads (`enable_gqa`) and broadcast otherwise.

    Args:
        softcap: c of `c * tanh(s / c)`, which scores are limited by before the mask; None for no limit.
    """
    q_shape, k_shape, v_shape = (tuple(n.meta["val"].shape) for n in (q, k, v))
    lead = _lead(q_shape, k_shape, v_shape, enable_gqa)
    kv_lead = (*lead[:-1], k_shape[-3]) if enable_gqa else lead
    m, n = q_shape[-2], k_shape[-2]
    operands = [
        _fold(b, q, (*lead, *q_shape[-2:]), lead),
        _fold(b, k, (*kv_lead, *k_shape[-2:]), kv_lead),
        _fold(b, v, (*kv_lead, *v_shape[-2:]), kv_lead),
    ]
    if mask is not None:
        mask = _mask(b, mask, lead, m, n)
    width = v_shape[-1]
    factor = 1.0 / math.sqrt(q_shape[-1]) if scale is None else float(scale)
    if max(q_shape[-1], width) > WIDEST and mask is None and not (causal or softcap or enable_gqa):
        query, keys, values = operands
        result = _spelled_out(b, query, keys, values, factor)
        return result if len(lead) == 2 else b.emit(aten.reshape.default, result, [*lead, m, width])
    batch, heads = math.prod(lead[:-1]), lead[-1] if lead else 1
    with b.mode:
        value = torch.empty(batch, heads, m, width, dtype=q.meta["val"].dtype, device=q.meta["val"].device)
    result = b.call(ATTENTION, (*operands, mask, factor, causal, softcap or 0.0), {}, value)
    return result if len(lead) == 2 else b.emit(aten.reshape.default, result, [*lead, m, width])


def _spelled_out(b: GraphBuilder, q: fx.Node, k: fx.Node, v: fx.Node, factor: float) -> fx.Node:
    """Two products and a softmax, whose scores stand in memory: for heads wider than a program can hold."""
    dtype = q.meta["val"].dtype
    scores = b.emit(aten.mul.Tensor, contract(b, q, k, "bhmk,bhnk->bhmn"), factor)
    powers = b.emit(
        aten.exp.default, b.emit(aten.sub.Tensor, scores, b.emit(aten.amax.default, scores, [-1], True))
    )
    weights = b.emit(aten.div.Tensor, powers, b.emit(aten.sum.dim_IntList, powers, [-1], True))
    return cast(b, contract(b, cast(b, weights, dtype), v, "bhmk,bhkn->bhmn"), dtype)


def can_attend(
    q: fx.Node,
    k: fx.Node,
    v: fx.Node,
    mask: fx.Node | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    **options: Any,
) -> str | None:
    """Why these arguments cannot be a `topo.attention`, or None when they can."""
    dtypes = {n.meta["val"].dtype for n in (q, k, v)}
    if dropout != 0:
        return "dropout draws from torch's random generator"
    if len(dtypes) != 1 or dtypes.isdisjoint(_TYPES):
        return f"attention on {', '.join(sorted(map(str, dtypes)))}: kernels take one of {', '.join(map(str, _TYPES))}"
    if 0 in (*q.meta["val"].shape, *k.meta["val"].shape, *v.meta["val"].shape):
        return "attention on an empty tensor"
    return None


def _lead(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], grouped: bool) -> tuple[int, ...]:
    if grouped:
        return (*torch.broadcast_shapes(q[:-3], k[:-3], v[:-3]), q[-3])
    return tuple(torch.broadcast_shapes(q[:-2], k[:-2], v[:-2]))


def _fold(b: GraphBuilder, x: fx.Node, shape: tuple[int, ...], lead: tuple[int, ...]) -> fx.Node:
    """`x` broadcast to `shape`, its leading dims folded into batch and heads."""
    if tuple(x.meta["val"].shape) != shape:
        x = b.emit(aten.expand.default, x, list(shape))
    if len(lead) == 2:
        return x
    folded = [math.prod(lead[:-1]), lead[-1] if lead else 1, *shape[-2:]]
    return b.emit(aten.reshape.default, x, folded)


def _mask(b: GraphBuilder, mask: fx.Node, lead: tuple[int, ...], m: int, n: int) -> fx.Node:
    """The mask with rank 4; dims of size 1 stay, unless leading dims have to be folded."""
    shape = tuple(mask.meta["val"].shape)
    if len(lead) <= 2:
        padded = (1,) * (4 - len(shape)) + shape
        return mask if padded == shape else b.emit(aten.reshape.default, mask, list(padded))
    return _fold(b, mask, (*lead, m, n), lead)
