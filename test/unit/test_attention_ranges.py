"""Attention kernels whose rows see a range of keys: bounds, positions, soft caps, against float64 in the interpreter."""

import math
from dataclasses import dataclass

import pytest
import torch
from test_attention_kernels import DTYPES, attention_op, lowered, qkv, run, tensor
from torch_mlir import ir

from topo_opt.codegen.triton.attention_space import MOST_CANDIDATES
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.dialects import load
from topo_opt.runtime.numerics import compare
from topo_opt.tuning import search_space


@dataclass(frozen=True)
class Range:
    """Bounds as they stand in the IR, and as functions of row and position."""

    low: str | None = None
    high: str | None = None
    softcap: float | None = None

    def attributes(self) -> str:
        maps = [
            f"{n} = affine_map<(m, p) -> ({e})>" for n, e in (("low", self.low), ("high", self.high)) if e
        ]
        return ", ".join([*maps, *([f"softcap = {self.softcap!r} : f64"] if self.softcap else [])])

    def seen(self, rows: int, keys: int, positions: torch.Tensor) -> torch.Tensor:
        m, n = torch.arange(rows)[:, None], torch.arange(keys)
        p = positions.expand(-1, rows)[:, None, :, None]
        seen = torch.ones(p.shape[0], 1, rows, keys, dtype=torch.bool)
        for text, test in ((self.low, torch.ge), (self.high, torch.lt)):
            for part in (text or "").split(","):
                if part:
                    value = eval(part.replace("floordiv", "//").replace("mod", "%"), {"m": m, "p": p})
                    seen = seen & test(n, value)
        return seen


