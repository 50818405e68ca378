"""Products of tensors as `topo::contract` with an einsum-like equation, accumulated in f32 for half inputs.

`contract(a, b, "bmk,bnk->bmn")`: a letter that is missing from an operand broadcasts over it. There is one letter per dim and
no letter stands twice in one operand, which is what `linalg.contract` accepts.
"""

from typing import Any

import torch
from torch import fx

from topo_opt.frontend.graph_builder import GraphBuilder
from topo_opt.frontend.topo_ops import CONTRACT

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
_BATCH = "abcdefghij"


def contract(b: GraphBuilder, x: fx.Node, y: fx.Node, equation: str) -> fx.Node:
    """The contraction of `x` and `y`; f32 when they are half, else of their own type."""
    terms, result = equation.split("->")
    sizes: dict[str, int] = {}
    for term, node in zip(terms.split(","), (x, y), strict=True):
        sizes.update(zip(term, _shape(node), strict=True))
    dtype = x.meta["val"].dtype
    wide = torch.float32 if dtype in HALF else dtype
    with b.mode:
        value = torch.empty([sizes[letter] for letter in result], dtype=wide, device=x.meta["val"].device)
    return b.call(CONTRACT, (x, y, equation, wide), {}, value)


def matmul(b: GraphBuilder, x: fx.Node, y: fx.Node) -> fx.Node:
    """As `aten.matmul`: the last two dims are multiplied, the leading ones broadcast, 1-D operands are vectors."""
    xs, ys = _shape(x), _shape(y)
    x_core, y_core = ("mk"[-len(xs) :], "kn"[: len(ys)])
    x_batch, y_batch = xs[: -len(x_core)], ys[: -len(y_core)]
    batch = torch.broadcast_shapes(x_batch, y_batch)
    x, x_term = _batch_term(b, x, x_batch, batch)
    y, y_term = _batch_term(b, y, y_batch, batch)
    result = _BATCH[: len(batch)] + x_core.replace("k", "") + y_core.replace("k", "")
    return contract(b, x, y, f"{x_term}{x_core},{y_term}{y_core}->{result}")


def linear(b: GraphBuilder, x: fx.Node, weight: fx.Node, bias: fx.Node | None = None) -> fx.Node:
    """As `aten.linear`: `x @ weight.T + bias`."""
    batch = _BATCH[: len(_shape(x)) - 1]
    columns = "n" if len(_shape(weight)) == 2 else ""
    product = contract(b, x, weight, f"{batch}k,{columns}k->{batch}{columns}")
    return add_bias(b, product, bias)


def add_bias(
    b: GraphBuilder, product: fx.Node, bias: fx.Node | None, beta: Any = 1, alpha: Any = 1
) -> fx.Node:
    """`beta * bias + alpha * product` in the type of the product. As in torch, `beta = 0` does not read the bias."""
    if alpha != 1:
        product = b.emit(aten.mul.Scalar, product, alpha)
    if bias is None or beta == 0:
        return product
    dtype = product.meta["val"].dtype
    if bias.meta["val"].dtype != dtype:
        bias = b.emit(aten._to_copy.default, bias, dtype=dtype)
    if beta != 1:
        bias = b.emit(aten.mul.Scalar, bias, beta)
    return b.emit(aten.add.Tensor, product, bias)


def _add_product(
    b: GraphBuilder, bias: fx.Node, x: fx.Node, y: fx.Node, *, beta: Any = 1, alpha: Any = 1
) -> fx.Node:
    return add_bias(b, matmul(b, x, y), bias, beta, alpha)


def _add_summed_product(
    b: GraphBuilder, bias: fx.Node, x: fx.Node, y: fx.Node, *, beta: Any = 1, alpha: Any = 1
) -> fx.Node:
    """`addbmm`: the batch is summed over too, which needs it moved next to k and flattened into it."""
    batch, rows, inner = _shape(x)
    columns = _shape(y)[2]
    x = b.emit(aten.permute.default, x, [1, 0, 2])
    x = b.emit(aten.reshape.default, x, [rows, batch * inner])
    y = b.emit(aten.reshape.default, y, [batch * inner, columns])
    return add_bias(b, matmul(b, x, y), bias, beta, alpha)


# Op -> rule(builder, *args, **kwargs) with args as of the op, half tensors unwidened; the result is f32 when they are half.
CONTRACTIONS: dict[Any, Any] = {
    aten.linear.default: linear,
    aten.mm.default: matmul,
    aten.bmm.default: matmul,
    aten.matmul.default: matmul,
    aten.mv.default: matmul,
    aten.dot.default: matmul,
    aten.vdot.default: matmul,
    aten.addmm.default: _add_product,
    aten.baddbmm.default: _add_product,
    aten.addmv.default: _add_product,
    aten.addbmm.default: _add_summed_product,
}


def can_contract(*operands: fx.Node) -> bool:
    """Whether a product of these tensors is a `linalg.contract`: one type, float of 16 bits or more, or integer."""
    dtypes = {n.meta["val"].dtype for n in operands}
    return len(dtypes) == 1 and dtypes <= _CONTRACTED


_CONTRACTED = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _batch_term(
    b: GraphBuilder, x: fx.Node, own: tuple[int, ...], batch: tuple[int, ...]
) -> tuple[fx.Node, str]:
    """`x` without the batch dims that broadcast, and the letters of the others."""
    letters = _BATCH[len(batch) - len(own) : len(batch)]
    broadcast = [i for i, size in enumerate(own) if size == 1 and batch[i + len(batch) - len(own)] != 1]
    if broadcast:
        kept = [size for i, size in enumerate(_shape(x)) if i not in broadcast]
        x = b.emit(aten.reshape.default, x, kept)
    return x, "".join(letter for i, letter in enumerate(letters) if i not in broadcast)
