"""Packs: the source of several kernels as one, when it pays, and which kernels may go together."""

import itertools
import re
from dataclasses import replace

import pytest
import torch
from kernel_check import assembled, kernel_functions, launch
from torch_mlir import ir

from topo_opt import dialects
from topo_opt.codegen import resources
from topo_opt.codegen.kernel_source import KernelSource, Param, Scratch
from topo_opt.codegen.plan_graph import Argument, Node, PlanGraph, Result
from topo_opt.codegen.triton import lower_kernel, pack
from topo_opt.errors import UnsupportedError
from topo_opt.passes.schedule.launch_order import launch_order
from topo_opt.passes.schedule.pack_cost import Candidate, makespan
from topo_opt.passes.schedule.pack_siblings import choose_packs
from topo_opt.runtime import kernel_scan

GRID_SOURCE = '''"""out[z, y, x] = in[z, y, x] + a number of its own, counted in a scratch that stays zero"""

import triton
import triton.language as tl


@triton.jit
def {name}(in0, out0, count, B: tl.constexpr):
    at = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + {rows} * tl.program_id(axis=2))
    i = at * B + tl.arange(0, B)
    tl.atomic_add(count, 1)
    tl.store(out0 + i, tl.load(in0 + i) + {number}.0 + at)
    tl.store(count, 0)
'''


def grid_kernel(name: str, number: int, grid: tuple[int, int, int]) -> KernelSource:
    text = (
        GRID_SOURCE.replace("{name}", name).replace("{number}", str(number)).replace("{rows}", str(grid[1]))
    )
    params = (
        Param("in0", "arg", 0, "fp32"),
        Param("out0", "result", 0, "fp32"),
        Param("count", "scratch", 0, "i32"),
    )
    return KernelSource(name, text, params, grid, 4, constexprs={"B": 4}, scratch=(Scratch("i32", 1, True),))


def packed(calls: str, results: str, sources: dict[str, KernelSource], monkeypatch) -> KernelSource:
    """The pack @p with the body `calls`, whose members have the given sources."""
    kernels = "\n".join(
        f"func.func private @{n}(%a: tensor<96xf32>) -> tensor<96xf32> "
        f'attributes {{topo.kernel = {{family = "loops"}}}} {{ return %a : tensor<96xf32> }}'
        for n in sources
    )
    types = ", ".join(["tensor<96xf32>"] * (results.count(",") + 1))
    text = f"""{kernels}
    func.func private @p(%x: tensor<96xf32>, %y: tensor<96xf32>) -> ({types})
        attributes {{topo.kernel = {{family = "pack", tile = {{warps = 4 : i64}}}}}} {{
      {calls}
      return {results} : {types}
    }}"""
    import topo_opt.codegen.triton as triton_codegen

    monkeypatch.setattr(
        triton_codegen,
        "lower_kernel",
        lambda f, target=None: sources[ir.StringAttr(f.attributes["sym_name"]).value],
    )
    with dialects.load(ir.Context()), ir.Location.unknown():
        module = ir.Module.parse(text)
        return lower_kernel(next(f for f in kernel_functions(module) if pack.is_pack(f)))


CALL = "func.call @{} (%{}) : (tensor<96xf32>) -> tensor<96xf32>"


def test_members_get_their_own_programs_scratch_and_results(monkeypatch):
    sources = {"a": grid_kernel("a", 100, (4, 3, 2)), "b": grid_kernel("b", 200, (24, 1, 1))}
    body = "; ".join(
        ["%0 = " + CALL.format("a", "y"), "%1 = " + CALL.format("b", "x"), "%2 = " + CALL.format("a", "x")]
    )
    made = packed(body.replace("; ", "\n"), "%0, %1, %2", sources, monkeypatch)
    assert not made.problems() and made.grid == (72, 1, 1) and len(made.scratch) == 3
    assert made.source.count("def a(") == 1
    # Both calls of a are one piece of code, with their arguments chosen.
    assert made.source.count("which = pid // 24") == 1 and len(re.findall(r"^ +a\(", made.source, re.M)) == 1
    kernel_scan.check(made.source.encode(), "p.py")
    x, y = torch.randn(96), torch.randn(96)
    out = [torch.empty(96) for _ in range(3)]
    launch(made, [x, y], out)
    programs = torch.arange(24).repeat_interleave(4)
    for got, given, number in zip(out, (y, x, x), (100, 200, 100)):
        torch.testing.assert_close(got, given + number + programs)


def test_the_source_compiles_with_the_warps_of_its_members(monkeypatch, tmp_path):
    sources = {"a": grid_kernel("a", 1, (4, 3, 2)), "b": grid_kernel("b", 2, (24, 1, 1))}
    made = packed(
        "%0 = " + CALL.format("a", "x") + "\n%1 = " + CALL.format("b", "y"), "%0, %1", sources, monkeypatch
    )
    assert (made.num_warps, made.num_stages) == (4, 1)
    assert resources.measure({"p": made}, cache=tmp_path)["p"].registers > 0