def expected(q, k, v, range_, positions, mask, dtype):
    group = q.shape[1] // k.shape[1]
    q, k, v = (t.to(dtype) for t in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if range_.softcap:
        scores = range_.softcap * torch.tanh(scores / range_.softcap)
    seen = range_.seen(q.shape[2], k.shape[2], positions)
    if mask is not None:
        seen = seen & mask
    scores = scores.masked_fill(~seen, -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(empty, 0.0) @ v


def check(q, k, v, range_: Range, positions=None, mask=None, tile=None):
    element = next(n for n, d in DTYPES.items() if d == q.dtype)
    extra = [(t, e) for t, e in ((mask, "i1"), (positions, "i64")) if t is not None]
    types = [tensor(t.shape, element) for t in (q, k, v)] + [tensor(t.shape, e) for t, e in extra]
    result = tensor([*q.shape[:3], v.shape[3]], element)
    segments = f"array<i32: 1, 1, 1, {int(mask is not None)}, {int(positions is not None)}>"
    attributes = (
        f"causal = false, scale = {1 / math.sqrt(q.shape[-1])!r} : f64, operandSegmentSizes = {segments}"
    )
    names = ", ".join(f"%arg{i}" for i in range(len(types)))
    more = range_.attributes()
    body = f'%out = "topo.attention"({names}) {{{attributes}{", " + more if more else ""}}} : ({", ".join(types)}) -> {result}'
    source = lowered(types, result, body, tile)
    arguments = [q, k, v, *(t for t, _ in extra)]
    ours = run(source, arguments, (*q.shape[:3], v.shape[3]), q.dtype, launches=2)
    where = torch.zeros(1, 1, dtype=torch.int64) if positions is None else positions
    eager, exact = (expected(q, k, v, range_, where, mask, t) for t in (q.dtype, torch.float64))
    verdict = compare(ours, eager, exact)
    assert verdict.passed, f"{verdict}\n{source.source}"
    return source


RANGES = {
    "causal": Range(high="m + 1"),
    "offset": Range(high="m + 9"),
    "before": Range(high="m - 3"),
    "window": Range(low="m - 5", high="m + 1"),
    "chunks": Range(low="m floordiv 16 * 16", high="m + 1"),
    "capped": Range(high="m + 1", softcap=3.0),
    "two": Range(high="m + 1, 30"),
    "band": Range(low="m - 20", high="m + 20"),
}
TILES = {
    "default": None,
    "blocks": {"m": 16, "n": 16, "warps": 4, "stages": 1, "pack": 1, "splits": 1},
    "packed": {"m": 16, "n": 16, "warps": 4, "stages": 1, "pack": 2, "splits": 1},
    "split": {"m": 16, "n": 16, "warps": 4, "stages": 1, "pack": 2, "splits": 4},
}


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", RANGES)
def test_range(name, tile):
    torch.manual_seed(0)
    check(*qkv(1, 2, 1, 37, 53, 16, dtype=torch.float32), RANGES[name], tile=TILES[tile])


@pytest.mark.parametrize("tile", ["blocks", "split"])
@pytest.mark.parametrize("positions", [[[40], [0]], [[12]], None, [[90], [-2]]])
def test_positions(positions, tile):
    """A cache of which each sequence has filled a part; one position a row when None."""
    torch.manual_seed(0)
    rows = 3
    given = torch.tensor(positions) if positions else torch.tensor([[7, 3, 50], [0, 1, 2]])
    window = Range(low="m + p - 20", high="m + p + 1")
    for range_ in (Range(high="m + p + 1"), window):
        q, k, v = qkv(2, 2, 1, rows, 64, 16, dtype=torch.float32)
        check(q, k, v, range_, given, tile=TILES[tile])


@pytest.mark.parametrize("tile", [{**TILES["blocks"], "bounds": 1}, {**TILES["split"], "bounds": 1}, None])
def test_range_with_padding(tile):
    torch.manual_seed(0)
    q, k, v = qkv(2, 2, 1, 37, 53, 16, dtype=torch.float32)
    mask = torch.ones(2, 1, 1, 53, dtype=torch.bool)
    mask[0, ..., :20], mask[1, ..., 30:] = False, False
    check(q, k, v, RANGES["causal"], mask=mask, tile=tile)


def test_decode_of_one_token_in_half():
    torch.manual_seed(0)
    q, k, v = qkv(2, 8, 2, 1, 256, 64)
    source = check(q, k, v, Range(high="p + 1"), torch.tensor([[100]]))
    assert source.grid[1] > 1


def test_capped_in_half():
    torch.manual_seed(0)
    check(*qkv(1, 2, 2, 40, 40, 32), Range(high="m + 1", softcap=20.0))


def test_keys_that_no_row_sees_are_not_read():
    """A cache of which the end holds no numbers."""
    torch.manual_seed(0)
    q, k, v = qkv(1, 2, 1, 1, 128, 16, dtype=torch.float32)
    k[:, :, 64:], v[:, :, 64:] = math.nan, math.nan
    tile = {**TILES["packed"], "n": 32}
    source = lowered(
        [tensor(q.shape, "f32"), tensor(k.shape, "f32"), tensor(v.shape, "f32"), "tensor<1x1xi64>"],
        tensor(q.shape, "f32"),
        '%out = "topo.attention"(%arg0, %arg1, %arg2, %arg3) {causal = false, scale = 0.25 : f64, '
        "high = affine_map<(m, p) -> (p + 1)>, operandSegmentSizes = array<i32: 1, 1, 1, 0, 1>} : "
        "(tensor<1x2x1x16xf32>, tensor<1x1x128x16xf32>, tensor<1x1x128x16xf32>, tensor<1x1xi64>) -> tensor<1x2x1x16xf32>",
        tile,
    )
    ours = run(source, [q, k, v, torch.tensor([[63]])], q.shape, q.dtype)
    assert ours.isfinite().all()


@pytest.mark.parametrize(
    ("shape", "grid_rows"),
    [((1, 32, 8, 2048, 2048, 64), 32), ((1, 32, 8, 1, 1024, 64), 8), ((2, 8, 8, 300, 300, 256), 16)],
)
def test_candidates_have_code(shape, grid_rows):
    """Every tile that is offered can be launched, or says why it has no code (descriptors)."""
    b, h, g, m, n, d = shape
    types = [tensor((b, h, m, d), "bf16"), *[tensor((b, g, n, d), "bf16")] * 2]
    body = attention_op("%out", [(f"%arg{i}", t) for i, t in enumerate(types)], types[0], 0.125, m > 1)
    text = f'func.func private @k(%arg0: {types[0]}, %arg1: {types[1]}, %arg2: {types[2]}) -> {types[0]} attributes {{topo.kernel = {{family = "attention"}}}} {{\n{body}\nreturn %out : {types[0]}\n}}'
    with ir.Context() as context, ir.Location.unknown():
        load(context)
        module = ir.Module.parse(text)
        kernel = Kernel(module.body.operations[0].operation)
        tiles = search_space.candidates(kernel)
        assert 5 < len(tiles) <= MOST_CANDIDATES + 1
        assert len({tuple(sorted(t.items())) for t in tiles}) == len(tiles)
        for tile in tiles[::4]:
            source = search_space.lower(kernel, tile)
            assert source.grid[0] >= grid_rows
