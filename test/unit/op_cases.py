"""A wide table of small programs: every kind of op the compiler meets, over the shapes and dtypes where they differ.

One row is `name -> (function, make_inputs)`; `make_inputs(dtype)` gives the example arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Make = Callable[[torch.dtype], tuple[Any, ...]]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
F32 = (torch.float32,)
I64 = (torch.int64,)
INTS = (torch.int64, torch.int32, torch.int8, torch.uint8)
COMPLEX = (torch.complex64,)
BOOL = (torch.bool,)


@dataclass(frozen=True)
class OpCase:
    """A function with its inputs for each of `dtypes`."""

    function: Callable[..., Any]
    make: Make
    dtypes: tuple[torch.dtype, ...]


def values(*shapes: tuple[int, ...], low: float = -3.0, high: float = 3.0) -> Make:
    """Random tensors of these shapes: uniform floats and complex numbers, small integers, booleans."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(_random(shape, dtype, low, high) for shape in shapes)

    return make


def _random(shape: tuple[int, ...], dtype: torch.dtype, low: float, high: float) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) > 0.4
    if dtype.is_complex:
        return torch.complex(
            _random(shape, torch.float32, low, high), _random(shape, torch.float32, low, high)
        ).to(dtype)
    if dtype.is_floating_point:
        return (torch.rand(shape) * (high - low) + low).to(dtype)
    return torch.randint(0 if dtype == torch.uint8 else -9, 10, shape).to(dtype)


def with_indices(shape: tuple[int, ...], *indices: Any) -> Make:
    """A random tensor and constant index tensors."""
    return lambda dtype: (_random(shape, dtype, -3.0, 3.0), *(torch.tensor(i) for i in indices))


A = torch.ops.aten
M = (5, 7)
V = values(M)
P = values(M, low=0.1, high=3.0)
U = values(M, low=-0.9, high=0.9)
TWO = values(M, M)
IMAGE = values((2, 3, 8, 7))

_UNARY: dict[str, tuple[Callable[..., Any], Make]] = {
    name: (getattr(torch, name), make)
    for names, make in (
        (
            "abs neg sin cos tanh exp sigmoid erf ceil floor round trunc sign square sgn expm1 atan sinh cosh asinh exp2",
            V,
        ),
        ("log log2 log10 log1p sqrt rsqrt reciprocal digamma lgamma", P),
        ("asin acos atanh tan erfinv", U),
    )
    for name in names.split()
}
_ACTIVATIONS = {
    name: (getattr(F, name), V)
    for name in [
        "relu",
        "relu6",
        "silu",
        "gelu",
        "elu",
        "selu",
        "celu",
        "leaky_relu",
        "softplus",
        "mish",
        "hardswish",
        "hardsigmoid",
        "hardtanh",
        "softsign",
        "tanhshrink",
        "logsigmoid",
        "softshrink",
        "hardshrink",
    ]
}