PRODUCT = """func.func private @{name}(%x: tensor<256x256xbf16>, %w: tensor<{columns}x256xbf16>) -> tensor<256x{columns}xbf16>
    attributes {{topo.kernel = {{family = "gemm", tile = {{m = 128 : i64, n = 128 : i64, k = 64 : i64, group = 8 : i64, stages = 3 : i64, warps = 8 : i64, tma = 1 : i64}}}}}} {{
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<256x{columns}xf32>
  %none = linalg.fill ins(%zero : f32) outs(%empty : tensor<256x{columns}xf32>) -> tensor<256x{columns}xf32>
  %sum = linalg.contract indexing_maps = [affine_map<(m, n, k) -> (m, k)>, affine_map<(m, n, k) -> (n, k)>, affine_map<(m, n, k) -> (m, n)>]
    ins(%x, %w : tensor<256x256xbf16>, tensor<{columns}x256xbf16>) outs(%none : tensor<256x{columns}xf32>) -> tensor<256x{columns}xf32>
  %y = "topo.demote"(%sum) : (tensor<256x{columns}xf32>) -> tensor<256x{columns}xbf16>
  return %y : tensor<256x{columns}xbf16>
}}"""


def test_products_of_warp_groups_stay_asynchronous_in_a_pack(tmp_path):
    """ptxas says so when it waits for each of them, and members do not add up their shared memory."""
    columns = {"a": 512, "b": 256, "c": 384}
    calls = [
        f"%{n} = call @{n}(%x, %w{n}) : (tensor<256x256xbf16>, tensor<{c}x256xbf16>) -> tensor<256x{c}xbf16>"
        for n, c in columns.items()
    ]
    arguments = ", ".join(
        ["%x: tensor<256x256xbf16>", *(f"%w{n}: tensor<{c}x256xbf16>" for n, c in columns.items())]
    )
    types = ", ".join(f"tensor<256x{c}xbf16>" for c in columns.values())
    text = "\n".join(
        [
            *(PRODUCT.format(name=n, columns=c) for n, c in columns.items()),
            f'func.func private @p({arguments}) -> ({types}) attributes {{topo.kernel = {{family = "pack", tile = {{warps = 8 : i64}}}}}} {{',
            *calls,
            f"return {', '.join(f'%{n}' for n in columns)} : {types}\n}}",
        ]
    )
    with dialects.load(ir.Context()), ir.Location.unknown():
        module = ir.Module.parse(text)
        made = lower_kernel(next(f for f in kernel_functions(module) if pack.is_pack(f)))
    kernel_scan.check(made.source.encode(), "p.py")
    compiled, remarks = assembled(made, tmp_path)
    assert "wgmma" in compiled.asm["ptx"] and "Potential Performance Loss" not in remarks, remarks
    stage = (128 + 128) * 64 * 2
    assert compiled.metadata.shared < 4 * stage


