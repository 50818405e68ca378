"""Convolutional models in plain torch.nn: a residual network with bottlenecks, and a U-Net with attention."""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 with batch norm; the middle one carries the stride."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        outputs = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        same = stride == 1 and inputs == outputs
        shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if same else shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """The layout of ResNet-50 with a free width and number of blocks; ResNet-50 is width 64, blocks (3, 4, 6, 3)."""

    def __init__(self, width: int, blocks: tuple[int, ...], classes: int):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        layers: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(Bottleneck(channels, width << stage, stride))
                channels = 4 * (width << stage)
        self.body = nn.Sequential(*layers)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(channels, classes)
        for module in self.modules():  # statistics as after training: not the identity
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.pool(self.body(self.stem(x))), 1))


class TimedBlock(nn.Module):
    """Group norm, SiLU and convolution twice, with the time embedding added between; residual."""

    def __init__(self, inputs: int, outputs: int, time: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(y))) + self.skip(x)


class PixelAttention(nn.Module):
    """Self-attention over all pixels, two heads."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(4, channels),
            nn.Linear(channels, 3 * channels),
            nn.Linear(channels, channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        parts = self.qkv(tokens).view(batch, height * width, 3, 2, channels // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        tokens = self.out(mixed.transpose(1, 2).reshape(batch, height * width, channels))
        return x + tokens.transpose(1, 2).reshape(x.shape)


class UNet(nn.Module):
    """Down and up with skip connections, as in diffusion models."""

    def __init__(self, channels: int, depth: int):
        super().__init__()
        self.channels = channels
        time = 4 * channels
        self.time = nn.Sequential(nn.Linear(channels, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(3, channels, 3, padding=1)
        sizes = [channels << level for level in range(depth + 1)]
        self.down = nn.ModuleList(TimedBlock(a, b, time) for a, b in pairwise(sizes))
        self.shrink = nn.ModuleList(nn.Conv2d(b, b, 3, 2, 1) for b in sizes[1:])
        self.attention = PixelAttention(sizes[-1])
        self.up = nn.ModuleList(TimedBlock(2 * b, a, time) for a, b in pairwise(sizes))
        self.norm, self.leave = nn.GroupNorm(4, channels), nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        half = self.channels // 2
        rates = torch.exp(
            -math.log(10000.0) * torch.arange(half, device=x.device, dtype=torch.float32) / half
        )
        angles = step.float()[:, None] * rates
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype))
        y, skips = self.enter(x), []
        for block, shrink in zip(self.down, self.shrink):
            y = block(y, time)
            skips.append(y)
            y = shrink(y)
        y = self.attention(y)
        for block, skip in zip(reversed(self.up), reversed(skips)):
            y = F.interpolate(y, scale_factor=2.0, mode="nearest")
            y = block(torch.cat([y, skip], 1), time)
        return self.leave(F.silu(self.norm(y)))
