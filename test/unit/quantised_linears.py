"""Linear layers with quantised weights, spelled as users spell them with plain PyTorch ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
K, N = 256, 128


def _bytes(generator: torch.Generator, *shape: int, low: int = -128, high: int = 128) -> Tensor:
    kind = torch.int8 if low < 0 else torch.uint8
    return torch.randint(low, high, shape, generator=generator).to(kind)


class _Quantised(nn.Module):
    """Makes its tensors from a seed; `double()` of everything is what the result is compared with."""

    def __init__(self, k: int = K, n: int = N, dtype: torch.dtype = torch.bfloat16, seed: int = 0):
        super().__init__()
        self.k, self.n, self.dtype = k, n, dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.make()
        del self.generator

    def make(self) -> None:
        raise NotImplementedError

    def keep(self, **tensors: Tensor) -> None:
        for name, value in tensors.items():
            self.register_buffer(name, value)

    def scales(self, *shape: int) -> Tensor:
        return (torch.rand(shape, generator=self.generator) * 0.01 + 0.005).to(self.dtype)


class Int8Channel(_Quantised):
    """int8, symmetric, one scale a column: the weight is dequantised."""

    def make(self) -> None:
        self.keep(q=_bytes(self.generator, self.n, self.k), scale=self.scales(self.n, 1))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.q.to(x.dtype) * self.scale)


class Int8Behind(Int8Channel):
    """int8, symmetric, one scale a column: the product is scaled."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.q.to(x.dtype)) * self.scale[:, 0]


class Int8ZeroPoint(_Quantised):
    """uint8 with one scale and one zero point a column, and a bias."""

    def make(self) -> None:
        self.keep(
            q=_bytes(self.generator, self.n, self.k, low=0, high=256),
            zero=_bytes(self.generator, self.n, 1, low=100, high=156),
            scale=self.scales(self.n, 1),
            bias=torch.randn(self.n, generator=self.generator).to(self.dtype),
        )

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.q.to(x.dtype) - self.zero.to(x.dtype)) * self.scale
        return nn.functional.linear(x, weight, self.bias)


class _Int4(_Quantised):
    group = 32

    def make(self) -> None:
        groups = self.k // self.group
        self.keep(
            q=_bytes(self.generator, self.n, self.k // 2, low=0, high=256),
            scale=self.scales(self.n, groups, 1),
            zero=_bytes(self.generator, self.n, groups, 1, low=0, high=16),
        )

    def unpacked(self) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        grouped = self.unpacked().view(self.n, self.k // self.group, self.group).to(x.dtype)
        return nn.functional.linear(x, (grouped * self.scale).view(self.n, self.k))


class Int4Stack(_Int4):
    """Two values a byte, the low one first, minus eight, a scale for 32 steps of k."""

    def unpacked(self) -> Tensor:
        return torch.stack([self.q & 0xF, self.q >> 4], dim=-1).view(self.n, self.k).to(torch.int8) - 8


class Int4HighFirst(_Int4):
    """The high value first, scales of 64 steps, zero points of each group."""

    group = 64

    def unpacked(self) -> Tensor:
        return torch.stack((self.q >> 4, self.q & 15), dim=2).reshape(self.n, self.k)

    def forward(self, x: Tensor) -> Tensor:
        grouped = self.unpacked().reshape(self.n, -1, self.group).to(x.dtype)
        weight = (grouped - self.zero.to(x.dtype)) * self.scale
        return x @ weight.reshape(self.n, self.k).t()


class Int4Signed(_Int4):
    """Signed bytes, the sign extended by shifts, scales of 128 steps."""

    group = 128

    def make(self) -> None:
        super().make()
        self.q = self.q.view(torch.int8)

    def unpacked(self) -> Tensor:
        return torch.stack([self.q << 4 >> 4, self.q >> 4], dim=-1).flatten(1)


class Int4Halves(_Int4):
    """Low values are the first half of k, high values the second."""

    def unpacked(self) -> Tensor:
        return torch.cat([self.q & 0xF, self.q >> 4], dim=1).to(torch.int8) - 8


class Fp8Tensor(_Quantised):
    """fp8 with one scale."""

    def make(self) -> None:
        self.keep(
            q=torch.randn(self.n, self.k, generator=self.generator).to(FP8), scale=self.scales(1)[0].float()
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.q.to(x.dtype) * self.scale.to(x.dtype))


class Fp8Channel(Fp8Tensor):
    """fp8 with one scale a column, in f32."""

    def make(self) -> None:
        super().make()
        self.keep(scale=self.scales(self.n, 1).float())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, (self.q.float() * self.scale).to(x.dtype))


class Fp8Blocks(Fp8Tensor):
    """fp8 with one scale for 128x128 weights, as the DeepSeek checkpoints have them."""

    def make(self) -> None:
        super().make()
        self.keep(scale=self.scales(self.n // 128, self.k // 128).float())

    def forward(self, x: Tensor) -> Tensor:
        blocks = self.q.view(self.n // 128, 128, self.k // 128, 128).float()
        weight = blocks * self.scale[:, None, :, None]
        return nn.functional.linear(x, weight.view(self.n, self.k).to(x.dtype))


class Fp8Repeated(Fp8Blocks):
    """The same, with scales repeated to the weight's size."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return nn.functional.linear(x, (self.q.float() * scale).to(x.dtype))


class Int8Packed(Int8Channel):
    """`_weight_int8pack_mm`."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(x, self.q, self.scale[:, 0])


LINEARS: dict[str, Callable[..., _Quantised]] = {
    "int8-channel": Int8Channel,
    "int8-behind": Int8Behind,
    "int8-zero-point": Int8ZeroPoint,
    "int4-stack": Int4Stack,
    "int4-high-first": Int4HighFirst,
    "int4-signed": Int4Signed,
    "int4-halves": Int4Halves,
    "fp8-tensor": Fp8Tensor,
    "fp8-channel": Fp8Channel,
    "fp8-blocks": Fp8Blocks,
    "fp8-repeated": Fp8Repeated,
    "int8-packed": Int8Packed,
}
