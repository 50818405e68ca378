"""Kernels of mixtures of experts: picks, grouping and grouped products, interpreted, against torch and against float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_check import check_kernels, kernel_functions, launch, to_kernel_ir
from torch_mlir import ir

from topo_opt import dialects, reference
from topo_opt.codegen.triton import lower_kernel
from topo_opt.codegen.triton.grouped_matrix import most_blocks
from topo_opt.codegen.triton.target import Target
from topo_opt.passes.schedule.form_expert_kernels import shares_matrices

SETTINGS = settings(max_examples=12, deadline=None, derandomize=True)
SIZES = {"f32": 3e-6, "bf16": 1e-2, "f16": 1.5e-3}


def kernels_of(text: str) -> ir.Module:
    with dialects.load(ir.Context()), ir.Location.unknown():
        return to_kernel_ir(ir.Module.parse(text))


def families(module: ir.Module) -> list[str]:
    return [
        ir.StringAttr(ir.DictAttr(f.attributes["topo.kernel"])["family"]).value
        for f in kernel_functions(module)
    ]


# -- picks --------------------------------------------------------------------------------------------------------------


def top_k_text(rows: int, columns: int, k: int, element: str, largest: bool = True) -> str:
    x, values = f"tensor<{rows}x{columns}x{element}>", f"tensor<{rows}x{k}x{element}>"
    return f"""
    func.func @main(%x: {x}) -> ({values}, tensor<{rows}x{k}xi64>) {{
      %v, %i = "topo.top_k"(%x) {{k = {k} : i64, largest = {str(largest).lower()}}}
        : ({x}) -> ({values}, tensor<{rows}x{k}xi64>)
      return %v, %i : {values}, tensor<{rows}x{k}xi64>
    }}"""


def run_single(
    module: ir.Module, inputs: list[torch.Tensor], tile: dict[str, int] | None = None
) -> list[torch.Tensor]:
    """The only kernel of a module on the given inputs."""
    with module.context, ir.Location.unknown():
        (function,) = kernel_functions(module)
        if tile is not None:
            set_tile(function, tile)
        source = lower_kernel(function, Target())
        expected = reference.run(module, source.name, [i.clone() for i in inputs])
        results = [torch.full_like(e, 77) for e in expected]
        launch(source, inputs, results)
    return results


@given(
    st.integers(1, 7),
    st.sampled_from([1, 2, 5, 16, 33, 128]),
    st.integers(1, 9),
    st.sampled_from(["f32", "bf16", "f16", "i32"]),
    st.booleans(),
    st.data(),
)
@SETTINGS
def test_picks_with_ties(rows, columns, k, element, largest, data):
    k = min(k, columns)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i32": torch.int32}[element]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randint(-3, 4, (rows, columns), generator=generator).to(dtype)
    values, indices = run_single(kernels_of(top_k_text(rows, columns, k, element, largest)), [x])
    wanted = torch.sort(x, dim=-1, descending=largest, stable=True)
    assert torch.equal(values, wanted.values[:, :k])
    assert torch.equal(indices, wanted.indices[:, :k])


def test_picks_among_infinities_zeros_and_nans():
    inf = math.inf
    x = torch.tensor([[0.0, -0.0, inf, -inf, math.nan, -1.0, 1e-45, 3e38]])
    for largest in (True, False):
        values, indices = run_single(kernels_of(top_k_text(1, 8, 8, "f32", largest)), [x])
        wanted = torch.sort(x, dim=-1, descending=largest, stable=True)
        assert torch.equal(indices, wanted.indices)
        assert torch.equal(values.nan_to_num(7), wanted.values.nan_to_num(7))


# -- grouping -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "groups", "block"), [(1, 1, 1), (5, 3, 8), (64, 7, 64), (300, 16, 64), (40, 64, 16)]
)
def test_rows_are_grouped_stably(rows, groups, block):
    text = f"""
    func.func @main(%g: tensor<{rows}xi64>) -> (tensor<{rows}xi32>, tensor<{groups + 1}xi32>) {{
      %o, %s = "topo.group_rows"(%g) {{groups = {groups} : i64}} : (tensor<{rows}xi64>) -> (tensor<{rows}xi32>, tensor<{groups + 1}xi32>)
      return %o, %s : tensor<{rows}xi32>, tensor<{groups + 1}xi32>
    }}"""
    group = torch.randint(-1, groups + 1, (rows,), generator=torch.Generator().manual_seed(rows))
    order, offsets = run_single(kernels_of(text), [group], {"x": block, "warps": 4})
    inside = [r for g in range(groups) for r in (group == g).nonzero()[:, 0].tolist()]
    assert order.tolist()[: len(inside)] == inside
    assert offsets.tolist() == [int((group < g).logical_and(group >= 0).sum()) for g in range(groups + 1)]


@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from([1, 4, 16]), st.data())
@SETTINGS
def test_the_grid_covers_every_split_of_rows(rows, groups, block, data):
    found = data.draw(st.lists(st.integers(0, groups - 1), min_size=rows, max_size=rows))
    blocks = sum(-(-found.count(g) // block) for g in range(groups))
    assert blocks <= most_blocks(rows, groups, block)


def test_rows_are_grouped_where_they_share_matrices():
    assert not shares_matrices(8, 128) and not shares_matrices(2, 8)
    assert shares_matrices(64, 128) and shares_matrices(16, 8) and shares_matrices(2, 1)


# -- products -----------------------------------------------------------------------------------------------------------


def product_text(
    tokens: int, share: int, inner: int, hidden: int, groups: int, element: str, layout: str
) -> str:
    """`silu(y[:, :hidden]) * y[:, hidden:] * scale[a]` of tokens repeated `share` times; `layout` of a matrix: "nk" or "kn"."""
    rows, columns = tokens * share, 2 * hidden
    wide = f"tensor<{rows}x{columns}xf32>"
    stored = f"{groups}x{columns}x{inner}" if layout == "nk" else f"{groups}x{inner}x{columns}"
    view = f"""
      %t = tensor.empty() : tensor<{groups}x{inner}x{columns}x{element}>
      %w = linalg.generic {{indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d2, d1)>, affine_map<(d0, d1, d2) -> (d0, d1, d2)>],
        iterator_types = ["parallel", "parallel", "parallel"]}} ins(%s : tensor<{stored}x{element}>)
        outs(%t : tensor<{groups}x{inner}x{columns}x{element}>) {{
      ^bb0(%a: {element}, %b: {element}):
        linalg.yield %a : {element}
      }} -> tensor<{groups}x{inner}x{columns}x{element}>"""
    weights, half = ("%w", view) if layout == "nk" else ("%s", ""), f"tensor<{rows}x{hidden}xf32>"
    result = half if element == "f32" else f"tensor<{rows}x{hidden}x{element}>"
    ending = "" if element == "f32" else f'%n = "topo.demote"(%e) : ({half}) -> {result}'
    return f"""
    func.func @main(%x: tensor<{tokens}x{inner}x{element}>, %s: tensor<{stored}x{element}>, %g: tensor<{rows}xi64>,
                    %f: tensor<{rows}xf32>) -> {result} {{
      %p = tensor.empty() : tensor<{tokens}x{share}x{inner}x{element}>
      %q = linalg.generic {{indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d2)>, affine_map<(d0, d1, d2) -> (d0, d1, d2)>],
        iterator_types = ["parallel", "parallel", "parallel"]}} ins(%x : tensor<{tokens}x{inner}x{element}>)
        outs(%p : tensor<{tokens}x{share}x{inner}x{element}>) {{
      ^bb0(%a: {element}, %b: {element}):
        linalg.yield %a : {element}
      }} -> tensor<{tokens}x{share}x{inner}x{element}>
      %r = tensor.collapse_shape %q [[0, 1], [2]] : tensor<{tokens}x{share}x{inner}x{element}> into tensor<{rows}x{inner}x{element}>
      {weights[1]}
      %y = "topo.grouped_product"(%r, {weights[0]}, %g) {{operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>}}
        : (tensor<{rows}x{inner}x{element}>, tensor<{groups}x{inner}x{columns}x{element}>, tensor<{rows}xi64>) -> {wide}
      %u = tensor.extract_slice %y[0, 0] [{rows}, {hidden}] [1, 1] : {wide} to {half}
      %v = tensor.extract_slice %y[0, {hidden}] [{rows}, {hidden}] [1, 1] : {wide} to {half}
      %o = tensor.empty() : {half}
      %e = linalg.generic {{indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>,
        affine_map<(d0, d1) -> (d0)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]}}
        ins(%u, %v, %f : {half}, {half}, tensor<{rows}xf32>) outs(%o : {half}) {{
      ^bb0(%a: f32, %b: f32, %c: f32, %d: f32):
        %h = math.tanh %a : f32
        %i = arith.mulf %h, %b : f32
        %j = arith.mulf %i, %c : f32
        linalg.yield %j : f32
      }} -> {half}
      {ending}
      return {"%e" if element == "f32" else "%n"} : {result}
    }}"""


def set_tile(function: ir.Operation, tile: dict[str, int]) -> None:
    i64 = ir.IntegerType.get_signless(64)
    entries = {n.name: n.attr for n in ir.DictAttr(function.attributes["topo.kernel"])}
    entries["tile"] = ir.DictAttr.get({k: ir.IntegerAttr.get(i64, v) for k, v in tile.items()})
    function.attributes["topo.kernel"] = ir.DictAttr.get(entries)


def check_products(text: str, groups: int, element: str, tile: dict[str, int] | None = None) -> list[str]:
    """Runs the plan of a module kernel by kernel; returns the sources of the grouped products."""
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[element]
    module = kernels_of(text)
    with module.context, ir.Location.unknown():
        main = next(
            o.operation for o in module.body.operations if "topo.kernel" not in o.operation.attributes
        )
        kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        generator = torch.Generator().manual_seed(0)
        x, w, g, f = (list(ir.RankedTensorType(t).shape) for t in kind.inputs)
        inputs = [
            torch.randn(x, generator=generator).to(dtype),
            (torch.randn(w, generator=generator) / 8).to(dtype),
            torch.randint(0, groups, g, generator=generator),
            torch.randn(f, generator=generator),
        ]
        (expected,) = reference.run(module, "main", [i.clone() for i in inputs])
        values = dict(zip(map(hash, main.regions[0].blocks[0].arguments), inputs))
        functions = {ir.StringAttr(k.attributes["sym_name"]).value: k for k in kernel_functions(module)}
        for kernel in functions.values() if tile else ():
            if "experts" in str(kernel.attributes["topo.kernel"]):
                set_tile(kernel, tile)
        sources = []
        for view in main.regions[0].blocks[0].operations:
            op = view.operation
            if op.name == "func.return":
                (result,) = (values[hash(v)] for v in op.operands)
                break
            source = lower_kernel(functions[ir.FlatSymbolRefAttr(op.attributes["callee"]).value], Target())
            arguments = [values[hash(v)] for v in op.operands]
            outputs = [torch.full_like(e, 77) for e in reference.run(module, source.name, arguments)]
            launch(source, arguments, outputs)
            values.update(zip(map(hash, op.results), outputs))
            sources += [source.source] if source.family == "experts" else []
    error = (result.double() - expected.double()).abs().max().item()
    assert error <= SIZES[element] * max(expected.double().abs().max().item(), 1.0), f"{error}\n{sources[0]}"
    return sources


@pytest.mark.parametrize("element", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_sorted_rows_with_gate_and_up(element, layout):
    text = product_text(13, 3, 40, 24, 5, element, layout)
    (source,) = check_products(text, 5, element)
    products = source.count(" + _f32_product(" if element == "f32" else "tl.dot")
    assert products == 2 and "if expert < 5" in source
    assert families(kernels_of(text)) == ["group_rows", "experts"]


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("swap", [0, 1])
@pytest.mark.parametrize("tma", [0, 1])
@pytest.mark.parametrize("tail", [0, 16])
def test_every_form_of_a_tile(layout, swap, tma, tail):
    tile = {"m": 32, "n": 32, "k": 16, "swap": swap, "warps": 4, "stages": 2, "tma": tma, "tail": tail}
    (source,) = check_products(product_text(50, 2, 40, 40, 3, "bf16", layout), 3, "bf16", tile)
    assert ("weights1.load" in source) == bool(tma)
    assert source.count("tl.dot") == (4 if tail else 2)


def test_more_rows_a_group_than_a_block():
    (source,) = check_products(product_text(150, 2, 16, 16, 2, "bf16", "nk"), 2, "bf16")
    assert "tl.dot" in source


@pytest.mark.parametrize(("element", "inner"), [("bf16", 48), ("f32", 5), ("f16", 768)])
def test_few_rows_stream_their_matrices(element, inner):
    text = product_text(1, 3, inner, 9, 64, element, "nk")
    (source,) = check_products(text, 64, element)
    assert "tl.dot" not in source
    assert families(kernels_of(text)) == ["experts"]


def test_a_row_of_another_token_is_not_part_of_the_kernel():
    """What mixes rows after the product stays outside: a sum over the rows of a token."""
    text = product_text(1, 2, 16, 8, 64, "f32", "nk")
    rows = text.index("return")
    summed = """%z = arith.constant 0.0 : f32
      %k = tensor.empty() : tensor<8xf32>
      %l = linalg.fill ins(%z : f32) outs(%k : tensor<8xf32>) -> tensor<8xf32>
      %m = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d1, d0)>, affine_map<(d0, d1) -> (d0)>],
        iterator_types = ["parallel", "reduction"]} ins(%e : tensor<2x8xf32>) outs(%l : tensor<8xf32>) {
      ^bb0(%a: f32, %b: f32):
        %c = arith.addf %a, %b : f32
        linalg.yield %c : f32
      } -> tensor<8xf32>
      return %m : tensor<8xf32>
    }"""
    text = text[:rows].replace("-> tensor<2x8xf32> {\n      %p", "-> tensor<8xf32> {\n      %p") + summed
    assert families(kernels_of(text)) == ["experts", "loops"]
    assert check_kernels(kernels_of(text))


# -- what others must know of them --------------------------------------------------------------------------------------


def test_the_floor_counts_the_matrices_that_are_reached():
    from topo_opt.estimate import work_of

    module = kernels_of(product_text(1, 2, 256, 64, 64, "bf16", "nk"))
    (function,) = kernel_functions(module)
    work, matrix = work_of(function), 256 * 128 * 2
    assert 1.9 * matrix < work.nbytes < 2.1 * matrix
    assert dict(work.matrix_ops) == {"bf16": 2 * 2 * 256 * 128}


def test_tuning_spreads_rows_evenly_over_groups():
    from topo_opt.tuning.arguments import signature_of

    module = kernels_of(product_text(20, 2, 16, 8, 4, "bf16", "nk"))
    function = kernel_functions(module)[-1]
    fills = {(a.fill, a.bound, a.shape) for a in signature_of(function).arguments if a.fill != "normal"}
    assert ("ends", 40, (5,)) in fills and ("index", 40, (40,)) in fills and ("index", 4, (40,)) in fills


def test_candidates_are_distinct_and_lower():
    from topo_opt.codegen.triton.kernel import Kernel
    from topo_opt.tuning.search_space import candidates, lower

    for text in (
        product_text(20, 2, 64, 64, 2, "bf16", "nk"),
        product_text(1, 2, 2048, 64, 64, "bf16", "nk"),
    ):
        module = kernels_of(text)
        with module.context, ir.Location.unknown():
            kernel = Kernel(kernel_functions(module)[-1], Target())
            found = candidates(kernel)
            assert len(found) > 3 and len({str(sorted(t.items())) for t in found}) == len(found)
            assert len({lower(kernel, t).digest() for t in found}) == len(found)
