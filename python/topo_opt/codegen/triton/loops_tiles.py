"""Default tiles of pointwise ops and reductions: from how neighbouring rows and columns lie in memory.

Blocks are chosen so that neighbouring threads read neighbouring elements, that a row is read once where it fits in
registers, and that there are programs for the whole machine: a few long rows are shared by many programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from topo_opt.codegen.triton.broadcast_reads import within_rows
from topo_opt.codegen.triton.kernel import Kernel, next_power_of_two
from topo_opt.codegen.triton.looped_rows import UNROLLED_COLUMNS, combines_plainly, kept_words, passes
from topo_opt.codegen.triton.row_split_tiles import MOST_ROWS, Shared, ranked
from topo_opt.codegen.triton.target import Precision
from topo_opt.codegen.triton.transposed_reads import Probe, two_axes
from topo_opt.errors import UnsupportedError
from topo_opt.structured.graph import element_bytes
from topo_opt.structured.index import ZERO, const, delinearize

Tile = dict[str, int]

ELEMENTS = 1024
"""Elements a program of a pointwise kernel computes: two loads of 16 bytes a thread in f32."""
HALF_ELEMENTS = 4096
"""Elements that a program of rows of half precision has, where rows are many: norms of 4,096 to 12,288 rows of 768 and 1,024 took 3.6, 8.2 and
4.0 us with four rows a program, 5.3, 15.5 and 5.2 with one (searches, H200)."""
PERSISTENT_COLUMNS = 8192
"""Rows up to this many elements are held in one block: 8 warps of 32 threads hold 32 f32 values each."""
REREAD_COLUMNS = 16384
"""As `PERSISTENT_COLUMNS`, with more warps, where a row in blocks would be read more than once."""
LOOP_COLUMNS = 4096
SHARED_COLUMNS = 2048
"""As `LOOP_COLUMNS`, of a row that programs share: 16 rows of 4 M f32 took 119 us in such steps, 165 to 268 in longer ones (short search,
H200)."""
STEP_ELEMENTS = 2048
"""Elements of a step of neighbouring rows: 268 us against 365 with twice as many, 64 x 2048 x 2047 f32 summed over the middle (short search, H200)."""
STRIDED_COLUMNS = 512
"""Columns that are not neighbours and that are held in one block."""
WINDOW_STRIDE = 16
"""Rows at most so many elements apart share cache lines: columns are then visited one at a time."""
WINDOW_COLUMNS = 128
"""Columns of such rows, where each row has elements of its own; neighbours only up to `UNROLLED_COLUMNS`."""
PROGRAMS_PER_CORE = 4
"""Programs of 8 warps that one core runs at a time."""
ROUNDS = 4
"""How often the programs that run at a time follow each other, where they are more: the last round may be nearly empty."""
LEAST_STEPS = 4
"""Steps of a program at least, where rows are shared for that."""
LONGEST_LINE = 256
"""Neighbouring columns of a window that a block has."""
LINE_ELEMENTS = 2048
"""Elements of a block of lines: 16 loads a thread, which don't wait for each other."""
IDLE = 1.15
"""Elements of blocks to elements that exist, at most, where one dimension of the rows is divided into blocks."""
RUN_ELEMENTS = 4
"""Neighbours that a thread reads at once."""
COMBINED_ELEMENTS = 16384
"""Parts of a block of rows that one program puts together."""


EXCHANGED = 1 << 18
"""Elements up to which a kernel that waits for other devices is bound by how fast it sees what arrives: few warps a program see it first. One
exchange of 4,096 bf16 in a row of them took 1.79 us with 256 elements and a warp, 1.84 with 512 and two, 2.27 with 512 and one, 2.37 with 4,096 and eight;
of 131,072 elements 2.79 with 512 and two, 3.49 with one (two H200, CUDA graph, 2026-11-30)."""


@dataclass(frozen=True)
class Layout:
    """How far apart neighbouring rows and columns of the largest tensor that a reduction reads are, in elements.

    `inner`, `inner_cols`: dimensions of the rows and of the columns, the last ones, along which all are that far apart.
    """

    row: int
    column: int
    elements: int
    inner: int
    inner_cols: int


