"""The matrix form of gemm kernels: descriptors, persistent programs, several products; interpreted, against float64."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import plan_samples
import pytest
import torch
from gemm_samples import Function, Named
from kernel_check import check_kernels, random_tensor
from test_gemm_kernels import gated, verify
from torch_mlir import ir

from topo_opt import dialects
from topo_opt.codegen.kernel_source import KernelSource, Param
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.tiles import default_tile
from topo_opt.errors import InputError, UntrustedError
from topo_opt.runtime import executor, kernel_scan, strict_json
from topo_opt.runtime.executor import kernel_arguments
from topo_opt.runtime.plan import Descriptor, KernelParam
from topo_opt.runtime.plan_check import from_json
from topo_opt.tuning.compiled import launch_record

TILE = {"m": 16, "n": 32, "k": 32, "group": 2, "warps": 4, "stages": 3}
FORMS = {
    "pointers": {},
    "descriptors": {"tma": 1},
    "persistent": {"persistent": 3},
    "persistent descriptors": {"tma": 1, "persistent": 3},
    "splits": {"splits": 2},
    "split descriptors": {"tma": 1, "splits": 3},
}


def described(checked) -> list[str]:
    return [p.name for p in checked.source.params if p.descriptor]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [(32, 64, 64), (37, 72, 40)])
def test_product_with_residual(form, sizes):
    m, n, k = sizes
    f = Function()
    x, w, residual = f.argument((m, k)), f.argument((n, k)), f.argument((m, n))
    code = ["%w = arith.extf {1} : bf16 to f32", "%r = arith.addf {0}, %w : f32"]
    total = f.pointwise([(f.contract(x, w), "d0, d1"), (residual, "d0, d1")], (m, n), "f32", code)
    checked = verify(f.text([f.demote(total)], TILE | FORMS[form]))
    assert len(described(checked)) == (2 if "tma" in FORMS[form] else 0)
    pointers = [p.name for p in checked.source.params if not p.descriptor and p.kind != "scratch"]
    assert pointers == (["in2", "out0"] if "tma" in FORMS[form] else ["in0", "in1", "in2", "out0"])


@pytest.mark.parametrize("splits", [2, 3, 4])
def test_splits_of_k_in_f32(splits):
    """Every split has steps, and what they share out is the whole of k."""
    f = Function()
    x, w = f.argument((20, 200), "f32"), f.argument((40, 200), "f32")
    checked = verify(f.text([f.contract(x, w)], TILE | {"splits": splits}))
    assert checked.source.grid == (2 * 2 * splits, 1, 1)
    assert [s.zeroed for s in checked.source.scratch] == [False, True]


@pytest.mark.parametrize("form", FORMS)
def test_weights_by_columns(form):
    f = Function()
    x, w = f.argument((20, 48)), f.argument((48, 72))
    checked = verify(f.text([f.contract(x, w, transposed=False)], TILE | FORMS[form]))
    assert ".T" not in checked.source.source.partition("@triton.jit")[2]


@pytest.mark.parametrize("form", FORMS)
def test_gate_and_up_share_the_left_operand(form):
    f = Function()
    x, gate, up = f.argument((24, 64)), f.argument((40, 64)), f.argument((40, 64))
    checked = verify(f.text([gated(f, f.contract(x, gate), f.contract(x, up))], TILE | FORMS[form]))
    if "tma" in FORMS[form]:
        assert len(described(checked)) == 3
        assert checked.source.source.count(".load([pid_m") == 1


ALIKE = {**TILE, "tma": 1}


def paired(checked) -> list[dict]:
    """The descriptors that span two operands."""
    return [p.descriptor for p in checked.source.params if p.descriptor and p.descriptor["block"][0] == 2]


@pytest.mark.parametrize("persistent", [0, 3])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("m, n, k", [(24, 64, 64), (37, 72, 40)])
def test_weights_of_gate_and_up_are_one_operand_wherever_they_lie(m, n, k, gate_first, persistent):
    memory = torch.randn(4, n, k, generator=torch.Generator().manual_seed(0)).bfloat16()
    places = [memory[0], memory[3]] if gate_first else [memory[2], memory[0]]

    def somewhere(kind, generator):
        weights = list(ir.RankedTensorType(kind).shape) == [n, k] and places
        return places.pop(0) if weights else random_tensor(kind, generator)

    f = Function()
    x, gate, up = f.argument((m, k)), f.argument((n, k)), f.argument((n, k))
    result = gated(f, f.contract(x, gate), f.contract(x, up))
    checked = verify(
        f.text([result], ALIKE | {"persistent": persistent}, immutable=[1, 2], pdl=True), somewhere
    )
    (found,) = paired(checked)
    assert found["beside"] == "in2" and not places
    assert checked.source.source.count("tl.dot(") == 1 and checked.source.source.count("swapped = ") == 1
    kernel_scan.check(checked.source.source.encode(), "k.py")


def test_halves_of_one_weight_are_one_operand():
    f = Function()
    x, w = f.argument((24, 64)), f.argument((80, 64))
    product = f.contract(x, w)
    result = gated(f, f.slice(product, (0, 0), (24, 40)), f.slice(product, (0, 40), (24, 40)))
    checked = verify(f.text([result], ALIKE, parts=2, period=40))
    (found,) = paired(checked)
    assert found["strides"] == [40 * 64, 64, 1] and "beside" not in found
    assert "swapped" not in checked.source.source.partition("@triton.jit")[2]


@pytest.mark.parametrize("case", ["may be written", "by columns", "in f32", "in splits", "other rows"])
def test_weights_that_are_no_one_operand(case):
    f = Function()
    element = "f32" if case == "in f32" else "bf16"
    shape = (64, 40) if case == "by columns" else (40, 64)
    x, gate, up = f.argument((24, 64), element), f.argument(shape, element), f.argument(shape, element)
    other = f.argument((24, 64), element) if case == "other rows" else x
    transposed = case != "by columns"
    result = gated(f, f.contract(x, gate, transposed), f.contract(other, up, transposed))
    immutable = [1] if case == "may be written" else [1, 2]
    tile = ALIKE | ({"splits": 2} if case == "in splits" else {})
    checked = verify(f.text([result], tile, immutable=immutable, pdl=True))
    product = " + _f32_product(" if case == "in f32" else "tl.dot("
    assert not paired(checked) and checked.source.source.count(product) == 2


def test_a_persistent_tile_only_for_weights_that_are_one_operand():
    """ptxas would make several products in a loop over tiles wait for each other."""
    f = Function()
    x, gate, up = f.argument((4096, 4096)), f.argument((14336, 4096)), f.argument((14336, 4096))
    result = gated(f, f.contract(x, gate), f.contract(x, up))
    tiles = []
    with dialects.load(ir.Context()), ir.Location.unknown():
        for immutable in ([1, 2], [1]):
            module = ir.Module.parse(f.text([result], None, immutable=immutable, pdl=True))
            tiles.append(default_tile(Kernel(module.body.operations[0].operation)))
    assert tiles[0]["persistent"] == 132 and tiles[0]["n"] == 128 and tiles[0]["stages"] == 3
    assert "persistent" not in tiles[1] and tiles[1]["n"] == 128 and tiles[1]["stages"] == 4


def test_weights_that_lie_too_far_apart_are_refused(monkeypatch):
    two = torch.zeros(2, 16, 16, dtype=torch.bfloat16)
    params = (
        KernelParam("in1", "bf16"),
        KernelParam("d", "bf16", Descriptor((2, 16, 16), (256, 16, 1), (2, 16, 16), "in1")),
    )
    kernel = replace(launch_record({**asdict(EMPTY), "params": []}), params=params)
    assert kernel_arguments(kernel, [two[1], two[0]])["d"].shape == [2, 16, 16]
    assert kernel_arguments(kernel, [two[0], two[1]])["d"].shape == [3, 16, 16]
    monkeypatch.setattr(executor, "FARTHEST_APART", 512)
    with pytest.raises(InputError, match="512 bytes apart"):
        kernel_arguments(kernel, [two[1], two[0]])


EMPTY = KernelSource("k", "", (), (1, 1, 1))


@pytest.mark.parametrize("same", [True, False])
def test_pairs_in_a_pack(same):
    """Members name the pointer of their second operand as the pack does, be they one function or two."""
    texts = []
    for name, columns in (("a", 40), ("b", 40 if same else 48)):
        f = Function()
        x, gate, up = f.argument((24, 64)), f.argument((columns, 64)), f.argument((columns, 64))
        result = gated(f, f.contract(x, gate), f.contract(x, up))
        text = f.text([result], ALIKE, name=name, immutable=[1, 2], pdl=True)
        texts.append(text.removeprefix("module {").removesuffix("}"))
    second, columns = ("a", 40) if same else ("b", 48)
    one, other, rows = "tensor<40x64xbf16>", f"tensor<{columns}x64xbf16>", "tensor<24x64xbf16>"
    results = f"tensor<24x40xbf16>, tensor<24x{columns}xbf16>"
    pack = f"""func.func private @p(%x: {rows}, %g: {one}, %u: {one}, %h: {other}, %v: {other}) -> ({results})
      attributes {{topo.kernel = {{family = "pack", pdl = true, immutable = array<i64: 1, 2, 3, 4>, tile = {{warps = 4 : i64}}}}}} {{
      %0 = call @a(%x, %g, %u) : ({rows}, {one}, {one}) -> tensor<24x40xbf16>
      %1 = call @{second}(%x, %h, %v) : ({rows}, {other}, {other}) -> tensor<24x{columns}xbf16>
      return %0, %1 : {results}
    }}"""
    with dialects.load(ir.Context()), ir.Location.unknown():
        module = ir.Module.parse("\n".join([texts[0], *([] if same else texts[1:]), pack]))
        found = check_kernels(module)[-1]
    assert [d["beside"] for d in paired(found)] == ["in2", "in4"]
    for ours, expected in zip(found.ours, found.expected, strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"beside": "in7"}, "a pointer of bf16"),
        ({"beside": "d"}, "a pointer of bf16"),
        ({"shape": [3, 16, 16]}, "a dimension for them"),
        ({"block": [4, 16, 16]}, "a dimension for them"),
        ({"shape": [2, 17, 16]}, "ends after buffer 0"),
    ],
)
def test_a_plan_with_a_descriptor_of_two_tensors_is_checked(change, message):
    text = """
      func.func private @k(%a: tensor<256xbf16>, %b: tensor<256xbf16>) -> tensor<4xbf16>
          attributes {topo.kernel = {family = "loops"}} { %0 = tensor.empty() : tensor<4xbf16> return %0 : tensor<4xbf16> }
      func.func @main(%p: tensor<256xbf16> {topo.kind = "param", topo.name = "p"}, %q: tensor<256xbf16> {topo.kind = "param", topo.name = "q"})
          -> (tensor<4xbf16> {topo.kind = "output"}) attributes {topo.function = "main"} {
        %0 = call @k(%p, %q) : (tensor<256xbf16>, tensor<256xbf16>) -> tensor<4xbf16>
        return %0 : tensor<4xbf16>
      }"""
    descriptor = {"shape": [2, 16, 16], "strides": [256, 16, 1], "block": [2, 16, 16], "beside": "in1"}

    def plan(made):
        params = (
            Param("in1", "arg", 1, "bf16"),
            Param("d", "arg", 0, "bf16", made),
            Param("out0", "result", 0, "bf16"),
        )
        built = plan_samples.build(text, {"k": KernelSource("k", CODE, params, (1, 1, 1))})
        return json.loads(strict_json.dumps(built.plan.to_json()))

    (kernel,) = from_json(plan(descriptor)).kernels.values()
    assert kernel.params[1].descriptor.beside == "in1"
    with pytest.raises(UntrustedError, match=message):
        plan(descriptor | change)


CODE = '"""k"""\n\nimport triton\n\n\n@triton.jit\ndef k(in1, d, out0):\n    pass\n'


def heads_first(f: Function, batch: int, heads: int, rows: int, depth: int, n: int) -> Named:
    """`x[batch, heads, rows, depth]`, an attention's result, as rows of a product with `w[n, heads * depth]`."""
    x, w = f.argument((batch, heads, rows, depth)), f.argument((n, heads, depth))
    into = f.filled((batch, rows, n))
    maps = ", ".join(
        f"affine_map<(d0, d1, d2, d3, d4) -> {m}>"
        for m in ("(d0, d3, d1, d4)", "(d2, d3, d4)", "(d0, d1, d2)")
    )
    made = Named("%product", into.shape, "f32")
    f.lines.append(
        f"{made.name} = linalg.contract indexing_maps = [{maps}] ins({x.name}, {w.name} : {x.type}, {w.type}) "
        f"outs({into.name} : {into.type}) -> {made.type}"
    )
    return made


