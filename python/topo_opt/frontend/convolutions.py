"""Convolutions: products and sums over small windows where they are such, else calls of one ATen operator without a bias.

Every form of the operator (`conv1d` ... `conv_transpose3d`, padding by name, without a batch) is written as one `aten.convolution`
on a batch, so that passes know one op. Its bias is added behind it: ATen would add it in a kernel of its own, here it joins what
reads the result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx

from topo_opt.frontend.casts import cast
from topo_opt.frontend.contractions import HALF, contract
from topo_opt.frontend.graph_builder import Argument, GraphBuilder
from topo_opt.frontend.precision import narrow_results
from topo_opt.frontend.signature import dtype_name
from topo_opt.frontend.topo_ops import aten_call

aten = torch.ops.aten

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_WINDOW = 49
"""Products that are added up in a loop nest of its own for each element, at most: 7x7."""
_F32_INTENSITY = 24.0
"""Flops for each byte of input and output up to which a product in f32 takes less time than its memory traffic. cuDNN rounds
factors to TF32, which is several times faster than products that are exact in f32: about 66 Tflop/s on an H200 when this was set
(80 since, `codegen.triton.f32_products`) against 4.8 TB/s, and what cuDNN's result still has to go through once more beyond that."""
_WINDOWED_INTENSITY = 33.0
"""The same for windows that overlap. 8 channels to 64 by windows of 3x3 (32 flops for each byte), with a group norm behind, take 0.545 ms
as a product and 0.555 in TF32 with channels last (H200, 64 images of 128x128); with an activation alone 0.44 and 0.34. Such convolutions are
exact in eager mode, where channels are first, so that TF32 is 500 times its error. 16 channels to 32 (48 flops) take 0.46 and 0.33."""


