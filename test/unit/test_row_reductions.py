"""Reductions of long rows: passes, pairs that one read serves, rows shared by programs, windows. Against float64."""

from __future__ import annotations

import re

import pytest
import torch
from kernel_check import launch
from loops_samples import compiled, kernels_of
from torch_mlir import ir

import topo_opt
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.loops import lower
from topo_opt.codegen.triton.loops_tiles import default_tile, read_layout
from topo_opt.codegen.triton.target import Target
from topo_opt.errors import UnsupportedError


def run(function, inputs, tile, shapes) -> tuple[str, list[torch.Tensor]]:
    """Source and results of the only kernel of a function with a tile of ours."""
    module, functions = kernels_of(function, *inputs)
    assert len(functions) == 1
    with module.context, ir.Location.unknown():
        kernel = Kernel(functions[0], Target())
        kernel.attributes = {**kernel.attributes, "tile": tile}
        source = lower(kernel)
    results = [torch.full(shape, 7.5) for shape in shapes]
    launch(source, [i.contiguous() for i in inputs], results)
    return source.source, results


def check(function, inputs, tile, shapes, times: float = 2.0) -> str:
    """Our error against float64 is at most `times` eager's, with some slack for errors near zero."""
    source, ours = run(function, inputs, tile, shapes)
    exact = function(*(i.double() if i.is_floating_point() else i for i in inputs))
    eager = function(*inputs)
    exact, eager = ([t] if isinstance(t, torch.Tensor) else list(t) for t in (exact, eager))
    for mine, want, theirs in zip(ours, exact, eager, strict=True):
        assert torch.equal(mine.isnan(), want.isnan()) and torch.equal(mine.isinf(), want.isinf())
        finite = want.isfinite()
        scale = want[finite].abs().max().item() if finite.any() else 1.0
        allowed = times * (theirs.double() - want)[finite].abs().max().item() + 3e-7 * scale
        assert (mine.double() - want)[finite].abs().max().item() <= allowed
    return source


ROWS = [{"x": 1, "r": 64, "warps": 4}, {"x": 4, "r": 32, "warps": 4}]


@pytest.mark.parametrize("tile", ROWS)
@pytest.mark.parametrize("columns", [256, 300])
def test_softmax_reads_a_row_twice(tile, columns):
    x = torch.randn(5, columns) * 4
    x[0, :70] = float("-inf")
    x[1] = float("-inf")
    x[2, 17] = float("inf")
    x[3, 290 % columns] = float("nan")
    source = check(lambda x: torch.softmax(x, 1), [x], tile, [x.shape])
    assert source.count("for r0 in") == 2


@pytest.mark.parametrize("tile", [*ROWS, ROWS[0] | {"parts": 3}, ROWS[1] | {"parts": 8}])
def test_log_sum_exp_takes_one_pass(tile):
    x = torch.randn(5, 300) * 30
    x[1, :100] = float("-inf")
    source = check(lambda x: torch.logsumexp(x, 1), [x], tile, [(5,)])
    assert source.count("for r0 in") == 1


@pytest.mark.parametrize("tile", ROWS)
@pytest.mark.parametrize("columns", [256, 300])
def test_moments_are_right_far_from_zero_in_two_reads(tile, columns):
    x = torch.randn(5, columns) * 0.5 + torch.tensor([0.0, 3.0, 1e3, -1e4, 1e-3])[:, None]
    x[1, :64] = 0.0
    source = check(lambda x: torch.nn.functional.layer_norm(x, (columns,)), [x], tile, [x.shape])
    assert source.count("for r0 in") == 2


@pytest.mark.parametrize("tile", [t | {"parts": 3} for t in ROWS])
def test_shared_rows_give_mean_and_variance(tile):
    def moments(x):
        mean = x.mean(1, keepdim=True)
        return mean[:, 0], ((x - mean) ** 2).mean(1)

    x = torch.randn(5, 300) + 10
    source = check(moments, [x], tile, [(5,), (5,)])
    assert "atomic_add" in source and source.count("for r0 in") == 1
    loop, combined = source.split("if arrived ==")
    assert "tl.sum(count" not in loop and "tl.sum(parts" in combined


