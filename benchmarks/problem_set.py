"""Small problems of one or a few layers in f32: the shapes of kernels that people write by hand.

Every entry builds a module and its inputs on a device; on `meta` there are shapes only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from quantised_problems import QUANTISED
from torch import nn

Built = tuple[nn.Module, tuple[torch.Tensor, ...]]
Builder = Callable[[str], Built]


class Apply(nn.Module):
    """Layers one after the other, then a function of their result (and of further inputs)."""

    def __init__(self, function: Callable[..., torch.Tensor], *layers: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.function = function

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return self.function(self.layers(x), *rest)


class Attention(nn.Module):
    """Causal self-attention written out, with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Residual(nn.Module):
    """Two convolutions with batch norm, and the input added before the last activation."""

    def __init__(self, channels: int):
        super().__init__()
        self.a, self.b = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.na, self.nb = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.nb(self.b(F.relu(self.na(self.a(x))))))


def of(
    function: Callable[..., torch.Tensor],
    *shapes: Sequence[int],
    layers: Callable[[], Sequence[nn.Module]] = tuple,
) -> Builder:
    """A function of random inputs, behind layers that are made for the device."""

    def build(device: str) -> Built:
        with torch.device(device):
            module = Apply(function, *layers()).eval().requires_grad_(False)
            return module, tuple(torch.rand(shape) * 2 - 1 for shape in shapes)

    return build


def model(make: Callable[[], nn.Module], *shape: int) -> Builder:
    """A module of one random input."""

    def build(device: str) -> Built:
        with torch.device(device):
            return make().eval().requires_grad_(False), (torch.rand(shape) * 2 - 1,)

    return build


def _frobenius(x: torch.Tensor) -> torch.Tensor:
    return x / torch.linalg.vector_norm(x)


def _cross_entropy(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, ((places + 1) * 0.49 * x.shape[1]).long())


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


WIDE = (4096, 98304)
IMAGES = (64, 64, 256, 256)
ROWS = (64, 2048, 2047)

ELEMENTWISE: dict[str, Builder] = {
    "relu": of(F.relu, WIDE),
    "gelu": of(F.gelu, WIDE),
    "gelu-tanh-written": of(_gelu_tanh, WIDE),
    "selu": of(F.selu, WIDE),
    "softsign": of(F.softsign, WIDE),
    "scaled-add": of(lambda x, y: x * 1.7 + y, (8192, 16384), (8192, 16384)),
    "odd-size": of(torch.tanh, (1021, 100003)),
    "transpose-add": of(lambda x, y: x.t() + y, (16384, 8192), (8192, 16384)),
    "channel-scale": of(lambda x, s: x * s.view(1, -1, 1, 1) + 0.5, IMAGES, (64,)),
}

ROWWISE: dict[str, Builder] = {
    "softmax-1k": of(lambda x: x.softmax(-1), (65536, 1024)),
    "softmax-12k": of(lambda x: x.softmax(-1), (8192, 12288)),
    "softmax-98k": of(lambda x: x.softmax(-1), WIDE),
    "log-softmax-98k": of(lambda x: x.log_softmax(-1), WIDE),
    "softmax-dim1": of(lambda x: x.softmax(1), (64, 128, 64, 256)),
    "logsumexp-98k": of(lambda x: x.logsumexp(-1), WIDE),
    "l1-norm": of(lambda x: x / x.abs().mean(1, keepdim=True), WIDE),
    "l2-norm": of(lambda x: x / x.norm(dim=1, keepdim=True), WIDE),
    "frobenius": of(_frobenius, IMAGES),
    "rms-norm-dim1": of(lambda x: x / (x.pow(2).mean(1, keepdim=True) + 1e-5).sqrt(), IMAGES),
    "layer-norm-4m": of(lambda x: F.layer_norm(x, x.shape[1:]), (16, 64, 256, 256)),
    "layer-norm-4k": of(lambda x: F.layer_norm(x, x.shape[1:]), (65536, 4096)),
    "instance-norm": of(F.instance_norm, IMAGES),
    "group-norm": of(lambda x: x, IMAGES, layers=lambda: [nn.GroupNorm(8, 64)]),
    "batch-norm": of(lambda x: x, IMAGES, layers=lambda: [nn.BatchNorm2d(64)]),
}