_FLOAT_CASES: dict[str, tuple[Callable[..., Any], Make]] = {
    **_UNARY,
    **_ACTIVATIONS,
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), V),
    "add_broadcast": (lambda x, y, z: x + y * z, values((4, 1, 6), (3, 1), (6,))),
    "add_scalar": (lambda x: x + 2.5 - x * 3, V),
    "rsub": (lambda x: 1.0 - x, V),
    "div": (torch.div, values(M, M, low=0.5, high=3.0)),
    "floor_divide": (torch.floor_divide, values(M, M, low=0.5, high=3.0)),
    "remainder": (lambda x: torch.remainder(x, 1.3), V),
    "fmod": (lambda x: torch.fmod(x, 1.3), V),
    "pow_scalar": (lambda x: x**3 + x**2, V),
    "pow_half": (lambda x: x**0.5 + x**-0.5, P),
    "pow_tensor": (torch.pow, values(M, M, low=0.2, high=2.0)),
    "maximum": (torch.maximum, TWO),
    "clamp": (lambda x: x.clamp(-1.0, 0.5), V),
    "clamp_min_tensor": (lambda x, y: torch.clamp(x, min=y), TWO),
    "where": (lambda x, y: torch.where(x > y, x, 0.5 * y), TWO),
    "masked_fill": (lambda x, y: x.masked_fill(y > 0, float("-inf")), TWO),
    "comparisons": (lambda x, y: (x < y, x <= y, x > y, x >= y, x == y, x != y), TWO),
    "isnan": (lambda x: (torch.isnan(x / (x - x)), torch.isinf(1 / (x - x))), V),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.3), TWO),
    "addcmul": (lambda x, y: torch.addcmul(x, x, y, value=0.5), TWO),
    "atan2": (torch.atan2, TWO),
    "hypot": (torch.hypot, TWO),
    "logaddexp": (torch.logaddexp, TWO),
    "nan_to_num": (lambda x: torch.nan_to_num(torch.log(x)), V),
    "sum_all": (lambda x: x.sum(), V),
    "sum_dims": (lambda x: x.sum((0, 2)), values((3, 5, 7))),
    "sum_keepdim": (lambda x: x.sum(1, keepdim=True), V),
    "mean": (lambda x: (x.mean(), x.mean(-1)), V),
    "var": (lambda x: (x.var(1), x.var(1, correction=0), x.std()), V),
    "var_mean": (lambda x: torch.var_mean(x, 1), V),
    "prod": (lambda x: x.prod(1), V),
    "amax_amin": (lambda x: (x.amax(1), x.amin((0, 1)), x.max(), x.min()), V),
    "max_with_index": (lambda x: torch.max(x, 1), V),
    "min_with_index": (lambda x: torch.min(x, 0, keepdim=True), V),
    "argmax": (lambda x: (x.argmax(), x.argmax(1), x.argmin(0)), V),
    "argmax_ties": (lambda x: (x.round().argmax(1), x.round().argmin(1)), V),
    "norm": (
        lambda x: (x.norm(), torch.linalg.vector_norm(x, 1, 1), torch.linalg.vector_norm(x, float("inf"), 0)),
        V,
    ),
    "logsumexp": (lambda x: torch.logsumexp(x, 1), V),
    "softmax": (lambda x: x.softmax(-1), V),
    "softmax_dim0": (lambda x: x.softmax(0), V),
    "log_softmax": (lambda x: x.log_softmax(-1), V),
    "cumsum": (lambda x: (x.cumsum(0), x.cumsum(1)), V),
    "cumprod": (lambda x: x.cumprod(1), V),
    "logcumsumexp": (lambda x: torch.logcumsumexp(x, 1), V),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (7,), w, b), values(M, (7,), (7,))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (7,), w, 1e-5), values(M, (7,))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), values((2, 4, 3, 5), (4,), (4,))),
    "batch_norm": (
        lambda x, m, w, b: F.batch_norm(x, m, w.abs() + 0.5, w, b),
        values((2, 3, 5), (3,), (3,), (3,)),
    ),
    "instance_norm": (F.instance_norm, values((2, 3, 5))),
    "mm": (torch.mm, values((5, 7), (7, 3))),
    "mv_dot": (lambda x, y, z: (x @ y, torch.dot(y, z)), values(M, (7,), (7,))),
    "bmm": (torch.bmm, values((2, 5, 7), (2, 7, 3))),
    "matmul_broadcast": (torch.matmul, values((3, 1, 5, 7), (2, 7, 4))),
    "linear": (F.linear, values((2, 5, 7), (3, 7), (3,))),
    "addmm": (lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2.0), values((3,), (5, 7), (7, 3))),
    "baddbmm": (torch.baddbmm, values((2, 5, 3), (2, 5, 7), (2, 7, 3))),
    "outer": (torch.outer, values((5,), (3,))),
    "einsum": (lambda x, y: torch.einsum("bij,kj->bki", x, y), values((2, 5, 7), (3, 7))),
    "attention": (F.scaled_dot_product_attention, values((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8))),
    "attention_causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        values((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8)),
    ),
    "attention_masked": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m > -1),
        values((1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8), (1, 1, 5, 6)),
    ),
    "conv1d": (lambda x, w: F.conv1d(x, w, stride=2, padding=1), values((2, 3, 9), (4, 3, 3))),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), values((2, 3, 8, 7), (4, 3, 3, 3), (4,))),
    "conv2d_grouped": (lambda x, w: F.conv2d(x, w, dilation=2, groups=3), values((1, 3, 8, 7), (6, 1, 3, 3))),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), values((1, 3, 4, 5), (3, 2, 3, 3))),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), IMAGE),
    "max_pool2d_indices": (lambda x: F.max_pool2d(x, 2, return_indices=True), IMAGE),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), IMAGE),
    "avg_pool2d_unpadded": (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), IMAGE),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 3, 1), values((2, 3, 9))),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (4, 1)), values((1, 2, 8, 7))),
    "upsample_nearest": (lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"), IMAGE),
    "upsample_bilinear": (
        lambda x: F.interpolate(x, size=(11, 5), mode="bilinear", align_corners=False),
        IMAGE,
    ),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), values((1, 8, 3, 5))),
    "reflection_pad": (lambda x: F.pad(x, (1, 2), mode="reflect"), values((1, 3, 6))),
    "replication_pad": (lambda x: F.pad(x, (1, 2, 0, 1), mode="replicate"), IMAGE),
    "embedding_bag_mean": (lambda w: w[torch.tensor([[0, 2], [1, 1]])].mean(1), V),
    "cosine_similarity": (F.cosine_similarity, TWO),
    "cdist": (torch.cdist, values((4, 3), (5, 3))),
    "normalize": (lambda x: F.normalize(x, dim=1), V),
    "glu": (lambda x: F.glu(x, 0), values((4, 5))),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.tensor([1, 0, 6, 2, 2])), V),
    "to_int_and_back": (lambda x: x.to(torch.int32).to(torch.float32) + x, V),
    "rope": (
        lambda x, c, s: x * c + torch.cat([-x[..., 4:], x[..., :4]], -1) * s,
        values((2, 3, 5, 8), (5, 8), (5, 8)),
    ),
    "tril_triu": (lambda x: (x.tril(1), x.triu(-1)), V),
    "bernoulli_free_dropout": (lambda x: F.dropout(x, 0.5, training=False), V),
}

