"""What depends on which device computes it: numbers of iterations, rows of attention, parts of a table, experts."""

from __future__ import annotations

import pytest
import torch
from sharded import check_equal
from torch_mlir import ir

from topo_opt import reference
from topo_opt.frontend.ingest import bytecode, parse
from topo_opt.pipeline.run import run
from topo_opt.reference.binding import find_function
from topo_opt.sharding.annotate import lift
from topo_opt.sharding.named import parse_mesh

GRID = 'shard.grid @mesh(shape = 2x2) {topo.axes = ["x", "y"]}\n'


def check(text: str, *inputs: torch.Tensor, expect: str) -> None:
    """The function without annotations, whole, against all ranks of the one with them."""
    split = parse(GRID + text)
    plain = parse(bytecode(split))
    with plain.context, ir.Location.unknown():
        lift(find_function(plain, "main"), parse_mesh("x=2,y=2"))
    whole = reference.run(plain, "main", list(inputs))
    ranks = parse(bytecode(split))
    run("builtin.module(topo-propagate-shardings,topo-partition)", ranks)
    assert expect in str(ranks)
    check_equal(ranks, list(inputs), whole)
    run("builtin.module(topo-simplify-collectives,topo-lower-slices)", ranks)
    check_equal(ranks, list(inputs), whole)


@pytest.mark.parametrize("axes", ["[[0], [1]]", "[[1, 0]]", "[[], [0, 1]]"])
def test_numbers_of_iterations(axes: str) -> None:
    """An iota plus a tensor, with rows and columns over either axis or both."""
    text = f"""func.func @main(%x: tensor<8x4xi64>) -> tensor<8x4xi64> {{
      %s = shard.sharding @mesh split_axes = {axes} : !shard.sharding
      %e = tensor.empty() : tensor<8x4xi64>
      %b = linalg.generic {{indexing_maps = [affine_map<(m, n) -> (m, n)>, affine_map<(m, n) -> (m, n)>],
                           iterator_types = ["parallel", "parallel"]}} ins(%x : tensor<8x4xi64>) outs(%e : tensor<8x4xi64>) {{
      ^bb0(%v: i64, %o: i64):
        %m = linalg.index 0 : index
        %n = linalg.index 1 : index
        %c = arith.constant 100 : index
        %t = arith.muli %m, %c : index
        %u = arith.addi %t, %n : index
        %w = arith.index_cast %u : index to i64
        %r = arith.addi %v, %w : i64
        linalg.yield %r : i64
      }} -> tensor<8x4xi64>
      %a = shard.shard %b to %s : tensor<8x4xi64>
      return %a : tensor<8x4xi64>
    }}"""
    check(text, torch.arange(32).reshape(8, 4), expect='topo.kind = "coordinate"')


BOUNDS = {
    "causal": ("causal = true", False),
    "window": ("causal = true, low = affine_map<(m, p) -> (m - 2)>", False),
    "chunks": ("causal = false, high = affine_map<(m, p) -> ((m floordiv 3) * 3 + 3)>", False),
    "cache": ("causal = false, high = affine_map<(m, p) -> (m + p + 1)>", True),
    "cache and window": (
        "causal = false, low = affine_map<(m, p) -> (m + p - 2)>, high = affine_map<(m, p) -> (m + p + 1)>",
        True,
    ),
}


@pytest.mark.parametrize("axes", ["[[], [], [0]]", "[[], [0], [1]]", "[[], [], [1, 0]]"])
@pytest.mark.parametrize("name", BOUNDS)
def test_rows_of_attention(name: str, axes: str) -> None:
    """Rows split over one or two axes see the keys that they saw."""
    bound, positioned = BOUNDS[name]
    more, kinds = (", %p", ", tensor<1x1xi64>") if positioned else ("", "")
    text = f"""func.func @main(%q: tensor<1x4x8x8xf32>, %k: tensor<1x2x12x8xf32>, %v: tensor<1x2x12x8xf32>, %p: tensor<1x1xi64>) -> tensor<1x4x8x8xf32> {{
      %s = shard.sharding @mesh split_axes = {axes} : !shard.sharding
      %b = "topo.attention"(%q, %k, %v{more}) {{scale = 0.5 : f64, {bound}, operandSegmentSizes = array<i32: 1, 1, 1, 0, {int(positioned)}>}}
        : (tensor<1x4x8x8xf32>, tensor<1x2x12x8xf32>, tensor<1x2x12x8xf32>{kinds}) -> tensor<1x4x8x8xf32>
      %a = shard.shard %b to %s : tensor<1x4x8x8xf32>
      return %a : tensor<1x4x8x8xf32>
    }}"""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 8, 8), torch.randn(1, 2, 12, 8), torch.randn(1, 2, 12, 8)
    check(text, q, k, v, torch.tensor([[3]]), expect='topo.kind = "coordinate"')


@pytest.mark.parametrize("axes", ["[[0]]", "[[1, 0]]", "[[0], [1]]"])
def test_parts_of_a_table(axes: str) -> None:
    """Each device looks up what it has; ids of all parts."""
    text = f"""func.func @main(%b: tensor<12x4xf32>, %ids: tensor<6xi64>) -> tensor<6x4xf32> {{
      %s = shard.sharding @mesh split_axes = {axes} : !shard.sharding
      %a = shard.shard %b to %s : tensor<12x4xf32>
      %e = tensor.empty() : tensor<6x4xf32>
      %y = linalg.generic {{indexing_maps = [affine_map<(m, n) -> (m)>, affine_map<(m, n) -> (m, n)>],
                           iterator_types = ["parallel", "parallel"]}} ins(%ids : tensor<6xi64>) outs(%e : tensor<6x4xf32>) {{
      ^bb0(%id: i64, %o: f32):
        %i = arith.index_cast %id : i64 to index
        %j = linalg.index 1 : index
        %v = tensor.extract %a[%i, %j] : tensor<12x4xf32>
        linalg.yield %v : f32
      }} -> tensor<6x4xf32>
      return %y : tensor<6x4xf32>
    }}"""
    table = torch.randn(12, 4)
    check(text, table, torch.tensor([0, 11, 5, 6, 3, 9]), expect="shard.all_reduce")


@pytest.mark.parametrize("axes", ["[[0]]", "[[0, 1]]", "[[0], [1]]", "[[1], [], [0]]"])
def test_experts(axes: str) -> None:
    """Rows of experts of other devices are none of ours."""
    text = f"""func.func @main(%x: tensor<6x4xf32>, %b: tensor<4x4x2xf32>, %g: tensor<6xi64>) -> tensor<6x2xf32> {{
      %s = shard.sharding @mesh split_axes = {axes} : !shard.sharding
      %a = shard.shard %b to %s : tensor<4x4x2xf32>
      %y = "topo.grouped_product"(%x, %a, %g) {{operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>}}
        : (tensor<6x4xf32>, tensor<4x4x2xf32>, tensor<6xi64>) -> tensor<6x2xf32>
      return %y : tensor<6x2xf32>
    }}"""
    torch.manual_seed(0)
    check(
        text,
        torch.randn(6, 4),
        torch.randn(4, 4, 2),
        torch.tensor([3, 0, 1, 2, 1, 3]),
        expect="shard.all_reduce",
    )