REDUCTIONS: dict[str, Builder] = {
    "sum-all": of(lambda x: x.sum(), WIDE),
    "mse": of(F.mse_loss, (16384, 16384), (16384, 16384)),
    "huber": of(F.smooth_l1_loss, (16384, 16384), (16384, 16384)),
    "hinge": of(lambda x, y: (1 - x * y).clamp(min=0).mean(), (16384, 16384), (16384, 1)),
    "kl-div": of(
        lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
        (8192, 8192),
        (8192, 8192),
    ),
    "cross-entropy": of(_cross_entropy, (32768, 4096), (32768,)),
    "triplet": of(
        lambda a, b, c: F.triplet_margin_loss(a, b, c), (32768, 4096), (32768, 4096), (32768, 4096)
    ),
    "sum-dim1": of(lambda x: x.sum(1), ROWS),
    "mean-dim1": of(lambda x: x.mean(1), ROWS),
    "max-dim1": of(lambda x: x.amax(1), ROWS),
    "argmax-dim1": of(lambda x: x.argmax(1), ROWS),
    "argmin-rows": of(lambda x: x.argmin(-1), (8192, 16384)),
    "mean-rows-few": of(lambda x: x.mean(-1), (32, 4194304)),
    "sum-columns": of(lambda x: x.sum(0), (1048576, 96)),
    "global-average": of(lambda x: x.mean((2, 3)), IMAGES),
    "max-pool-1d": of(lambda x: F.max_pool1d(x, 8, 1, 4, 3), (64, 192, 16384)),
    "max-pool-2d": of(lambda x: F.max_pool2d(x, 4, 1, 1), (32, 64, 256, 256)),
    "max-pool-3d": of(lambda x: F.max_pool3d(x, 3, 2, 1), (16, 32, 64, 64, 64)),
    "avg-pool-1d": of(lambda x: F.avg_pool1d(x, 8, 1, 4), (64, 128, 16384)),
    "avg-pool-2d": of(lambda x: F.avg_pool2d(x, 11), (16, 64, 1024, 1024)),
    "avg-pool-3d": of(lambda x: F.avg_pool3d(x, 3, 2, 1), (16, 32, 64, 64, 64)),
}

SCANS: dict[str, Builder] = {
    "cumsum": of(lambda x: x.cumsum(1), (8192, 32768)),
    "cumprod": of(lambda x: (x * 0.01 + 1).cumprod(1), (8192, 32768)),
    "cumsum-reverse": of(lambda x: x.flip(1).cumsum(1).flip(1), (8192, 32768)),
    "cumsum-masked": of(lambda x, m: (x * (m > 0)).cumsum(1), (8192, 32768), (8192, 32768)),
}

