"""The matrix form: tensor cores, one tile of the result at a time, k in blocks.

Programs compute one tile each, or, with `persistent`, as many programs as the machine holds walk over all tiles: loads of the
next tile then start under the epilogue of the one before. With `splits`, so many programs share a tile, each with its range
of k; the last one to arrive adds up their sums in order and does the epilogue (`arrivals`). With `tma`, operands that lie in
memory as a tensor descriptor can say are copied by the hardware; the others are loaded through pointers.

Where tile columns stand for two columns each (`parts` = 2), and a block of them for neighbouring columns, one product over all
of these is taken apart in the end: its operand is then a plain block. So are two products of the same rows whose weights lie in
memory alike, as those of gate and up: a descriptor spans both (`gemm_descriptors.Pair`), and tensor cores get blocks of twice the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from topo_opt.codegen.kernel_source import KernelSource, Param, Scratch
from topo_opt.codegen.triton import arrivals, f32_products
from topo_opt.codegen.triton.emit import Axis
from topo_opt.codegen.triton.gemm_base import Gemm
from topo_opt.codegen.triton.gemm_descriptors import BlockAxis, Operand, Pair, describe, paired
from topo_opt.codegen.triton.gemm_terms import Accumulator, Block, Place
from topo_opt.errors import UnsupportedError
from topo_opt.runtime.plan import SWAPPED
from topo_opt.structured.index import Expr, symbol

_SHAPE = "(BLOCK_M, BLOCK_N)"
_SIDES = ("left", "right")
_WIDEST = 2**31 - 1  # of offsets in 32 bits
_K_AXES = {"left": ("ka", "[None, :]"), "right": ("kb", "[:, None]")}
"""The axis that k is for each side, and how its positions lie in a block."""


@dataclass(frozen=True)
class _Product:
    """One product of the main loop: its name, and the accumulators it gives by part; `joined`: all parts in one."""

    name: str
    accumulators: tuple[Accumulator, ...]
    joined: bool

    @property
    def columns(self) -> str:
        """Source of the number of its columns."""
        return "BLOCK_N * 2" if self.joined else "BLOCK_N"

    @property
    def first(self) -> Accumulator:
        return self.accumulators[0]


class Matrix(Gemm):
    """Tiles are walked in groups of rows, so that neighbours share operands in L2."""

    def _axes(self) -> dict[str, Axis]:
        tile = self.tile
        return {
            "m": self.axis("m", self.m, tile["m"]),
            "n": self.axis("n", self.columns, tile["n"]),
            "nw": self.axis("nw", self.n, 2 * tile["n"]),
            "ka": self.axis("ka", self.k, tile["k"]),
            "kb": self.axis("kb", self.k // self.packed, tile["k"] // self.packed),
            **self.row_parts.axes(tile["n"]),
            "b": Axis("b", self.batch, "b", scalar=True),
        }

    def lower(self) -> KernelSource:
        tile = self.tile
        self.rows, self.cols = -(-self.m // tile["m"]), -(-self.columns // tile["n"])
        self.described: dict[Operand | Pair, str] = {}
        m, n = symbol("m", self.m), symbol("n", self.columns)
        self.start()
        tiles, programs = self.rows * self.cols * self.batch, tile.get("persistent", 0)
        self.scratch: list[tuple[str, Scratch]] = []
        if programs:
            if self._splits > 1:
                raise UnsupportedError("a persistent kernel with k in splits")
            self.wait()
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
        self.row_parts.define("pid_n", "[None, :]")
        places = self.places(m, n)
        self.check_coverage(places, self.batch * self.m * self.columns)
        products = self._products(self._accumulators(places, m), n)
        described = [[self._describe(p, side) for side in _SIDES] for p in products]
        pair = self._pair(products, described)
        for name, columns in [("acc", "BLOCK_N * 2")] if pair else [(p.name, p.columns) for p in products]:
            line(f"{name} = tl.zeros((BLOCK_M, {columns}), tl.float32)")
        if not walking:
            self.wait()
        with self.emitter.scope(f"for k0 in range({start}, {end}, BLOCK_K):"):
            if pair:
                self._multiply_pair(described[0][0], pair)
            else:
                self._multiply(products, described)
        if self._splits == 1:
            self._finish(products, self._apart(pair) if pair else [p.name for p in products], places)
        else:
            self._combine(products, places, number)

    def _multiply(self, products: Sequence[_Product], described: Sequence[Sequence[Operand | None]]) -> None:
        """One step of k of all products."""
        if any(p.joined and both[1] is None for p, both in zip(products, described)):
            self.define("nw", f"pid_n{self.cast} * (BLOCK_N * 2) + tl.arange(0, BLOCK_N * 2)[None, :]")
        for position, side in enumerate(_SIDES):
            if not all(both[position] for both in described):
                axis, places_in_k = _K_AXES[side]
                divided = f" // {self.packed}" if side == "right" and self.packed > 1 else ""
                self.define(axis, f"k0{divided} + tl.arange(0, BLOCK_K{divided}){places_in_k}")
        loaded: dict[Operand, str] = {}
        for product, both in zip(products, described):
            left, right = (self._factor(product, s, d, loaded) for s, d in zip(_SIDES, both))
            total = f32_products.product(left, right, self.element, product.name)
            self.writer.line(f"{product.name} = {total}")

    def _pair(
        self, products: Sequence[_Product], described: Sequence[Sequence[Operand | None]]
    ) -> Pair | None:
        """The weights of two products as one operand; None where they don't lie so, or nothing is gained."""
        if len(products) != 2 or any(p.joined for p in products) or self._splits > 1 or self.element == "f32":
            return None
        (left, first), (other, second) = described
        if left is None or left != other or first is None or second is None:
            return None
        return paired(self.kernel.graph, first, second, self.kernel.immutable)

    def _multiply_pair(self, left: Operand | None, pair: Pair) -> None:
        """One step of k of two products."""
        assert left is not None, "_pair() has seen it"
        rows = self.writer.bind(left.load(self._descriptor(left, "left")))
        weights = self.writer.bind(pair.load(self._descriptor(pair, "right")))
        self.writer.line(f"acc = tl.dot({rows}, {weights}, acc)")

    def _apart(self, pair: Pair) -> list[str]:
        """The sums of the two products, in their order."""
        line, name = self.writer.line, self.writer.fresh("sum")
        halves = "tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1))"
        line(f"{name}0, {name}1 = tl.split({halves})")
        if pair.beside is None:
            return [f"{name}0", f"{name}1"]
        line(f"swapped = {self._descriptor(pair, 'right')}.shape[0] == {SWAPPED}")
        return [self.writer.bind(f"tl.where(swapped, {name}{1 - part}, {name}{part})") for part in range(2)]

    @property
    def has_pair(self) -> bool:
        """Whether a descriptor spans the weights of two products, of a kernel that is lowered."""
        return any(isinstance(o, Pair) for o in self.described)

    def _descriptor(self, operand: Operand | Pair, side: str) -> str:
        """The name of an operand's descriptor."""
        return self.described.setdefault(operand, f"{side}{len(self.described)}_desc")

    def _products(self, accumulators: Sequence[Accumulator], n: Expr) -> list[_Product]:
        """The products of the main loop: one an accumulator, or one for both parts of a contraction."""
        parts = [self.column(part, n) for part in range(self.parts)]
        neighbours = self.parts == 2 and self.tile["n"] % self.period == 0
        if not (neighbours and all(a.column in parts for a in accumulators)):
            names = ["acc", *(f"acc{i}" for i in range(1, len(accumulators)))]
            return [_Product(name, (a,), False) for name, a in zip(names, accumulators)]
        found: dict[int, list[Accumulator]] = {}
        for a in accumulators:
            found.setdefault(a.contraction.node.id, []).append(a)
        names = ["acc", *(f"acc{i}" for i in range(1, len(found)))]
        return [_Product(name, tuple(group), True) for name, group in zip(names, found.values())]

    def _finish(self, products: Sequence[_Product], sums: Sequence[str], places: Sequence[Place]) -> None:
        """The epilogue, from complete sums."""
        for product, total in zip(products, sums):
            if not product.joined:
                self.seed_product(product.first, total, ("m", "n"))
                continue
            halves = self._halves(total)
            for accumulator in product.accumulators:
                part = int(accumulator.column != self.column(0, symbol("n", self.columns)))
                self.seed_product(accumulator, halves[part], ("m", "n"))
        shape = f"(BLOCK_M, {self.row_parts.block})"
        for statistic in self._row_sums:
            term = self.block_of_terms(statistic, symbol("s", self.row_parts.parts), ("m", "s"), shape)
            total = self.writer.bind(statistic.combiner.reduce(term))
            self.seed_statistic(statistic, total, ("m",))
        for place in places:
            self.store(place, ("m", "n"), _SHAPE)

    def _halves(self, total: str) -> tuple[str, str]:
        """The parts of a joined product: `period` columns of the first, as many of the second, and so on."""
        blocks, name = self.tile["n"] // self.period, self.writer.fresh("half")
        pairs = f"tl.reshape({total}, (BLOCK_M, {blocks}, 2, {self.period}))"
        self.writer.line(f"{name}0, {name}1 = tl.split(tl.permute({pairs}, (0, 1, 3, 2)))")
        for part in range(2):
            self.writer.line(f"{name}{part} = tl.reshape({name}{part}, {_SHAPE})")
        return f"{name}0", f"{name}1"

    def _combine(self, products: Sequence[_Product], places: Sequence[Place], number: str) -> None:
        """Writes this program's sums; the last program of a tile adds all of them up and finishes."""
        line, splits, per_batch = self.writer.line, self._splits, self.rows * self.cols
        slots = per_batch * self.batch
        columns = products[0].columns
        elements = self.tile["m"] * self.tile["n"] * (2 if products[0].joined else 1)
        line(f"slot = b * {per_batch} + {number}" if self.batch > 1 else f"slot = {number}")
        line(f"lane = tl.arange(0, BLOCK_M)[:, None] * ({columns}) + tl.arange(0, {columns})[None, :]")
        wide = ".to(tl.int64)" if slots * splits * elements > _WIDEST else ""

        def part(name: str, split: str) -> str:
            return f"part_{name} + (slot * {splits} + {split}){wide} * {elements} + lane"

        for product in products:
            line(f"tl.store({part(product.name, 'split')}, {product.name})")
        arrivals.count_in(self.writer, "slot")
        with self.emitter.scope(f"if arrived == {splits - 1}:"):
            sums = [f"sum{i}" for i in range(len(products))]
            for total, product in zip(sums, products):
                line(f'{total} = tl.load({part(product.name, "0")}, cache_modifier=".cg")')
            with self.emitter.scope(f"for other in range(1, {splits}):"):
                for total, product in zip(sums, products):
                    line(f'{total} += tl.load({part(product.name, "other")}, cache_modifier=".cg")')
            self._finish(products, sums, places)
            arrivals.set_back(self.writer, "slot")
        self.scratch = [(f"part_{p.name}", Scratch("fp32", slots * splits * elements)) for p in products]
        self.scratch.append((arrivals.COUNTERS, arrivals.counters(slots)))

    def _accumulators(self, places: list[Place], m: Expr) -> list[Accumulator]:
        def store_all() -> None:
            for place in places:
                self.store(place, ("m", "n"), _SHAPE)

        products, beside, self._row_sums = self.sort(self.emitter.rehearse(store_all).reductions)
        if beside:
            raise UnsupportedError("a statistic in the matrix form of a gemm kernel")
        return [self.accumulator(r, [m]) for r in products]

    # -- operands ---------------------------------------------------------------------------------------------------

    def _factor(
        self, product: _Product, side: str, described: Operand | None, loaded: dict[Operand, str]
    ) -> str:
        """A block of an operand, (m, k) or (k, n), as a name."""
        if described is not None:
            if described not in loaded:
                loaded[described] = self.writer.bind(described.load(self._descriptor(described, side)))
            return loaded[described]
        axis, other = _K_AXES[side][0], self._other_axis(product, side)
        mask, first = self.emitter.axes[axis].mask, product.first
        if side == "left":
            found = self.operand(first, side, symbol(axis, self.k))
            return self.factor(found, mask, axis, {other, axis}, "(BLOCK_M, BLOCK_K)")
        asked = replace(first, column=symbol("nw", self.n)) if product.joined else first
        weights = self.weights(asked, symbol(axis, self.k // self.packed))
        return self.packed_factor(weights, mask, axis, {other, axis}, Block(("BLOCK_K", product.columns), 0))

    def _other_axis(self, product: _Product, side: str) -> str:
        """The axis of an operand beside k."""
        return "m" if side == "left" else "nw" if product.joined else "n"

    def _indices(self, product: _Product, side: str, position: int) -> list[Expr]:
        """Where a block of an operand is read."""
        accumulator = product.first
        column = symbol("nw", self.n) if product.joined else accumulator.column
        k = symbol(_K_AXES[side][0], self.k)
        loop = accumulator.contraction.loop(self.batch_index, accumulator.row, column, k)
        return accumulator.contraction.node.maps[position].apply(loop)

    def _describe(self, product: _Product, side: str) -> Operand | None:
        """The operand as a descriptor says it, or None."""
        tile = self.tile
        if not tile.get("tma"):
            return None
        k = BlockAxis(_K_AXES[side][0], self.k, tile["k"], "k0", "k0 // BLOCK_K")
        other = self._other_axis(product, side)
        size, block, number = {
            "m": (self.m, tile["m"], "pid_m"),
            "n": (self.columns, tile["n"], "pid_n"),
            "nw": (self.n, 2 * tile["n"], "pid_n"),
        }[other]
        outer = BlockAxis(other, size, block, f"{number} * {block}", number)
        position, value = product.first.contraction.operand(side)
        find = partial(describe, self.emitter, value, self._indices(product, side, position))
        try:
            return find((outer, k) if side == "left" else (k, outer))
        except UnsupportedError:
            return None

    def _with_descriptors(self) -> list[Param]:
        """Parameters of the kernel: pointers that the source still names, and the descriptors."""
        graph, text = self.kernel.graph, self.writer.text()
        pointers = {p.index: p.name for p in self.params if p.kind == "arg"}
        made = [
            o.param(graph, name, pointers.__getitem__) if isinstance(o, Pair) else o.param(graph, name)
            for o, name in self.described.items()
        ]
        beside = {p.descriptor.get("beside") for p in made if p.descriptor}
        kept = [
            p
            for p in self.params
            if p.kind != "arg" or not made or p.name in beside or _is_named(p.name, text)
        ]
        return [*(p for p in kept if p.kind == "arg"), *made, *(p for p in kept if p.kind != "arg")]


def _is_named(name: str, text: str) -> bool:
    words = text.translate({ord(c): " " for c in "()[]{},:+-*/%=&|<>.~\n"}).split()
    return name in words
