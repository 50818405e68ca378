"""codegen.triton.attention_early: what an attention reads before the kernel in front of it has written its row of keys and values.

The kernel in front finishes when the attention waits: until then the queries and the written row of keys and values are NaN.
"""

import ast
import importlib.util
import math
import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from torch_mlir import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from topo_opt.codegen.triton import lower_kernel, pack
from topo_opt.codegen.triton.dependent_launch import TRIGGER, WAIT, WAIT_IN_LOOP, arrange
from topo_opt.dialects import load
from topo_opt.runtime.interpreter import interpreting, launch
from topo_opt.runtime.kernel_module import load_function

TYPES = {torch.bfloat16: "bf16", torch.float32: "f32", torch.bool: "i1", torch.int64: "i64"}
MEMORY = {"fp32": torch.float32, "i32": torch.int32}
TILE = {"m": 16, "n": 16, "warps": 2, "stages": 3, "pack": 4, "splits": 2, "bounds": 0}
B, H, G, D, KEYS = 2, 8, 2, 32, 80


def tensor(value):
    return f"tensor<{'x'.join(map(str, value.shape))}x{TYPES[value.dtype]}>"


def kernel(values, *, tile=None, marks=None, dim=2, extra="", segments=(1, 1, 1, 0, 0)):
    """An attention of `values` (queries, keys, values, what else it takes), with the index of the written row as its last argument."""
    last = len(values) - 1
    marks = (
        f"written = [array<i64: 1, {last}, {dim}>, array<i64: 2, {last}, {dim}>], settled = array<i64: {', '.join(map(str, range(3, last + 1)))}>"
        if marks is None
        else marks
    )
    types, result = [tensor(v) for v in values], tensor(values[0])
    tiles = ", ".join(f"{k} = {v} : i64" for k, v in (TILE | (tile or {})).items())
    names, inner = ", ".join(f"%arg{i}" for i in range(last)), ", ".join(types[:-1])
    text = f"""func.func private @k_attention({", ".join(f"%arg{i}: {t}" for i, t in enumerate(types))}) -> {result}
      attributes {{topo.kernel = {{family = "attention", pdl = true, immutable = array<i64>, tile = {{{tiles}}}{marks and ", " + marks}}}}} {{
      %0 = "topo.attention"({names}) {{causal = false, scale = 0.3 : f64, operandSegmentSizes = array<i32: {", ".join(map(str, segments))}>{extra}}} : ({inner}) -> {result}
      return %0 : {result}
    }}"""
    with ir.Context() as context, ir.Location.unknown():
        load(context)
        module = ir.Module.parse(text)
        source = lower_kernel(module.body.operations[0].operation)
    assert source.problems() == []
    return source


def inputs(dtype=torch.bfloat16, keys=KEYS):
    return torch.randn(B, H, 1, D).to(dtype), *(torch.randn(B, G, keys, D).to(dtype) for _ in range(2))


def run(source, arguments, written):
    """The kernel's result, when the kernel in front writes the queries and row `written` of keys and values as the kernel waits."""
    complete = [a.clone() for a in arguments]
    arguments[0].fill_(math.nan)
    if 0 <= written < arguments[1].shape[2]:
        for rows in arguments[1:3]:
            rows[:, :, written] = math.nan
    waits = []

    def wait(**_):
        waits.append(1)
        for argument, value in zip(arguments, complete):
            argument.copy_(value)

    out = torch.full(arguments[0].shape, math.nan).to(arguments[0].dtype)
    scratch = [
        (torch.zeros if s.zeroed else torch.empty)(s.numel, dtype=MEMORY[s.dtype]) for s in source.scratch
    ]
    buffers = {"arg": arguments, "result": [out], "scratch": scratch}
    passed = {p.name: buffers[p.kind][p.index] for p in source.params}
    with interpreting():
        function = load_function(source.source, f"{source.name}.py", source.name)
        names = function.fn.__globals__
        names |= dict.fromkeys({"gdc_wait", "wait_in_loop"} & names.keys(), wait)
        launch(function, source.grid, {**passed, **source.constexprs}, [*arguments, out, *scratch])
    assert len(waits) >= math.prod(source.grid), "a program that did not wait"
    assert not any(buffer.any() for buffer, s in zip(scratch, source.scratch) if s.zeroed)
    return out


