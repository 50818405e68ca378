"""Sums over devices inside of kernels: codegen.triton.exchange, the memory behind it, and what its plan may say.

One process plays one rank: what the others would give lies in its box already.
"""

import dataclasses
import importlib.util
import os
import re

import pytest
import torch
import triton
from torch_mlir import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from topo_opt import dialects
from topo_opt.codegen.plan import _kernel
from topo_opt.codegen.triton import lower_kernel, pack
from topo_opt.codegen.triton.exchange_boxes import SETS
from topo_opt.errors import InputError, UnsupportedError, UntrustedError
from topo_opt.runtime import boxes, plan_check
from topo_opt.runtime import plan as rt
from topo_opt.runtime.executor import kernel_arguments
from topo_opt.runtime.interpreter import interpreting, launch
from topo_opt.runtime.kernel_module import load_function
from topo_opt.tuning.key import canonical

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.int32: "i32"}
CPU = torch.device("cpu")


def lowered(text):
    with ir.Context() as context, ir.Location.unknown():
        dialects.load(context)
        module = ir.Module.parse(text)
        source = lower_kernel(module.body.operations[0].operation)
    assert source.problems() == []
    return source


def partners(ranks, memory="host"):
    return f'axes = ["x"], memory = "{memory}", ranks = {ranks} : i64'


def reader_text(size, dtype, ranks, *, given, tile=64, exchange=True, memory="host"):
    """residual + (sum over ranks of the part)."""
    t, add = f"tensor<1x{size}x{NAMES[dtype]}>", "arith.addi" if dtype == torch.int32 else "arith.addf"
    said = f"exchange = {{argument = 1 : i64, given = {str(given).lower()}, {partners(ranks, memory)}}}, "
    return f"""func.func private @add(%a: {t}, %b: {t}) -> {t} attributes {{topo.kernel = {{family = "loops", {said if exchange else ""}
        rows = array<i64: 1, {size}>, cols = array<i64>, full_shape = array<i64: 1, {size}>, full_map = affine_map<(d0, d1) -> (d0, d1)>,
        tile = {{x = {tile} : i64, r = 1 : i64, warps = 1 : i64}}}}}} {{
      %e = tensor.empty() : {t}
      %s = linalg.generic {{indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>],
        iterator_types = ["parallel", "parallel"]}} ins(%a, %b : {t}, {t}) outs(%e : {t}) {{
      ^bb0(%x: {NAMES[dtype]}, %y: {NAMES[dtype]}, %o: {NAMES[dtype]}):
        %t = {add} %x, %y : {NAMES[dtype]}
        linalg.yield %t : {NAMES[dtype]}
      }} -> {t}
      return %s : {t}
    }}"""


class Rank:
    """One rank with a kernel, and the boxes of all."""

    def __init__(self, source, place, exchange=None, programs=None):
        self.source, exchange = source, exchange or source.exchange
        ranks = exchange.ranks
        self.memory = torch.full((ranks, exchange.nbytes), boxes.ABSENT, dtype=torch.uint8)
        kernel = rt.Kernel(
            "kernels/k.py", "k", "loops", (), (programs or source.grid[0], 1, 1), 1, 1, {}, exchange=exchange
        )
        addresses = [box.data_ptr() for box in self.memory]
        (self.boxes,) = boxes.kernel_boxes(
            {"k": (exchange, kernel)}, place, addresses, CPU, spans=tuple(self.memory)
        ).values()  # fmt: skip

    def slices(self, rank, dtype):
        """The box of a rank as [set, sender, element]."""
        return self.memory[rank].view(BITS[dtype]).view(SETS, len(self.memory) - 1, -1)

    def run(self, arguments):
        given = arguments | {"boxes": self.boxes.words, "turns": self.boxes.turns}
        kinds = {"arg": "in{}", "result": "out{}"}
        tensors = [given[kinds.get(p.kind, p.name).format(p.index)] for p in self.source.params]
        with interpreting():
            function = load_function(self.source.source, "k.py", self.source.name)
            kernel = _kernel("k", self.source, None)
            launch(
                function, self.source.grid, kernel_arguments(kernel, tensors), [*tensors, *self.boxes.spans]
            )


