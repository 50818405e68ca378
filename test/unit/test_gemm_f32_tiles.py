"""Tiles of the matrix form for f32, and where k is split between programs."""

from __future__ import annotations

import pytest
from gemm_samples import Function
from torch_mlir import ir

from topo_opt import dialects
from topo_opt.codegen.triton import gemm_space, lower_kernel
from topo_opt.codegen.triton.gemm_figures import figures_of
from topo_opt.codegen.triton.gemm_tiles import default_tile
from topo_opt.codegen.triton.kernel import Kernel


def product(m: int, n: int, k: int, element: str) -> str:
    f = Function()
    return f.text([f.contract(f.argument((m, k), element), f.argument((n, k), element))], None)


def tiles(m: int, n: int, k: int, element: str = "f32") -> list[dict[str, int]]:
    """The default tile, then those to measure."""
    with dialects.load(ir.Context()), ir.Location.unknown():
        module = ir.Module.parse(product(m, n, k, element))
        kernel = Kernel(module.body.operations[0].operation)
        return [default_tile(kernel), *gemm_space.candidates(kernel)]


@pytest.mark.parametrize("element", ["f32", "bf16"])
def test_few_results_with_long_k_are_split(element):
    default = tiles(256, 256, 16384, element)[0]
    assert default["splits"] > 1
    programs = 256 // default["m"] * (256 // default["n"]) * default["splits"]
    assert 64 <= programs <= 264


@pytest.mark.parametrize("element", ["f32", "bf16"])
def test_a_full_machine_is_not_split(element):
    assert not any("splits" in t for t in tiles(4096, 4096, 4096, element))


def test_large_products_have_large_tiles():
    default, *found = tiles(4096, 4096, 4096)
    assert (default["m"], default["n"]) == (128, 128)
    assert {t.get("tma", 0) for t in found} == {0, 1}
    assert len({tuple(sorted(t.items())) for t in found}) == len(found)


def test_small_products_have_small_tiles():
    default = tiles(33, 20, 50)[0]
    assert default["m"] <= 64 and default["n"] <= 32 and "splits" not in default


@pytest.mark.parametrize("sizes", [(256, 256, 4096), (100, 30, 70)])
def test_every_candidate_lowers(sizes):
    with dialects.load(ir.Context()), ir.Location.unknown():
        for tile in tiles(*sizes)[:8]:
            f = Function()
            m, n, k = sizes
            text = f.text([f.contract(f.argument((m, k), "f32"), f.argument((n, k), "f32"))], tile)
            module = ir.Module.parse(text)
            source = lower_kernel(module.body.operations[0].operation)
            assert source.grid[0] % tile.get("splits", 1) == 0
            assert " + _f32_product(" in source.source


WINDOWS = """
func.func private @k(%x: tensor<64x8x4096xf32>, %w: tensor<64x72xf32>) -> tensor<64x64x4088xf32> attributes {topo.kernel = {family = "gemm"}} {
  %e = tensor.empty() : tensor<64x4088x8x9xf32>
  %u = linalg.generic {indexing_maps = [affine_map<(n, p, c, k) -> (n, c, p + k)>, affine_map<(n, p, c, k) -> (n, p, c, k)>], iterator_types = ["parallel", "parallel", "parallel", "parallel"]} ins(%x : tensor<64x8x4096xf32>) outs(%e : tensor<64x4088x8x9xf32>) {
  ^bb0(%i: f32, %o: f32):
    linalg.yield %i : f32
  } -> tensor<64x4088x8x9xf32>
  %rows = tensor.collapse_shape %u [[0], [1], [2, 3]] : tensor<64x4088x8x9xf32> into tensor<64x4088x72xf32>
  %z = arith.constant 0.0 : f32
  %t = tensor.empty() : tensor<64x64x4088xf32>
  %f = linalg.fill ins(%z : f32) outs(%t : tensor<64x64x4088xf32>) -> tensor<64x64x4088xf32>
  %r = linalg.contract indexing_maps = [affine_map<(n, p, o, k) -> (n, p, k)>, affine_map<(n, p, o, k) -> (o, k)>, affine_map<(n, p, o, k) -> (n, o, p)>] ins(%rows, %w : tensor<64x4088x72xf32>, tensor<64x72xf32>) outs(%f : tensor<64x64x4088xf32>) -> tensor<64x64x4088xf32>
  return %r : tensor<64x64x4088xf32>
}
"""


def test_short_sums_over_windows_have_short_blocks():
    """Every element of a window is loaded by itself, so that what a block of 32 leaves empty of 72 costs as much as what it holds."""
    with dialects.load(ir.Context()), ir.Location.unknown():
        module = ir.Module.parse(WINDOWS)
        kernel = Kernel(module.body.operations[0].operation)
        assert figures_of(kernel).scattered and default_tile(kernel)["k"] == 16
        plain = ir.Module.parse(product(64 * 4088, 64, 72, "f32"))
        assert not figures_of(Kernel(plain.body.operations[0].operation)).scattered
