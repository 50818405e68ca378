"""Attention kernels through the Triton interpreter, judged against float64; and what the compiler makes of them."""

import importlib.util
import itertools
import math
import re
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_mlir import ir

from topo_opt import topology
from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton import attention, lower_kernel
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.target import Target
from topo_opt.dialects import load
from topo_opt.errors import UnsupportedError
from topo_opt.runtime.interpreter import interpreting, launch
from topo_opt.runtime.kernel_module import load_function
from topo_opt.runtime.numerics import compare

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "i1": torch.bool}
TRITON_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "i32": torch.int32,
    "i1": torch.bool,
}
ID4 = "affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>"


def tensor(shape, element) -> str:
    return f"tensor<{'x'.join(map(str, [*shape, element]))}>"


def lowered(
    arguments: list[str],
    result: str,
    body: str,
    tile: dict[str, int] | None = None,
    target: Target | None = None,
) -> KernelSource:
    """The kernel of a function of family attention; `%0`, `%1`, ... are its arguments, `%out` what it returns."""
    attributes = 'family = "attention"'
    if tile:
        attributes += f", tile = {{{', '.join(f'{k} = {v} : i64' for k, v in tile.items())}}}"
    signature = ", ".join(f"%arg{i}: {t}" for i, t in enumerate(arguments))
    text = f"func.func private @k_attention({signature}) -> {result} attributes {{topo.kernel = {{{attributes}}}}} {{\n{body}\nreturn %out : {result}\n}}"
    with ir.Context() as context, ir.Location.unknown():
        load(context)
        module = ir.Module.parse(text)
        source = lower_kernel(module.body.operations[0].operation, target or Target())
    assert source.problems() == []
    return source


def attention_op(name: str, operands: list[tuple[str, str]], result: str, scale: float, causal: bool) -> str:
    names, types = ", ".join(o for o, _ in operands), ", ".join(t for _, t in operands)
    segments = f"array<i32: 1, 1, 1, {len(operands) - 3}, 0>"
    attributes = (
        f"{{causal = {str(causal).lower()}, scale = {scale!r} : f64, operandSegmentSizes = {segments}}}"
    )
    return f'{name} = "topo.attention"({names}) {attributes} : ({types}) -> {result}'


def plain(q, k, v, mask=None, scale=None, causal=False, tile=None, target=None) -> KernelSource:
    """The kernel of one attention on contiguous tensors."""
    element = next(n for n, d in DTYPES.items() if d == q.dtype)
    types = [
        tensor(t.shape, next(n for n, d in DTYPES.items() if d == t.dtype))
        for t in (q, k, v, *([] if mask is None else [mask]))
    ]
    result = tensor([*q.shape[:3], v.shape[3]], element)
    operands = [(f"%arg{i}", t) for i, t in enumerate(types)]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return lowered(types, result, attention_op("%out", operands, result, scale, causal), tile, target)


def run(source: KernelSource, arguments: list[torch.Tensor], shape, dtype, launches: int = 1) -> torch.Tensor:
    """The kernel's result. Memory that it must not trust is filled with NaN."""
    out = torch.full(shape, float("nan")).to(dtype)
    scratch = []
    for s in source.scratch:
        blank = torch.zeros if s.zeroed else lambda n, dtype: torch.full((n,), float("nan"), dtype=dtype)
        scratch.append(blank(s.numel, dtype=TRITON_DTYPES[s.dtype]))
    buffers = {"arg": arguments, "result": [out], "scratch": scratch}
    values = {p.name: described(buffers[p.kind][p.index], p.descriptor) for p in source.params}
    with interpreting():
        function = load_function(source.source, f"{source.name}.py", source.name)
        for _ in range(launches):
            out.fill_(math.nan)
            launch(function, source.grid, {**values, **source.constexprs}, [*arguments, out, *scratch])
    return out


def described(buffer: torch.Tensor, made):
    """The parameter: the buffer itself or a tensor descriptor of it."""
    if made is None:
        return buffer
    from triton.tools.tensor_descriptor import TensorDescriptor

    assert sum((n - 1) * s for n, s in zip(made["shape"], made["strides"])) < buffer.numel()
    return TensorDescriptor(buffer, made["shape"], made["strides"], made["block"])