@pytest.mark.parametrize(
    ("ranks", "place", "dtype", "size", "given"),
    [
        (2, 0, torch.bfloat16, 256, False),
        (2, 1, torch.bfloat16, 100, True),
        (3, 1, torch.float16, 77, False),
        (4, 3, torch.float32, 65, False),
        (4, 0, torch.float32, 64, True),
        (2, 1, torch.float32, 1, False),
    ],
)
@pytest.mark.parametrize("memory", ["host", "peers"])
def test_a_reader_adds_up_what_all_ranks_give(ranks, place, dtype, size, given, memory):
    """Five launches in a row: every set is used, emptied and used again. In memory of GPUs all sets are looked at first."""
    source = lowered(reader_text(size, dtype, ranks, given=given, memory=memory))
    assert ("seen" in source.source) == (memory == "peers")
    rank = Rank(source, place)
    torch.manual_seed(0)
    others = [r for r in range(ranks) if r != place]
    for number in range(5):
        parts = torch.randn(ranks, size).to(dtype)
        residual, out = torch.randn(1, size).to(dtype), torch.empty(1, size, dtype=dtype)
        mine, now = rank.slices(place, dtype), number % SETS
        assert bool((mine[now, :, :size] == -1).all()), "a set that is used again is empty"
        for sender, r in enumerate(others):
            mine[now, sender, :size] = parts[r].view(BITS[dtype])
        rank.run({"in0": residual, "in1": parts[place].clone()[None], "out0": out})
        total = parts[0].float()
        for r in range(1, ranks):
            total = total + parts[r].float()
        total = total.to(dtype)  # a sum is rounded to its type
        assert torch.equal(out, (residual.float() + total.float()).to(dtype))
        assert bool((mine[number % SETS - 1, :, :size] == -1).all()), "the set of the launch before is empty"
        for r in others:
            found = rank.slices(r, dtype)[now, place - (place > r), :size]
            assert torch.equal(found, parts[place].view(BITS[dtype])) != given
            rank.slices(r, dtype)[now] = -1
    assert rank.boxes.turns.tolist() == [5 % SETS] * rank.source.grid[0]


def test_numbers_that_look_absent_arrive():
    """A NaN with all bits set travels as another NaN."""
    rank = Rank(lowered(reader_text(64, torch.bfloat16, 2, given=False)), 0)
    part = torch.ones(1, 64, dtype=torch.bfloat16)
    part.view(torch.int16)[0, 5] = -1
    rank.slices(0, torch.bfloat16)[0, 0, :64] = torch.ones(64, dtype=torch.bfloat16).view(torch.int16)
    out = torch.empty(1, 64, dtype=torch.bfloat16)
    rank.run({"in0": torch.zeros(1, 64, dtype=torch.bfloat16), "in1": part, "out0": out})
    assert out.isnan().nonzero().tolist() == [[0, 5]]
    sent = rank.slices(1, torch.bfloat16)[0, 0, :64]
    assert bool((sent != -1).all()) and sent.view(torch.bfloat16).isnan().nonzero().tolist() == [[5]]


def test_a_rank_that_need_not_wait_goes_on():
    rank = Rank(lowered(reader_text(64, torch.float32, 2, given=True)), 0)
    rank.boxes.stop()
    zeros = torch.zeros(1, 64)
    rank.run({"in0": zeros, "in1": zeros, "out0": torch.empty(1, 64)})
    assert rank.boxes.turns.tolist() == [1]


@pytest.mark.parametrize(("rows", "n"), [(1, 48), (8, 64), (130, 96)])
def test_a_product_gives_what_it_stores(rows, n):
    """Of every form: a vector, a few rows, a matrix with blocks that reach past its end."""
    k, ranks, place = 64, 3, 1
    a, w, o = (f"tensor<{s}xbf16>" for s in (f"{rows}x{k}", f"{n}x{k}", f"{rows}x{n}"))
    said = f"gives = {{result = 0 : i64, {partners(ranks)}}}"
    text = f"""func.func private @p(%x: {a}, %w: {w}) -> {o} attributes {{topo.kernel = {{family = "gemm", {said}}}}} {{
      %z = arith.constant 0.0 : f32
      %e = tensor.empty() : tensor<{rows}x{n}xf32>
      %f = linalg.fill ins(%z : f32) outs(%e : tensor<{rows}x{n}xf32>) -> tensor<{rows}x{n}xf32>
      %p = linalg.contract indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d2)>, affine_map<(d0, d1, d2) -> (d1, d2)>,
        affine_map<(d0, d1, d2) -> (d0, d1)>] ins(%x, %w : {a}, {w}) outs(%f : tensor<{rows}x{n}xf32>) -> tensor<{rows}x{n}xf32>
      %d = "topo.demote"(%p) : (tensor<{rows}x{n}xf32>) -> {o}
      return %d : {o}
    }}"""
    source = lowered(text)
    assert source.exchange is None
    numel = rows * n
    exchange = rt.Exchange(("x",), ranks, SETS * (ranks - 1) * numel * 2, "host")
    rank = Rank(source, place, exchange, programs=7)
    rank.boxes.turns += 1  # the second set
    torch.manual_seed(0)
    out = torch.empty(rows, n, dtype=torch.bfloat16)
    given = {"in0": torch.randn(rows, k).bfloat16(), "in1": torch.randn(n, k).bfloat16(), "out0": out}
    rank.run(given)
    for r in range(ranks):
        box = rank.slices(r, torch.bfloat16)
        expected = torch.full_like(box, -1)
        if r != place:
            expected[1, place - (place > r)] = out.flatten().view(torch.int16)
        assert torch.equal(box, expected)
    assert rank.boxes.turns.tolist() == [1] * 7