@pytest.mark.parametrize("persistent", [0, 2])
@pytest.mark.parametrize("rows, left", [(32, True), (24, False)])
def test_rows_of_heads(rows, left, persistent):
    """Blocks of 16 rows lie inside the 32 rows of a batch, but not inside 24: then the operand keeps its pointer."""
    f = Function()
    product = heads_first(f, 2, 3, rows, 32, 40)
    checked = verify(f.text([product], TILE | {"tma": 1, "persistent": persistent}))
    assert (len(described(checked)) == 2) == left


@pytest.mark.parametrize("form", FORMS)
def test_batches(form):
    f = Function()
    x, w = f.argument((3, 20, 40)), f.argument((3, 24, 40))
    into = f.filled((3, 20, 24))
    maps = ", ".join(
        f"affine_map<(d0, d1, d2, d3) -> {m}>" for m in ("(d0, d1, d3)", "(d0, d2, d3)", "(d0, d1, d2)")
    )
    made = Named("%product", into.shape, "f32")
    f.lines.append(
        f"{made.name} = linalg.contract indexing_maps = [{maps}] ins({x.name}, {w.name} : {x.type}, {w.type}) "
        f"outs({into.name} : {into.type}) -> {made.type}"
    )
    checked = verify(f.text([made], TILE | FORMS[form]))
    assert len(described(checked)) == (2 if "tma" in FORMS[form] else 0)


