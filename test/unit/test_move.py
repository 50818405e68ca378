"""Parts that change places between devices, by kernels: codegen.triton.move. One process plays one rank, as in test_exchange."""

from types import SimpleNamespace

import pytest
import torch
from test_exchange import BITS, NAMES, Rank, partners
from torch_mlir import ir

from topo_opt import dialects
from topo_opt.codegen.triton import lower_kernel
from topo_opt.codegen.triton.exchange_boxes import SETS
from topo_opt.codegen.triton.move import default_tile
from topo_opt.errors import UnsupportedError
from topo_opt.passes.schedule.outline import callee
from topo_opt.pipeline.run import run
from topo_opt.pipeline.spec import parse
from topo_opt.topology.loading import load
from topo_opt.tuning.subjects import subjects_of

ATTRIBUTES = {
    "all_gather": "gather_axis = {to}",
    "all_to_all": "split_axis = {cut} concat_axis = {to}",
    "reduce_scatter": "reduction = sum scatter_dim = {cut}",
}


def whole(shape, dim, ranks):
    return [size * (ranks if d == dim else 1) for d, size in enumerate(shape)]


def tensor(shape, dtype):
    return f"tensor<{'x'.join(map(str, shape))}x{NAMES[dtype]}>"


def lowered(kind, given, result, dtype, ranks, cut, to, tile=64):
    said = ATTRIBUTES[kind].format(cut=cut, to=to)
    a, b = tensor(given, dtype), tensor(result, dtype)
    text = f"""module {{
      shard.grid @mesh(shape = {ranks})
      func.func private @move(%a: {a}) -> {b} attributes {{topo.kernel = {{family = "move", exchange = {{{partners(ranks)}}},
          tile = {{x = {tile} : i64, warps = 1 : i64}}}}}} {{
        %r = shard.{kind} %a on @mesh grid_axes = [0] {said} : {a} -> {b}
        return %r : {b}
      }}
    }}"""
    with ir.Context() as context, ir.Location.unknown():
        dialects.load(context)
        module = ir.Module.parse(text)
        source = lower_kernel(module.body.operations[1].operation)
    assert source.problems() == []
    return source


CASES = [
    # ranks, place, element, shape of a part, cut along, joined along
    ("all_gather", 2, 0, torch.bfloat16, (3, 40), None, 0),
    ("all_gather", 3, 2, torch.float32, (2, 3, 7), None, 1),
    ("all_gather", 4, 1, torch.float16, (5, 13), None, 1),
    ("all_to_all", 2, 0, torch.bfloat16, (1, 4, 6, 8), 1, 2),
    ("all_to_all", 2, 1, torch.bfloat16, (1, 4, 6, 8), 2, 1),
    ("all_to_all", 4, 3, torch.float32, (3, 5), 1, 0),
    ("all_to_all", 3, 1, torch.float16, (7, 9), 0, 1),
    ("reduce_scatter", 2, 1, torch.bfloat16, (4, 33), 0, None),
    ("reduce_scatter", 3, 0, torch.float32, (2, 3, 5), 2, None),
    ("reduce_scatter", 4, 2, torch.bfloat16, (3, 64), 1, None),
]


@pytest.mark.parametrize(("kind", "ranks", "place", "dtype", "part", "cut", "to"), CASES)
def test_parts_come_where_they_belong(kind, ranks, place, dtype, part, cut, to):
    """Five launches in a row: every set is used, emptied and used again."""
    given, result = whole(part, cut, ranks), whole(part, to, ranks)
    source = lowered(kind, given, result, dtype, ranks, cut, to)
    rank, numel = Rank(source, place), torch.empty(part).numel()
    others = [r for r in range(ranks) if r != place]
    torch.manual_seed(0)
    for number in range(5):
        held = torch.randn(ranks, *given).to(dtype)
        cuts = [h.chunk(ranks, cut) if cut is not None else [h] * ranks for h in held]
        mine, now = rank.slices(place, dtype), number % SETS
        assert bool((mine[now, :, :numel] == -1).all())
        for sender, r in enumerate(others):
            mine[now, sender, :numel] = cuts[r][place].contiguous().view(BITS[dtype]).flatten()
        out = torch.full(result, torch.nan).to(dtype)
        rank.run({"in0": held[place].clone(), "out0": out})
        for_me = [c[place] for c in cuts]
        if kind == "reduce_scatter":
            total = for_me[0].float()
            for other in for_me[1:]:
                total = total + other.float()
            assert torch.equal(out, total.to(dtype))
        else:
            assert torch.equal(out, torch.cat(for_me, to))
        assert bool((mine[number % SETS - 1, :, :numel] == -1).all())
        for r in others:
            found = rank.slices(r, dtype)[now, place - (place > r), :numel]
            assert torch.equal(found, cuts[place][r].contiguous().view(BITS[dtype]).flatten())
            rank.slices(r, dtype)[now] = -1
    assert rank.boxes.turns.tolist() == [5 % SETS] * source.grid[0]