@pytest.mark.parametrize(("rows", "n", "dtype"), [(5, 48, torch.bfloat16), (32, 64, torch.float32)])
def test_a_product_of_few_rows_adds_up_what_it_makes(rows, n, dtype):
    k, ranks, place, name = 64, 3, 1, NAMES[dtype]
    a, w, o = (f"tensor<{s}x{name}>" for s in (f"{rows}x{k}", f"{n}x{k}", f"{rows}x{n}"))
    demote = (
        f'%d = "topo.demote"(%p) {{topo.summed}} : (tensor<{rows}x{n}xf32>) -> {o}' if name != "f32" else ""
    )
    summed = "" if demote else " {topo.summed}"
    text = f"""func.func private @p(%x: {a}, %w: {w}) -> {o} attributes {{topo.kernel = {{family = "gemm", exchange = {{{partners(ranks)}}}}}}} {{
      %z = arith.constant 0.0 : f32
      %e = tensor.empty() : tensor<{rows}x{n}xf32>
      %f = linalg.fill ins(%z : f32) outs(%e : tensor<{rows}x{n}xf32>) -> tensor<{rows}x{n}xf32>
      %p = linalg.contract indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d2)>, affine_map<(d0, d1, d2) -> (d1, d2)>,
        affine_map<(d0, d1, d2) -> (d0, d1)>]{summed} ins(%x, %w : {a}, {w}) outs(%f : tensor<{rows}x{n}xf32>) -> tensor<{rows}x{n}xf32>
      {demote}
      return {"%d" if demote else "%p"} : {o}
    }}"""
    rank = Rank(lowered(text), place)
    torch.manual_seed(0)
    x, weights, out = (
        torch.randn(rows, k).to(dtype),
        torch.randn(n, k).to(dtype),
        torch.empty(rows, n, dtype=dtype),
    )
    mine = (x.float() @ weights.float().T).to(dtype)
    for number in range(4):
        parts = torch.randn(ranks, rows * n).to(dtype)
        box = rank.slices(place, dtype)
        for sender, r in enumerate(r for r in range(ranks) if r != place):
            box[number % SETS, sender, : rows * n] = parts[r].view(BITS[dtype])
        rank.run({"in0": x, "in1": weights, "out0": out})
        expected = parts[0].float() + mine.flatten().float() + parts[2].float()
        torch.testing.assert_close(out.flatten().float(), expected.to(dtype).float(), rtol=2e-2, atol=2e-2)
        given = rank.slices(0, dtype)[number % SETS, 0, : rows * n].view(dtype)
        torch.testing.assert_close(given.float(), mine.flatten().float(), rtol=2e-2, atol=2e-2)
        assert torch.equal(out.flatten(), ((parts[0].float() + given.float()) + parts[2].float()).to(dtype))
        assert bool((box[number % SETS - 1, :, : rows * n] == -1).all())
    assert rank.boxes.turns.tolist() == [4 % SETS] * rank.source.grid[0]


def test_only_floats_are_added_up():
    with pytest.raises(UnsupportedError, match="type i32 are not exchanged"):
        lowered(reader_text(64, torch.int32, 2, given=False))


def test_boxes_are_read_behind_the_wait():
    """The set of this turn may still hold what was there three launches ago, until the launches in between have ended."""
    text = reader_text(64, torch.float32, 2, given=True, memory="peers").replace(
        'family = "loops"', 'family = "loops", pdl = true, immutable = array<i64>'
    )
    body = lowered(text).source.split("def add")[1]
    before, after = body.split("gdc_wait()")
    assert "tl.load(boxes + 2" in before and "volatile" not in before and "tl.load(own_box" in after