_ANY_CASES: dict[str, tuple[Callable[..., Any], Make]] = {
    "reshape": (lambda x: x.reshape(7, 5).t().reshape(-1), V),
    "transpose": (lambda x: x.permute(2, 0, 1).contiguous(), values((2, 3, 4))),
    "slices": (lambda x: (x[1:4, ::2], x[-1], x[..., 3]), V),
    "select_unbind": (lambda x: torch.unbind(x, 0)[2], V),
    "cat": (lambda x, y: torch.cat([x, y, x], 0), values((2, 3), (4, 3))),
    "stack": (lambda x, y: torch.stack([x, y], 1), TWO),
    "split": (lambda x: torch.split(x, 3, 1), V),
    "chunk": (lambda x: x.chunk(3, 1), V),
    "expand": (lambda x: x.expand(3, 5, 7), values((5, 1))),
    "repeat": (lambda x: x.repeat(2, 3), V),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), V),
    "flip": (lambda x: x.flip(1), V),
    "roll": (lambda x: x.roll((1, -2), (0, 1)), V),
    "unfold": (lambda x: x.unfold(1, 3, 2), V),
    "narrow": (lambda x: x.narrow(1, 2, 3), V),
    "diagonal": (lambda x: x.diagonal(1), V),
    "squeeze": (lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze(1), V),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 3), value=1), V),
    "pad_negative": (lambda x: F.pad(x, (-1, 2)), V),
    "embedding": (lambda w, i: F.embedding(i, w), with_indices((9, 4), [[0, 8], [3, 3]])),
    "index_select": (lambda x, i: x.index_select(1, i), with_indices(M, [6, 0, 2])),
    "index_tensors": (lambda x, i, j: x[i, j], with_indices(M, [0, 4, 2], [6, 1, 1])),
    "index_negative": (lambda x, i: x[i], with_indices(M, [-1, 0, -5])),
    "index_outer": (lambda x, i: x[:, i], with_indices((3, 4, 5), [[0, 3], [1, 1]])),
    "gather": (lambda x, i: x.gather(1, i), with_indices(M, [[0, 6], [1, 1], [2, 0], [3, 3], [4, 5]])),
    "take_along_dim": (lambda x, i: x.take_along_dim(i, 0), with_indices(M, [[0, 1, 2, 3, 4, 0, 1]])),
    "index_copy": (lambda x, i: x.index_copy(0, i, x[:2] + x[:2]), with_indices(M, [3, 1])),
    "index_put": (lambda x, i: x.index_put((i,), x[:2]), with_indices(M, [3, 1])),
    "index_put_accumulate": (
        lambda x, i: x.index_put((i,), x[:3], accumulate=True),
        with_indices(M, [3, 1, 3]),
    ),
    "index_add": (lambda x, i: x.index_add(0, i, x[:3]), with_indices(M, [3, 1, 3])),
    "scatter": (
        lambda x, i: x.scatter(1, i, x.flip(0)),
        with_indices(M, [[0, 6], [1, 2], [2, 0], [3, 4], [4, 5]]),
    ),
    "scatter_value": (
        lambda x, i: x.scatter(1, i, 1),
        with_indices(M, [[0, 6], [1, 2], [2, 0], [3, 4], [4, 5]]),
    ),
    "scatter_add": (lambda x, i: x.scatter_add(0, i, x), with_indices((3, 2), [[0, 0], [0, 2], [2, 2]])),
    "slice_scatter": (lambda x: x.slice_scatter(x[:2] + x[1:3], 0, 1, 5, 2), V),
    "select_scatter": (lambda x: x.select_scatter(x[0] + x[1], 0, 2), V),
    "zeros_like": (lambda x: (torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 3)), V),
    "eq_ne": (lambda x, y: (x == y, x != y), TWO),
    "clone_identity": (lambda x: (x, x.clone()), V),
    "one_element": (lambda x: x + x, values((1,))),
    "zero_dim": (lambda x: x * x, values(())),
    "empty": (lambda x: (x + x, x.t().contiguous()), values((3, 0))),
    "empty_sum": (lambda x: x.sum(1), values((3, 0))),
    "rank5": (lambda x: (x + x).permute(4, 0, 3, 1, 2), values((2, 1, 3, 2, 4))),
}

