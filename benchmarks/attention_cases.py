"""The attentions that `attention_kernels.py` measures, and the tiles that it tries for each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One attention: sizes, causal or not, the shape of a boolean mask and what it allows."""

    name: str
    b: int
    h: int
    g: int
    m: int
    n: int
    d: int
    causal: bool = False
    mask: tuple[int, int, int, int] | None = None
    filled: str = "random"
    """What the mask allows: "random" (nine of ten), "half" of the keys, or "causal"."""
    dtype: str = "bf16"
    position: int | None = None
    """The last key that is filled, which the kernel reads from memory (instead of a mask)."""

    @property
    def flops(self) -> float:
        """Multiplications and additions that the result needs."""
        triangle = self.causal or self.filled == "causal"
        seen = self.m * (self.m + 1) / 2 if triangle else self.m * self.n
        return 4.0 * self.b * self.h * seen * self.d

    @property
    def nbytes(self) -> int:
        """Bytes that must be read and written once."""
        item = 4 if self.dtype == "fp32" else 2
        keys = self.n // 2 if self.filled == "half" else self.n
        keys = keys if self.position is None else self.position + 1
        elements = 2 * self.b * self.h * self.m * self.d + 2 * self.b * self.g * keys * self.d
        return item * elements + math.prod(self.mask or (0,))

    @property
    def is_decode(self) -> bool:
        return self.m <= 16


def _decode(model: str, depth: int, keys: int, batches: Iterable[int], filled: str = "random") -> list[Case]:
    return [
        Case(
            f"{model} decode b{b} n{keys} {filled}",
            b,
            32,
            8,
            1,
            keys,
            depth,
            mask=(b, 1, 1, keys),
            filled=filled,
        )
        for b in batches
    ]


CASES = [
    Case("llama-1b prefill", 1, 32, 8, 2048, 2048, 64, causal=True),
    Case("llama-1b prefill, causal mask", 1, 32, 8, 2048, 2048, 64, mask=(1, 1, 2048, 2048), filled="causal"),
    Case("llama-8b prefill", 1, 32, 8, 2048, 2048, 128, causal=True),
    Case("llama-8b prefill of 8192", 1, 32, 8, 8192, 8192, 128, causal=True),
    Case("llama-8b prefill of 700", 1, 32, 8, 700, 700, 128, causal=True),
    Case("phi-3 prefill, depth 96", 1, 32, 32, 2048, 2048, 96, causal=True),
    Case("gemma prefill, depth 256", 1, 8, 4, 2048, 2048, 256, causal=True),
    Case("bert row mask", 8, 12, 12, 512, 512, 64, mask=(8, 1, 1, 512)),
    Case("bert square mask", 8, 12, 12, 512, 512, 64, mask=(8, 1, 512, 512)),
    Case("whisper encoder", 4, 20, 20, 1500, 1500, 64),
    Case("vit-h depth 80", 8, 16, 16, 257, 257, 80),
    Case("f32, depth 64", 32, 16, 16, 512, 512, 64, dtype="fp32"),
    Case("f32, depth 96", 32, 8, 8, 512, 512, 96, dtype="fp32"),
    Case("f32 causal, depth 128", 4, 16, 16, 1024, 1024, 128, causal=True, dtype="fp32"),
    *_decode("llama-1b", 64, 1024, (1, 8, 32)),
    *_decode("llama-1b", 64, 1024, (1, 32), "half"),
    *_decode("llama-8b", 128, 1024, (1, 8)),
    *_decode("llama-8b", 128, 8192, (1,)),
    *(
        Case(f"llama-1b decode b{b} n1024 at {p}", b, 32, 8, 1, 1024, 64, position=p)
        for b in (1, 8, 32)
        for p in (63, 511, 1023)
    ),
]

# m, n, warps, stages of many rows, by padded depth.
PREFILL = {
    64: [
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 128, 4, 1),
        (64, 128, 4, 2),
        (64, 128, 4, 3),
        (128, 32, 4, 3),
        (128, 64, 4, 2),
        (128, 64, 4, 3),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
    ],
    128: [
        (64, 64, 4, 1),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 128, 4, 1),
        (64, 128, 4, 2),
        (128, 32, 8, 3),
        (128, 64, 4, 2),
        (128, 64, 8, 1),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 128, 8, 1),
        (128, 128, 8, 2),
    ],
    256: [
        (64, 32, 4, 1),
        (64, 32, 4, 2),
        (64, 64, 4, 1),
        (64, 64, 4, 2),
        (64, 32, 8, 2),
        (64, 64, 8, 2),
        (128, 32, 8, 2),
        (128, 64, 8, 1),
        (128, 64, 8, 2),
    ],
}
SINGLE = [
    (m, n, warps, stages)
    for m, n, warps, stages in itertools.product((32, 64, 128), (16, 32, 64), (4, 8), (1, 2))
    if warps * 8 <= m
]
"""The same in f32."""
# n, warps, stages of few rows.
DECODE = [(32, 2, 3), (64, 2, 3), (64, 4, 3), (64, 4, 4), (128, 4, 2)]


def tiles(case: Case) -> list[dict[str, int]]:
    """The sweep of a case."""
    group = case.h // case.g
    if not case.is_decode:
        names = ("m", "n", "warps", "stages")
        depth = next(d for d in PREFILL if case.d <= d)
        rest = {"pack": 1, "splits": 1}
        shapes = SINGLE if case.dtype == "fp32" else PREFILL[depth]
        found = [dict(zip(names, t)) | rest | {"bounds": 0, "tma": 0} for t in shapes]
        found += [t | {"bounds": 1} for t in found[:5] if case.mask]
        return found if case.dtype == "fp32" else found + [t | {"tma": 1} for t in found]
    fill = max(1, 1 << (132 // (case.b * case.g)).bit_length())
    splits = sorted(
        {
            s
            for s in (1, max(1, fill // 4), max(1, fill // 2), fill, fill * 2)
            if case.n // s >= 32 and (s > 1 or fill <= 2)
        }
    )
    return [
        {"m": 16, "n": n, "warps": w, "stages": s, "pack": group, "splits": p, "bounds": bounds, "tma": 0}
        for (n, w, s), p, bounds in itertools.product(DECODE, splits, (0, 1) if case.mask else (0,))
        if case.n // p >= n
    ]
