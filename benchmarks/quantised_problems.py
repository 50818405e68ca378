"""Linear layers with quantised weights in bf16, a few rows: what decoding with weight-only quantisation consists of.

`bf16-*` is the same layer without quantisation, to see what the smaller weights bring.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

K, N, GROUP = 4096, 14336, 128

Built = tuple[nn.Module, tuple[Tensor, ...]]


class Plain(nn.Module):
    """No quantisation."""

    def __init__(self, device: str):
        super().__init__()
        _buffer(self, "weight", torch.randn(N, K, device=device).to(torch.bfloat16) / K**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Int8(nn.Module):
    """int8, one scale a column."""

    def __init__(self, device: str):
        super().__init__()
        _buffer(self, "q", torch.randint(-128, 128, (N, K), device=device).to(torch.int8))
        _buffer(self, "scale", (torch.rand(N, 1, device=device) * 1e-4 + 1e-4).to(torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.q.to(x.dtype) * self.scale)


class Int4(nn.Module):
    """Two values a byte, a scale for `GROUP` steps of k."""

    def __init__(self, device: str):
        super().__init__()
        _buffer(self, "q", torch.randint(0, 256, (N, K // 2), device=device).to(torch.uint8))
        _buffer(self, "scale", (torch.rand(N, K // GROUP, 1, device=device) * 1e-3 + 1e-3).to(torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        values = torch.stack([self.q & 0xF, self.q >> 4], dim=-1).view(N, K).to(torch.int8) - 8
        grouped = values.view(N, K // GROUP, GROUP).to(x.dtype) * self.scale
        return F.linear(x, grouped.view(N, K))


class Fp8(nn.Module):
    """fp8 (e4m3), one scale a column."""

    def __init__(self, device: str):
        super().__init__()
        _buffer(self, "q", torch.randn(N, K, device=device).to(torch.float8_e4m3fn))
        _buffer(self, "scale", torch.rand(N, 1, device=device) * 1e-3 + 1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.q.to(self.scale.dtype) * self.scale).to(x.dtype))


def _buffer(module: nn.Module, name: str, value: Tensor) -> None:
    module.register_buffer(name, value)


def _with_rows(make: Callable[[str], nn.Module], rows: int) -> Callable[[str], Built]:
    def build(device: str) -> Built:
        return make(device).eval(), (torch.randn(rows, K, device=device).to(torch.bfloat16),)

    return build


QUANTISED = {
    f"{name}-linear-{rows}": _with_rows(make, rows)
    for name, make in {"bf16": Plain, "int8": Int8, "int4": Int4, "fp8": Fp8}.items()
    for rows in (1, 16)
}
