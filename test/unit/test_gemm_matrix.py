"""The matrix form of gemm kernels: descriptors, persistent programs, several products; interpreted, against float64."""

from __future__ import annotations

import pytest
from gemm_samples import Function, Named
from test_gemm_kernels import gated, verify

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
    from torch_mlir import ir

    from topo_opt import dialects
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