PRODUCTS: dict[str, Builder] = {
    "matmul-4096": of(torch.matmul, (4096, 4096), (4096, 4096)),
    "matmul-tall": of(torch.matmul, (32768, 64), (64, 32768)),
    "matmul-long-k": of(torch.matmul, (256, 131072), (131072, 256)),
    "matmul-odd": of(torch.matmul, (4103, 2949), (2949, 2985)),
    "matmul-transposed": of(lambda x, y: x.t() @ y.t(), (4096, 2048), (4096, 4096)),
    "matrix-vector": of(torch.matmul, (2048, 131072), (131072, 1)),
    "batched": of(torch.bmm, (128, 512, 1024), (128, 1024, 2048)),
    "diagonal": of(lambda d, x: torch.diag(d) @ x, (4096,), (4096, 4096)),
    "upper-triangular": of(lambda x, y: torch.triu(x.triu() @ y.triu()), (4096, 4096), (4096, 4096)),
    "gemm-relu": of(F.relu, (1024, 8192), layers=lambda: [nn.Linear(8192, 8192)]),
    "gemm-swish-scale": of(
        lambda x: x * torch.sigmoid(x) * 2.0, (1024, 8192), layers=lambda: [nn.Linear(8192, 8192)]
    ),
    "gemm-sum": of(
        lambda x: x.sum(1, keepdim=True) * 0.75, (1024, 8192), layers=lambda: [nn.Linear(8192, 8192)]
    ),
    "gemm-group-norm": of(
        lambda x: F.hardtanh(x), (1024, 8192), layers=lambda: [nn.Linear(8192, 8192), nn.GroupNorm(16, 8192)]
    ),
    "gemm-logsumexp": of(
        lambda x: F.gelu(F.leaky_relu(x.logsumexp(1, keepdim=True))),
        (1024, 8192),
        layers=lambda: [nn.Linear(8192, 8192)],
    ),
    "mlp": model(
        lambda: nn.Sequential(
            nn.Linear(8192, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)
        ),
        256,
        8192,
    ),
}

LAYERS: dict[str, Builder] = {
    "conv-relu-bias": of(lambda x, b: F.relu(x) + b, (64, 64, 128, 128), (128, 1, 1), layers=lambda: [nn.Conv2d(64, 128, 3)]),
    "conv-mish": of(F.mish, (64, 64, 128, 128), layers=lambda: [nn.Conv2d(64, 128, 3)]),
    "conv-instance-norm": of(lambda x: F.instance_norm(x) / 2.0, (64, 64, 128, 128), layers=lambda: [nn.Conv2d(64, 128, 3)]),
    "conv-group-norm-tanh": of(torch.tanh, (64, 8, 128, 128), layers=lambda: [nn.Conv2d(8, 64, 3), nn.GroupNorm(16, 64)]),
    "conv-softmax-pool": of(lambda x: F.max_pool2d(x.softmax(1), 2), (64, 16, 128, 128), layers=lambda: [nn.Conv2d(16, 32, 3)]),
    "conv-min-tanh": of(lambda x: torch.tanh(x.amin(1, keepdim=True)), (64, 16, 256, 256), layers=lambda: [nn.Conv2d(16, 64, 3)]),
    "conv-few-channels": of(lambda x: F.hardswish(F.relu(x)), (64, 8, 128, 128), layers=lambda: [nn.Conv2d(8, 64, 3)]),
    "conv-stem": of(lambda x: F.max_pool2d(F.relu(x), 3, 2, 1), (32, 3, 224, 224), layers=lambda: [nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64)]),
    "conv-transpose-scale": of(lambda x: (x * 2.0).clamp(0, 1) / 2.0, (32, 64, 128, 128), layers=lambda: [nn.ConvTranspose2d(64, 64, 3, 2, 1, 1)]),
    "conv3d-group-norm-mean": of(lambda x: x.mean((1, 2, 3, 4)), (64, 3, 24, 32, 32), layers=lambda: [nn.Conv3d(3, 24, 3), nn.GroupNorm(8, 24)]),
    "pointwise-conv": of(lambda x: x, (16, 64, 256, 256), layers=lambda: [nn.Conv2d(64, 128, 1)]),
    "depthwise-separable": of(lambda x: x, (16, 64, 256, 256), layers=lambda: [nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.Conv2d(64, 128, 1)]),
    "residual-block": model(lambda: Residual(64), 32, 64, 112, 112),
    "attention": model(lambda: Attention(768, 8), 32, 512, 768),
    "sdpa": of(F.scaled_dot_product_attention, (32, 16, 512, 64), (32, 16, 512, 64), (32, 16, 512, 64)),
    "transformer-layer": model(lambda: nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True), 32, 256, 512),
}  # fmt: skip

PROBLEMS: dict[str, Builder] = ELEMENTWISE | ROWWISE | REDUCTIONS | SCANS | PRODUCTS | LAYERS | QUANTISED