REFUSED = {
    "differ in warps": ("a", {"num_warps": 8}),
    "more than functions": ("b", {"source": grid_kernel("b", 2, (24, 1, 1)).source + "\nN: tl.constexpr = 3\n"}),
    "beside its own": ("b", {"source": grid_kernel("b", 2, (24, 1, 1)).source + "\n@triton.jit\ndef c(x):\n    return x\n"}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_kernels_that_can_not_be_members_are_refused(message, monkeypatch):
    name, change = REFUSED[message]
    sources = {"a": grid_kernel("a", 1, (24, 1, 1)), "b": grid_kernel("b", 2, (24, 1, 1))}
    sources[name] = replace(sources[name], **change)
    with pytest.raises(UnsupportedError, match=message):
        packed(
            "%0 = " + CALL.format("a", "x") + "\n%1 = " + CALL.format("b", "y"),
            "%0, %1",
            sources,
            monkeypatch,
        )


def test_a_kernel_that_finds_its_program_in_another_way_is_no_member():
    good = grid_kernel("a", 1, (24, 1, 1))
    assert pack.obstacle(good) is None
    other = replace(good, source=good.source.replace("tl.program_id(0)", "tl.program_id(axis=0 + 0)"))
    assert "another way" in str(pack.obstacle(other))


# -- the choice -----------------------------------------------------------------------------------------------------


def candidate(programs: int, program_ns: float, slots: int = 10) -> Candidate:
    return Candidate(
        "k", {}, replace(grid_kernel("a", 1, (1, 1, 1)), grid=(programs, 1, 1)), program_ns, slots
    )


SCHEDULES = [
    ([(25, 4.0)], 12.0),
    ([(20, 4.0), (5, 4.0)], 12.0),
    ([(15, 4.0), (5, 4.0)], 8.0),
    ([(12, 4.0), (8, 1.0)], 8.0),
    ([(10, 4.0), (30, 1.0)], 7.0),
    ([(100_000, 1.0)], 10_000.0),
]


@pytest.mark.parametrize(("members", "expected"), SCHEDULES)
def test_a_makespan_is_that_of_programs_in_order_on_free_slots(members, expected):
    assert makespan([candidate(*m) for m in members]) == expected


def plan(nodes: list[tuple[str, list[int], list[int], tuple]], arguments: int, results=()) -> PlanGraph:
    """Nodes are (kernel, inputs, outputs, inout); values are numbered from 0, arguments first."""
    graph = PlanGraph("main")
    for i in range(1 + max(v for _, a, b, _ in nodes for v in (*a, *b))):
        graph.new_value("float32", (4,))
        if i < arguments:
            graph.arguments.append(Argument("buffer", f"b{i}", i))
    for kernel, inputs, outputs, inout in nodes:
        kind = "copy" if kernel == "copy" else "kernel"
        graph.nodes.append(Node(kind, inputs, outputs, kernel=kernel, inout=inout))
    graph.results += [Result("mutation", name, "float32", value) for name, value in results]
    return graph


def packs(graph: PlanGraph, most: int = 8) -> list[list[str]]:
    """Kernels of every pack, when all that may go together do."""

    def members(symbols):
        return [replace(candidate(1, 1.0), symbol=s) for s in symbols] if len(symbols) <= most else None

    return [[m.symbol for m in p.members] for p in choose_packs(graph, launch_order(graph), members)]


def test_siblings_go_together_and_dependent_kernels_never_do():
    graph = plan([("q", [0], [1], ()), ("k", [0], [2], ()), ("o", [1, 2], [3], ()), ("v", [0], [4], ())], 1)
    assert packs(graph) == [["q", "k", "v"]]
    assert packs(graph, most=2) == [["q", "k"], ["o", "v"]]
    assert packs(plan([("a", [0], [1], ()), ("b", [1], [2], ())], 1)) == []


def test_a_kernel_with_time_to_spare_waits_for_company():
    # v could run first, but only the second level of the long path has a kernel of one member less.
    graph = plan([("a", [0], [1], ()), ("b", [1], [2], ()), ("v", [0], [3], ()), ("w", [3, 2], [4], ())], 1)

    def members(symbols):
        return [replace(candidate(1, 1.0), symbol=s) for s in symbols] if set(symbols) == {"b", "v"} else None

    (pack_,) = choose_packs(graph, launch_order(graph), members)
    assert [m.symbol for m in pack_.members] == ["b", "v"] and pack_.calls == (1, 2)


def test_copies_are_not_counted_among_calls():
    graph = plan([("copy", [0], [1], ()), ("a", [1], [2], ()), ("b", [0], [3], ())], 1)
    order = launch_order(graph)
    found = choose_packs(graph, order, lambda s: [replace(candidate(1, 1.0), symbol=x) for x in s])
    assert [p.calls for p in found] == [(0, 1)]


def test_a_reader_of_the_old_content_is_not_packed_with_the_writer():
    rewrite = ("u", [0, 1], [2], ((0, 0),))
    assert packs(plan([rewrite, ("r", [0], [3], ())], 2)) == []
    assert packs(plan([rewrite, ("r", [1], [3], ())], 2)) == [["u", "r"]]
    # A second reader that depends on the new content reads a copy of the old one, as the plan will make it.
    assert packs(plan([rewrite, ("r", [0, 2], [3], ()), ("s", [1], [4], ())], 2)) == [["u", "s"]]


def test_a_reader_of_state_is_not_packed_with_who_makes_its_new_value():
    nodes = [("f", [1], [2], ()), ("r", [0], [3], ())]
    assert packs(plan(nodes, 2)) == [["f", "r"]]
    assert packs(plan(nodes, 2, results=[("b0", 2)])) == []


def test_two_rewrites_of_one_buffer_stay_apart():
    assert packs(plan([("u", [0, 1], [2], ((0, 0),)), ("w", [0, 1], [3], ((0, 0),))], 2)) == []


@pytest.mark.parametrize("seed", range(4))
def test_packs_never_make_a_cycle(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(high):
        return int(torch.randint(0, high, (1,), generator=generator))

    nodes = []
    for i in range(40):
        inputs = sorted({draw(3 + i) for _ in range(1 + draw(3))})
        nodes.append((f"k{i}", inputs, [3 + i], ((0, 0),) if draw(4) == 0 else ()))
    graph = plan(nodes, 3)
    order = launch_order(graph)
    found = choose_packs(
        graph, order, lambda s: [replace(candidate(1, 1.0), symbol=x) for x in s] if len(s) < 4 else None
    )
    assert found
    unit = list(range(40))
    for p in found:
        for a, b in itertools.combinations(p.calls, 2):
            assert not order.conflict(a, b)
        for c in p.calls:
            unit[c] = p.calls[0]
    edges = {(unit[i], unit[f]) for i in range(40) for f in order.after[i]}
    assert all(a != b for a, b in edges)
    left = set(unit)
    while left:
        free = {u for u in left if not any(b == u and a in left for a, b in edges)}
        assert free, "a cycle"
        left -= free
