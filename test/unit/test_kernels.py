"""Every kernel family over shapes, layouts and types: the generated Triton, interpreted, against the reference executor."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_check import check_kernels, kernel_functions, to_kernel_ir
from torch_mlir import ir

from topo_opt import dialects

SETTINGS = settings(max_examples=25, deadline=None, derandomize=True)
FLOATS = st.sampled_from(["f32", "bf16", "f16", "f64"])
# Relative to the largest result: one rounding of the storage type, or of f32 accumulation over a few hundred terms.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


def verify(text: str, level: int = 2, kernels: int | None = None) -> list:
    """Compiles IR text to kernels and compares each with the reference executor."""
    with dialects.load(ir.Context()), ir.Location.unknown():
        module = to_kernel_ir(ir.Module.parse(text), level)
        if kernels is not None:
            names = [ir.StringAttr(f.attributes["sym_name"]).value for f in kernel_functions(module)]
            assert len(names) == kernels, names
        checked = check_kernels(module)
    assert checked
    for kernel in checked:
        for ours, expected in zip(kernel.ours, kernel.expected, strict=True):
            assert ours.shape == expected.shape and ours.dtype == expected.dtype
            if not ours.dtype.is_floating_point:
                assert torch.equal(ours, expected), kernel.source.source
                continue
            scale = max(expected.double().abs().max().item(), 1.0) if expected.numel() else 1.0
            error = (ours.double() - expected.double()).abs().max().item() if ours.numel() else 0.0
            assert error <= TOLERANCE[ours.dtype] * scale, f"{error}\n{kernel.source.source}"
    return checked


def tensor(shape, element: str) -> str:
    return f"tensor<{'x'.join([*map(str, shape), element])}>"


def dims(count: int, first: int = 0) -> str:
    return ", ".join(f"d{i}" for i in range(first, first + count))


def identity(rank: int) -> str:
    return f"affine_map<({dims(rank)}) -> ({dims(rank)})>"


def iterators(kinds) -> str:
    return "[" + ", ".join(f'"{k}"' for k in kinds) + "]"


@st.composite
def shapes(draw, low=1, high=4, largest=9):
    return draw(st.lists(st.integers(1, largest), min_size=low, max_size=high))


@given(shapes(), FLOATS, st.data())
@SETTINGS
def test_pointwise_with_broadcast_and_transpose(shape, element, data):
    rank = len(shape)
    order = data.draw(st.permutations(range(rank)))
    kept = data.draw(st.lists(st.booleans(), min_size=rank, max_size=rank))
    moved = [shape[d] for d in order]
    small = [s if k else 1 for s, k in zip(shape, kept)]
    maps = [
        f"affine_map<({dims(rank)}) -> ({', '.join(f'd{d}' for d in order)})>",
        f"affine_map<({dims(rank)}) -> ({', '.join(f'd{d}' if k else '0' for d, k in enumerate(kept))})>",
        identity(rank),
    ]
    a, b, out = tensor(moved, element), tensor(small, element), tensor(shape, element)
    verify(f"""
    func.func @main(%a: {a}, %b: {b}) -> {out} {{
      %e = tensor.empty() : {out}
      %r = linalg.generic {{indexing_maps = [{", ".join(maps)}], iterator_types = {iterators(["parallel"] * rank)}}}
        ins(%a, %b : {a}, {b}) outs(%e : {out}) {{
      ^bb0(%x: {element}, %y: {element}, %o: {element}):
        %s = arith.mulf %x, %y : {element}
        %t = arith.addf %s, %x : {element}
        linalg.yield %t : {element}
      }} -> {out}
      return %r : {out}
    }}""", kernels=1)  # fmt: skip


REDUCTIONS = {"arith.addf": "0.0", "arith.maximumf": "0xFF800000", "arith.mulf": "1.0"}


def reduction(shape, axes, op: str, element: str = "f32") -> str:
    """Reduces over `axes`, then uses the result beside the input: a fused row kernel where that is legal."""
    rank = len(shape)
    rows = [d for d in range(rank) if d not in axes]
    small = tensor([shape[d] for d in rows], element)
    full = tensor(shape, element)
    to_rows = f"affine_map<({dims(rank)}) -> ({', '.join(f'd{d}' for d in rows)})>"
    kinds = ["reduction" if d in axes else "parallel" for d in range(rank)]
    return f"""
    func.func @main(%a: {full}) -> ({small}, {full}) {{
      %z = arith.constant {REDUCTIONS[op]} : {element}
      %i = tensor.empty() : {small}
      %f = linalg.fill ins(%z : {element}) outs(%i : {small}) -> {small}
      %r = linalg.generic {{indexing_maps = [{identity(rank)}, {to_rows}], iterator_types = {iterators(kinds)}}}
        ins(%a : {full}) outs(%f : {small}) {{
      ^bb0(%x: {element}, %o: {element}):
        %s = {op} %x, %o : {element}
        linalg.yield %s : {element}
      }} -> {small}
      %e = tensor.empty() : {full}
      %n = linalg.generic {{indexing_maps = [{identity(rank)}, {to_rows}, {identity(rank)}], iterator_types = {iterators(["parallel"] * rank)}}}
        ins(%a, %r : {full}, {small}) outs(%e : {full}) {{
      ^bb0(%x: {element}, %y: {element}, %o: {element}):
        %s = arith.subf %x, %y : {element}
        linalg.yield %s : {element}
      }} -> {full}
      return %r, %n : {small}, {full}
    }}"""


@given(shapes(high=4, largest=7), st.sampled_from(sorted(REDUCTIONS)), st.data())
@SETTINGS
def test_reductions_over_any_axes(shape, op, data):
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    verify(reduction(shape, axes, op), kernels=1)


@pytest.mark.parametrize("columns", [8192, 16384, 16385, 20000])
def test_rows_longer_than_a_block_loop(columns):
    # At -O1, where rows this few and this long stay one kernel.
    found = verify(reduction([2, columns], {1}, "arith.addf"), level=1, kernels=1)
    assert ("for r0" in found[0].source.source) == (columns > 16384)


def contraction(batch, m, n, k, element, transposed, epilogue) -> str:
    """`out[b, m, n] = relu(a @ b + bias)` with the transposes in the maps, halves accumulated in f32."""
    left, right = [*batch, *m, k], [*batch, *([n, k] if transposed else [k, n])]
    count, b, rows = len(batch) + len(m) + 2, len(batch), len(m)
    n_dim, k_dim = f"d{b + rows}", f"d{b + rows + 1}"
    heads = [f"d{i}" for i in range(b)]
    middle = [f"d{i}" for i in range(b, b + rows)]
    maps = [
        f"affine_map<({dims(count)}) -> ({', '.join([*heads, *middle, k_dim])})>",
        f"affine_map<({dims(count)}) -> ({', '.join([*heads, *([n_dim, k_dim] if transposed else [k_dim, n_dim])])})>",
        f"affine_map<({dims(count)}) -> ({', '.join([*heads, *middle, n_dim])})>",
    ]
    out = [*batch, *m, n]
    rank = len(out)
    last = f"affine_map<({dims(rank)}) -> (d{rank - 1})>"
    wide, narrow = tensor(out, "f32"), tensor(out, element)
    accumulate = f"""
      %z = arith.constant 0.0 : f32
      %e = tensor.empty() : {wide}
      %f = linalg.fill ins(%z : f32) outs(%e : {wide}) -> {wide}
      %c = linalg.contract indexing_maps = [{", ".join(maps)}]
        ins(%a, %b : {tensor(left, element)}, {tensor(right, element)}) outs(%f : {wide}) -> {wide}"""
    bias = f"""
      %g = linalg.generic {{indexing_maps = [{identity(rank)}, {last}, {identity(rank)}], iterator_types = {iterators(["parallel"] * rank)}}}
        ins(%c, %bias : {wide}, {tensor([n], "f32")}) outs(%e : {wide}) {{
      ^bb0(%x: f32, %y: f32, %o: f32):
        %s = arith.addf %x, %y : f32
        %t = arith.maximumf %s, %z : f32
        linalg.yield %t : f32
      }} -> {wide}"""
    value = "%g" if epilogue else "%c"
    demote = f'%r = "topo.demote"({value}) : ({wide}) -> {narrow}' if element != "f32" else ""
    result = "%r" if element != "f32" else value
    return f"""
    func.func @main(%a: {tensor(left, element)}, %b: {tensor(right, element)}, %bias: {tensor([n], "f32")}) -> {narrow} {{
      {accumulate}
      {bias if epilogue else ""}
      {demote}
      return {result} : {narrow}
    }}"""


@given(
    st.lists(st.integers(1, 3), max_size=2),
    st.lists(st.sampled_from([1, 2, 3, 5, 17, 33]), min_size=1, max_size=2),
    st.sampled_from([1, 4, 7, 32, 40]),
    st.sampled_from([1, 3, 16, 40, 130]),
    st.sampled_from(["f32", "bf16", "f16"]),
    st.booleans(),
    st.booleans(),
)
@SETTINGS
def test_matrix_products(batch, m, n, k, element, transposed, epilogue):
    verify(contraction(batch, m, n, k, element, transposed, epilogue), kernels=1)


def test_vector_form_is_taken_for_few_rows_and_for_few_columns():
    for m, n in ((1, 64), (4, 64), (64, 1)):
        found = verify(contraction([], [m], n, 48, "bf16", True, True), kernels=1)
        assert "tl.dot" not in found[0].source.source
    assert "tl.dot" in verify(contraction([], [16], 64, 48, "bf16", True, True))[0].source.source


@given(shapes(low=1, high=3, largest=6), st.data())
@SETTINGS
def test_chains_of_views(shape, data):
    """Random slices, pads, reversals, reshapes and concatenations are one kernel, exactly."""
    lines, value, current = [], "%a", list(shape)
    for step in range(data.draw(st.integers(1, 5))):
        kind = data.draw(st.sampled_from(["slice", "pad", "flip", "flatten", "concat"]))
        name, before = f"%v{step}", tensor(current, "f32")
        rank = len(current)
        if kind == "slice":
            starts = [data.draw(st.integers(0, s - 1)) for s in current]
            strides = [data.draw(st.integers(1, 2)) for _ in current]
            sizes = [
                data.draw(st.integers(1, (s - b - 1) // t + 1)) for s, b, t in zip(current, starts, strides)
            ]
            current = sizes
            lines.append(
                f"{name} = tensor.extract_slice {value}{starts} {sizes} {strides} : {before} to {tensor(current, 'f32')}"
            )
        elif kind == "pad":
            low = [data.draw(st.integers(0, 2)) for _ in current]
            high = [data.draw(st.integers(0, 2)) for _ in current]
            current = [s + a + b for s, a, b in zip(current, low, high)]
            arguments = ", ".join(f"%i{step}_{d}: index" for d in range(rank))
            lines.append(
                f"{name} = tensor.pad {value} low{low} high{high} {{\n^bb0({arguments}):\n tensor.yield %pad : f32\n}} : {before} to {tensor(current, 'f32')}"
            )
        elif kind == "flip":
            axis = data.draw(st.integers(0, rank - 1))
            places = ", ".join(f"{current[d] - 1} - d{d}" if d == axis else f"d{d}" for d in range(rank))
            lines.append(
                f"%e{step} = tensor.empty() : {before}\n"
                f"{name} = linalg.generic {{indexing_maps = [affine_map<({dims(rank)}) -> ({places})>, {identity(rank)}], "
                f"iterator_types = {iterators(['parallel'] * rank)}}} ins({value} : {before}) outs(%e{step} : {before}) {{\n"
                f"^bb0(%x: f32, %o: f32):\n linalg.yield %x : f32\n}} -> {before}"
            )
        elif kind == "flatten":
            if rank == 1:
                continue
            current = [prod(current)]
            lines.append(
                f"{name} = tensor.collapse_shape {value} [[{', '.join(map(str, range(rank)))}]] : {before} into {tensor(current, 'f32')}"
            )
        else:
            axis = data.draw(st.integers(0, rank - 1))
            current = [s * 2 if d == axis else s for d, s in enumerate(current)]
            lines.append(
                f"{name} = tensor.concat dim({axis}) {value}, {value} : ({before}, {before}) -> {tensor(current, 'f32')}"
            )
        value = name
        if prod(current) > 4000:
            break
    rank, result = len(current), tensor(current, "f32")
    body = "\n".join(lines)
    verify(f"""
    func.func @main(%a: {tensor(shape, "f32")}) -> {result} {{
      %pad = arith.constant 7.0 : f32
      {body}
      %e = tensor.empty() : {result}
      %r = linalg.generic {{indexing_maps = [{identity(rank)}, {identity(rank)}], iterator_types = {iterators(["parallel"] * rank)}}}
        ins({value} : {result}) outs(%e : {result}) {{
      ^bb0(%x: f32, %o: f32):
        %n = arith.negf %x : f32
        linalg.yield %n : f32
      }} -> {result}
      return %r : {result}
    }}""", kernels=1)  # fmt: skip


@given(shapes(low=1, high=3, largest=8), st.sampled_from(["arith.addf", "arith.mulf"]), st.data())
@SETTINGS
def test_scans_along_any_axis(shape, op, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    carry = tensor([s for d, s in enumerate(shape) if d != axis], "f32")
    full = tensor(shape, "f32")
    verify(f"""
    func.func @main(%a: {full}) -> {full} {{
      %z = arith.constant {REDUCTIONS[op]} : f32
      %e = tensor.empty() : {full}
      %f = linalg.fill ins(%z : f32) outs(%e : {full}) -> {full}
      %g = tensor.empty() : {carry}
      %h = linalg.fill ins(%z : f32) outs(%g : {carry}) -> {carry}
      %r:2 = tm_tensor.scan dimension({axis}) inclusive(true) ins(%a : {full}) outs(%f, %h : {full}, {carry}) {{
      ^bb0(%x: f32, %y: f32):
        %s = {op} %x, %y : f32
        tm_tensor.yield %s : f32
      }} -> {full}, {carry}
      return %r#0 : {full}
    }}""", kernels=1)  # fmt: skip


@given(st.lists(st.integers(2, 6), min_size=2, max_size=4), st.data())
@SETTINGS
def test_indexed_updates_in_place(shape, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    count = data.draw(st.integers(1, 2))
    source = [count if d == axis else s for d, s in enumerate(shape)]
    whole, part, index = tensor(shape, "bf16"), tensor(source, "bf16"), tensor([count], "i64")
    text = f"""
    func.func @main(%a: {whole}, %b: {part}, %i: {index}) -> {whole} {{
      %r = "topo.index_update"(%a, %b, %i) {{dim = {axis} : i64}} : ({whole}, {part}, {index}) -> {whole}
      return %r : {whole}
    }}"""
    with dialects.load(ir.Context()), ir.Location.unknown():
        module = to_kernel_ir(ir.Module.parse(text))
        # Distinct positions: which of two writes to one place wins is not defined.
        places = iter([torch.arange(count)])
        checked = check_kernels(
            module,
            lambda t, g: (
                next(places)
                if "i64" in str(t)
                else torch.randn(list(ir.RankedTensorType(t).shape)).bfloat16()
            ),
        )
    (kernel,) = checked
    assert torch.equal(kernel.ours[0], kernel.expected[0])


def test_offsets_beyond_32_bits_are_computed_in_64():
    with dialects.load(ir.Context()), ir.Location.unknown():
        from topo_opt.codegen.triton import lower_kernel

        module = to_kernel_ir(ir.Module.parse(f"""
        func.func @main(%a: tensor<3x{1 << 30}xf32>) -> tensor<3x{1 << 30}xf32> {{
          %e = tensor.empty() : tensor<3x{1 << 30}xf32>
          %r = linalg.generic {{indexing_maps = [{identity(2)}, {identity(2)}], iterator_types = ["parallel", "parallel"]}}
            ins(%a : tensor<3x{1 << 30}xf32>) outs(%e : tensor<3x{1 << 30}xf32>) {{
          ^bb0(%x: f32, %o: f32):
            %n = arith.negf %x : f32
            linalg.yield %n : f32
          }} -> tensor<3x{1 << 30}xf32>
          return %r : tensor<3x{1 << 30}xf32>
        }}"""))  # fmt: skip
        (function,) = kernel_functions(module)
        assert "tl.program_id(0).to(tl.int64)" in lower_kernel(function).source
