"""Packs are tuned as a whole: members agree on their warps, and other users of a member keep its tile."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from torch_mlir import ir
from tuning_samples import FakeMeasurer, device, only_kernel, sum_of_squares

from topo_opt import dialects
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.target import Target
from topo_opt.errors import UnsupportedError
from topo_opt.tuning.forms import Packed, Single, tunable
from topo_opt.tuning.settings import Settings
from topo_opt.tuning.subjects import Subject
from topo_opt.tuning.tuner import tune

PACK = """
func.func private @k_pack(%a: tensor<6x200xf32>, %b: tensor<4x64xf32>, %c: tensor<4x64xf32>)
    -> (tensor<6xf32>, tensor<4xf32>, tensor<4xf32>)
    attributes {topo.kernel = {family = "pack", immutable = array<i64>, pdl = true, tile = {stages = 1 : i64, warps = 4 : i64}}} {
  %0 = func.call @k_large(%a) : (tensor<6x200xf32>) -> tensor<6xf32>
  %1 = func.call @k_small(%b) : (tensor<4x64xf32>) -> tensor<4xf32>
  %2 = func.call @k_small(%c) : (tensor<4x64xf32>) -> tensor<4xf32>
  return %0, %1, %2 : tensor<6xf32>, tensor<4xf32>, tensor<4xf32>
}
func.func @main(%a: tensor<6x200xf32>) -> tensor<6xf32> attributes {topo.function = "main"} {
  %0 = func.call @k_large(%a) : (tensor<6x200xf32>) -> tensor<6xf32>
  return %0 : tensor<6xf32>
}
"""


def member(name: str, m: int, n: int) -> str:
    module = sum_of_squares(m, n)
    text = only_kernel(module).get_asm(use_local_scope=True)
    return re.sub(r"warps = \d+", "warps = 4", re.sub(r"@k_\w+", f"@{name}", text))


@pytest.fixture
def module() -> Iterator[ir.Module]:
    text = member("k_large", 6, 200) + member("k_small", 4, 64) + PACK
    made = ir.Module.parse(text, dialects.load(ir.Context()))
    with made.context, ir.Location.unknown():
        yield made


def function(module: ir.Module, name: str) -> ir.Operation:
    return ir.SymbolTable(module.operation)[name].operation


def tile_of(module: ir.Module, name: str) -> dict[str, int]:
    return dict(Kernel(function(module, name)).attributes["tile"])


def test_a_pack_has_the_tiles_of_its_different_members(module):
    pack = tunable(function(module, "k_pack"), Target())
    assert isinstance(pack, Packed) and list(pack.members) == ["k_large", "k_small"]
    assert pack.own == {
        f"{i}.{k}": v for i, s in enumerate(pack.members) for k, v in tile_of(module, s).items()
    }
    assert isinstance(tunable(function(module, "k_small"), Target()), Single)


def test_candidates_agree_on_warps_and_have_code(module):
    pack = tunable(function(module, "k_pack"), Target())
    tiles = pack.candidates()
    assert tiles[0] == pack.own and len(tiles) > 4
    assert len({t["0.warps"] for t in tiles}) > 2
    before = str(module)
    for tile in tiles[:8]:
        assert tile["0.warps"] == tile["1.warps"] == pack.lower(tile).num_warps
    with pytest.raises(UnsupportedError):
        pack.lower({**pack.own, "0.warps": 2})
    assert str(module) == before


def test_bounds_and_arguments_are_those_of_the_pack(module):
    signature = tunable(function(module, "k_pack"), Target()).signature(50 << 20)
    assert [a.shape for a in signature.arguments] == [(6, 200), (4, 64), (4, 64)]
    assert [r.shape for r in signature.results] == [(6,), (4,), (4,)]


def test_members_are_part_of_the_key(module):
    first = tunable(function(module, "k_pack"), Target()).key
    other = ir.Module.parse(str(module).replace("arith.mulf", "arith.addf"), module.context)
    assert tunable(function(other, "k_pack"), Target()).key.text != first.text
    retiled = ir.Module.parse(str(module).replace("x = 4", "x = 2"), module.context)
    assert tunable(function(retiled, "k_pack"), Target()).key == first


def test_a_member_that_others_call_is_copied(module, tmp_path):
    large = tile_of(module, "k_large")

    def answer(job):
        return 1.0 if job.case.id == "k_pack" and job.tile["0.warps"] == 2 else 5.0

    subjects = [Subject(s, function(module, s)) for s in ("k_pack", "k_large")]
    settings = Settings("short", tmp_path, limit_s=9)
    tuned = tune(subjects, device(), settings, find=lambda _: (FakeMeasurer(answer), ""))
    assert tuned.choices["k_pack"].tile["0.warps"] == 2
    assert tile_of(module, "k_large") == large
    assert tile_of(module, "k_pack")["warps"] == tuned.sources["k_pack"].num_warps == 2
    (copied,) = set(tunable(function(module, "k_pack"), Target()).members) - {"k_small"}
    assert re.fullmatch(r"k_large_\w{6}", copied)
    assert module.operation.verify()
    again = ir.Module.parse(str(module), module.context)
    found = tune(
        [Subject("k_pack", function(again, "k_pack"))], device(), settings, find=lambda _: (None, "none")
    )
    assert found.choices["k_pack"].basis == "cache"
