"""How the blocks of the skinny form lie, as source: without slices, and with the slices of k as the first of three axes."""

from __future__ import annotations

from dataclasses import dataclass

from topo_opt.codegen.triton.gemm_terms import Block


@dataclass(frozen=True)
class Shapes:
    """How the axes of blocks lie, as source: what follows a range along an axis, and shapes."""

    n: str
    m: str
    weights_k: str
    """With `{k}` for the size of a block (or slice) of k."""
    rows_k: str
    weights: Block
    rows: str
    sums: str
    """Of what products are added to."""
    tile: str
    row: str
    reduced: str
    """The sum of a tile of factors over k, of a `{}`."""
    combined: str
    """As `reduced`, with a function."""


FLAT = Shapes(
    n="[:, None]",
    m="[None, :]",
    weights_k="tl.arange(0, {k})[None, :]",
    rows_k="tl.arange(0, BLOCK_K)[:, None]",
    weights=Block(("BLOCK_N", "BLOCK_K"), 1),
    rows="(BLOCK_K, BLOCK_M)",
    sums="(BLOCK_N, BLOCK_M)",
    tile="(BLOCK_N, BLOCK_M)",
    row="(1, BLOCK_M)",
    reduced="tl.sum({0}, axis=0)[None, :]",
    combined="tl.reduce({0}, 0, {1})[None, :]",
)
SLICED = Shapes(
    n="[None, :, None]",
    m="[None, None, :]",
    weights_k="(tl.arange(0, SLICES)[:, None, None] * {k} + tl.arange(0, {k})[None, None, :])",
    rows_k="(tl.arange(0, SLICES)[:, None, None] * SLICE_K + tl.arange(0, SLICE_K)[None, :, None])",
    weights=Block(("SLICES", "BLOCK_N", "SLICE_K"), 2),
    rows="(SLICES, SLICE_K, BLOCK_M)",
    sums="(SLICES, BLOCK_N, BLOCK_M)",
    tile="(1, BLOCK_N, BLOCK_M)",
    row="(1, 1, BLOCK_M)",
    reduced="tl.sum(tl.sum({0}, axis=1), axis=0)[None, None, :]",
    combined="tl.reduce(tl.reduce({0}, 1, {1}), 0, {1})[None, None, :]",
)