@pytest.mark.parametrize(
    "reduce,shape,dims",
    [(torch.sum, (3000,), (0,)), (torch.amax, (3, 40, 7), (1,)), (torch.sum, (2, 3, 50), (0, 2))],
)
def test_shared_rows_sum_and_maximum(reduce, shape, dims):
    x = torch.rand(shape)
    tile = {"x": 4, "r": 8 if len(shape) > 1 else 256, "warps": 4, "parts": 5}
    source = check(lambda x: reduce(x, dims), [x], tile, [x.sum(dims).shape])
    assert "atomic_add" in source


def _mean_and_variance(x):
    mean = x.mean(0, keepdim=True)
    return mean[0], ((x - mean) ** 2).mean(0)


def _maximum_and_its_place(x):
    return x.amax(0), x.argmax(0)


@pytest.mark.parametrize(
    "function", [lambda x: x.sum(0), lambda x: x.logsumexp(0), _mean_and_variance, _maximum_and_its_place]
)
def test_more_parts_than_lanes_are_merged_block_by_block(function):
    x = torch.randn(300, 40, generator=torch.Generator().manual_seed(7)) * 4
    x[:, 3], x[5, 4], x[77, 5], x[290, 6] = -torch.inf, torch.nan, torch.inf, 100.0
    if function is _mean_and_variance:
        x = torch.nan_to_num(x, 0.0, 3.0, -3.0) + 1000
    module, functions = kernels_of(function, x)
    expected, exact = function(x), function(x.double())
    expected, exact = ([t] if isinstance(t, torch.Tensor) else t for t in (expected, exact))
    assert len(functions) == 1
    with module.context, ir.Location.unknown():
        kernel = Kernel(functions[0], Target())
        tile = {"x": 32, "r": 8, "warps": 1, "parts": 19}
        kernel.attributes = {**kernel.attributes, "tile": tile}
        source = lower(kernel)
    assert source.source.count("for first") == 1 and "range(0, 19, 16)" in source.source
    results = [torch.empty_like(e) for e in expected]
    launch(source, [x], results)
    for ours, eager, want in zip(results, expected, exact):
        if not ours.is_floating_point():
            assert torch.equal(ours, eager)
            continue
        finite = want.isfinite()
        assert torch.equal(ours[~finite], eager[~finite]) or ours[~finite].isnan().equal(
            want[~finite].isnan()
        )
        allowed = 2 * (eager - want)[finite].abs().max() + 1e-6 * want[finite].abs().max()
        assert (ours - want)[finite].abs().max() <= allowed


def test_shared_rows_leave_the_counter_zero_and_do_not_depend_on_the_order_of_arrival():
    x = torch.randn(2, 300)
    module, functions = kernels_of(lambda x: x.sum(1), x)
    with module.context, ir.Location.unknown():
        kernel = Kernel(functions[0], Target())
        kernel.attributes = {**kernel.attributes, "tile": {"x": 1, "r": 32, "warps": 4, "parts": 4}}
        source = lower(kernel)
    assert [s.zeroed for s in source.scratch] == [False, True]
    assert "tl.store(arrivals + tl.program_id(0), 0)" in source.source
    assert 'sem="acq_rel"' in source.source and ".cg" in source.source


@pytest.mark.parametrize("reduce", [lambda x: (x > 48).any(1), lambda x: x.amax(1)])
def test_integers_and_booleans_are_shared_too(reduce):
    x = torch.randint(-50, 50, (3, 300), dtype=torch.int32)
    module, functions = kernels_of(reduce, x)
    with module.context, ir.Location.unknown():
        kernel = Kernel(functions[0], Target())
        kernel.attributes = {**kernel.attributes, "tile": {"x": 2, "r": 32, "warps": 4, "parts": 3}}
        source = lower(kernel)
    result = torch.zeros_like(reduce(x))
    launch(source, [x], [result])
    assert torch.equal(result, reduce(x))


@pytest.mark.parametrize("size,stride,padding", [(2, 2, 0), (3, 2, 1), (11, 11, 0)])
def test_windows_are_walked_one_column_at_a_time(size, stride, padding):
    x = torch.randn(2, 3, 24, 24)
    pool = torch.nn.MaxPool2d(size, stride, padding) if padding else torch.nn.AvgPool2d(size, stride)
    out = pool(x)
    source = check(lambda x: pool(x), [x], {"x": 64, "r": 1, "warps": 4}, [out.shape])
    assert ("tl.static_range" in source) == (size * size <= 32)


