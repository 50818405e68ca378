"""Products of f32 factors in three pieces each: exact to the last bits, with infinities and NaN where eager has them, on tensor cores."""

import re

import pytest
import torch
from gemm_samples import Function
from kernel_check import assembled, check_kernels
from torch_mlir import ir

from topo_opt import dialects
from topo_opt.codegen.triton import f32_products, lower_kernel
from topo_opt.codegen.triton.reductions import prelude

TILE = {"m": 64, "n": 32, "k": 32, "group": 8, "warps": 4, "stages": 3}


def product(left: torch.Tensor, right: torch.Tensor, **tile: int) -> torch.Tensor:
    """`left @ right.T` by the interpreter."""
    f = Function()
    text = f.text(
        [f.contract(f.argument(tuple(left.shape), "f32"), f.argument(tuple(right.shape), "f32"))],
        TILE | tile,
    )
    factors = [left, right]
    with dialects.load(ir.Context()), ir.Location.unknown():
        (checked,) = check_kernels(ir.Module.parse(text), lambda *_: factors.pop(0))
    return checked.ours[0]


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e15])
def test_products_are_as_exact_as_f32(scale):
    torch.manual_seed(0)
    a, b = torch.randn(70, 200) * scale, torch.randn(40, 200)
    b[:, ::3] *= 1000.0
    exact = a.double() @ b.double().T
    eager = (a @ b.T - exact).abs().max()
    assert (product(a, b) - exact).abs().max() <= 2 * eager


def test_whole_numbers_of_24_bits_are_exact():
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-(2**23), 2**23, (64, 32), generator=generator).float()
    assert torch.equal(product(a, torch.eye(32)), a)


def test_single_products_are_off_by_little():
    """One term a result, as of a diagonal matrix: what is left out shows beside half a unit in the last place."""
    generator = torch.Generator().manual_seed(0)
    a = torch.diag(torch.randn(64, generator=generator))
    b = torch.randn(32, 64, generator=generator)
    exact = a.double() @ b.double().T
    assert ((product(a, b) - exact).abs() <= 2.0**-22 * exact.abs()).all()


def test_infinities_and_nan_are_what_they_are_in_eager_mode():
    torch.manual_seed(0)
    a, b = torch.randn(64, 48), torch.randn(32, 48)
    a[0, 1], a[1, 2], a[2, 3] = float("inf"), float("-inf"), float("nan")
    a[3, 4], a[3, 5] = float("inf"), float("-inf")
    b[5, 1], b[6, 1], b[7, 7] = 1.0, -0.5, float("inf")  # pieces of the first two are zero
    a[4, 7], b[8, 1] = 2.0, 0.0
    expected = a.double() @ b.double().T
    ours = product(a, b)
    assert torch.equal(ours.isnan(), expected.isnan())
    assert torch.equal(ours.isposinf(), expected.isposinf()) and torch.equal(
        ours.isneginf(), expected.isneginf()
    )


def test_functions_are_defined_where_a_product_needs_them():
    assert prelude(f32_products.product("a", "b", "bf16", "acc")) == ""
    source = prelude(f"x = {f32_products.product('a', 'b', 'f32', 'acc')}")
    assert re.findall(r"^def (\w+)", source, re.M) == ["_f32_pieces", "_f32_product"]


@pytest.mark.parametrize(
    "tile", [{}, {"m": 128, "n": 128, "warps": 8}, {"m": 256, "n": 64, "k": 16, "warps": 8, "stages": 4}]
)
def test_pieces_need_no_conversion_and_products_fit_in_registers(tile, tmp_path):
    """Of what Triton generates for Hopper: no conversion to bf16 (16 in a cycle of a core), tensor cores of warp groups, no spills."""
    f = Function()
    text = f.text([f.contract(f.argument((512, 256), "f32"), f.argument((256, 256), "f32"))], TILE | tile)
    with dialects.load(ir.Context()), ir.Location.unknown():
        module = ir.Module.parse(text)
        made = lower_kernel(module.body.operations[0].operation)
    compiled, remarks = assembled(made, tmp_path)
    text = compiled.asm["ptx"]
    assert "wgmma.mma_async" in text and "cvt.rn.bf16" not in text
    assert " 0 bytes spill stores" in remarks, remarks