def test_all_threads_go_on_together(tmp_path):
    """Every warp reads four elements for itself, and each may see something else: what the loop ends by passes through shared memory."""
    text = reader_text(4, torch.float32, 2, given=False, tile=4).replace("warps = 1", "warps = 4")
    source, file = lowered(text), tmp_path / "kernel.py"
    file.write_text(source.source)
    spec = importlib.util.spec_from_file_location("exchange_compiled", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kinds = {p.name: f"*{p.dtype}" if p.dtype else "i32" for p in source.params}
    signature = kinds | dict.fromkeys(source.constexprs, "constexpr")
    asked = ASTSource(module.add, signature, dict(source.constexprs))
    made = triton.compile(asked, target=GPUTarget("cuda", 90, 32), options={"num_warps": source.num_warps})
    (loop,) = re.findall(r"\n(\$L__BB0_\d+):.*?Loop Header(.*?)bra.uni\s+\1;", made.asm["ptx"], re.S)
    before, reads = loop[1].split("ld.volatile", 1)
    assert "st.shared" in before and "bar.sync" in before and "ld.shared" in before.split("bar.sync")[-1]
    assert "ld.volatile" in reads


def test_a_kernel_that_takes_is_no_member_of_a_pack():
    assert "boxes" in str(pack.obstacle(lowered(reader_text(64, torch.float32, 2, given=False))))


def test_what_is_exchanged_is_no_matter_of_tuning():
    """The same entry tunes a kernel with and without."""
    texts = []
    for exchange in (True, False):
        with ir.Context() as context:
            dialects.load(context)
            module = ir.Module.parse(reader_text(64, torch.bfloat16, 2, given=True, exchange=exchange))
            texts.append(canonical(module.body.operations[0].operation.get_asm(use_local_scope=True)))
    assert "exchange" not in texts[0] and texts[0] == texts[1]


def test_shared_memory_that_is_too_small_is_an_error(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(boxes.os, "posix_fallocate", full)
    with pytest.raises(InputError, match=r"2097152 bytes .* can't be reserved: No space left"):
        boxes.SharedFile(1 << 20, 2)
    assert set(os.listdir("/proc/self/fd")) == before


def test_shared_memory_leaves_no_file():
    made = boxes.SharedFile(5000, 2)
    other = boxes.SharedFile(5000, 2, made.path)
    addresses, memory, _ = made.map(CPU)
    _, theirs, _ = other.map(CPU)
    assert bool((memory == boxes.ABSENT).all()) and addresses[1] - addresses[0] >= 5000
    made.close()
    with pytest.raises(InputError, match="can't be opened"):
        boxes.SharedFile(5000, 2, made.path).map(CPU)
    memory[5001] = 7
    assert theirs[5001] == 7


def plan(**changed):
    """One kernel that exchanges, launched once."""
    exchange = rt.Exchange(("x",), 2, 1024)
    params = tuple(
        rt.KernelParam(n, t)
        for n, t in (("in0", "fp32"), ("out0", "fp32"), ("boxes", "i64"), ("turns", "i32"))
    )
    kernel = rt.Kernel("kernels/k.py", "k", "loops", params, (3, 1, 1), 1, 1, {}, exchange=exchange)
    buffers = [
        rt.Buffer("input", "float32", (8,)),
        rt.Buffer("output", "float32", (8,)),
        rt.Buffer("boxes", "int64", (4,), name="k"),
        rt.Buffer("turns", "int32", (3,), name="k"),
    ]
    for number, buffer in changed.get("buffers", {}).items():
        buffers[number] = dataclasses.replace(buffers[number], **buffer)
    kernel = dataclasses.replace(kernel, **changed.get("kernel", {}))
    step = rt.KernelStep("k", (0, 1, 2, 3), changed.get("writes", (1, 3)))
    variant = rt.Variant(
        "main",
        {},
        (rt.InputLeaf("tensor", "x", "float32", (8,), 0),),
        (rt.OutputLeaf("tensor", 1, "float32"),),
        tuple(buffers),
        (step,),
        0,
        0,
    )
    return rt.Plan(rt.SCHEMA, {"k": kernel, "other": kernel}, {"main": rt.Function((variant,))}, mesh=(rt.MeshAxis("x", 2),), devices=("a", "b"))  # fmt: skip


def test_a_plan_that_exchanges_is_read_as_it_was_written():
    assert plan_check.from_json(plan().to_json()) == plan()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"buffers": {2: {"name": "none"}}}, "is no kernel that exchanges"),
        ({"buffers": {2: {"shape": (5,)}}}, "boxes of k are 4 numbers"),
        ({"buffers": {3: {"dtype": "int64"}}}, "turns of k are 3 numbers"),
        ({"buffers": {3: {"name": "other"}}}, "writes the turns of other"),
        ({"writes": (1, 2)}, "writes boxes k"),
        ({"kernel": {"exchange": rt.Exchange(("y",), 2, 1024)}}, "not axes of the mesh"),
        ({"kernel": {"exchange": rt.Exchange(("x",), 3, 1024)}}, "ranks is 3, the axes have 2 places"),
        ({"kernel": {"exchange": rt.Exchange(("x",), 2, 1 << 40)}}, "out of range"),
        ({"kernel": {"exchange": None}}, "is no kernel that exchanges"),
    ],
)
def test_plans_that_reach_into_foreign_memory_are_refused(changed, message):
    with pytest.raises(UntrustedError, match=message):
        plan_check.check(plan(**changed))