def default_tile(kernel: Kernel) -> Tile:
    """Block sizes, warps and parts of a kernel of family `loops`."""
    rows, cols = prod(kernel.attributes["rows"]), prod(kernel.attributes["cols"])
    cores = kernel.target.cores
    if cols == 1 and "exchange" in kernel.attributes and rows <= EXCHANGED:
        few = rows < EXCHANGED // 4
        return {"x": min(next_power_of_two(rows), 256 if few else 512), "r": 1, "warps": 1 if few else 2}
    if cols == 1:
        both = two_axes(kernel)
        return both.default(rows, cores) if both else _pointwise(kernel, rows)
    layout, once = read_layout(kernel), _reads_once(kernel)
    limit = UNROLLED_COLUMNS if abs(layout.row) == 1 else WINDOW_COLUMNS
    is_window = once and abs(layout.row) <= WINDOW_STRIDE and abs(layout.row) < cols <= limit
    many = rows >= cores * ELEMENTS // 4
    if is_window and many:
        return _window(kernel, layout)
    if once and many and (lines := _lines(kernel, layout)):
        return lines
    if abs(layout.column) == 1 or abs(layout.row) > WINDOW_STRIDE:
        tile = _along_columns(rows, cols, once) | _several_rows(kernel, rows, cols)
        if tile["r"] == LOOP_COLUMNS and _parts(kernel, tile):
            tile["r"] = SHARED_COLUMNS
    elif once and -(-rows // MOST_ROWS) < cores and not _whole_runs(kernel, layout, MOST_ROWS):
        return _few_neighbours(kernel, layout, rows, cols)
    else:
        tile = _along_rows(kernel, layout, once)
    return tile | _parts(kernel, tile)


def _pointwise(kernel: Kernel, rows: int) -> Tile:
    spread = max(128, next_power_of_two(rows // (2 * kernel.target.cores)))
    tile = {"x": min(next_power_of_two(max(rows, 1)), ELEMENTS, spread), "r": 1}
    tile |= within_rows(kernel, tile["x"])
    return tile | {"warps": max(1, min(4, tile["x"] // 128))}


def _along_columns(rows: int, cols: int, once: bool) -> Tile:
    """Threads lie along the columns."""
    most = PERSISTENT_COLUMNS if once else REREAD_COLUMNS
    if cols > most:
        return {"x": 1, "r": LOOP_COLUMNS, "warps": 8}
    r = next_power_of_two(cols)
    x = max(1, min(next_power_of_two(rows), ELEMENTS // r))
    return {"x": x, "r": r, "warps": min(32, max(8, r // 1024)) if r * x >= 4096 else 4}


def _several_rows(kernel: Kernel, rows: int, cols: int) -> Tile:
    """Several rows of half precision a program, of those that would have one to themselves, where there are enough for all cores; else empty."""
    r = next_power_of_two(cols)
    together = min(HALF_ELEMENTS // r, rows // (PROGRAMS_PER_CORE * kernel.target.cores))
    if r < ELEMENTS or together < 2 or kernel.precision == Precision.EXACT:
        return {}
    return {"x": 1 << (together.bit_length() - 1), "r": r, "warps": 4 if r <= HALF_ELEMENTS // 4 else 8}


def _along_rows(kernel: Kernel, layout: Layout, once: bool) -> Tile:
    """Threads lie along the rows, which are neighbours in memory."""
    rows, cols = prod(kernel.attributes["rows"]), prod(kernel.attributes["cols"])
    if once or cols > STRIDED_COLUMNS:
        x = min(next_power_of_two(rows), 128)
        elements = STEP_ELEMENTS // next_power_of_two(max(kept_words(_loops(kernel, {"x": 1, "r": 1})), 1))
        tile = {"x": x, "r": min(next_power_of_two(cols), elements // x), "warps": 4}
    else:
        r = next_power_of_two(cols)
        x = min(next_power_of_two(rows), max(16, min(64, 8192 // r)))
        tile = {"x": x, "r": r, "warps": 8 if x * r >= 8192 else 4}
    return tile | _whole_runs(kernel, layout, tile["x"])


def _whole_runs(kernel: Kernel, layout: Layout, x: int) -> Tile:
    """Blocks along the inner dimensions of the rows alone, where Triton would not see the runs of neighbours otherwise.

    A block of all rows divides by the number of neighbours, and what it reads has runs of powers of two that divide it.
    """
    rows = kernel.attributes["rows"]
    count = prod(rows[len(rows) - layout.inner :])
    if count == prod(rows) or count & -count >= RUN_ELEMENTS:
        return {}
    fitting = [x]
    while fitting[-1] > 16:
        fitting.append(fitting[-1] // 2)
    idle = {size: -(-count // size) * size / count for size in fitting}
    best = next((s for s in fitting if idle[s] <= IDLE), min(fitting, key=lambda s: idle[s]))
    return {"x": min(best, next_power_of_two(count)), "inner": layout.inner}


def _window(kernel: Kernel, layout: Layout) -> Tile:
    """Columns are visited one at a time: the elements of a window, which those of its neighbours share."""
    x = 512 if abs(layout.row) == 1 else 256
    found = _whole_runs(kernel, layout, x)
    # On an H200 in f32, avg_pool1d of windows of 8 took 411 us with two neighbours a thread and 653 with four (64 x 128 x 16384),
    # avg_pool2d of 11 x 11 took 1013 us with one and 1257 in lines of windows (16 x 64 x 1024 x 1024).
    return {"x": x, "r": 1, "warps": 8} | (found if found.get("x", 0) >= 256 else {})


def _lines(kernel: Kernel, layout: Layout) -> Tile:
    """Blocks with a line of many windows each, where threads along the rows would lie many elements apart; else empty."""
    cols = kernel.attributes["cols"]
    line = prod(cols[len(cols) - layout.inner_cols :])
    apart = abs(layout.row) >= RUN_ELEMENTS and abs(layout.column) == 1
    if not apart or not RUN_ELEMENTS <= line <= LONGEST_LINE or line == prod(cols):
        return {}
    if not combines_plainly(_loops(kernel, {"x": 1, "r": 1})):
        return {}
    r = next_power_of_two(line)
    return {"x": LINE_ELEMENTS // r, "r": r, "warps": 4, "inner_cols": layout.inner_cols}


def _few_neighbours(kernel: Kernel, layout: Layout, rows: int, cols: int) -> Tile:
    """Rows that are neighbours in memory and too few for a program each: shared by programs."""
    graph = kernel.graph
    read = [graph.values[v] for v in graph.arguments]
    bytes_each = max((element_bytes(v.element) for v in read if v.numel == layout.elements), default=4)
    kept = kept_words(_loops(kernel, {"x": 1, "r": 1}))
    tile = ranked(Shared(rows, cols, bytes_each, kept), kernel.target)[0][1]
    return tile if tile["parts"] > 1 else {k: v for k, v in tile.items() if k != "parts"}


def _parts(kernel: Kernel, tile: Tile) -> Tile:
    """How many programs share a block of rows, where the blocks alone leave cores idle.

    Blocks that the machine runs at once are shared by as many as fill it. More are shared where few rounds would end with
    most cores idle.
    """
    space = _loops(kernel, tile).space
    steps = -(-space.col_count // space.r_block)
    at_once = kernel.target.cores * PROGRAMS_PER_CORE * 8 // tile["warps"]
    parts = at_once // space.blocks
    if parts < 2 and space.blocks > at_once // 2:
        parts = min(-(-ROUNDS * at_once // space.blocks), steps // LEAST_STEPS)
    parts = _even(min(steps, parts, COMBINED_ELEMENTS // tile["x"]), steps)
    if parts < 2 or not _can_share(kernel, tile):
        return {}
    return {"parts": parts}


def _even(parts: int, steps: int) -> int:
    """Fewer parts where they have equal steps then, which needs no masks; not so few that it costs more than that."""
    return next((p for p in range(parts, parts * 3 // 4, -1) if steps % p == 0), parts)


def _can_share(kernel: Kernel, tile: Tile) -> bool:
    """Whether one pass over the columns, in any order, gives every result."""
    loops = _loops(kernel, tile)
    if any(loops.is_full(v) for v in kernel.graph.returns):
        return False
    count, any_order = passes(loops)
    return count == 1 and any_order


def _reads_once(kernel: Kernel) -> bool:
    """Whether a loop over blocks of a row would read it once: nothing but reductions that one pass serves."""
    return _can_share(kernel, {"x": 1, "r": 1})


def _loops(kernel: Kernel, tile: Tile):
    from topo_opt.codegen.triton.loops import Loops

    return Loops(kernel, tile=tile | {"warps": 4})


def read_layout(kernel: Kernel) -> Layout:
    """The layout of the largest tensor that the first reduction of a kernel reads."""
    loops = _loops(kernel, {"x": 1, "r": 1})
    space, graph = loops.space, kernel.graph
    probe = Probe(graph, loops.writer, loops.emitter.axes, loops.emitter.pointers)
    probe.places, loops.emitter = [], probe
    probe.on_reduction = loops.reduction_missing
    for node in graph.nodes:
        shape = graph.values[node.results[0]].shape or ()
        if not node.has_reduction or prod(shape) != space.row_count or probe.places:
            continue
        try:
            loops.term(node, 0, tuple(delinearize(space.x, shape)))
        except UnsupportedError:  # it reads another reduction, or has other columns
            continue
    found = [(n, p) for n, _, p in probe.places if {"x", "r"} & p.symbols]
    if not found:
        return Layout(space.col_count, 1, space.row_count * space.col_count, len(space.rows), len(space.cols))
    elements, place = max(found, key=lambda item: item[0])

    def at(x: int, r: int) -> int:
        return place.substitute({"x": const(x) if x else ZERO, "r": const(r) if r else ZERO}).bounds[0]

    start, row = at(0, 0), at(min(1, space.row_count - 1), 0) - at(0, 0)
    column = at(0, 1) - start
    inner = _run(space.rows, lambda n: at(n, 0) - start == row * n)
    return Layout(row, column, elements, inner, _run(space.cols, lambda n: at(0, n) - start == column * n))


def _run(sizes: Sequence[int], continues: Callable[[int], bool]) -> int:
    """How many of the last dimensions are one run; `continues(n)`: whether an index after n inner ones lies where it would."""
    dims, count = 0, 1
    for size in reversed(sizes):
        if size > 1 and not continues(count):
            break
        dims, count = dims + 1, count * size
    return dims
