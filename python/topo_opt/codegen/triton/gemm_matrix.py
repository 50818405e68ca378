"""The matrix form: tensor cores, one tile of the result at a time, k in blocks.

Programs compute one tile each, or, with `persistent`, as many programs as the machine holds walk over all tiles: loads of the
next tile then start under the epilogue of the one before. With `splits`, so many programs share a tile, each with its range
of k; the last one to arrive adds up their sums in order and does the epilogue (`arrivals`). With `tma`, operands that lie in
memory as a tensor descriptor can say are copied by the hardware; the others are loaded through pointers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from topo_opt.codegen.kernel_source import KernelSource, Param, Scratch
from topo_opt.codegen.triton import arrivals
from topo_opt.codegen.triton.element_types import dot_precision
from topo_opt.codegen.triton.emit import Axis
from topo_opt.codegen.triton.gemm_base import Accumulator, Gemm, Place
from topo_opt.codegen.triton.gemm_descriptors import BlockAxis, Operand, describe
from topo_opt.errors import UnsupportedError
from topo_opt.structured.index import Expr, symbol

_SHAPE = "(BLOCK_M, BLOCK_N)"
_SIDES = ("left", "right")
_WIDEST = 2**31 - 1  # of offsets in 32 bits
_K_AXES = {
    "left": ("ka", "(BLOCK_M, BLOCK_K)", "[None, :]"),
    "right": ("kb", "(BLOCK_K, BLOCK_N)", "[:, None]"),
}
"""The axis that k is for each side, the shape of a block, and how positions in k lie in it."""


class Matrix(Gemm):
    """Tiles are walked in groups of rows, so that neighbours share operands in L2."""

    def _axes(self) -> dict[str, Axis]:
        tile = self.tile
        return {
            "m": self.axis("m", self.m, tile["m"]),
            "n": self.axis("n", self.columns, tile["n"]),
            "ka": self.axis("ka", self.k, tile["k"]),
            "kb": self.axis("kb", self.k, tile["k"]),
            "b": Axis("b", self.batch, "b", scalar=True),
        }

    def lower(self) -> KernelSource:
        tile = self.tile
        self.rows, self.cols = -(-self.m // tile["m"]), -(-self.columns // tile["n"])
        self.described: dict[Operand, str] = {}
        m, n = symbol("m", self.m), symbol("n", self.columns)
        if self.pdl:
            self.writer.line("gdc_launch_dependents()")
        tiles, programs = self.rows * self.cols * self.batch, tile.get("persistent", 0)
        self.scratch: list[tuple[str, Scratch]] = []
        if programs:
            if self._splits > 1:
                raise UnsupportedError("a persistent kernel with k in splits")
            if self.pdl:
                self.writer.line("gdc_wait()")
            programs = min(programs, tiles)
            with self.emitter.scope(
                f"for pid in tl.range(tl.program_id(0), {tiles}, {programs}, flatten=True):"
            ):
                self._tile("pid", m, n)
            grid = (programs, 1, 1)
        else:
            self.writer.line("pid = tl.program_id(0)")
            self._tile(None, m, n)
            grid = (self.rows * self.cols * self._splits, self.batch, 1)
        self.params = self._with_descriptors()
        blocks = {"BLOCK_M": tile["m"], "BLOCK_N": tile["n"], "BLOCK_K": tile["k"]}
        return self.source(blocks, grid, tile["stages"], self.scratch)

    @property
    def _splits(self) -> int:
        """Programs that share a tile: as many as have a step of k."""
        return -(-self._all_steps // self._steps)

    @property
    def _all_steps(self) -> int:
        return -(-self.k // self.tile["k"])

    @property
    def _steps(self) -> int:
        """Steps of k of a program."""
        return -(-self._all_steps // self.tile.get("splits", 1))

    def _tile(self, walking: str | None, m: Expr, n: Expr) -> None:
        """One tile of the result; `walking` names the number of the tile over all batches, None takes two program numbers."""
        line, tile = self.writer.line, self.tile
        group, per_batch = min(tile["group"], self.rows), self.rows * self.cols
        number = "pid"
        if walking and self.batch > 1:
            line(f"b = ({walking} // {per_batch}){self.cast}")
            number = self.writer.bind(f"{walking} % {per_batch}", "t")
        elif self.batch > 1:
            self.define_batch()
        start, end = "0", str(self.k)
        if self._splits > 1:
            # Programs that run together have the same k, whose operands they share, and different tiles.
            number = self.writer.bind(f"pid % {per_batch}", "t")
            line(f"split = pid // {per_batch}")
            chunk = self._steps * tile["k"]
            start = self.writer.bind(f"split * {chunk}", "start")
            end = f"{start} + {chunk}"
            if self._all_steps % self._steps:
                end = f"tl.minimum({end}, {self._all_steps * tile['k']})"
        line(f"first = {number} // {group * self.cols} * {group}")
        line(f"rows = tl.minimum({self.rows} - first, {group})")
        line(f"pid_m = first + {number} % {group * self.cols} % rows")
        line(f"pid_n = {number} % {group * self.cols} // rows")
        self.define("m", f"pid_m{self.cast} * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]")
        self.define("n", f"pid_n{self.cast} * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]")
        places = self.places(m, n)
        self.check_coverage(places, self.batch * self.m * self.columns)
        accumulators = self._accumulators(places, m)
        names = ["acc", *(f"acc{i}" for i in range(1, len(accumulators)))]
        for name in names:
            line(f"{name} = tl.zeros({_SHAPE}, tl.float32)")
        if self.pdl and not walking:
            line("gdc_wait()")
        with self.emitter.scope(f"for k0 in range({start}, {end}, BLOCK_K):"):
            described = [[self._describe(a, side) for side in _SIDES] for a in accumulators]
            for position, side in enumerate(_SIDES):
                if not all(both[position] for both in described):
                    axis, _, places_in_k = _K_AXES[side]
                    self.define(axis, f"k0 + tl.arange(0, BLOCK_K){places_in_k}")
            loaded: dict[Operand, str] = {}
            for name, accumulator, both in zip(names, accumulators, described):
                left, right = (self._factor(accumulator, s, d, loaded) for s, d in zip(_SIDES, both))
                line(f"{name} = tl.dot({left}, {right}, {name}{self._precision})")
        if self._splits == 1:
            self._finish(accumulators, names, places)
        else:
            self._combine(accumulators, names, places, number)

    def _finish(
        self, accumulators: Sequence[Accumulator], names: Sequence[str], places: Sequence[Place]
    ) -> None:
        """The epilogue, from complete sums."""
        for name, accumulator in zip(names, accumulators):
            self.seed_product(accumulator, name, ("m", "n"))
        for place in places:
            self.store(place, ("m", "n"), _SHAPE)

    def _combine(
        self, accumulators: Sequence[Accumulator], names: Sequence[str], places: Sequence[Place], number: str
    ) -> None:
        """Writes this program's sums; the last program of a tile adds all of them up and finishes."""
        line, splits, per_batch = self.writer.line, self._splits, self.rows * self.cols
        slots, elements = per_batch * self.batch, self.tile["m"] * self.tile["n"]
        line(f"slot = b * {per_batch} + {number}" if self.batch > 1 else f"slot = {number}")
        line("lane = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]")
        wide = ".to(tl.int64)" if slots * splits * elements > _WIDEST else ""

        def part(name: str, split: str) -> str:
            return f"part_{name} + (slot * {splits} + {split}){wide} * {elements} + lane"

        for name in names:
            line(f"tl.store({part(name, 'split')}, {name})")
        arrivals.count_in(self.writer, "slot")
        with self.emitter.scope(f"if arrived == {splits - 1}:"):
            sums = [f"sum{i}" for i in range(len(names))]
            for total, name in zip(sums, names):
                line(f'{total} = tl.load({part(name, "0")}, cache_modifier=".cg")')
            with self.emitter.scope(f"for other in range(1, {splits}):"):
                for total, name in zip(sums, names):
                    line(f'{total} += tl.load({part(name, "other")}, cache_modifier=".cg")')
            self._finish(accumulators, sums, places)
            arrivals.set_back(self.writer, "slot")
        self.scratch = [(f"part_{name}", Scratch("fp32", slots * splits * elements)) for name in names]
        self.scratch.append((arrivals.COUNTERS, arrivals.counters(slots)))

    def _accumulators(self, places: list[Place], m: Expr) -> list[Accumulator]:
        needs = self.emitter.rehearse(lambda: [self.store(p, ("m", "n"), _SHAPE) for p in places])
        if not all(map(self.is_product, needs.reductions)):
            raise UnsupportedError("a statistic in the matrix form of a gemm kernel")
        return [self.accumulator(r, [m]) for r in needs.reductions]

    @property
    def _precision(self) -> str:
        return dot_precision(self.element)

    # -- operands ---------------------------------------------------------------------------------------------------

    def _factor(
        self, accumulator: Accumulator, side: str, described: Operand | None, loaded: dict[Operand, str]
    ) -> str:
        """A block of an operand, (m, k) or (k, n), as a name."""
        axis, shape, _ = _K_AXES[side]
        other = "m" if side == "left" else "n"
        if described is not None:
            if described not in loaded:
                name = self.described.setdefault(described, f"{side}{len(self.described)}_desc")
                loaded[described] = self.writer.bind(described.load(name))
            return loaded[described]
        value = self.operand(accumulator, side, symbol(axis, self.k))
        return self.factor(value, self.emitter.axes[axis].mask, axis, {other, axis}, shape)

    def _describe(self, accumulator: Accumulator, side: str) -> Operand | None:
        """The operand as a descriptor says it, or None."""
        tile = self.tile
        if not tile.get("tma"):
            return None
        axis = _K_AXES[side][0]
        k = BlockAxis(axis, self.k, tile["k"], "k0", "k0 // BLOCK_K")
        if side == "left":
            outer = BlockAxis("m", self.m, tile["m"], "pid_m * BLOCK_M", "pid_m")
        else:
            outer = BlockAxis("n", self.columns, tile["n"], "pid_n * BLOCK_N", "pid_n")
        contraction = accumulator.contraction
        position, value = contraction.operand(side)
        loop = contraction.loop(self.batch_index, accumulator.row, accumulator.column, symbol(axis, self.k))
        indices = contraction.node.maps[position].apply(loop)
        find = partial(describe, self.emitter, value, indices)
        try:
            return find((outer, k) if side == "left" else (k, outer))
        except UnsupportedError:
            return None

    def _with_descriptors(self) -> list[Param]:
        """Parameters of the kernel: pointers that the source still names, and the descriptors."""
        graph, text = self.kernel.graph, self.writer.text()
        made = [o.param(graph, name) for o, name in self.described.items()]
        kept = [p for p in self.params if p.kind != "arg" or not made or _is_named(p.name, text)]
        return [*(p for p in kept if p.kind == "arg"), *made, *(p for p in kept if p.kind != "arg")]


def _is_named(name: str, text: str) -> bool:
    words = text.translate({ord(c): " " for c in "()[]{},:+-*/%=&|<>.~\n"}).split()
    return name in words