def reference(q, k, v, mask=None, scale=None, causal=False):
    """float64 attention; rows that see nothing are 0."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (t.double() for t in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(empty, 0.0) @ v


def check(q, k, v, mask=None, scale=None, causal=False, tile=None, launches=1) -> KernelSource:
    source = plain(q, k, v, mask, scale, causal, tile)
    arguments = [q, k, v] if mask is None else [q, k, v, mask]
    ours = run(source, arguments, (*q.shape[:3], v.shape[3]), q.dtype, launches)
    eager_mask = mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)
    eager = F.scaled_dot_product_attention(q, k, v, eager_mask, 0.0, causal, scale=scale, enable_gqa=True)
    verdict = compare(ours, eager, reference(q, k, v, mask, scale, causal))
    assert verdict.passed, f"{verdict}\n{source.source}"
    return source


def qkv(b, h, g, m, n, d, e=None, dtype=torch.bfloat16):
    return (
        torch.randn(b, h, m, d).to(dtype),
        torch.randn(b, g, n, d).to(dtype),
        torch.randn(b, g, n, d if e is None else e).to(dtype),
    )


SHAPES = {
    "prefill": dict(b=1, h=2, g=2, m=70, n=70, d=64),
    "grouped": dict(b=2, h=4, g=2, m=40, n=50, d=32),
    "depth 80": dict(b=1, h=1, g=1, m=33, n=65, d=80),
    "depth 96": dict(b=1, h=1, g=1, m=64, n=64, d=96),
    "depth 128": dict(b=1, h=1, g=1, m=32, n=48, d=128),
    "depth 256": dict(b=1, h=1, g=1, m=20, n=40, d=256),
    "narrow": dict(b=1, h=1, g=1, m=18, n=17, d=16),
    "one deep": dict(b=1, h=2, g=1, m=17, n=5, d=1, e=3),
    "values wider": dict(b=1, h=1, g=1, m=24, n=24, d=24, e=40),
    "one key": dict(b=2, h=2, g=1, m=5, n=1, d=64),
    "decode": dict(b=1, h=4, g=1, m=1, n=96, d=64),
    "decode one head": dict(b=1, h=1, g=1, m=1, n=33, d=80),
    "decode split": dict(b=1, h=8, g=2, m=1, n=300, d=64),
    "few rows": dict(b=1, h=6, g=2, m=3, n=130, d=32),
}


VARIANTS = [*itertools.product(SHAPES, ["bf16"], [False, True]), *itertools.product(SHAPES, ["f32"], [False])]
VARIANTS += [("prefill", "f16", True), ("decode split", "f16", False), ("prefill", "f32", True)]


@pytest.mark.parametrize("shape,dtype,causal", VARIANTS)
def test_matches_float64(shape, dtype, causal):
    check(*qkv(**SHAPES[shape], dtype=DTYPES[dtype]), causal=causal)


@pytest.mark.parametrize("m,n", [(1, 200), (20, 70)])
@pytest.mark.parametrize("kind", ["padding", "square", "heads", "bf16", "f32 minimum", "minus infinity"])
def test_masks(kind, m, n):
    q, k, v = qkv(2, 4, 2, m, n, 32)
    minimum = torch.finfo(torch.float32).min
    masks = {
        "padding": lambda: (
            torch.arange(n)[None, None, None, :] < torch.tensor([n // 2, 0]).reshape(2, 1, 1, 1)
        ),
        "square": lambda: torch.rand(1, 1, m, n) < 0.5,
        "heads": lambda: torch.rand(2, 4, m, n) < 0.2,
        "bf16": lambda: torch.randn(1, 4, m, n).bfloat16(),
        "f32 minimum": lambda: (
            torch.where(torch.rand(2, 1, m, n) < 0.5, 0.0, minimum) + torch.zeros(2, 1, 1, 1)
        ),
        "minus infinity": lambda: torch.where(torch.rand(1, 1, m, n) < 0.3, 0.0, -math.inf).to(
            torch.bfloat16
        ),
    }
    mask = masks[kind]()
    if kind != "padding":
        mask[..., 0, :] = (
            False
            if mask.dtype == torch.bool
            else torch.finfo(mask.dtype).min
            if "inf" not in kind
            else -math.inf
        )
    if kind == "f32 minimum":  # eager takes the mask's own dtype only: judged against the rule's floor
        ours = run(plain(q, k, v, mask), [q, k, v, mask], q.shape, q.dtype)
        exact = reference(q, k, v, mask)
        assert compare(ours, exact.to(q.dtype), exact).passed
    else:
        check(q, k, v, mask)


def _causal(m, n):
    return torch.arange(n)[None, :] <= torch.arange(m)[:, None] + (n - m)


BOUNDS = {
    "end of a cache": (1, 150, lambda: (torch.arange(150) < 49).reshape(1, 1, 1, 150)),
    "one window": (
        1,
        150,
        lambda: ((torch.arange(150) > 70) & (torch.arange(150) < 122)).reshape(1, 1, 1, 150),
    ),
    "nothing": (1, 150, lambda: torch.zeros(1, 1, 1, 150, dtype=torch.bool)),
    "ragged batch": (
        1,
        150,
        lambda: (torch.arange(150)[None] < torch.tensor([0, 133])[:, None]).reshape(2, 1, 1, 150),
    ),
    "causal": (40, 80, lambda: _causal(40, 80).reshape(1, 1, 40, 80)),
    "window": (
        50,
        50,
        lambda: (_causal(50, 50) & (torch.arange(50) > torch.arange(50)[:, None] - 9)).reshape(1, 1, 50, 50),
    ),
    "heads differ": (
        2,
        200,
        lambda: torch.arange(200).reshape(1, 1, 1, 200) < torch.tensor([3, 50, 90, 120]).reshape(1, 4, 1, 1),
    ),
}


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("name", BOUNDS)
def test_keys_outside_the_mask_are_skipped(name, splits):
    m, n, make = BOUNDS[name]
    mask = make()
    q, k, v = qkv(2, 4, 2, m, n, 16) if m < 16 else qkv(1, 2, 2, m, n, 16)
    tile = dict(m=16, n=16, warps=4, stages=2, pack=2 if m < 16 else 1, splits=splits, bounds=1)
    check(q, k, v, mask, tile=tile)
    if m > 1:
        return
    # Blocks that no row sees are not even read: NaN there would spread through the product with weights of zero.
    poisoned = v.clone()
    for b, g in itertools.product(range(2), range(2)):
        seen = mask.expand(2, 4, m, n)[b, 2 * g : 2 * g + 2].flatten(0, 1).any(
            0
        ).nonzero().flatten().tolist() or [n, -1]
        poisoned[b, g, : seen[0] // 16 * 16] = math.nan
        poisoned[b, g, (seen[-1] // 16 + 1) * 16 :] = math.nan
    assert poisoned.isnan().any()
    ours = run(plain(q, k, v, mask, tile=tile), [q, k, poisoned, mask], q.shape, q.dtype)
    exact = reference(q, k, v, mask)
    assert compare(ours, exact.to(q.dtype), exact).passed


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0, 60.0])
def test_any_scale(scale, splits):
    tile = dict(m=32, n=16, warps=4, stages=2, pack=1, splits=splits)
    check(*qkv(1, 2, 1, 17, 70, 16, dtype=torch.float16), scale=scale, tile=tile)


def test_causal_with_a_mask():
    mask = torch.rand(1, 1, 40, 40) < 0.5
    q, k, v = qkv(1, 1, 1, 40, 40, 16)
    ours = run(plain(q, k, v, mask, causal=True), [q, k, v, mask], q.shape, q.dtype)
    exact = reference(q, k, v, mask, causal=True)
    assert compare(ours, exact.to(q.dtype), exact).passed


@pytest.mark.parametrize("kept, together", [(1 << 24, 6), (2 * 70 * 64, 2), (1, 1)])
def test_long_rows_of_groups_that_fit_in_l2_come_first(monkeypatch, kept, together):
    monkeypatch.setattr(attention, "_KEPT_BYTES", kept)
    q, k, v = qkv(2, 3, 3, 70, 70, 16)
    source = check(q, k, v, causal=True, tile=dict(m=16, n=32, warps=1, stages=2, pack=1, splits=1, bounds=0))
    assert f"pid % {together}\n" in source.source


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    dtype=st.sampled_from(["bf16", "f16", "f32"]),
    b=st.integers(1, 2),
    g=st.integers(1, 2),
    group=st.integers(1, 3),
    m=st.integers(1, 40),
    n=st.integers(1, 150),
    d=st.integers(1, 40),
    e=st.integers(1, 40),
    causal=st.booleans(),
    block_m=st.sampled_from([16, 32]),
    block_n=st.sampled_from([16, 32, 64]),
    packed=st.booleans(),
    splits=st.sampled_from([1, 1, 2, 4, 8]),
)
def test_any_shape_and_tile(dtype, b, g, group, m, n, d, e, causal, block_m, block_n, packed, splits):
    tile = dict(m=block_m, n=block_n, warps=4, stages=2, pack=group if packed else 1, splits=splits)
    check(*qkv(b, g * group, g, m, n, d, e, DTYPES[dtype]), causal=causal, tile=tile)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("splits", [1, 4])
def test_error_is_eager_error(dtype, splits):
    """Without a floor, on enough elements for the root mean square to mean something."""
    q, k, v = qkv(1, 4, 4, 64, 256, 64, dtype=DTYPES[dtype])
    tile = dict(m=64, n=64, warps=4, stages=2, pack=1, splits=splits)
    exact, eager = reference(q, k, v), F.scaled_dot_product_attention(q, k, v)
    ours = run(plain(q, k, v, tile=tile), [q, k, v], q.shape, q.dtype)
    error = lambda t: (t.double() - exact).square().mean().sqrt()  # noqa: E731
    assert error(ours) <= 1.5 * error(eager)


DESCRIBED = {
    "prefill": (dict(b=2, h=4, g=2, m=40, n=70, d=32), True),
    "depth 80": (dict(b=1, h=2, g=2, m=20, n=50, d=80), False),
    "one head": (dict(b=1, h=1, g=1, m=20, n=40, d=64, e=16), False),
    "decode": (dict(b=2, h=4, g=2, m=1, n=200, d=64), False),
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_keys_and_values_through_descriptors(name):
    sizes, causal = DESCRIBED[name]
    few = sizes["m"] == 1
    tile = dict(m=16, n=32, warps=4, stages=2, pack=2 if few else 1, splits=4 if few else 1, tma=1)
    source = check(*qkv(**sizes), causal=causal, tile=tile)
    assert [p.name for p in source.params if p.descriptor] == ["keys", "values"]
    assert "in1" not in source.source.split("def k_attention")[1]


@pytest.mark.parametrize("m,splits", [(20, 1), (1, 4)])
def test_offsets_of_64_bits(m, splits, monkeypatch):
    monkeypatch.setattr(Kernel, "wide", True)
    q, k, v = qkv(2, 4, 2, m, 150, 16)
    mask = torch.rand(2, 1, m, 150) < 0.5
    tile = dict(m=16, n=32, warps=4, stages=2, pack=2 if m == 1 else 1, splits=splits, bounds=1)
    source = check(q, k, v, mask, tile=tile)
    check(q, k, v, causal=True, tile={**tile, "bounds": 0, "tma": 1})
    assert "n = (n0 + tl.arange(0, BLOCK_N)[None, :]).to(tl.int64)" in source.source


@pytest.mark.parametrize(
    "dtype, depth, described",
    [(torch.bfloat16, 64, True), (torch.float16, 128, True), (torch.float32, 64, False), (torch.bfloat16, 256, True),
     (torch.bfloat16, 512, False), (torch.bfloat16, 20, False)],
    ids=["half", "deep", "f32", "deeper", "deepest", "rows that are not aligned"],
)  # fmt: skip
def test_many_rows_read_keys_through_descriptors_where_that_is_known_to_be_fast(dtype, depth, described):
    source = plain(*(_shape(1, 4, 512, depth, dtype=dtype) for _ in range(3)))
    assert {p.name for p in source.params if p.descriptor} == ({"keys", "values"} if described else set())


@pytest.mark.parametrize(
    "rows, heads, block, warps", [(2048, 32, 128, 8), (700, 32, 64, 4), (2048, 4, 64, 4)]
)
def test_long_prompts_of_deep_heads_take_larger_blocks(rows, heads, block, warps):
    """128 rows where they come in three rounds of the cores; and two programs of 64 rows fit the shared memory of a core."""
    source = plain(*(_shape(1, heads, rows, 128, dtype=torch.bfloat16) for _ in range(3)), causal=True)
    assert (source.constexprs["BLOCK_M"], source.num_warps) == (block, warps)
    kept = 2 * 128 * (block + 2 * source.num_stages * source.constexprs["BLOCK_N"])
    assert kept * (2 if block == 64 else 1) <= 227 << 10


@pytest.mark.parametrize(
    "batch, keys, splits", [(1, 1024, 32), (4, 512, 16), (8, 1024, 8), (32, 1024, 2), (64, 1024, 1)]
)
def test_keys_are_split_over_as_many_programs_as_a_machine_has_use_for(batch, keys, splits):
    """Up to four programs on each of 132 cores, of no fewer than 32 keys."""
    source = plain(*_shapes(batch, 32, 8, 1, keys, 64), _shape(1, 1, 1, keys, dtype=torch.bool))
    assert source.grid[:2] == (batch * 8, splits)


@pytest.mark.parametrize("heads, shared, rows, keys, depth", [(8, 8, 64, 1024, 128), (32, 8, 16, 1024, 64)])
def test_many_rows_of_few_heads_leave_no_split_without_keys(heads, shared, rows, keys, depth):
    source = plain(*_shapes(1, heads, shared, rows, keys, depth))
    assert source.grid[1] > 1 and source.grid[1] * source.constexprs["BLOCK_N"] <= keys


def test_split_counters_are_left_at_zero():
    """A second launch finds the counters as the first did."""
    source = check(*qkv(1, 8, 2, 1, 300, 32), launches=2)
    assert source.grid[1] > 1 and source.scratch[3].zeroed


def test_heads_that_share_keys_read_them_once():
    """Keys expanded to every query head inside the kernel are packed as if the op had been grouped."""
    b, h, g, n, d = 1, 8, 2, 96, 32
    short, long, full = (
        tensor([b, g, n, d], "bf16"),
        tensor([b, g, h // g, n, d], "bf16"),
        tensor([b, h, n, d], "bf16"),
    )
    query = tensor([b, h, 1, d], "bf16")

    def expand(out: str, source: str) -> str:
        maps = "affine_map<(b, g, s, n, d) -> (b, g, n, d)>, affine_map<(b, g, s, n, d) -> (b, g, s, n, d)>"
        return f"""
        {out}e = tensor.empty() : {long}
        {out}w = linalg.generic {{indexing_maps = [{maps}], iterator_types = ["parallel", "parallel", "parallel", "parallel", "parallel"]}}
            ins({source} : {short}) outs({out}e : {long}) {{ ^bb0(%x: bf16, %y: bf16): linalg.yield %x : bf16 }} -> {long}
        {out} = tensor.collapse_shape {out}w [[0], [1, 2], [3], [4]] : {long} into {full}"""

    op = attention_op("%out", [("%arg0", query), ("%k", full), ("%v", full)], query, d**-0.5, False)
    source = lowered([query, short, short], query, expand("%k", "%arg1") + expand("%v", "%arg2") + "\n" + op)
    q, k, v = qkv(b, h, g, 1, n, d)
    assert source.source.split("def k_attention")[1] == plain(q, k, v).source.split("def k_attention")[1]
    ours = run(source, [q, k, v], q.shape, q.dtype)
    eager = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert compare(ours, eager, reference(q, k, v)).passed


@pytest.mark.parametrize("tma", [0, 1])
def test_views_prologue_and_epilogue_fold_into_the_kernel(tma):
    """q, k, v are slices of one projection, q is scaled on the way in, a generated mask, and heads merge on the way out with
    a residual added in f32."""
    b, m, h, d = 2, 24, 2, 16
    packed, split = tensor([b, m, 3 * h * d], "bf16"), tensor([b, m, h, d], "bf16")
    heads, merged, wide = (
        tensor([b, h, m, d], "bf16"),
        tensor([b, m, h * d], "bf16"),
        tensor([b, m, h * d], "f32"),
    )
    maskt = tensor([1, 1, m, m], "i1")
    moved = "affine_map<(b, m, h, d) -> (b, h, m, d)>"
    par4, par3 = '["parallel", "parallel", "parallel", "parallel"]', '["parallel", "parallel", "parallel"]'
    id3 = "affine_map<(a, b, c) -> (a, b, c)>"
    lines = []
    for i, name in enumerate("qkv"):
        work = (
            "%y = arith.mulf %x, %two : bf16\nlinalg.yield %y : bf16"
            if name == "q"
            else "linalg.yield %x : bf16"
        )
        lines.append(f"""
        %{name}s = tensor.extract_slice %arg0[0, 0, {i * h * d}] [{b}, {m}, {h * d}] [1, 1, 1] : {packed} to {merged}
        %{name}x = tensor.expand_shape %{name}s [[0], [1], [2, 3]] output_shape [{b}, {m}, {h}, {d}] : {merged} into {split}
        %{name}e = tensor.empty() : {heads}
        %{name} = linalg.generic {{indexing_maps = [{ID4}, {moved}], iterator_types = {par4}}} ins(%{name}x : {split})
            outs(%{name}e : {heads}) {{ ^bb0(%x: bf16, %o: bf16): {work} }} -> {heads}""")
    body = f"""
        %two = arith.constant 2.0 : bf16
        {"".join(lines)}
        %me = tensor.empty() : {maskt}
        %mask = linalg.generic {{indexing_maps = [{ID4}], iterator_types = {par4}}} outs(%me : {maskt}) {{ ^bb0(%o: i1):
            %r = linalg.index 2 : index
            %c = linalg.index 3 : index
            %t = arith.cmpi sle, %c, %r : index
            linalg.yield %t : i1 }} -> {maskt}
        {attention_op("%a", [("%q", heads), ("%k", heads), ("%v", heads), ("%mask", maskt)], heads, 0.25, False)}
        %te = tensor.empty() : {split}
        %t = linalg.generic {{indexing_maps = [{moved}, {ID4}], iterator_types = {par4}}} ins(%a : {heads}) outs(%te : {split})
            {{ ^bb0(%x: bf16, %o: bf16): linalg.yield %x : bf16 }} -> {split}
        %flat = tensor.collapse_shape %t [[0], [1], [2, 3]] : {split} into {merged}
        %we = tensor.empty() : {wide}
        %sum = linalg.generic {{indexing_maps = [{id3}, {id3}, {id3}], iterator_types = {par3}}} ins(%flat, %arg1 : {merged}, {merged})
            outs(%we : {wide}) {{ ^bb0(%x: bf16, %z: bf16, %o: f32):
            %x32 = arith.extf %x : bf16 to f32
            %z32 = arith.extf %z : bf16 to f32
            %s = arith.addf %x32, %z32 : f32
            linalg.yield %s : f32 }} -> {wide}
        %out = "topo.demote"(%sum) : ({wide}) -> {merged}"""
    tile = dict(m=16, n=16, warps=4, stages=2, pack=1, splits=1, tma=tma)
    source = lowered([packed, merged], merged, body, tile)
    projection, residual = torch.randn(b, m, 3 * h * d).bfloat16(), torch.randn(b, m, h * d).bfloat16()
    q, k, v = (t.reshape(b, m, h, d).transpose(1, 2) for t in projection.split(h * d, -1))
    ours = run(source, [projection, residual], residual.shape, torch.bfloat16)
    merge = lambda t: t.transpose(1, 2).reshape(b, m, h * d)  # noqa: E731
    eager = merge(F.scaled_dot_product_attention(q * 2, k, v, is_causal=True, scale=0.25)) + residual
    exact = merge(reference(q * 2, k, v, scale=0.25, causal=True)) + residual.double()
    assert compare(ours, eager, exact).passed, source.source
    assert source.source.count("tl.store(") == 1


@pytest.mark.parametrize(
    "make,message",
    [
        (
            lambda: plain(
                *qkv(1, 1, 1, 4, 4, 16, dtype=torch.float32),
                tile=dict(m=16, n=16, warps=4, stages=1, pack=3, splits=1),
            ),
            "packs 3 heads",
        ),
        (lambda: _f64(), "attention on f64"),
        (
            lambda: plain(
                *qkv(1, 1, 1, 4, 4, 20), tile=dict(m=16, n=16, warps=4, stages=1, pack=1, splits=1, tma=1)
            ),
            "strides of 80 and 20 elements of 2 bytes",
        ),
    ],
    ids=["pack", "f64", "unaligned"],
)
def test_refuses(make, message):
    with pytest.raises(UnsupportedError, match=message):
        make()


def _f64() -> KernelSource:
    shape = tensor([1, 1, 4, 16], "f64")
    return lowered(
        [shape] * 3, shape, attention_op("%out", [(f"%arg{i}", shape) for i in range(3)], shape, 0.25, False)
    )


GOLDENS = {
    "attention_prefill": lambda: plain(*_shapes(4, 32, 8, 2048, 2048, 64), causal=True),
    "attention_decode": lambda: plain(
        *_shapes(1, 32, 8, 1, 1024, 64), _shape(1, 1, 1, 1024, dtype=torch.bool)
    ),
}


COMPILED = {
    "prefill": lambda: plain(*_shapes(1, 32, 8, 2048, 2048, 64), causal=True),
    "square mask": lambda: plain(*_shapes(8, 12, 12, 512, 512, 64), _shape(8, 1, 512, 512, dtype=torch.bool)),
    "decode": lambda: plain(*_shapes(1, 16, 4, 1, 1024, 256), _shape(1, 1, 1, 1024, dtype=torch.bool)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_for_sm_90_without_spills(name, tmp_path, monkeypatch):
    shared, stack = _needs(COMPILED[name](), 90, tmp_path, monkeypatch)
    assert shared <= 232448 and stack == 0


@pytest.mark.parametrize(
    "machine, dtype, depth",
    [("rtx4090-x8-pcie", torch.bfloat16, 256), ("dgx-a100-x8", torch.float32, 64), ("l20-x8-pcie", torch.float32, 128),
     ("dgx-a100-x8", torch.bfloat16, 128)],
)  # fmt: skip
def test_many_rows_fit_other_machines_too(machine, dtype, depth, tmp_path, monkeypatch):
    device = topology.load(machine).primary
    source = plain(*(_shape(8, 16, 512, depth, dtype=dtype) for _ in range(3)), target=Target.of(device))
    shared, stack = _needs(source, device.target.capability, tmp_path, monkeypatch)
    assert shared <= device.cores.shared_memory_per_block_bytes.value and stack <= 512


def _needs(source, capability, tmp_path, monkeypatch) -> tuple[int, int]:
    """Bytes of shared memory a program of a kernel, and of registers spilled a thread."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    file = tmp_path / f"{source.name}.py"
    file.write_text(source.source)
    spec = importlib.util.spec_from_file_location("attention_compiled", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    signature = {p.name: _type(p) for p in source.params} | dict.fromkeys(source.constexprs, "constexpr")
    pointers = [i for i, p in enumerate(source.params) if p.descriptor is None]
    aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
    kernel = ASTSource(getattr(module, source.name), signature, dict(source.constexprs), aligned)
    options = {"num_warps": source.num_warps, "num_stages": source.num_stages}
    compiled = triton.compile(kernel, target=GPUTarget("cuda", capability, 32), options=options)
    (tmp_path / "k.cubin").write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run(
        [tool, "-res-usage", tmp_path / "k.cubin"], capture_output=True, text=True, check=True
    ).stdout
    return compiled.metadata.shared, int(re.search(r"STACK:(\d+)", usage)[1])


def _type(param):
    block = ",".join(map(str, (param.descriptor or {}).get("block", ())))
    return f"tensordesc<{param.dtype}[{block}]>" if block else f"*{param.dtype}"


def _shape(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _shapes(b, h, g, m, n, d):
    return _shape(b, h, m, d), _shape(b, g, n, d), _shape(b, g, n, d)


@pytest.mark.parametrize("name", GOLDENS)
def test_source_is_as_recorded(name):
    """The generated text; after a wanted change write the new text over the file."""
    recorded = Path(__file__).parent / "goldens" / f"{name}.py"
    assert GOLDENS[name]().source == recorded.read_text()
