"""The index space of an attention kernel: its axes, its tile, what its scores need, and the tiles that it can have."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from math import log2

from topo_opt.codegen.triton import attention_bounds
from topo_opt.codegen.triton.attention_problem import Problem, read_problem
from topo_opt.codegen.triton.attention_range import KeyRange
from topo_opt.codegen.triton.attention_split import Split
from topo_opt.codegen.triton.attention_tiles import (
    MOST_SPLITS,
    PROGRAMS_PER_CORE,
    SPLIT_KEYS,
    default_tile,
    with_descriptors,
)
from topo_opt.codegen.triton.emit import Axis, Emitter, Value
from topo_opt.codegen.triton.kernel import Kernel, next_power_of_two
from topo_opt.codegen.triton.writer import Writer
from topo_opt.errors import UnsupportedError
from topo_opt.structured.index import Expr, const, symbol

LOG2E = 1.4426950408889634
SMALLEST_DOT = 16
"""`tl.dot` takes no dimension under this."""
MOST_ROWS = 32
"""Rows of a block of few: from 64 on, products are wgmma's."""
_POSITIONS = ("row", "n", "nv", "ns", "nx", "nf")
"""Axes whose offsets may need 64 bits; program numbers and bounds of loops never do."""


def dot_block(size: int) -> int:
    """The block of a dimension that is not split: a power of two that `tl.dot` takes."""
    return max(SMALLEST_DOT, next_power_of_two(size))


