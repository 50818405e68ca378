"""Ops from export to the generated kernels, run in the interpreter, against eager under the float64 rule.

Cases share a program. None of them may leave anything to ATen, unless it says what.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from float64_rule import check, tensors
from torch import Tensor, nn
from torch.ao.quantization.fx import _decomposed  # noqa: F401  defines the ops of quantized_decomposed
from torch.nn import functional as F

from topo_opt import api
from topo_opt.errors import UnsupportedError
from topo_opt.runtime.numerics import float64_outputs, to_float64

A = torch.ops.aten
Q = torch.ops.quantized_decomposed
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """A function of tensors, its arguments, and the ops it may leave to ATen."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    left: set[str] = field(default_factory=set)


def floats(*shape: int) -> Tensor:
    return torch.linspace(-2.0, 2.0, max(torch.Size(shape).numel(), 1)).mul(7).sin().mul(2).reshape(shape)


def ints(*shape: int, high: int = 5) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) * 7 % high).reshape(shape)


def pairs(*shape: int) -> Tensor:
    return torch.complex(floats(*shape), floats(*shape).flip(0))


def _checked(x: Tensor, n: Tensor) -> Tensor:
    torch._check(n.item() >= 0)
    return x + 1


CASES = {
    "index-casts": Case(lambda x: F.adaptive_max_pool3d(x, (2, 3, 2)), (floats(1, 2, 5, 4, 7),)),
    "average-pool-without-batch": Case(lambda x: F.avg_pool2d(x, 2), (floats(2, 6, 4),)),
    "adaptive-averages": Case(
        lambda x, y: (F.adaptive_avg_pool3d(x, (2, 3, 2)), F.adaptive_avg_pool3d(y, (2, 1, 3))),
        (floats(1, 2, 5, 4, 7), floats(2, 4, 3, 6)),
    ),
    "adaptive-maxima-with-positions": Case(
        lambda x, y: (
            F.adaptive_max_pool2d(x, (3, 2), return_indices=True),
            F.adaptive_max_pool1d(y, 4, return_indices=True),
            F.adaptive_max_pool2d(x.round(), (2, 2), return_indices=True),
        ),
        (floats(2, 2, 7, 5), floats(3, 9)),
    ),
    "maxima-with-positions": Case(
        lambda x, y: (
            F.max_pool2d(x, 3, 2, 1, return_indices=True),
            F.max_pool2d(x.round(), (2, 3), (1, 2), (1, 0), 2, ceil_mode=True, return_indices=True),
            F.max_pool1d(x[0], 2, return_indices=True),
            F.max_pool3d(y, 2, 1, 1, return_indices=True),
        ),
        (floats(2, 2, 7, 8), floats(1, 2, 3, 4, 3)),
    ),
    "quantize": Case(
        lambda x: (
            Q.quantize_per_tensor(x, 0.017, 3, -128, 127, torch.int8),
            Q.quantize_per_tensor(x * 0.1, 0.01, 100, 0, 255, torch.uint8),
        ),
        (floats(4, 9),),
    ),
    "dequantize": Case(
        lambda x: Q.dequantize_per_tensor(x, 0.017, 3, -128, 127, torch.int8),
        (ints(4, 9, high=127).to(torch.int8),),
    ),
    "quantize-by-tensor": Case(
        lambda x, s, z: Q.dequantize_per_tensor(
            Q.quantize_per_tensor(x, s, z, -128, 127, torch.int8), s, z, -128, 127, torch.int8
        ),
        (floats(4, 9), torch.tensor(0.013), torch.tensor(2)),
    ),
    "quantize-channels": Case(
        lambda x, s, z: Q.dequantize_per_channel(
            Q.quantize_per_channel(x, s, z, 1, -128, 127, torch.int8), s, z, 1, -128, 127, torch.int8
        ),
        (floats(4, 3), torch.tensor([0.02, 0.015, 0.03]), torch.tensor([0, 5, -3])),
    ),
    "fake-quantize": Case(
        lambda x: A.fake_quantize_per_tensor_affine_cachemask(x, 0.02, 1, -64, 63), (floats(5, 7),)
    ),
    "bucketize": Case(
        lambda x, b: (torch.bucketize(x, b), torch.bucketize(x, b, right=True, out_int32=True)),
        (torch.tensor([0.0, 0.5, 1.0, -2.0, 7.0, float("nan")]), torch.tensor([0.0, 0.5, 2.0])),
    ),
    "grid-sample": Case(
        lambda x, g: F.grid_sample(x, g.clamp(-1.2, 1.2), align_corners=False),
        (floats(1, 2, 5, 4), floats(1, 3, 3, 2)),
    ),
    "cross-entropy": Case(lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), (floats(5, 7), ints(5))),
    "rrelu": Case(lambda x: F.rrelu(x, training=False), (floats(5, 7),)),
    "complex-from-real": Case(lambda x: (x.to(torch.complex64), x.to(torch.complex128)), (floats(5),)),
    "complex-promotion": Case(
        lambda x, y: (x * y.to(torch.complex128), torch.cat([x, y.real.to(torch.complex64)])),
        (pairs(4), pairs(4)),
    ),
    "complex-functions": Case(
        lambda x, y: (x.abs(), -x, x / y, torch.exp(x), x == y, torch.linalg.vector_norm(x)),
        (pairs(4), pairs(4).flip(0) + 1),
    ),
    "products-over-several-batches": Case(torch.matmul, (floats(2, 1, 3, 4), floats(3, 1, 2, 4, 3))),
    "strides-under-views": Case(
        lambda x: (x[1:].as_strided((2, 2), (3, 1)), x[:, 1].as_strided((3,), (2,), 4)), (floats(4, 5),)
    ),
    "views-of-prims": Case(lambda x: torch.ops.prims.view_of(x) + 1, (floats(5),)),
    "scatter-means": Case(
        lambda x, i: x.scatter_reduce(0, i, x, "mean", include_self=False), (floats(4, 3), ints(4, 3, high=4))
    ),
    "fp8": Case(
        lambda x: (x.to(FP8).float(), (x * 3).to(FP8).float(), (x * 290).to(FP8).float()), (floats(6, 7),)
    ),
    "rows-by-mask": Case(
        lambda x, m, v, w: (
            x.index_put((m,), v),
            x.index_put((m,), v, accumulate=True),
            x.index_put((m[:, None] & torch.ones(1, 3, dtype=torch.bool),), w),
        ),
        (floats(4, 3), torch.tensor([True, False, True, False]), floats(2, 3), floats(6)),
    ),
    "checks-of-data": Case(_checked, (floats(3), torch.tensor(2))),
    "promotion-that-fakes-miss": Case(
        lambda g, x: A.threshold_backward(g, x, 0.5), (ints(6, high=9), floats(6))
    ),
    "shifts": Case(
        lambda i: (i << 2, torch.bitwise_right_shift(i, 1), torch.bitwise_left_shift(i, 3)), (ints(7),)
    ),
}
ALONE = ("views-of-prims",)
"""Torch cannot take these apart, nor what shares a program with them."""