def tile_of(function, *inputs) -> list[tuple[tuple[int, int], dict[str, int]]]:
    """(row and column stride, default tile) of every kernel that reduces; shapes only."""
    module, functions = kernels_of(function, *inputs)
    found = []
    with module.context, ir.Location.unknown():
        for operation in functions:
            kernel = Kernel(operation, Target(cores=132))
            if kernel.attributes["family"] == "loops" and kernel.attributes["cols"]:
                layout = read_layout(kernel)
                found.append(((layout.row, layout.column), default_tile(kernel)))
    return found


def meta(*shape):
    return torch.empty(shape, device="meta")


def test_default_tiles_follow_the_layout():
    ((strides, tile),) = tile_of(lambda x: x.sum(1), meta(64, 512, 1024))
    assert strides == (1, 1024) and tile["x"] >= 64 and 1 < tile["r"] < 512
    ((strides, tile),) = tile_of(lambda x: x.sum(-1), meta(8192, 4096))
    assert strides == (4096, 1) and tile["x"] == 1 and "parts" not in tile
    ((strides, tile),) = tile_of(torch.nn.MaxPool2d(3, 2), meta(16, 64, 256, 256))
    assert strides == (2, 1) and tile["r"] == 1 and tile["x"] >= 256


@pytest.mark.parametrize(
    "dtype, rows, columns, x, warps",
    [(torch.bfloat16, 12288, 768, 4, 4), (torch.bfloat16, 2048, 2048, 2, 8), (torch.bfloat16, 1500, 768, 2, 4),
     (torch.bfloat16, 600, 768, 1, 4), (torch.float32, 12288, 768, 1, 4)],
)  # fmt: skip
def test_many_short_rows_of_half_precision_share_programs(dtype, rows, columns, x, warps):
    given = torch.empty(rows, columns, device="meta", dtype=dtype)
    ((_, tile),) = tile_of(lambda a: torch.nn.functional.layer_norm(a, (columns,)), given)
    assert (tile["x"], tile["warps"]) == (x, warps)


