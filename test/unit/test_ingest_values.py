"""Ops whose lowering by torch-mlir differs from eager: our rules must give eager's values."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from topo_opt.frontend.ingest import structured_module
from topo_opt.reference import run

NAN = torch.tensor([[math.nan, 1.0, -2.0, math.inf], [0.5, -math.inf, 3.0, math.nan]])
X = torch.tensor([[-1.5, 2.5, 0.3, -0.0], [7.0, -3.2, 0.5, 1.0]])
Y = torch.tensor([[0.5, -2.0, 0.1, 3.0], [-2.0, 1.1, -0.25, 0.1]])
BIG = torch.tensor([2**53 + 1, -(2**53) - 1, 2**62 + 3, -7, 7, -(2**63)])
SMALL = torch.tensor([3, 2, 7, 2, -2, 3])
U8 = torch.tensor([0, 1, 127, 128, 200, 255], dtype=torch.uint8)
V8 = torch.tensor([3, 255, 2, 7, 100, 1], dtype=torch.uint8)
I8 = torch.tensor([-128, -1, 0, 5, 100, 127], dtype=torch.int8)
H, B16 = X.half(), X.bfloat16()
ROWS = torch.arange(24.0).view(4, 6)

# Name -> (function of its tensors to a list of results, tensors). One program each, since starting one is what takes time.
GROUPS: dict[str, tuple[Callable[..., list[torch.Tensor]], tuple[torch.Tensor, ...]]] = {
    "nan": (
        lambda x, y: [
            torch.maximum(x, y), torch.minimum(y, x), torch.fmax(x, y), torch.fmin(y, x), x.clamp(-0.5, 0.5),
            x.clamp(min=0.0), F.relu6(x), F.hardtanh(x), x.relu(), torch.isfinite(x), x.argmax(1), x.argmin(),
            *x.max(dim=0), *x.min(dim=1, keepdim=True), x.amax(0), torch.softmax(x, 1), 1 / x,
        ],
        (NAN, Y),
    ),
    "floats": (
        lambda x, y: [
            x // y, torch.remainder(x, y), torch.fmod(x, y), torch.fmod(x, -0.7), x // 0.1, torch.round(x),
            torch.div(x, y, rounding_mode="trunc"), F.gelu(x, approximate="tanh"), torch.logaddexp(x, y), x ** 2,
        ],
        (X, Y),
    ),
    "integers": (
        lambda x, y: [
            x // y, x % y, torch.fmod(x, y), torch.div(x, y, rounding_mode="trunc"), x // -3, x % 5, y**3, x * y,
            x.sum(), y.prod(), y.float().mean(), torch.cumsum(x, 0), y > 2.5, x.clamp(-3, 5),
        ],
        (BIG, SMALL),
    ),
    "bytes": (
        lambda x, y, z: [
            x + y, x - y, x * 2, x // y, x % y, x > y, x + z, x / y, x.sum(), x.max(), *x.max(0), x.float(), ~x, x >> 1,
            torch.where(x > 100, x, z), torch.cat([x, z]), x.clamp(10, 200), x.amin(0), z.abs(), z * z, -z, z // 3,
        ],
        (U8, V8, I8),
    ),
    "halves": (
        lambda x, y: [
            x * 3 + 0.1, x + y, x < y, x.softmax(-1), x.sum(), x.mean(0), torch.cumsum(x, 1), x.exp(), x.var(1),
            x * torch.arange(4), x.sum(dtype=torch.float32), x.prod(1), torch.cat([x, y]), x.to(torch.int8), x**2,
        ],
        (H, B16),
    ),
    "places": (
        lambda x, i: [
            x[:, i], x[i], x.index_put((i,), x[:3] * 2), x.index_put((i,), x[:3], accumulate=True), x.index_add(1, i + 1, x[:, :3]),
            x.index_copy(0, i + 1, x[:3]), x.masked_fill(x > 3, -1.0), x.as_strided((3, 2), (6, 2), 1), F.pad(x, (-1, 2)),
            x.unfold(1, 3, 2), torch.roll(x, (1, -2), (0, 1)), x.flip(0), torch.where(x > 3, 0.0, x),
        ],
        (ROWS, torch.tensor([2, 0, -1])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_values_are_those_of_eager(name):
    function, tensors = GROUPS[name]
    expected = function(*tensors)
    module = structured_module(lambda *args: function(*args), tensors)
    assert "call @aten" not in str(module)
    results = run(module, "main", list(tensors))
    assert len(results) == len(expected)
    for position, (result, want) in enumerate(zip(results, expected, strict=True)):
        torch.testing.assert_close(
            result, want, equal_nan=True, msg=lambda m, p=position: f"result {p} of {name}: {m}"
        )