def expected(q, k, v, seen, cap=None):
    """float64 attention; `seen`: which keys, or what is added to the scores."""
    q, k, v = (t.double() for t in (q, k.repeat_interleave(H // G, 1), v.repeat_interleave(H // G, 1)))
    scores = q @ k.transpose(-1, -2) * 0.3
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen, -math.inf) if seen.dtype == torch.bool else scores + seen.double()
    empty = (scores == -math.inf).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(empty, 0.0) @ v


def close(ours, wanted):
    tolerance = 2e-2 if ours.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours.double(), wanted, atol=tolerance, rtol=tolerance)


def early(source):
    body = source.source.split("def k_attention")[1]
    return "!= written" in body and body.index("for n0") < body.index(WAIT_IN_LOOP)


ALL = torch.ones(1, dtype=torch.bool)


@pytest.mark.parametrize("written", [0, 15, 16, 41, KEYS - 1])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_the_row_that_the_kernel_in_front_writes_is_read_behind_the_wait(written, splits):
    values = [*inputs(), torch.tensor([written])]
    source = kernel(values, tile={"splits": splits})
    assert early(source)
    wanted = expected(*values[:3], ALL)
    close(run(source, values, written), wanted)


@pytest.mark.parametrize("written", [-1, KEYS, 2**32 + 5])
def test_an_index_outside_of_the_rows_is_none_of_them(written):
    values = [*inputs(), torch.tensor([written])]
    close(run(kernel(values), values, written), expected(*values[:3], ALL))


@pytest.mark.parametrize("bounds", [0, 1])
@pytest.mark.parametrize("written, visible", [(30, 31), (0, 1), (30, 30), (64, 3), (5, 0)])
def test_a_mask_that_is_complete_is_read_before_the_wait(written, visible, bounds):
    mask = (torch.arange(KEYS) < visible)[None, None, None]
    values = [*inputs(), mask, torch.tensor([written])]
    source = kernel(values, tile={"bounds": bounds}, segments=(1, 1, 1, 1, 0))
    assert early(source)
    wanted = expected(*values[:3], mask)
    close(run(source, values, written), wanted)


def test_a_mask_that_is_added_counts_for_the_written_row_too():
    mask = torch.randn(B, 1, 1, KEYS)
    mask[0, ..., 7] = -math.inf
    values = [*inputs(torch.float32), mask, torch.tensor([7])]
    source = kernel(values, segments=(1, 1, 1, 1, 0))
    assert early(source)
    wanted = expected(*values[:3], mask)
    close(run(source, values, 7), wanted)


@pytest.mark.parametrize("splits", [1, 2])
def test_positions_of_the_sequences_bound_the_keys(splits):
    places = torch.tensor([[50], [12]])
    values = [*inputs(), places, torch.tensor([12])]
    extra = (
        ", high = affine_map<(m, p) -> (p + 1)>, low = affine_map<(m, p) -> (p - 20)>, softcap = 5.0 : f64"
    )
    source = kernel(values, tile={"splits": splits}, segments=(1, 1, 1, 0, 1), extra=extra)
    assert early(source)
    n = torch.arange(KEYS)
    wanted = expected(*values[:3], ((n <= places) & (n >= places - 20))[:, None, None], cap=5.0)
    close(run(source, values, 12), wanted)


@pytest.mark.parametrize("splits", [1, 4])
def test_blocks_that_reach_past_the_keys(splits):
    values = [*inputs(keys=75), torch.tensor([74])]
    source = kernel(values, tile={"splits": splits})
    assert early(source)
    wanted = expected(*values[:3], ALL)
    close(run(source, values, 74), wanted)


@pytest.mark.parametrize("written", [59, 60])
def test_one_head_a_program_has_one_loop_too(written):
    values = [*inputs(), torch.tensor([written])]
    source = kernel(values, tile={"splits": 1, "pack": 1}, extra=", high = affine_map<(m, p) -> (m + 60)>")
    assert early(source) and source.source.count("for n0") == 1
    wanted = expected(*values[:3], torch.arange(KEYS) < 60)
    close(run(source, values, written), wanted)


def test_the_loop_leaves_the_written_row_out_wherever_its_loads_stand():
    """Triton requests blocks of a loop ahead of it: none of them may read what the wait stands for."""
    mask = torch.ones(1, 1, 1, KEYS, dtype=torch.bool)
    source = kernel([*inputs(), mask, torch.tensor([3])], tile={"bounds": 1}, segments=(1, 1, 1, 1, 0))
    function = ast.parse(source.source).body[-1]
    (loop,) = (n for n in function.body if isinstance(n, ast.For))
    made = {n.targets[0].id: ast.unparse(n.value) for n in loop.body if isinstance(n, ast.Assign)}
    loads = [v for v in made.values() if "tl.load" in v]
    assert sum("tl.load(in1" in v for v in loads) == sum("tl.load(in2" in v for v in loads) == 1
    for text in loads:
        call = ast.parse(text, mode="eval").body
        if "tl.load(in3" not in text:
            (test,) = (k.value.id for k in call.keywords if k.arg == "mask")
            assert made[test] in ("n != written", "nv != written")
    queries = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == "in0"]
    (branch,) = (n for n in loop.body if isinstance(n, ast.If))
    assert queries and all(branch.lineno < n.lineno <= branch.end_lineno for n in queries)
    assert (
        ast.unparse(branch.body[0]) == WAIT_IN_LOOP
        and ast.unparse(function.body[function.body.index(loop) + 1]) == WAIT
    )