class Together(nn.Module):
    """Several cases in one forward; `spans` tells which inputs are whose."""

    def __init__(self, functions: list[Any], spans: list[tuple[int, int]]):
        super().__init__()
        self.functions, self.spans = functions, spans

    def forward(self, *inputs: Any) -> list[Any]:
        return [f(*inputs[a:b]) for f, (a, b) in zip(self.functions, self.spans, strict=True)]


def _groups() -> list[Any]:
    shared = [name for name in CASES if name not in ALONE]
    chunks = [shared[i : i + 7] for i in range(0, len(shared), 7)] + [[name] for name in ALONE]
    return [pytest.param(chunk, id=f"{chunk[0]}-to-{chunk[-1]}") for chunk in chunks]


@pytest.mark.parametrize("names", _groups())
def test_cases(names: list[str]) -> None:
    inputs: list[Any] = []
    spans = []
    for name in names:
        spans.append((len(inputs), len(inputs) + len(CASES[name].args)))
        inputs += CASES[name].args
    module = Together([CASES[name].function for name in names], spans)
    program = api.compile(module, tuple(inputs), topology="cpu", device="cpu")
    (variant,) = program.plan.functions["main"].variants
    left = {step.op.split(".")[1]: step.reason for step in variant.steps if hasattr(step, "reason")}
    assert set(left) == set().union(*(CASES[name].left for name in names)), left
    found = program(*inputs)
    assert not program.fallbacks
    with torch.no_grad():
        eager = module(*inputs)
    labels = [
        f"{name}[{i}]" for name, out in zip(names, eager, strict=True) for i in range(len(tensors(out)))
    ]
    check(
        tensors(found),
        eager,
        [_exact(CASES[name], out) for name, out in zip(names, eager, strict=True)],
        labels,
    )


def _exact(case: Case, eager: Any) -> Any:
    """The outputs in float64; eager's own of ops that refuse it."""
    try:
        return float64_outputs(Together([case.function], [(0, len(case.args))]), case.args)
    except (AssertionError, RuntimeError):
        return [to_float64(value) for value in tensors(eager)]


class Counting(nn.Module):
    """State in a plain attribute, which export lifts as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.state[1:].add_(x[1:])
        return self.state * 2


def test_state_in_an_attribute_is_a_buffer() -> None:
    module, x = Counting(), floats(3)
    program = api.compile(Counting(), (x,), topology="cpu", device="cpu")
    for _ in range(2):
        assert torch.equal(program(x), module(x))
    assert not program.fallbacks


class Resizing(nn.Module):
    """Eager gives `out` the other shape, and back; torch's export loses that."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(start=1, end=13, out=x)


def test_an_output_argument_of_another_shape_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"shape \[12\] into 'x', which has \[3, 4\]"):
        api.compile(Resizing(), (torch.zeros(3, 4, dtype=torch.int64),), topology="cpu", device="cpu")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_stays_one_call(kind: type[nn.RNNBase]) -> None:
    layer, x = kind(4, 3, bidirectional=True).eval(), floats(6, 2, 4)
    program = api.compile(layer, (x,), topology="cpu", device="cpu")
    (variant,) = program.plan.functions["main"].variants
    assert [step.op.split(".")[1] for step in variant.steps if hasattr(step, "reason")] == [
        kind.__name__.lower()
    ]
    with torch.no_grad():
        torch.testing.assert_close(tensors(program(x)), tensors(layer(x)), rtol=0, atol=0)
