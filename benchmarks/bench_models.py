"""Models of the GPU benchmarks: plain PyTorch and transformers, sizes of published checkpoints, random weights.

`CASES` maps a case to a builder of (module, example inputs, bytes that must move, floating-point operations).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a Llama-style decoder; `cache` is the length of the key/value cache, 0 for a prompt without one."""

    width: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    layers: int
    vocabulary: int
    batch: int = 1
    cache: int = 0
    positions: int = 2048


LLAMA_1B = DecoderShape(2048, 32, 8, 64, 8192, 16, 128256)
LLAMA_3B = DecoderShape(3072, 24, 8, 128, 8192, 28, 128256)
LLAMA_8B = DecoderShape(4096, 32, 8, 128, 14336, 32, 128256)
QWEN_HALF_B = DecoderShape(896, 14, 2, 64, 4864, 24, 151936)
QWEN_1_5B = DecoderShape(1536, 12, 2, 128, 8960, 28, 151936)


class RmsNorm(nn.Module):
    """Root-mean-square norm with the statistics in f32."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return scaled.to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, the two halves of a head paired."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class DecoderLayer(nn.Module):
    """Attention with grouped query heads and a gated MLP."""

    def __init__(self, shape: DecoderShape):
        super().__init__()
        self.shape = shape
        q, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.attention_norm, self.mlp_norm = RmsNorm(shape.width), RmsNorm(shape.width)
        self.q = nn.Linear(shape.width, q, bias=False)
        self.k = nn.Linear(shape.width, kv, bias=False)
        self.v = nn.Linear(shape.width, kv, bias=False)
        self.o = nn.Linear(q, shape.width, bias=False)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)
        if shape.cache:
            size = (shape.batch, shape.kv_heads, shape.cache, shape.head_size)
            self.register_buffer("keys", torch.zeros(size))
            self.register_buffer("values", torch.zeros(size))

    def heads(self, x: Tensor, count: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], count, self.shape.head_size).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, mask: Tensor | None) -> Tensor:
        shape, normed = self.shape, self.attention_norm(x)
        q = rotate(self.heads(self.q(normed), shape.heads), cos, sin)
        k = rotate(self.heads(self.k(normed), shape.kv_heads), cos, sin)
        v = self.heads(self.v(normed), shape.kv_heads)
        if shape.cache:
            self.keys.index_copy_(2, position, k)
            self.values.index_copy_(2, position, v)
            k, v = self.keys, self.values
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """Token ids and positions to the logits of the last token."""

    def __init__(self, shape: DecoderShape):
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        frequencies = 500000.0 ** -(torch.arange(0, shape.head_size, 2) / shape.head_size)
        angles = torch.outer(torch.arange(shape.positions).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        if shape.cache:
            past = torch.ones(shape.positions, shape.cache, dtype=torch.bool).tril()
            self.register_buffer("visible", past)

    def forward(self, ids: Tensor, position: Tensor) -> Tensor:
        x = self.embedding(ids)
        cos, sin = self.cos[position][None, None], self.sin[position][None, None]
        mask = self.visible[position][None, None] if self.shape.cache else None
        for layer in self.layers:
            x = layer(x, cos, sin, position, mask)
        return self.head(self.norm(x[:, -1:]))


@dataclass(frozen=True)
class Work:
    """A module with inputs, and the least it can cost: bytes to move and operations to do."""

    module: nn.Module
    inputs: tuple[Any, ...]
    nbytes: int
    flops: int


def _materialise(module: nn.Module, device: str) -> nn.Module:
    """The module in bf16 with small random weights; on the meta device shapes only."""
    module = module.to(torch.bfloat16).eval().requires_grad_(False)
    if device == "meta":
        return module.to("meta")
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.02)
    return module


def decode(shape: DecoderShape, batch: int, cache: int) -> Callable[[str], Work]:
    """One token a sequence at the end of a full cache."""

    def build(device: str) -> Work:
        from dataclasses import replace

        sized = replace(shape, batch=batch, cache=cache, positions=max(shape.positions, cache))
        with torch.device(device):
            module = _materialise(Decoder(sized), device)
            ids, position = torch.ones(batch, 1, dtype=torch.long), torch.full((1,), cache - 1)
        weights = sum(p.numel() * 2 for n, p in module.named_parameters() if "embedding" not in n)
        kv = 2 * shape.layers * batch * shape.kv_heads * cache * shape.head_size * 2
        return Work(module, (ids, position), weights + kv, 0)

    return build


def prefill(shape: DecoderShape, length: int) -> Callable[[str], Work]:
    """A prompt without cache, logits of its last token."""

    def build(device: str) -> Work:
        with torch.device(device):
            module = _materialise(Decoder(shape), device)
            ids, position = torch.ones(1, length, dtype=torch.long), torch.arange(length)
        per_layer = (
            shape.width * shape.head_size * (2 * shape.heads + 2 * shape.kv_heads)
            + 3 * shape.width * shape.hidden
        )
        attention = 2 * shape.heads * shape.head_size * length * length
        return Work(module, (ids, position), 0, shape.layers * (2 * length * per_layer + attention))

    return build


def bert(batch: int, length: int, layers: int = 12) -> Callable[[str], Work]:
    """BERT-base, padded batch with an attention mask."""

    def build(device: str) -> Work:
        from transformers import BertConfig, BertModel

        class Encoder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                config = BertConfig(num_hidden_layers=layers, attn_implementation="sdpa")
                self.model = BertModel(config, add_pooling_layer=False)

            def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
                return self.model(ids, attention_mask=mask).last_hidden_state

        with torch.device(device):
            module = _materialise(Encoder(), device)
            ids, mask = (
                torch.ones(batch, length, dtype=torch.long),
                torch.ones(batch, length, dtype=torch.long),
            )
        tokens = batch * length
        flops = layers * (
            2 * tokens * (4 * 768 * 768 + 2 * 768 * 3072) + 4 * batch * 12 * length * length * 64
        )
        return Work(module, (ids, mask), 0, flops)

    return build


def _encoder_flops(
    layers: int, tokens: int, batch: int, length: int, width: int, causal: bool = False
) -> int:
    """Operations of transformer layers of `width` with heads of 64 and a hidden layer four times as wide."""
    seen = length // 2 if causal else length
    return layers * (2 * tokens * 12 * width * width + 4 * batch * length * seen * width)


def vit(batch: int) -> Callable[[str], Work]:
    """ViT-B/16 of transformers on 224 x 224 images, the last hidden state."""

    def build(device: str) -> Work:
        from transformers import ViTConfig, ViTModel

        class Encoder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = ViTModel(ViTConfig(attn_implementation="sdpa"), add_pooling_layer=False)

            def forward(self, pixels: Tensor) -> Tensor:
                return self.model(pixels).last_hidden_state

        with torch.device(device):
            module = _materialise(Encoder(), device)
            pixels = torch.randn(batch, 3, 224, 224, dtype=torch.bfloat16)
        patches = 2 * batch * 196 * 768 * 768
        return Work(module, (pixels,), 0, patches + _encoder_flops(12, batch * 197, batch, 197, 768))

    return build


def whisper_encoder(batch: int) -> Callable[[str], Work]:
    """The encoder of Whisper small on 30 seconds of speech."""

    def build(device: str) -> Work:
        from transformers import WhisperConfig
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        config = WhisperConfig(
            d_model=768,
            encoder_layers=12,
            encoder_attention_heads=12,
            encoder_ffn_dim=3072,
            attn_implementation="sdpa",
        )

        class Encoder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = WhisperEncoder(config)

            def forward(self, features: Tensor) -> Tensor:
                return self.model(features).last_hidden_state

        with torch.device(device):
            module = _materialise(Encoder(), device)
            features = torch.randn(batch, 80, 3000, dtype=torch.bfloat16)
        convolutions = 2 * batch * (3000 * 80 * 3 * 768 + 1500 * 768 * 3 * 768)
        return Work(module, (features,), 0, convolutions + _encoder_flops(12, batch * 1500, batch, 1500, 768))

    return build


def gpt2_medium(batch: int, length: int) -> Callable[[str], Work]:
    """GPT-2 medium on prompts without a cache, the logits of every token."""

    def build(device: str) -> Work:
        from transformers import GPT2Config, GPT2LMHeadModel

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = GPT2LMHeadModel(
                    GPT2Config(n_embd=1024, n_layer=24, n_head=16, attn_implementation="sdpa")
                )

            def forward(self, ids: Tensor) -> Tensor:
                return self.model(ids, use_cache=False).logits

        with torch.device(device):
            module = _materialise(Model(), device)
            ids = torch.ones(batch, length, dtype=torch.long)
        tokens = batch * length
        head = 2 * tokens * 1024 * 50257
        return Work(module, (ids,), 0, head + _encoder_flops(24, tokens, batch, length, 1024, causal=True))

    return build


def qwen3_moe_block(tokens: int) -> Callable[[str], Work]:
    """The mixture of experts of Qwen3-30B-A3B: 128 experts, 8 a token.

    The bytes are those of the experts that random tokens are expected to reach, each read once.
    """

    def build(device: str) -> Work:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        width, hidden, experts, chosen = 2048, 768, 128, 8
        config = Qwen3MoeConfig(
            hidden_size=width,
            moe_intermediate_size=hidden,
            num_experts=experts,
            num_experts_per_tok=chosen,
            norm_topk_prob=True,
        )
        config._experts_implementation = "grouped_mm"
        with torch.device(device):
            module = _materialise(Qwen3MoeSparseMoeBlock(config), device)
            x = torch.randn(1, tokens, width, dtype=torch.bfloat16)
        reached = experts * (1 - (1 - chosen / experts) ** tokens)
        nbytes = int(reached * 3 * width * hidden * 2) + 2 * (experts * width + 2 * tokens * width)
        flops = 2 * tokens * (chosen * 3 * width * hidden + experts * width)
        return Work(module, (x,), nbytes, flops)

    return build


CASES: dict[str, Callable[[str], Work]] = {
    "llama1b-decode-b1": decode(LLAMA_1B, 1, 1024),
    "llama1b-decode-b8": decode(LLAMA_1B, 8, 1024),
    "llama1b-decode-b32": decode(LLAMA_1B, 32, 1024),
    "llama8b-decode-b1": decode(LLAMA_8B, 1, 1024),
    "llama1b-prefill-2048": prefill(LLAMA_1B, 2048),
    "bert-base-8x512": bert(8, 512),
    "vit-b16-b32": vit(32),
    "whisper-small-encoder": whisper_encoder(1),
    "gpt2-medium-8x512": gpt2_medium(8, 512),
    "qwen3moe-block-t1": qwen3_moe_block(1),
    "qwen3moe-block-t8": qwen3_moe_block(8),
    "qwen3moe-block-t32": qwen3_moe_block(32),
    "qwen3moe-block-t2048": qwen3_moe_block(2048),
}

OTHERS: dict[str, Callable[[str], Work]] = {
    "qwen0.5b-decode-b1": decode(QWEN_HALF_B, 1, 1024),
    "qwen0.5b-decode-b16": decode(QWEN_HALF_B, 16, 2048),
    "llama1b-decode-b4-cache512": decode(LLAMA_1B, 4, 512),
    "llama1b-decode-b16-cache4096": decode(LLAMA_1B, 16, 4096),
    "llama1b-decode-b64": decode(LLAMA_1B, 64, 1024),
    "llama3b-decode-b1-cache2048": decode(LLAMA_3B, 1, 2048),
    "llama8b-decode-b8": decode(LLAMA_8B, 8, 1024),
    "llama3b-prefill-700": prefill(LLAMA_3B, 700),
    "bert-base-1x128": bert(1, 128),
    "bert-base-32x384": bert(32, 384),
    "vit-b16-b1": vit(1),
    "gpt2-medium-1x1024": gpt2_medium(1, 1024),
    "qwen3moe-block-t256": qwen3_moe_block(256),
    # From here on the cost models of tiles have not seen a kernel of it either.
    "qwen1.5b-decode-b6-cache3000": decode(QWEN_1_5B, 6, 3000),
    "llama1b-decode-b12-cache1500": decode(LLAMA_1B, 12, 1500),
    "llama8b-decode-b24": decode(LLAMA_8B, 24, 1024),
    "qwen1.5b-prefill-1300": prefill(QWEN_1_5B, 1300),
    "bert-base-4x256": bert(4, 256),
    "gpt2-medium-2x700": gpt2_medium(2, 700),
    "vit-b16-b8": vit(8),
}
"""Other widths, batch sizes and lengths: no tile is shipped for them."""
ALL = CASES | OTHERS