@pytest.mark.parametrize("persistent", [0, 2])
def test_an_operand_that_is_computed_keeps_its_pointers(persistent):
    f = Function()
    x, w = f.argument((20, 48)), f.argument((40, 48))
    code = ["%w = arith.extf {0} : bf16 to f32", "%r = math.exp %w : f32"]
    wide = f.demote(f.pointwise([(x, "d0, d1")], (20, 48), "f32", code))
    checked = verify(f.text([f.contract(wide, w)], TILE | {"tma": 1, "persistent": persistent}))
    assert described(checked) == ["right0_desc"]


def test_rows_that_are_no_multiple_of_16_bytes_keep_their_pointers():
    f = Function()
    x, w = f.argument((20, 36)), f.argument((40, 36))
    assert described(verify(f.text([f.contract(x, w)], TILE | {"tma": 1}))) == []


def test_a_tile_that_does_not_fit_is_replaced():
    from topo_opt.codegen.resources import DoesNotFit, measure
    from topo_opt.codegen.triton import lower_kernel
    from topo_opt.runtime.plan import MAX_SHARED_BYTES
    from topo_opt.topology import load
    from topo_opt.tuning.refit import Refit

    f = Function()
    product = f.contract(f.argument((256, 512)), f.argument((512, 512)))
    huge = {"m": 128, "n": 128, "k": 128, "group": 8, "warps": 8, "stages": 6}
    with dialects.load(ir.Context()), ir.Location.unknown():
        module = ir.Module.parse(f.text([product], huge))
        sources = {"k_gemm": lower_kernel(module.body.operations[0].operation)}
        refit = Refit(module.operation, load("h200-x1").primary)
        steps = 0
        while True:
            try:
                found = measure(sources)
                break
            except DoesNotFit as error:
                assert error.symbols == ("k_gemm",)
                sources |= refit.next_tiles(error)
                steps += 1
        assert steps >= 1 and found["k_gemm"].shared <= MAX_SHARED_BYTES
        assert str(huge["stages"]) + " : i64, warps" not in str(module)