_INT_CASES: dict[str, tuple[Callable[..., Any], Make]] = {
    "int_arithmetic": (lambda x, y: (x + y, x - y, x * y, -x), TWO),
    "int_order": (lambda x, y: (x < y, torch.maximum(x, y), x.clamp(1, 5)), TWO),
    "int_bits": (lambda x, y: (x & y, x | y, x ^ y, ~x), TWO),
    "int_sum": (lambda x: (x.sum(), x.sum(1)), V),
    "int_extrema": (lambda x: (x.amax(1), x.min(), x.argmax(1)), V),
    "int_to_float": (lambda x: (x.float() * 0.5, x / 2, x.bool()), V),
    "int_floor_divide": (lambda x: (x // 3, x % 3), V),
    "int_cumsum": (lambda x: x.cumsum(1), V),
    "int_abs": (torch.abs, V),
    "int_shift": (lambda x: (x << 1, x >> 1), V),
}

_OTHER: dict[str, OpCase] = {
    "bool_logic": OpCase(lambda x, y: (x & y, x | y, x ^ y, ~x, x.logical_and(y)), TWO, BOOL),
    "bool_add": OpCase(lambda x, y: (x + y, x * y, x.float() - y.float()), TWO, BOOL),
    "reciprocal_of_zero": OpCase(
        lambda x: (1.0 / x, x.reciprocal()), lambda _: (torch.tensor([2.0, 0.0, -0.0]),), F32
    ),
    "bool_any_all": OpCase(lambda x: (x.any(), x.all(1), x.any(0), x.sum(1)), V, BOOL),
    "bool_to_float": OpCase(lambda x: (x.float(), x.long() + 1, x.to(torch.bfloat16)), V, BOOL),
    "bool_where": OpCase(lambda x: torch.where(x, 1.0, -2.0), V, BOOL),
    "complex_arithmetic": OpCase(lambda x, y: (x * y, x + y, x - y, x / y), TWO, COMPLEX),
    "complex_parts": OpCase(lambda x: (x.real, x.imag, x.abs(), x.conj() * x), V, COMPLEX),
    "complex_rope": OpCase(
        lambda x, c: torch.view_as_real(torch.view_as_complex(x.reshape(3, 4, 2)) * c).flatten(1),
        lambda _: (torch.randn(3, 8), torch.polar(torch.ones(3, 4), torch.randn(3, 4))),
        F32,
    ),
    "arange": OpCase(lambda x: torch.arange(7) * 2 + x[0], values((5,)), I64),
    "arange_step": OpCase(lambda x: torch.arange(2, 20, 3) + x[:6], values((7,)), I64),
    "linspace": OpCase(lambda x: torch.linspace(0, 1, 7) + x, values((7,)), F32),
    "one_hot": OpCase(lambda i: F.one_hot(i, 5), lambda _: (torch.tensor([0, 4, 2]),), I64),
    "triangular_mask": OpCase(
        lambda x: torch.ones(5, 5, dtype=torch.bool).tril() & (x > 0), values((5,)), I64
    ),
    "bucketize": OpCase(
        lambda x, b: torch.bucketize(x, b), lambda _: (torch.rand(6), torch.tensor([0.2, 0.5])), F32
    ),
    "topk": OpCase(lambda x: x.topk(3, -1), V, F32),
    "sort": OpCase(lambda x: x.sort(-1), V, F32),
    "argsort": OpCase(lambda x: x.argsort(-1, descending=True), V, F32),
    "float64": OpCase(lambda x, y: (x @ y.t()).softmax(-1).sum(0), TWO, (torch.float64,)),
    "mixed_dtypes": OpCase(
        lambda x, y: x * y + x.half() + 1,
        lambda _: (torch.randn(3, 4), torch.randn(3, 4, dtype=torch.bfloat16)),
        F32,
    ),
    "uint8_image": OpCase(
        lambda x: (x.float() / 255 - 0.5).permute(0, 3, 1, 2), values((1, 4, 5, 3)), (torch.uint8,)
    ),
    "quantized_like": OpCase(
        lambda q, s: (q.to(torch.float32) * s).to(torch.bfloat16),
        lambda _: (torch.randint(-128, 127, (4, 6), dtype=torch.int8), torch.rand(4, 1)),
        F32,
    ),
}

_ONE_DTYPE = ("digamma", "lgamma", "erfinv", "hypot", "cdist", "upsample_bilinear", "cross_entropy")
"""Left to ATen, or without a half kernel in eager: nothing more to learn from other dtypes."""

CASES: dict[str, OpCase] = {
    **{
        name: OpCase(f, make, F32 if name in _ONE_DTYPE else FLOATS)
        for name, (f, make) in _FLOAT_CASES.items()
    },
    **{
        name: OpCase(f, make, (torch.float32, torch.int64, torch.bool))
        for name, (f, make) in _ANY_CASES.items()
    },
    **{name: OpCase(f, make, INTS) for name, (f, make) in _INT_CASES.items()},
    **_OTHER,
}