@dataclass
class AttentionSpace:
    """Sizes, tile and axes of one attention kernel, with the emitter that works on them."""

    kernel: Kernel
    writer: Writer = field(default_factory=lambda: Writer(indent=1))

    def __post_init__(self) -> None:
        kernel = self.kernel
        self.problem: Problem = read_problem(kernel)
        problem, tile = self.problem, kernel.attributes["tile"]
        self.pack: int = tile["pack"]
        if problem.shared % self.pack:
            raise UnsupportedError(f"a tile that packs {self.pack} heads where {problem.shared} share keys")
        self.groups = problem.heads // self.pack
        self.rows = self.pack * problem.rows
        self.block_m, self.block_n = tile["m"], tile["n"]
        self.block_d, self.block_e = dot_block(problem.depth), dot_block(problem.width)
        self.row_blocks = -(-self.rows // self.block_m)
        self.splits: int = tile["splits"]
        self.chunk = -(-problem.keys // (self.splits * self.block_n)) * self.block_n
        self.split = Split(self.splits, self.block_m, self.block_e, self.rows, self._after)
        used = {v for node in kernel.graph.nodes for v in node.operands}
        used |= {kernel.graph.arguments[index] for _, index, _ in kernel.written}
        pointers, self.params = kernel.pointer_params(used)
        self.bounded: bool = bool(tile.get("bounds", 0))
        if self.bounded and problem.mask_element != "i1":
            raise UnsupportedError("a tile with bounds where there is no boolean mask")
        self.block_s = attention_bounds.scan_block(self._mask_rows, problem.keys)
        self.axes = self._axes()
        self.range = self._key_range()
        self.emitter = Emitter(kernel.graph, self.writer, self.axes, pointers, precision=kernel.precision)

    def _axes(self) -> dict[str, Axis]:
        problem = self.problem

        def axis(name: str, size: int, block: int) -> Axis:
            return Axis(name, size, name, f"{name}_mask" if size % block else None)

        return {
            "b": Axis("b", problem.batch, "b", scalar=True),
            "g": Axis("g", self.groups, "g", scalar=True),
            "row": axis("row", self.rows, self.block_m),
            "d": axis("d", problem.depth, self.block_d),
            "dk": axis("dk", problem.depth, self.block_d),
            "e": axis("e", problem.width, self.block_e),
            "n": axis("n", problem.keys, self.block_n),
            "nv": axis("nv", problem.keys, self.block_n),
            "ns": axis("ns", problem.keys, self.block_s),
            # The keys of the block after this one, whose mask is read ahead; those of the first block are named by the loop.
            "nx": Axis("nx", problem.keys, "nx", "nx_mask"),
        }

    def _symbol(self, name: str) -> Expr:
        return symbol(name, self.axes[name].size)

    @property
    def _head(self) -> Expr:
        return self._symbol("g") * self.pack + self._symbol("row") // self.problem.rows

    @property
    def _query_row(self) -> Expr:
        return self._symbol("row") % self.problem.rows

    def _key_range(self) -> KeyRange:
        problem = self.problem
        first, last = const(0), const(problem.rows - 1)
        if self.pack == 1 and self.row_blocks > 1:
            first, last = symbol("first_row", problem.rows), symbol("last_row", problem.rows)
        positions = None if problem.positions is None else self._positions
        return KeyRange(
            problem.low, problem.high, problem.keys, problem.rows, self._query_row, first, last, positions
        )

    def _positions(self) -> Value:
        """Where the rows of the block stand."""
        assert self.problem.positions is not None
        shape = self.kernel.graph.values[self.problem.positions].shape or ()
        at = [self._symbol("b"), self._query_row]
        indices = [index * (0 if size == 1 else 1) for index, size in zip(at, shape, strict=True)]
        return self.emitter.real(self.problem.positions, indices)

    @property
    def _is_scaled_first(self) -> bool:
        """Whether scores are scaled before the maximum is taken, rather than in the exponent."""
        return self.problem.additive or self.problem.scale <= 0 or self.problem.softcap is not None

    @property
    def _before(self) -> str:
        """What scores are multiplied with before the maximum is known: they become exponents of two."""
        return "" if self._is_scaled_first else f" * {self.problem.scale * LOG2E!r}"

    @property
    def _after(self) -> str:
        """What differences to the maximum are multiplied with to be exponents of two. Under an additive mask scores stay in
        the mask's unit, where its smallest number does not overflow."""
        return f" * {LOG2E!r}" if self._is_scaled_first else ""

    @property
    def _may_see_nothing(self) -> bool:
        """Whether a row may have seen no position after its first block."""
        bounded = self.range.is_bounded and self.splits > 1
        return self.problem.mask is not None or self.range.may_be_empty or bounded

    @property
    def _may_be_empty(self) -> bool:
        """Whether a row may see no position at all."""
        return self.problem.mask is not None or self.range.may_be_empty

    def _define(self, name: str, code: str) -> None:
        """Defines an axis variable and, where its block reaches past the end, its mask."""
        axis = self.emitter.axes[name]
        if self.kernel.wide and name in _POSITIONS:
            code = f"({code}).to(tl.int64)"
        self.writer.line(f"{axis.source} = {code}")
        if axis.mask:
            self.writer.line(f"{axis.mask} = {axis.source} < {axis.size}")

    @property
    def _mask_rows(self) -> int:
        """Different rows of the mask in a block of rows."""
        shape = () if self.problem.mask is None else self.kernel.graph.values[self.problem.mask].shape or ()
        per_head = self.pack > 1 and shape[1:2] not in ((), (1,))
        return self.block_m if per_head or shape[2:3] not in ((), (1,)) else 1


MOST_CANDIDATES = 64
# For many rows and for few: (rows a block), (keys a block), (warps), (stages).
_MANY_ROWS = ((64, 128), (32, 64, 128, 256), (4, 8), (1, 2, 3, 4))
_FEW_ROWS = ((16, 32), (16, 32, 64, 128), (1, 2, 4, 8), (1, 2, 3, 4))
_BOTH = 16
"""Tiles of few rows that are tried with weights added up across warps behind the loop (which is what a tile means that does not say)
and with `late` = 0 in it: one step of 32 sequences took 1.164 and 1.231 ms with 128 keys a block and two stages, 1.176 and 1.170 with three
and no splits (H200, `benchmarks/results/kernels-h200.md`)."""
_KEYS_PER_WARP = 16
"""Keys of a block that a warp of a program of few rows loads at a time."""

MOST_REGISTERS = 200
"""Registers a thread that accumulators and scores may take."""


def candidates(kernel: Kernel) -> list[dict[str, int]]:
    """Tiles to try, the default first and then the most promising.

    All fit the registers and the shared memory that their blocks need. A tile with descriptors stands beside its
    neighbour without; where keys or values do not lie in memory as a descriptor says, it has no code. Whether a mask is
    scanned first is not varied: a measurement with one mask can't say what other masks need.
    """
    problem, default = read_problem(kernel), default_tile(kernel)
    many = default["m"] >= 64
    depth = next_power_of_two(max(problem.depth, problem.width, 16))
    shapes = _MANY_ROWS if many else _FEW_ROWS
    splits = {default["splits"]}
    if default["splits"] > 1 or default["pack"] * problem.rows <= default["m"]:
        splits |= {2**p for p in range(MOST_SPLITS.bit_length())}
    found = [
        {**default, "m": m, "n": n, "warps": warps, "stages": stages, "splits": count}
        for m, n, warps, stages in product(*shapes)
        for count in sorted(splits)
        if _fits(kernel, problem.element, depth, (m, n, warps, stages))
        and (count == 1 or default["pack"] * problem.rows <= m)
        and count * n <= next_power_of_two(problem.keys)
    ]
    if not many:
        groups = problem.batch * problem.heads // default["pack"]
        best = sorted(found, key=lambda t: (_few_rows_cost(problem, groups, kernel, t), sorted(t.items())))
        both = [t for tile in best for t in ([tile, {**tile, "late": 0}] if tile["warps"] > 1 else [tile])]
        return _once([default, *both[: 2 * _BOTH], *best[_BOTH:]])[:MOST_CANDIDATES]
    near = sorted(found, key=lambda t: (_many_rows_cost(default, t), sorted(t.items())))
    if problem.element == "f32":
        return _once([default, *near])[:MOST_CANDIDATES]
    described = with_descriptors(kernel, default) or default
    by_descriptors = [
        {**tile, "tma": 1}
        for tile in sorted(found, key=lambda t: (_many_rows_cost(described, t), sorted(t.items())))
    ]
    turns = [tile for pair in zip(by_descriptors, near) for tile in pair]
    return _once([default, *turns])[:MOST_CANDIDATES]


def _many_rows_cost(wanted: dict[str, int], tile: dict[str, int]) -> float:
    """How far a tile of many rows is from one that is known to be good: a larger block of rows wants the warps to go with it."""
    rows, warps = (log2(tile[key] / wanted[key]) for key in ("m", "warps"))
    return (
        0.8 * abs(rows)
        + 1.2 * abs(rows - warps)
        + 0.7 * abs(log2(tile["n"] / wanted["n"]))
        + 0.5 * abs(tile["stages"] - wanted["stages"])
    )


def _few_rows_cost(problem: Problem, groups: int, kernel: Kernel, tile: dict[str, int]) -> float:
    """How far a tile of few rows is from what reads keys fastest: enough programs, each with some blocks of keys in flight."""
    programs = groups * tile["splits"]
    wanted = min(PROGRAMS_PER_CORE * kernel.target.cores, groups * max(1, problem.keys // SPLIT_KEYS))
    blocks = max(1, problem.keys // (tile["splits"] * tile["n"]))
    stages = min(max(blocks, 2), 3)
    rows = next_power_of_two(max(SMALLEST_DOT, tile["pack"] * problem.rows))
    return (
        abs(log2(programs / wanted))
        + 0.5 * abs(log2(tile["n"] / (_KEYS_PER_WARP * tile["warps"])))
        + 0.2 * abs(tile["stages"] - stages)
        + 0.25 * abs(log2(blocks / 2))
        + 0.25 * abs(log2(tile["warps"] / 4))
        + abs(log2(tile["m"] / rows))
    )


def _once(tiles: list[dict[str, int]]) -> list[dict[str, int]]:
    unique = {tuple(sorted(t.items())): t for t in reversed(tiles)}
    return list(reversed(unique.values()))


def _fits(kernel: Kernel, element: str, depth: int, tile: tuple[int, int, int, int]) -> bool:
    """Whether accumulators and scores fit the registers of a program, and its blocks of q, k and v its shared memory."""
    m, n, warps, stages = tile
    width = 4 if element == "f32" else 2
    held = 2 * n if m <= MOST_ROWS and warps > 1 else n
    registers = m * (depth + held) // (32 * warps)
    shared = (m * depth + stages * 2 * n * depth) * width
    return registers <= MOST_REGISTERS and shared <= kernel.target.shared_bytes