def test_blocks_have_whole_runs_of_neighbours_where_their_number_is_odd():
    for function in (lambda x: x.sum(1), lambda x: x.argmax(1)):
        ((strides, tile),) = tile_of(function, meta(64, 2048, 2047))
        assert strides == (1, 2047) and tile["inner"] == 1 and tile["x"] == 128 and tile["parts"] > 1
        ((_, tile),) = tile_of(function, meta(64, 2048, 2048))
        assert "inner" not in tile
    ((_, tile),) = tile_of(lambda x: x.sum((1, 2)), meta(256, 128, 3, 15, 15))
    assert tile["inner"] == 2 and -(-225 // tile["x"]) * tile["x"] <= 1.15 * 225
    ((_, tile),) = tile_of(torch.nn.AvgPool1d(8, 1, 4), meta(64, 128, 16384))
    assert tile == {"x": 512, "r": 1, "warps": 8, "inner": 1}


INNER = {"x": 16, "r": 8, "warps": 1, "inner": 2}


@pytest.mark.parametrize(
    "function,tile",
    [
        (lambda x: x.sum(1), INNER),
        (lambda x: x.sum(1), INNER | {"parts": 3}),
        (lambda x: x.softmax(1), INNER),
        (lambda x: x.softmax(1), INNER | {"r": 64}),
    ],
)
def test_blocks_of_the_inner_rows_alone(function, tile):
    x = torch.randn(3, 40, 7, 5)
    source = check(function, [x], tile, [function(x).shape])
    assert "b = program //" in source


@pytest.mark.parametrize("function", [lambda x: x.sum(1), lambda x: x.argmax(1)])
def test_a_reduction_of_an_outer_axis_reads_runs_whatever_the_sizes(function):
    module, functions = kernels_of(function, meta(64, 2048, 2047))
    with module.context, ir.Location.unknown():
        kernel = Kernel(functions[0], Target(cores=132))
        tile = default_tile(kernel)
        kernel.attributes = {**kernel.attributes, "tile": tile}
        code = compiled(lower(kernel)).asm["ttgir"]
    layout = re.search(rf"tt\.load .*tensor<128x{tile['r']}x!tt\.ptr<f32>, (#\w+)>", code)[1]
    order = re.search(rf"{layout} = #ttg\.blocked<.*order = \[(\d)", code)[1]
    assert order == "0"  # threads lie along the rows


def test_few_columns_in_memory_are_read_in_blocks_that_fit_them():
    ((strides, tile),) = tile_of(lambda x: x.sum(0), meta(1 << 20, 96))
    assert strides == (1, 96) and 96 % tile["x"] == 0
    assert 96 // tile["x"] * tile["parts"] >= 2 * 132
    ((_, wide),) = tile_of(lambda x: x.sum(0), meta(1 << 16, 1024))
    assert wide["x"] == 128 and 8 * wide["parts"] >= 2 * 132
    ((_, tile),) = tile_of(lambda x: x.amax(0), meta(1 << 20, 3))
    assert tile["x"] == 4 and tile["parts"] >= 132


@pytest.mark.parametrize("shape,dims", [((1 << 24,), (0,)), ((1 << 20, 64), (0,)), ((8, 1 << 20), (1,))])
def test_few_long_rows_use_the_whole_machine(shape, dims):
    ((_, tile),) = tile_of(lambda x: x.sum(dims), meta(*shape))
    rows = 1
    for d, size in enumerate(shape):
        rows *= 1 if d in dims else size
    assert -(-rows // tile["x"]) * tile["parts"] >= 132


def test_rows_that_are_read_twice_stay_in_one_block_as_long_as_they_fit():
    ((_, tile),) = tile_of(lambda x: torch.softmax(x, 1), meta(4096, 16384))
    assert tile["r"] == 16384
    ((_, tile),) = tile_of(lambda x: torch.softmax(x, 1), meta(4096, 20000))
    assert tile["r"] < 20000


def test_long_rows_are_split_into_kernels_that_give_what_eager_gives():
    class Long(torch.nn.Module):
        def forward(self, x):
            return torch.softmax(x, 1), torch.nn.functional.layer_norm(x, x.shape[1:])

    x = torch.randn(2, 40000) + 3
    program = topo_opt.compile(Long(), (x,), device="cpu", strict=True)
    steps = [s.kernel for s in program.variants("main")[0].steps if hasattr(s, "kernel")]
    assert len(steps) >= 2
    for ours, exact, eager in zip(program(x), Long()(x.double()), Long()(x), strict=True):
        allowed = 2 * (eager - exact).abs().max() + 1e-6 * exact.abs().max()
        assert (ours - exact).abs().max() <= allowed


def _with_ties() -> torch.Tensor:
    """Rows with equal extremes, with no number in them, and of minus infinity alone."""
    x = torch.randint(-9, 9, (6, 300), generator=torch.Generator().manual_seed(3)).float()
    x[1, 77], x[2, 5], x[2, 200] = torch.nan, torch.nan, torch.inf
    x[3], x[4] = -torch.inf, torch.inf
    return x


@pytest.mark.parametrize(
    "tile", [*ROWS, {"x": 2, "r": 32, "warps": 4, "parts": 3}, {"x": 8, "r": 1, "warps": 4}]
)
@pytest.mark.parametrize("name", ["argmax", "argmin"])
@pytest.mark.parametrize("dim", [0, 1])
def test_places_of_extremes_in_one_read(tile, name, dim):
    x = _with_ties() if dim == 1 else _with_ties().t().contiguous()

    def place(x: torch.Tensor) -> torch.Tensor:
        return getattr(x, name)(dim)

    module, functions = kernels_of(place, x)
    with module.context, ir.Location.unknown():
        kernel = Kernel(functions[0], Target())
        kernel.attributes = {**kernel.attributes, "tile": tile}
        source = lower(kernel)
    results = [torch.full((6,), -1, dtype=torch.int64)]
    launch(source, [x], results)
    assert torch.equal(results[0], place(x))
    assert source.source.count("for r0 in") == 1 and source.source.count("tl.load(in0") == 1


@pytest.mark.parametrize("kind", ["max", "avg", "avg-inside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_windows_are_filled_by_the_loads(kind, dtype):
    x = (torch.randn(2, 3, 40) - 5).to(dtype)
    pool = torch.nn.MaxPool1d(8, 1, 4, 3) if kind == "max" else torch.nn.AvgPool1d(8, 1, 4)
    function = (lambda x: pool(x)) if kind != "avg-inside" else (lambda x: pool(x * 2))
    module, functions = kernels_of(function, x)
    tile = {"x": 16, "r": 1, "warps": 1, "inner": 1}
    with module.context, ir.Location.unknown():
        kernel = Kernel(functions[0], Target())
        kernel.attributes = {**kernel.attributes, "tile": tile}
        source = lower(kernel)
    exact = function(x.double())
    result = torch.full(exact.shape, 7.5, dtype=dtype)
    launch(source, [x], [result])
    allowed = 2 * (function(x) - exact).abs().max() + 1e-6 * exact.abs().max()
    assert (result - exact).abs().max() <= allowed
    code = source.source[source.source.index("@triton.jit\ndef k_") :]
    # A choice remains where what is padded is computed.
    assert ("tl.where" in code) == (kind == "avg-inside")
    assert ("other=float('-inf')" in code) == (kind == "max")


def test_elements_of_a_window_are_offsets_of_one_address():
    module, functions = kernels_of(torch.nn.AvgPool1d(8, 1, 4), meta(64, 128, 16384))
    with module.context, ir.Location.unknown():
        kernel = Kernel(functions[0], Target(cores=132))
        kernel.attributes = {**kernel.attributes, "tile": default_tile(kernel)}
        ptx = compiled(lower(kernel)).asm["ptx"]
    assert len(re.findall(r"ld\.global\.b32", ptx)) == 16  # 2 outputs a thread, 8 elements each
    assert len(re.findall(r"m(?:ul|ad)\.wide\.s32", ptx)) <= 8


@pytest.mark.parametrize("size,stride,padding", [(11, 11, 0), (5, 4, 2), (4, 4, 0)])
@pytest.mark.parametrize("pool", [torch.nn.AvgPool2d, torch.nn.MaxPool2d])
def test_lines_of_windows_are_read_whole(pool, size, stride, padding):
    window = pool(size, stride, padding)
    x = torch.randn(2, 3, 30, 31)
    line = 16 if size == 11 else 8
    tile = {"x": 8, "r": line, "warps": 1, "inner_cols": 1}
    source = check(lambda x: window(x), [x], tile, [window(x).shape])
    assert f"for q in range(0, {size})" in source


def test_columns_in_lines_are_not_counted_or_shared():
    x = torch.randn(2, 3, 30, 31)
    tile = {"x": 1, "r": 32, "warps": 1, "inner_cols": 1}
    check(lambda x: x.sum((2, 3)), [x], tile, [(2, 3)])
    for function, other in (
        (lambda x: ((x - x.mean((2, 3), keepdim=True)) ** 2).mean((2, 3)), {}),
        (lambda x: x.sum((2, 3)), {"r": 16}),
        (lambda x: x.sum((2, 3)), {"parts": 2}),
    ):
        with pytest.raises(UnsupportedError, match="columns in lines"):
            run(function, [x], tile | other, [(2, 3)])


def test_threads_lie_along_the_lines_of_wide_windows():
    ((_, tile),) = tile_of(torch.nn.AvgPool2d(13), meta(16, 64, 1024, 1024))
    assert tile == {"x": 128, "r": 16, "warps": 4, "inner_cols": 1}
    for smaller in (torch.nn.AvgPool2d(11), torch.nn.MaxPool2d(3, 2)):
        ((_, tile),) = tile_of(smaller, meta(16, 64, 256, 256))
        assert "inner_cols" not in tile
    module, functions = kernels_of(torch.nn.AvgPool2d(13), meta(16, 64, 1024, 1024))
    with module.context, ir.Location.unknown():
        kernel = Kernel(functions[0], Target(cores=132))
        kernel.attributes = {**kernel.attributes, "tile": default_tile(kernel)}
        code = compiled(lower(kernel)).asm["ttgir"]
    layout = re.search(r"tt\.load .*tensor<128x16x!tt\.ptr<f32>, (#\w+)>", code)[1]
    assert re.search(rf"{layout} = #ttg\.blocked<.*order = \[(\d)", code)[1] == "1"
