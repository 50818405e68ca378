"""Gemm kernels of few rows in every form: generated Triton, interpreted, against the reference executor, and once in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gemm_samples import Function, gated, reciprocal_root, rotated, scaled
from kernel_check import Checked, check_kernels, random_tensor
from torch_mlir import ir

from topo_opt import dialects
from topo_opt.codegen.triton import gemm_space, lower_kernel
from topo_opt.codegen.triton.gemm_tiles import default_tile
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.target import Target
from topo_opt.errors import UnsupportedError
from topo_opt.tuning import joint_products

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


def make(kind: ir.Type, generator: torch.Generator) -> torch.Tensor:
    """Indices that are a permutation's start, so that rows named twice don't decide a test; otherwise random."""
    if str(ir.RankedTensorType(kind).element_type) == "i64":
        (size,) = ir.RankedTensorType(kind).shape
        return torch.randperm(size + 2, generator=generator)[:size]
    return random_tensor(kind, generator)


def verify(text: str, made=make) -> Checked:
    with dialects.load(ir.Context()), ir.Location.unknown():
        module = ir.Module.parse(text)
        assert module.operation.verify()
        (checked,) = check_kernels(module, made)
    for ours, expected in zip(checked.ours, checked.expected, strict=True):
        assert ours.shape == expected.shape and ours.dtype == expected.dtype
        error = (ours.double() - expected.double()).abs().max().item()
        bound = TOLERANCE[ours.dtype] * max(expected.double().abs().max().item(), 1.0)
        assert error <= bound, f"{error}\n{checked.source.source}"
    assert not checked.source.problems()
    return checked


def vector(n: int = 4, k: int = 64, **more: int) -> dict[str, int]:
    return {"n": n, "k": k, "warps": 1} | more


# Tiles by form; a test names the forms that it is for. k = 200 leaves a tail, n = 24 a masked block.
TILES = {
    "vector": vector(),
    "whole rows": vector(k=256),
    "repeat": vector(repeat=2, k=128),
    "loop": vector(k=16),
    "skinny": {"split": 1, "n": 16, "k": 64, "warps": 4, "stages": 3},
    "split": {"split": 3, "n": 32, "k": 32, "warps": 4, "stages": 3},
    "sliced": {"split": 1, "n": 16, "k": 64, "slices": 4, "warps": 4, "stages": 3},
    "sliced split": {"split": 2, "n": 8, "k": 128, "slices": 8, "warps": 8, "stages": 2},
    "one step": {"split": 4, "n": 16, "k": 64, "warps": 4, "stages": 1},
    "ahead": {"split": 2, "n": 16, "k": 32, "warps": 4, "stages": 3, "ahead": 3},
    "all ahead": {"split": 1, "n": 32, "k": 64, "slices": 2, "warps": 4, "stages": 3, "ahead": 6},
}
ROWS = {
    "vector": 2,
    "whole rows": 1,
    "repeat": 3,
    "loop": 2,
    "skinny": 16,
    "split": 5,
    "one step": 20,
    "ahead": 7,
    "all ahead": 6,
    "sliced": 8,
    "sliced split": 3,
}
FORMS = list(TILES)


@pytest.mark.parametrize("form", FORMS)
def test_gate_and_up_share_one_read_of_the_rows(form):
    f = Function()
    x, a, b = f.argument((ROWS[form], 200)), f.argument((24, 200)), f.argument((24, 200))
    result = gated(f, f.contract(x, a), f.contract(x, b))
    checked = verify(f.text([result], TILES[form]))
    assert checked.source.source.count("tl.load(in0") <= 4 * max(ROWS[form], 4) * 3


@pytest.mark.parametrize("machine", ["mi300x-x8", "dgx2-v100-x16", "l20-x8-pcie", "h200-x1"])
@pytest.mark.parametrize("m, n, k", [(64, 28672, 8192), (48, 14336, 5120), (8, 896, 896)])
def test_every_machine_has_a_tile_for_products_that_take_a_norm(machine, m, n, k):
    f = Function()
    x, w, a, b = (f.argument(s) for s in ((m, k), (k,), (n, k), (n, k)))
    scale = reciprocal_root(f, f.mean_square(x))
    left = scaled(f, x, w)
    text = f.text([gated(f, f.contract(left, a), f.contract(left, b), scale)], None)
    with ir.Context() as context, ir.Location.unknown():
        dialects.load(context)
        module = ir.Module.parse(text)
        assert lower_kernel(module.body.operations[0].operation, Target.named(machine)).grid[0] > 0


def test_several_products_get_a_stage_more():
    """Gated products where one program has a core to itself; two parts of one product are one block of weights and as fast in three."""
    f = Function()
    x, a, b = f.argument((4096, 4096)), f.argument((14336, 4096)), f.argument((14336, 4096))
    texts = [f.text([gated(f, f.contract(x, a), f.contract(x, b))], None)]
    f = Function()
    product = f.contract(f.argument((4096, 4096)), f.argument((14336, 4096)))
    texts += [f.text([product], None, parts=2, period=64), f.text([product], None)]
    with ir.Context() as context, ir.Location.unknown():
        dialects.load(context)
        modules = [ir.Module.parse(text) for text in texts]
        tiles = [default_tile(Kernel(m.body.operations[0].operation)) for m in modules]
        module = ir.Module.parse(f.text([product], tiles[1], parts=2, period=64))
        function = module.body.operations[0].operation
        (together,) = joint_products.tiles([function, function], [function], Target())[0]
    assert [(t["n"], t["stages"]) for t in (*tiles, together)] == [(128, 4), (128, 3), (256, 3), (128, 3)]


@pytest.mark.parametrize("form", FORMS)
def test_halves_of_one_weight(form):
    """Gate and up as halves of one product: two parts of half the columns."""
    f = Function()
    m = ROWS[form]
    x, w = f.argument((m, 200)), f.argument((48, 200))
    product = f.contract(x, w)
    result = gated(f, f.slice(product, (0, 0), (m, 24)), f.slice(product, (0, 24), (m, 24)))
    verify(f.text([result], TILES[form], parts=2, period=24))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["halves", "interleaved", "slices"])
def test_rotation_reads_each_weight_once(form, kind):
    f = Function()
    x, w = f.argument((ROWS[form], 200)), f.argument((48, 200))
    result = rotated(f, f.contract(x, w), 3, kind == "interleaved", kind != "slices")
    period = 1 if kind == "interleaved" else 8
    checked = verify(f.text([result], TILES[form], parts=2, period=period))
    assert "tl.where" not in checked.source.source.split("tl.sum")[-1]


@pytest.mark.parametrize("form", FORMS)
def test_rotated_rows_are_written_into_a_cache(form):
    f = Function()
    m = ROWS[form]
    x, w, cache = f.argument((m, 200)), f.argument((48, 200)), f.argument((m + 2, 3, 16))
    index = f.argument((m,), "i64")
    result = f.update(cache, rotated(f, f.contract(x, w), 3, False, True), index, 0)
    verify(f.text([result], TILES[form], [[0, 2]], parts=2, period=8))


@pytest.mark.parametrize("form", FORMS)
def test_row_statistic_beside_the_product(form):
    """A norm after its row scale was sunk: the weight is in the prologue, the statistic in the epilogue."""
    f = Function()
    m = ROWS[form]
    x, w, a, b = f.argument((m, 200)), f.argument((200,)), f.argument((24, 200)), f.argument((24, 200))
    scale = reciprocal_root(f, f.mean_square(x))
    left = scaled(f, x, w)
    verify(f.text([gated(f, f.contract(left, a), f.contract(left, b), scale)], TILES[form]))


@pytest.mark.parametrize("form", FORMS)
def test_row_statistic_of_a_factor(form):
    """A whole norm before the product; its variance waits for its mean."""
    f = Function()
    m = ROWS[form]
    x, w, a = f.argument((m, 200)), f.argument((200,)), f.argument((24, 200))
    total = f.row_sum(x, ["%r = arith.extf {0} : bf16 to f32"])
    mean = f.pointwise(
        [(total, "d0")], (m,), "f32", ["%n = arith.constant 200.0 : f32", "%r = arith.divf {0}, %n : f32"]
    )
    centred = f.pointwise([(x, "d0, d1"), (mean, "d0")], x.shape, "f32", ["%w = arith.extf {0} : bf16 to f32", "%r = arith.subf %w, {1} : f32"])  # fmt: skip
    spread = f.row_sum(centred, ["%r = arith.mulf {0}, {0} : f32"])
    norm = f.pointwise(
        [(centred, "d0, d1"), (reciprocal_root(f, spread), "d0"), (w, "d1")], x.shape, "f32",
        ["%a = arith.mulf {0}, {1} : f32", "%b = arith.extf {2} : bf16 to f32", "%r = arith.mulf %a, %b : f32"],
    )  # fmt: skip
    verify(f.text([f.demote(f.contract(f.demote(norm), a))], TILES[form]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [8, 4])
def test_integer_weights_are_widened_in_the_load(form, bits):
    f = Function()
    x, q, s = (
        f.argument((ROWS[form], 200)),
        f.argument((24, 200 if bits == 8 else 100), "i8"),
        f.argument((24,), "f32"),
    )
    if bits == 8:
        code = ["%i = arith.sitofp {0} : i8 to f32", "%r = arith.mulf %i, {1} : f32"]
        w = f.pointwise([(q, "d0, d1"), (s, "d0")], (24, 200), "f32", code)
    else:
        code = [
            "%k = linalg.index 1 : index", "%two = arith.constant 2 : index", "%odd = arith.remsi %k, %two : index",
            "%c = arith.index_cast %odd : index to i8", "%four = arith.constant 4 : i8", "%sh = arith.muli %c, %four : i8",
            "%lo = arith.shrui {0}, %sh : i8", "%mask = arith.constant 15 : i8", "%u = arith.andi %lo, %mask : i8",
            "%e = arith.constant 8 : i8", "%z = arith.subi %u, %e : i8",
            "%i = arith.sitofp %z : i8 to f32", "%r = arith.mulf %i, {1} : f32",
        ]  # fmt: skip
        w = f.pointwise([(q, "d0, d1 floordiv 2"), (s, "d0")], (24, 200), "f32", code)
    verify(f.text([f.demote(f.contract(x, f.demote(w)))], TILES[form]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("element", ["f8E4M3FN", "f8E5M2"])
def test_eight_bit_floats_are_widened_in_the_load(form, element):
    f = Function()
    x, q, s = f.argument((ROWS[form], 200)), f.argument((24, 200), element), f.argument((24,), "f32")
    code = [f"%i = arith.extf {{0}} : {element} to f32", "%r = arith.mulf %i, {1} : f32"]
    w = f.pointwise([(q, "d0, d1"), (s, "d0")], (24, 200), "f32", code)
    verify(f.text([f.demote(f.contract(x, f.demote(w)))], TILES[form]))


@pytest.mark.parametrize("form", FORMS)
def test_f32_factors(form):
    f = Function()
    m = ROWS[form]
    x, w, a = f.argument((m, 200), "f32"), f.argument((200,), "f32"), f.argument((24, 200), "f32")
    code = ["%r = arith.mulf {0}, {1} : f32"]
    left = f.pointwise([(x, "d0, d1"), (w, "d1")], x.shape, "f32", code)
    verify(f.text([f.contract(left, a)], TILES[form]))


@pytest.mark.parametrize("form", FORMS)
def test_factors_that_are_not_zero_past_the_end_of_k(form):
    f = Function()
    x, a = f.argument((ROWS[form], 200)), f.argument((24, 200))
    exponential = f.pointwise([(x, "d0, d1")], x.shape, "f32", ["%w = arith.extf {0} : bf16 to f32", "%e = math.exp %w : f32", "%o1 = arith.constant 1.0 : f32", "%r = arith.divf %o1, %w : f32"])  # fmt: skip
    biased = f.pointwise([(a, "d0, d1")], a.shape, "f32", ["%w = arith.extf {0} : bf16 to f32", "%c = arith.constant 3.0 : f32", "%r = arith.addf %w, %c : f32"])  # fmt: skip
    verify(f.text([f.demote(f.contract(f.demote(exponential), f.demote(biased)))], TILES[form]))


@pytest.mark.parametrize("form", FORMS)
def test_dependent_launch_loads_nothing_that_may_be_written_before_the_wait(form):
    f = Function()
    x, w, a, r = (
        f.argument((ROWS[form], 200)),
        f.argument((200,)),
        f.argument((24, 200)),
        f.argument((ROWS[form], 24)),
    )
    product = f.contract(scaled(f, x, w), a)
    code = ["%w1 = arith.extf {1} : bf16 to f32", "%r = arith.addf {0}, %w1 : f32"]
    result = f.demote(f.pointwise([(product, "d0, d1"), (r, "d0, d1")], product.shape, "f32", code))
    source = verify(f.text([result], TILES[form], immutable=[1, 2], pdl=True)).source
    assert source.pdl
    before, _ = source.source.split("gdc_wait()\n")
    assert before.index("gdc_launch_dependents()\n") and "tl.load(in2 + " in before
    assert "tl.load(in0 + " not in before and "tl.load(in3 + " not in before
    nothing = verify(f.text([result], TILES[form], immutable=[], pdl=True)).source.source
    assert "tl.load(" not in nothing.split("gdc_wait()\n")[0]


@pytest.mark.parametrize("form", ["vector", "repeat", "loop", "split"])
def test_everything_at_once(form):
    """A sunk norm on integer weights, rotated, appended to a cache, launched dependently."""
    f = Function()
    m = ROWS[form]
    x, q, s, w = (
        f.argument((m, 200)),
        f.argument((48, 200), "i8"),
        f.argument((48,), "f32"),
        f.argument((200,)),
    )
    cache, index = f.argument((m + 2, 3, 16)), f.argument((m,), "i64")
    scale = reciprocal_root(f, f.mean_square(x))
    code = ["%i = arith.sitofp {0} : i8 to f32", "%r = arith.mulf %i, {1} : f32"]
    weights = f.demote(f.pointwise([(q, "d0, d1"), (s, "d0")], (48, 200), "f32", code))
    product = f.contract(scaled(f, x, w), weights)
    scaled_rows = f.pointwise(
        [(product, "d0, d1"), (scale, "d0")], product.shape, "f32", ["%r = arith.mulf {0}, {1} : f32"]
    )
    result = f.update(cache, rotated(f, scaled_rows, 3, False, True), index, 0)
    text = f.text([result], TILES[form], [[0, 4]], parts=2, period=8, immutable=[1, 2, 3], pdl=True)
    before, _ = verify(text).source.source.split("gdc_wait()\n")
    assert "tl.load(in1 + " in before and "in0" not in before.split("):")[1]


@pytest.mark.parametrize("form", ["vector", "split"])
def test_scattered_rows(form):
    f = Function()
    m = ROWS[form]
    x, w, into, index = (
        f.argument((m, 200)),
        f.argument((24, 200)),
        f.argument((m + 2, 24)),
        f.argument((m,), "i64"),
    )
    positions = f.expand(index, (m, 1), "[[0, 1]]")
    positions = f.pointwise([(positions, "d0, d1")], (m, 1), "i32", ["%r = arith.trunci {0} : i64 to i32"])
    result = f.scatter(into, f.demote(f.contract(x, w)), positions)
    verify(f.text([result], TILES[form], [[0, 2]]))


@pytest.mark.parametrize("form", FORMS)
def test_results_that_no_tile_covers_are_refused(form):
    f = Function()
    x, w = f.argument((ROWS[form], 200)), f.argument((24, 200))
    product = f.demote(f.contract(x, w))
    with pytest.raises(UnsupportedError, match="one-to-one"):
        verify(f.text([f.slice(product, (0, 4), (ROWS[form], 8))], TILES[form]))


def run(
    text: str, make: Callable[[ir.Type, torch.Generator], torch.Tensor]
) -> tuple[list[torch.Tensor], Checked]:
    """The inputs of a kernel, and its results."""
    inputs: list[torch.Tensor] = []

    def made(kind: ir.Type, generator: torch.Generator) -> torch.Tensor:
        inputs.append(make(kind, generator))
        return inputs[-1]

    with dialects.load(ir.Context()), ir.Location.unknown():
        (checked,) = check_kernels(ir.Module.parse(text), made)
    return inputs, checked


@pytest.mark.parametrize("form", FORMS)
def test_sunk_norm_and_gate_against_a_formula_in_float64(form):
    """Written down again with torch alone, in float64: the error is that of rounding the rows and the result."""
    f = Function()
    x, w, a, b = (
        f.argument((ROWS[form], 200)),
        f.argument((200,)),
        f.argument((24, 200)),
        f.argument((24, 200)),
    )
    scale = reciprocal_root(f, f.mean_square(x))
    left = scaled(f, x, w)
    result = gated(f, f.contract(left, a), f.contract(left, b), scale)
    inputs, checked = run(f.text([result], TILES[form]), random_tensor)
    rows, weight, gate, up = (t.double() for t in inputs)
    narrowed = (rows * weight).bfloat16().double() if "split" in TILES[form] else rows * weight
    root = torch.rsqrt((rows * rows).mean(1, keepdim=True) + 1e-5)
    expected = torch.nn.functional.silu(narrowed @ gate.T * root) * (narrowed @ up.T * root)
    # Half of the last place of bf16, and sums in f32.
    torch.testing.assert_close(checked.ours[0].double(), expected, rtol=2.0**-8, atol=2e-4)


def sample(m: int, n: int, k: int, transposed: bool = True) -> str:
    f = Function()
    x, a = f.argument((m, k)), f.argument((n, k) if transposed else (k, n))
    return f.text([f.demote(f.contract(x, a, transposed))], None)


def space(text: str) -> list[dict[str, int]]:
    with dialects.load(ir.Context()), ir.Location.unknown():
        module = ir.Module.parse(text)
        (function,) = [o.operation for o in module.body.operations]
        found = gemm_space.candidates(Kernel(function))
        assert default_tile(Kernel(function)) == found[0] or "m" in found[0]
        return found


@pytest.mark.parametrize(
    "m, n, k, transposed, form",
    [
        (1, 2048, 2048, True, "repeat n k warps stages"), (2, 768, 3072, True, "repeat n k warps stages"),
        (1, 24, 40, True, "n k warps stages"), (3, 1, 7, True, "n k warps stages"), (1, 2048, 2048, False, "split n k warps stages slices"),
        (8, 3072, 2048, True, "split n k warps stages slices"), (64, 2048, 8192, True, "split n k warps stages slices"),
        (65, 2048, 2048, True, "m n k group warps stages tma persistent"),
    ],
)  # fmt: skip
def test_space_starts_with_the_form_for_the_rows(m, n, k, transposed, form):
    found = space(sample(m, n, k, transposed))
    assert 0 < len(found) <= gemm_space.LIMIT
    assert set(found[0]) <= set(form.split()) and len({tuple(t.items()) for t in found}) == len(found)
    assert found == space(sample(m, n, k, transposed))


@pytest.mark.parametrize("m", [1, 3, 9])
@pytest.mark.parametrize("transposed", [True, False])
def test_every_tile_of_a_space_computes_the_product(m, transposed):
    tiles = space(sample(m, 72, 320, transposed))
    for tile in tiles[:: max(1, len(tiles) // 6)]:
        f = Function()
        x, a = f.argument((m, 320)), f.argument((72, 320) if transposed else (320, 72))
        if not tile.get("tma"):
            verify(f.text([f.demote(f.contract(x, a, transposed))], tile))


def test_splits_are_chosen_so_that_waves_are_full():
    """The tiles that were the fastest of a search on an H200 are among the first of the model."""
    for m, n, k, best in (
        (8, 2048, 2048, (4, 64, 128)),
        (8, 16384, 2048, (1, 64, 128)),
        (8, 2048, 8192, (4, 64, 256)),
    ):
        tiles = space(sample(m, n, k))
        assert any(t.get("slices") for t in tiles[:2])
        found = [(t["split"], t["n"], t["k"]) for t in tiles if "split" in t and "slices" not in t]
        assert best in found[:12], (n, k, found[:12])
