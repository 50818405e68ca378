"""Ways to multiply f32 matrices on tensor cores, beside cuBLAS in f32, side by side in one run.

    python benchmarks/f32_products.py [--size 4096]     # needs a Hopper GPU, torch and triton

`left @ right.T` of square matrices. Prints one line a way and tile: milliseconds, Tflop/s, the ratio to cuBLAS, and the largest
deviation of 256 rows from float64 relative to the largest magnitude. What kernels do is `pieces` (`codegen/triton/f32_products.py`);
the others are what it was chosen from (benchmarks/results/kernels-h200.md), and `tf32`, which no run has measured yet.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.testing import do_bench
from triton.tools.tensor_descriptor import TensorDescriptor

_CHECKED_ROWS = 256
_GROUP = tl.constexpr(8)


@triton.jit
def _tile(size, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    pid, cols = tl.program_id(0), tl.cdiv(size, BLOCK_N)
    first = pid // (_GROUP * cols) * _GROUP
    rows = tl.minimum(tl.cdiv(size, BLOCK_M) - first, _GROUP)
    return first + pid % (_GROUP * cols) % rows, pid % (_GROUP * cols) // rows


@triton.jit
def _store(out, acc, m, n, size, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    tl.store(out + rows * size + n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :], acc)


@triton.jit
def _pieces(x):
    bits = x.to(tl.int32, bitcast=True)
    rest = x - (bits & -65536).to(tl.float32, bitcast=True)
    rest_bits = rest.to(tl.int32, bitcast=True) + 32768
    last_bits = (rest - (rest_bits & -65536).to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    first = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    second = (rest_bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return first, second, (last_bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _smaller(a0, a1, a2, b0, b1, b2, total):
    total = tl.dot(a1, b1, total)
    total = tl.dot(a2, b0, total)
    total = tl.dot(a0, b2, total)
    total = tl.dot(a1, b0, total)
    return tl.dot(a0, b1, total)


@triton.jit
def through_pointers(
    left, right, out, size, WAY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """`WAY`: `bf16x6` (Triton's own), `pieces`, `two sums`, `right in memory` (`right` holds three pieces, one after the other), `tf32`."""
    m, n = _tile(size, BLOCK_M, BLOCK_N)
    a_rows = left + (m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]) * size
    b_rows = right + (n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]) * size
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    small = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, size, BLOCK_K):
        a = tl.load(a_rows + k0 + tl.arange(0, BLOCK_K)[None, :])
        place = k0 + tl.arange(0, BLOCK_K)[:, None]
        b = tl.load(b_rows + place)
        none = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if WAY == "bf16x6":
            acc = tl.dot(a, b, acc, input_precision="bf16x6")
        elif WAY == "tf32":
            # Tensor cores read no more than the upper 19 bits of a factor.
            a1 = a - (a.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
            b1 = b - (b.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
            part = tl.dot(a, b1, tl.dot(a1, b, none, input_precision="tf32"), input_precision="tf32")
            acc += tl.dot(a, b, tl.maximum(part, -3.4028234663852886e38), input_precision="tf32")
        else:
            a0, a1, a2 = _pieces(a)
            if WAY == "right in memory":
                b0, b1, b2 = (
                    b,
                    tl.load(b_rows + size * size + place),
                    tl.load(b_rows + 2 * size * size + place),
                )
            else:
                b0, b1, b2 = _pieces(b)
            if WAY == "two sums":
                small = _smaller(a0, a1, a2, b0, b1, b2, small)
                acc = tl.dot(a0, b0, acc)
            else:
                part = _smaller(a0, a1, a2, b0, b1, b2, none)
                acc += tl.dot(a0, b0, tl.maximum(part, -3.4028234663852886e38))
    _store(out, acc + small, m, n, size, BLOCK_M, BLOCK_N)


@triton.jit
def side_by_side(
    left, right, out, size, EVERY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Six products one after the other along k, pieces in memory; the sum of every `EVERY` blocks is added to the total."""
    m, n = _tile(size, BLOCK_M, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, 6 * size, BLOCK_K):
        part = tl.dot(left.load([m * BLOCK_M, k0]), right.load([n * BLOCK_N, k0]).T, part)
        if k0 % (EVERY * BLOCK_K) == (EVERY - 1) * BLOCK_K:
            acc += part
            part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    _store(out, acc + part, m, n, size, BLOCK_M, BLOCK_N)


@dataclass(frozen=True)
class Way:
    """One way with one tile: blocks of m, n and k, warps, stages; `every` of `side_by_side`."""

    name: str
    m: int
    n: int
    k: int
    warps: int
    stages: int
    every: int = 0


WAYS = (
    *(Way(w, *tile) for w in ("bf16x6", "pieces", "two sums", "right in memory", "tf32")
      for tile in ((128, 128, 32, 8, 3), (128, 64, 32, 4, 3), (64, 128, 32, 4, 3))),
    Way("tf32", 128, 128, 16, 8, 4),
    Way("side by side", 128, 128, 64, 8, 4, 12),
    Way("side by side", 128, 128, 64, 8, 4, 24),
    Way("side by side", 128, 128, 64, 4, 4, 12),
)  # fmt: skip


def pieces_of(x: torch.Tensor) -> list[torch.Tensor]:
    """Three tensors of bf16 that add up to `x`."""
    found, rest = [], x
    for _ in range(3):
        upper = (rest.view(torch.int32) & -65536).view(torch.float32)
        found.append(upper.bfloat16())
        rest = rest - upper
    return found


def beside_each_other(pieces: list[torch.Tensor], order: tuple[int, ...]) -> torch.Tensor:
    """Pieces in an order, in turn for every 64 columns."""
    size = pieces[0].shape[0]
    blocks = [pieces[i].view(size, -1, 64) for i in order]
    return torch.stack(blocks, 2).reshape(size, -1).contiguous()


class Ways:
    """Factors in every form that a way wants, and its launches."""

    def __init__(self, size: int):
        self.size = size
        self.left, self.right = (torch.randn(size, size, device="cuda") for _ in range(2))
        self.out = torch.empty(size, size, device="cuda")
        left, right = pieces_of(self.left), pieces_of(self.right)
        self.right_pieces = torch.stack(right)
        self.wide = beside_each_other(left, (1, 2, 0, 1, 0, 0)), beside_each_other(right, (1, 0, 2, 0, 1, 0))
        self.exact = self.left[:_CHECKED_ROWS].double() @ self.right.double().T

    def bound(self, way: Way) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The kernel of a way, its arguments and its options."""
        options = {
            "BLOCK_M": way.m,
            "BLOCK_N": way.n,
            "BLOCK_K": way.k,
            "num_warps": way.warps,
            "num_stages": way.stages,
        }
        if way.every:
            left, right = (
                TensorDescriptor.from_tensor(x, [b, way.k]) for x, b in zip(self.wide, (way.m, way.n))
            )
            return side_by_side, (left, right, self.out, self.size), options | {"EVERY": way.every}
        right = self.right_pieces if way.name == "right in memory" else self.right
        return through_pointers, (self.left, right, self.out, self.size), options | {"WAY": way.name}

    def compile(self, way: Way) -> None:
        kernel, arguments, options = self.bound(way)
        kernel.warmup(*arguments, grid=(1,), **options)

    def launch(self, way: Way) -> Callable[[], Any]:
        kernel, arguments, options = self.bound(way)
        programs = -(-self.size // way.m) * -(-self.size // way.n)
        return partial(kernel[(programs,)], *arguments, **options)

    def error(self) -> float:
        """Of what is in `out`."""
        difference = (self.out[:_CHECKED_ROWS].double() - self.exact).abs().max()
        return (difference / self.exact.abs().max()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=4096, help="a multiple of 256")
    size = parser.parse_args().size
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    ways = Ways(size)
    with ThreadPoolExecutor() as pool:
        list(pool.map(ways.compile, WAYS))
    peer: float | None = None
    calls = [("cuBLAS", partial(torch.matmul, ways.left, ways.right.T, out=ways.out))]
    calls += [(str(way), ways.launch(way)) for way in WAYS]
    for name, call in calls:
        ways.out.fill_(float("nan"))
        call()
        error, ms = ways.error(), do_bench(call, warmup=15, rep=60, quantiles=[0.5])
        peer = peer or ms
        print(
            f"{name}: {ms:.3f} ms, {2 * size**3 / ms / 1e9:.1f} Tflop/s, {ms / peer:.3f} of cuBLAS, error {error:.1e}"
        )


if __name__ == "__main__":
    main()