UNKNOWN = {
    "rows that are not marked": dict(marks="settled = array<i64: 3>"),
    "an index that is not complete": dict(marks="written = [array<i64: 1, 3, 2>, array<i64: 2, 3, 2>]"),
    "keys alone": dict(marks="written = [array<i64: 1, 3, 2>], settled = array<i64: 3>"),
    "another dimension than that of the keys": dict(dim=1),
    "loads that the compiler does not request ahead": dict(tile={"stages": 1}),
}  # fmt: skip


@pytest.mark.parametrize("options", UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_known_leaves_all_reads_behind_the_wait(options):
    values = [*inputs(), torch.tensor([3])]
    source = kernel(values, **options)
    body = source.source.split("def k_attention")[1]
    assert not early(source) and "tl.load" not in body[: body.index(WAIT)] and body.count(WAIT) == 1
    assert "wait_in_loop" not in source.source
    wanted = expected(*values[:3], ALL)
    close(run(source, values, 3), wanted)


@pytest.mark.parametrize("splits, stages", [(1, 4), (2, 2)])
def test_the_compiler_requests_the_first_blocks_of_keys_and_values_before_the_wait(tmp_path, splits, stages):
    values = [torch.empty(B, H, 1, 64), *(torch.empty(B, G, 1024, 64) for _ in range(2))]
    mask = torch.empty(1, 1, 1, 1024, dtype=torch.bool)
    tile = {"n": 64, "stages": stages, "splits": splits, "bounds": 1, "warps": 4}
    bf16 = [v.to(torch.bfloat16) for v in values]
    source = kernel([*bf16, mask, torch.tensor([3])], tile=tile, segments=(1, 1, 1, 1, 0))
    before, after = machine_code(source, tmp_path).split("ACQBULK", 1)
    # A thread copies 16 bytes at a time.
    each = 64 * 64 * 2 // 16 // (32 * tile["warps"])
    assert before.count("LDGSTS") == 2 * (stages - 1) * each
    assert "LDGSTS" in after and "STG" not in before


def machine_code(source, folder):
    """What the compiler makes of a kernel for sm_90."""
    file = folder / "kernel.py"
    file.write_text(source.source)
    spec = importlib.util.spec_from_file_location("early_keys_compiled", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    signature = {p.name: f"*{p.dtype}" for p in source.params} | dict.fromkeys(source.constexprs, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(source.params))}
    made = ASTSource(getattr(module, source.name), signature, dict(source.constexprs), aligned)
    options = {
        "num_warps": source.num_warps,
        "num_stages": source.num_stages,
        "launch_pdl": True,
        "enable_fp_fusion": True,
    }
    compiled = triton.compile(made, target=GPUTarget("cuda", 90, 32), options=options)
    (folder / "k.cubin").write_bytes(compiled.asm["cubin"])
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    usage, code = (
        subprocess.run([tools / t, *a, folder / "k.cubin"], capture_output=True, text=True, check=True).stdout
        for t, a in (("cuobjdump", ["-res-usage"]), ("nvdisasm", []))
    )
    assert int(re.search(r"STACK:(\d+)", usage)[1]) == 0, usage
    return code


def test_a_mask_that_the_kernel_in_front_makes_leaves_all_reads_behind_the_wait():
    mask = torch.ones(1, 1, 1, KEYS, dtype=torch.bool)
    marks = "written = [array<i64: 1, 4, 2>, array<i64: 2, 4, 2>], settled = array<i64: 4>"
    source = kernel([*inputs(), mask, torch.tensor([3])], marks=marks, segments=(1, 1, 1, 1, 0))
    assert not early(source)


def test_a_late_trigger_stands_behind_the_last_wait():
    marks = (
        "written = [array<i64: 1, 3, 2>, array<i64: 2, 3, 2>], settled = array<i64: 3>, late_trigger = true"
    )
    source = kernel([*inputs(), torch.tensor([3])], marks=marks)
    lines = [line.strip() for line in source.source.split("def k_attention")[1].splitlines()]
    assert lines.count(WAIT_IN_LOOP) == lines.count(WAIT) == 1 and lines.count(TRIGGER) == 1
    assert lines[lines.index(TRIGGER) - 1] == WAIT and lines.index(WAIT) > lines.index(WAIT_IN_LOOP)


def test_a_kernel_that_waits_in_its_loop_can_be_a_member_of_a_pack():
    source = kernel([*inputs(), torch.tensor([3])])
    assert early(source) and pack.obstacle(source) is None
    assert source.source.count("def wait_in_loop") == 1


def test_a_body_that_waits_may_not_read_before_what_is_not_known():
    body = ["    x = tl.load(in0)", "    for i in range(0, x):", f"        {WAIT_IN_LOOP}", f"    {WAIT}"]
    assert arrange(body, {"in0"}, ())[1:] == body
    with pytest.raises(AssertionError, match="in0"):
        arrange(body, set(), ())


@pytest.mark.parametrize("splits", [1, 2])
def test_keys_that_are_complete_are_read_before_the_wait_of_the_queries(splits):
    """As in attention to what an encoder has made."""
    values = [*inputs(), torch.tensor([3])]
    source = kernel(values, tile={"splits": splits}, marks="settled = array<i64: 1, 2>")
    body = source.source.split("def k_attention")[1]
    assert (
        body.index("for n0") < body.index(WAIT_IN_LOOP) < body.index("tl.load(in0") and "written" not in body
    )
    wanted = expected(*values[:3], ALL)
    close(run(source, values, KEYS), wanted)


def test_values_that_are_complete_beside_keys_of_which_one_is_written():
    values = [*inputs(), torch.tensor([3])]
    source = kernel(values, marks="written = [array<i64: 1, 3, 2>], settled = array<i64: 2, 3>")
    assert early(source)
    wanted = expected(*values[:3], ALL)
    close(run(source, values, 3), wanted)


def test_blocks_of_many_rows_wait():
    values = [*inputs(), torch.tensor([3])]
    assert not early(kernel(values, tile={"m": 64, "n": 64}))