def test_what_can_not_tell_that_it_has_come_stays_with_the_library():
    with pytest.raises(UnsupportedError, match="type i32"):
        lowered("all_gather", [4, 8], [8, 8], torch.int32, 2, None, 0)
    with pytest.raises(UnsupportedError, match="a part of one element"):
        lowered("all_gather", [1], [2], torch.float32, 2, None, 0)


def test_programs_hold_less_of_each_rank_where_there_are_many():
    def elements(ranks):
        return default_tile(
            SimpleNamespace(attributes={"exchange": {"axes": ["x"], "ranks": ranks, "memory": "host"}})
        )["x"]

    assert [elements(ranks) for ranks in (2, 8, 16, 72, 1024)] == [2048, 2048, 1024, 128, 128]


PLAN = """module {
  shard.grid @mesh(shape = 2x2) {topo.axes = ["x", "y"], topo.devices = ["gpu0", "gpu1", "gpu2", "gpu3"]}
  func.func @main(%a: tensor<8x16xf32>) -> (tensor<32x16xf32>, tensor<32x16xf32>, tensor<16x16xf32>) attributes {topo.function = "main"} {
    %0 = call @both(%a) : (tensor<8x16xf32>) -> tensor<32x16xf32>
    %1 = call @turned(%a) : (tensor<8x16xf32>) -> tensor<32x16xf32>
    %2 = call @one(%a) : (tensor<8x16xf32>) -> tensor<16x16xf32>
    return %0, %1, %2 : tensor<32x16xf32>, tensor<32x16xf32>, tensor<16x16xf32>
  }
  func.func private @both(tensor<8x16xf32>) -> tensor<32x16xf32> attributes {topo.collective = {axes = ["x", "y"], combiner = "add", dim = 0 : i64, kind = "all_gather", source = 0 : i64}}
  func.func private @turned(tensor<8x16xf32>) -> tensor<32x16xf32> attributes {topo.collective = {axes = ["y", "x"], combiner = "add", dim = 0 : i64, kind = "all_gather", source = 0 : i64}}
  func.func private @one(tensor<8x16xf32>) -> tensor<16x16xf32> attributes {topo.collective = {axes = ["y"], combiner = "add", dim = 0 : i64, kind = "all_gather", source = 0 : i64}}
  func.func private @unused(tensor<8x16xf32>) -> tensor<16x16xf32> attributes {topo.collective = {axes = ["x"], combiner = "add", dim = 0 : i64, kind = "all_gather", source = 0 : i64}}
}"""


@pytest.mark.parametrize("topology, memory", [("hgx-h200-x8", "peers"), ("rtx4090-x8-pcie", "host")])
def test_parts_are_numbered_as_ranks_are(topology, memory):
    """Over axes in another order than the mesh's, parts are not in the order of the ranks: that is left to the library."""
    with dialects.load(ir.Context()), ir.Location.unknown():
        module = ir.Module.parse(PLAN)
        run(parse(f"builtin.module(topo-exchange-parts{{topology={topology}}})"), module)
        called = [callee(op) for op in plan_calls(module)]
        assert [name.startswith("k_move") for name in called] == [True, False, True]
        text = str(module)
        assert text.count(f'memory = "{memory}"') == 2 and "ranks = 4" in text and "@unused" in text
        names = {ir.StringAttr(o.operation.attributes["sym_name"]).value for o in module.body.operations}
        assert subjects_of(module.operation, load(topology).primary, names) == [], (
            "one device can't tell their time"
        )


def plan_calls(module):
    (main,) = (o.operation for o in module.body.operations if "topo.function" in o.operation.attributes)
    return [o.operation for o in main.regions[0].blocks[0].operations if o.operation.name == "func.call"]