def rotated(f: Function, product: Named, depth: int, interleaved: bool) -> Named:
    """`product * 0.5 + rotate_half(product) * 2` over heads of `depth`."""
    m, n = product.shape
    heads = f.expand(product, (m, n // depth, depth), "[[0], [1, 2]]")
    turned = f.rotate(heads, interleaved)
    code = ["%h = arith.constant 0.5 : f32", "%t = arith.constant 2.0 : f32", "%a = arith.mulf {0}, %h : f32"]
    code += ["%b = arith.mulf {1}, %t : f32", "%r = arith.addf %a, %b : f32"]
    return f.demote(f.pointwise([(heads, "d0, d1, d2"), (turned, "d0, d1, d2")], heads.shape, "f32", code))


@pytest.mark.parametrize("form", [*FORMS, "splits"])
@pytest.mark.parametrize(
    "depth, interleaved, joined", [(16, False, True), (32, True, True), (128, False, False)]
)
def test_rotary_takes_neighbouring_columns_in_one_product(form, depth, interleaved, joined):
    tile = TILE | FORMS.get(form, {"tma": 1, "splits": 2})
    f = Function()
    x, w = f.argument((24, 64)), f.argument((256, 64))
    result = rotated(f, f.contract(x, w), depth, interleaved)
    period = 1 if interleaved else depth // 2
    checked = verify(f.text([result], tile, parts=2, period=period))
    text = checked.source.source.partition("@triton.jit")[2]
    assert text.count("tl.dot(") == (1 if joined else 2) and ("tl.split(" in text) == joined
    if "tma" in tile and joined:
        assert len(described(checked)) == 2