@dataclass(frozen=True)
class Convolution:
    """The arguments of a convolution. Lists have one number for each of the `spatial` dims; `same`: padding by name."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    same: bool = False

    @property
    def spatial(self) -> int:
        return len(self.kernel)

    @property
    def kernel(self) -> tuple[int, ...]:
        return tuple(self.weight.meta["val"].shape[2:])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the input."""
        return tuple(self.x.meta["val"].shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.x.meta["val"].dtype


def _names(transposed: bool) -> tuple[str, ...]:
    tail = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
    return ("x", "weight", "bias", "stride", "padding", *tail)


_FORMS: dict[Any, tuple[tuple[str, ...], bool]] = {
    aten.convolution.default: (
        ("x", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups"),
        False,
    ),
    **{
        op: (_names(False), False)
        for n in (1, 2, 3)
        for op in (getattr(aten, f"conv{n}d").default, getattr(aten, f"conv{n}d").padding)
    },
    aten.conv_transpose1d.default: (_names(True), True),
    aten.conv_transpose2d.input: (_names(True), True),
    aten.conv_transpose3d.input: (_names(True), True),
}


def convolution_of(node: fx.Node) -> Convolution | None:
    """What a node convolves, None when it is no convolution, or one of a type that stays as it is (f64, integers, complex)."""
    if node.target not in _FORMS:
        return None
    names, transposed = _FORMS[node.target]
    given = dict(zip(names, node.args)) | {"x" if k == "input" else k: v for k, v in node.kwargs.items()}
    x, weight = given["x"], given["weight"]
    spatial = weight.meta["val"].dim() - 2
    tensors = [x, weight, *([given["bias"]] if given.get("bias") is not None else [])]
    dtypes = {t.meta["val"].dtype for t in tensors}
    if len(dtypes) != 1 or not dtypes <= set(_FLOATS) or not 1 <= spatial <= 3:
        return None
    if 0 in x.meta["val"].shape or 0 in weight.meta["val"].shape:
        return None

    def sizes(name: str, default: int) -> tuple[int, ...]:
        value = given.get(name, default)
        listed = [value] if isinstance(value, int) else list(value)
        return tuple(listed * spatial if len(listed) == 1 else listed)

    by_name = isinstance(given.get("padding"), str)
    return Convolution(
        x, weight, given.get("bias"), sizes("stride", 1),
        (0,) * spatial if by_name else sizes("padding", 0), sizes("dilation", 1),
        bool(given.get("transposed", transposed)), sizes("output_padding", 0), int(given.get("groups", 1)),
        same=given.get("padding") == "same",
    )  # fmt: skip


def is_product(c: Convolution) -> bool:
    """Whether every element of the input meets the weights in one place at most: windows side by side, or of one element."""
    if c.transposed or c.groups != 1 or c.same or any(c.padding) or not _is_apart(c):
        return False
    if any(d != 1 and k != 1 for d, k in zip(c.dilation, c.kernel)):
        return False
    return c.dtype in HALF or _intensity(c) <= _F32_INTENSITY


def _is_apart(c: Convolution) -> bool:
    return c.kernel == c.stride or all(k == 1 for k in c.kernel)


def _intensity(c: Convolution) -> float:
    """Flops for each byte of the input and output of a product in f32."""
    outputs, inputs = c.weight.meta["val"].shape[:2]
    window = prod(c.kernel)
    return 2 * inputs * window * outputs / (4 * (inputs * window + outputs))


def is_windowed(c: Convolution) -> bool:
    """Whether a convolution is taken as a product of the windows that its input has, which overlap, with the weights.

    Windows are read where they are, so that this needs as many bytes as the convolution itself. That holds in f32 alone: what few
    channels make of a window is little work, cuDNN would want their order changed, and its products are often in TF32.
    """
    if c.transposed or c.groups != 1 or c.dtype != torch.float32 or _is_apart(c):
        return False
    outputs, channels = c.weight.meta["val"].shape[:2]
    places = prod(c.stride)
    flops = 2 * channels * prod(c.kernel) * outputs
    return flops <= _WINDOWED_INTENSITY * 4 * (channels * places + outputs)


def is_window_sum(c: Convolution) -> bool:
    """Whether every channel of the result is a sum over a small window of one channel of the input (depthwise)."""
    shape = tuple(c.weight.meta["val"].shape)
    batched = len(c.shape) == c.spatial + 2
    depthwise = c.groups > 1 and shape[1] == 1 and shape[0] == c.groups and not c.transposed
    return depthwise and c.spatial <= 2 and batched and prod(c.kernel) <= _WINDOW


def is_lowered(node: fx.Node) -> bool:
    """Whether a convolution becomes kernels of ours."""
    c = convolution_of(node)
    return c is not None and (is_product(c) or is_window_sum(c) or is_windowed(c))


def lower(b: GraphBuilder, node: fx.Node, env: Mapping[fx.Node, Argument]) -> Argument:
    """A convolution of which `is_lowered` holds, as ops that the lowering knows."""
    c = convolution_of(node)
    assert c is not None
    c = _placed(c, env)
    c, batched = _with_batch(b, c)
    lowering = _product if is_product(c) else _window_sum if is_window_sum(c) else _windowed
    result = lowering(b, c)
    return _finished(b, result, c, batched, node.meta["val"])


def leave(b: GraphBuilder, node: fx.Node, env: Mapping[fx.Node, Argument], reason: str) -> Argument | None:
    """A call of `aten.convolution` without a bias, and the bias added; None for what stays the call that it is."""
    c = convolution_of(node)
    if c is None:
        return None
    c = _placed(c, env)
    c, batched = _with_batch(b, c)
    c = _with_padding(b, c)
    result = _convolution(b, c.x, c.weight, c)
    template = {
        "args": [
            {"operand": 0}, {"operand": 1}, None, list(c.stride), list(c.padding), list(c.dilation),
            c.transposed, list(c.output_padding), c.groups,
        ],
        "kwargs": {},
    }  # fmt: skip
    dtypes = " ".join([dtype_name(c.dtype)] * 3)
    texts = ("aten.convolution.default", json.dumps(template), reason, dtypes)
    call = b.call(aten_call(2, 1), (*texts, c.x, c.weight), {}, result)
    return _finished(b, call, c, batched, node.meta["val"])


def _placed(c: Convolution, env: Mapping[fx.Node, Argument]) -> Convolution:
    """The arguments as nodes of the graph that is built."""
    bias = None if c.bias is None else env[c.bias]
    return replace(c, x=env[c.x], weight=env[c.weight], bias=bias)


def _with_batch(b: GraphBuilder, c: Convolution) -> tuple[Convolution, bool]:
    if len(c.shape) == c.spatial + 2:
        return c, True
    return replace(c, x=b.emit(aten.unsqueeze.default, c.x, 0)), False


def _with_padding(b: GraphBuilder, c: Convolution) -> Convolution:
    """Padding by name as numbers: an odd element goes to the end, which ATen has no number for."""
    if not c.same:
        return c
    total = [d * (k - 1) for d, k in zip(c.dilation, c.kernel)]
    c = replace(c, padding=tuple(t // 2 for t in total), same=False)
    if any(t % 2 for t in total):
        ends = [n for t in reversed(total) for n in (0, t % 2)]
        return replace(c, x=b.emit(aten.constant_pad_nd.default, c.x, ends, 0.0))
    return c


def _convolution(b: GraphBuilder, x: fx.Node, weight: fx.Node, c: Convolution) -> torch.Tensor:
    """The fake result of the convolution without its bias."""
    with b.mode:
        return aten.convolution.default(
            x.meta["val"], weight.meta["val"], None, list(c.stride), list(c.padding), list(c.dilation),
            c.transposed, list(c.output_padding), c.groups,
        ).contiguous()  # fmt: skip


def _finished(
    b: GraphBuilder, result: fx.Node, c: Convolution, batched: bool, expected: torch.Tensor
) -> Argument:
    """The bias added (in f32 for halves) and the batch of one taken off."""
    if c.bias is not None:
        bias = b.emit(aten.view.default, c.bias, [-1] + [1] * c.spatial)
        wide = torch.float32 if c.dtype in HALF else c.dtype
        result = b.emit(aten.add.Tensor, cast(b, result, wide), cast(b, bias, wide))
    result = result if batched else b.emit(aten.squeeze.dim, result, 0)
    return narrow_results(b, result, expected)


def _product(b: GraphBuilder, c: Convolution) -> fx.Node:
    """Windows side by side: every one is a row, whose product with the weights is a place of the result.

    Single elements are read where they are, `n k p, o k -> n o p`. Larger windows are put together first.
    """
    batch, channels, *lengths = c.shape
    outputs = c.weight.meta["val"].shape[0]
    counts = [(n - k) // s + 1 for n, k, s in zip(lengths, c.kernel, c.stride)]
    x, single = c.x, all(k == 1 for k in c.kernel)
    for d, (n, count, step) in enumerate(zip(lengths, counts, c.stride)):
        used = (count - 1) * step + 1 if single else count * step
        if used != n or (single and step != 1):
            x = b.emit(aten.slice.Tensor, x, d + 2, 0, used, step if single else 1)
    weight = b.emit(aten.view.default, c.weight, [outputs, -1])
    if single:
        rows = b.emit(aten.reshape.default, x, [batch, channels, prod(counts)])
        result = contract(b, weight, rows, "ok,nkp->nop")
        return b.emit(aten.view.default, result, [batch, outputs, *counts])
    split = [size for count, k in zip(counts, c.kernel) for size in (count, k)]
    x = b.emit(aten.reshape.default, x, [batch, channels, *split])
    places, inside = range(2, 2 + len(split), 2), range(3, 3 + len(split), 2)
    x = b.emit(aten.permute.default, x, [0, *places, 1, *inside])
    rows = b.emit(aten.reshape.default, x, [batch, prod(counts), channels * prod(c.kernel)])
    result = b.emit(aten.permute.default, contract(b, rows, weight, "npk,ok->npo"), [0, 2, 1])
    return b.emit(aten.reshape.default, result, [batch, outputs, *counts])


def _windowed(b: GraphBuilder, c: Convolution) -> fx.Node:
    """A product of windows and weights. Windows are a view of the padded input: `[batch, *places, channels, *inside]`."""
    c = _with_padding(b, c)
    x = c.x
    if any(c.padding):
        ends = [n for p in reversed(c.padding) for n in (p, p)]
        x = b.emit(aten.constant_pad_nd.default, x, ends, 0.0)
    batch, channels = c.shape[:2]
    outputs = c.weight.meta["val"].shape[0]
    for d, (kernel, stride, dilation) in enumerate(zip(c.kernel, c.stride, c.dilation)):
        x = b.emit(aten.unfold.default, x, d + 2, dilation * (kernel - 1) + 1, stride)
        if dilation > 1:
            x = b.emit(aten.slice.Tensor, x, -1, 0, dilation * (kernel - 1) + 1, dilation)
    counts = tuple(x.meta["val"].shape[2 : 2 + c.spatial])
    places, inside = range(2, 2 + c.spatial), range(2 + c.spatial, 2 + 2 * c.spatial)
    x = b.emit(aten.permute.default, x, [0, *places, 1, *inside])
    rows = b.emit(aten.reshape.default, x, [batch, prod(counts), channels * prod(c.kernel)])
    weight = b.emit(aten.view.default, c.weight, [outputs, -1])
    result = contract(b, rows, weight, "npk,ok->nop")
    return b.emit(aten.view.default, result, [batch, outputs, *counts])


def _window_sum(b: GraphBuilder, c: Convolution) -> fx.Node:
    """A depthwise convolution in f32 over two dims, which torch-mlir takes as a loop nest over the window."""
    c = _with_padding(b, c)
    x, weight = cast(b, c.x, torch.float32), cast(b, c.weight, torch.float32)
    flat = c.spatial == 1
    lists: list[Sequence[int]] = [c.stride, c.padding, c.dilation]
    if flat:
        x, weight = (b.emit(aten.unsqueeze.default, t, 2) for t in (x, weight))
        lists = [[first, *sizes] for first, sizes in zip((1, 0, 1), lists)]
    stride, padding, dilation = map(list, lists)
    result = b.emit(
        aten.convolution.default, x, weight, None, stride, padding, dilation, False, [0, 0], c.groups
    )
    return b.emit(aten.squeeze.dim, result, 2) if flat else result
