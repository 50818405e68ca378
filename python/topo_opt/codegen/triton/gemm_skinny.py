"""The skinny form: some rows beside many weights, on tensor cores.

The weights are the first operand of `tl.dot`, so that their columns fill the large side of the instruction, and the rows,
padded to a power of two, the small one. k is split over `split` programs: each writes its sums to scratch memory, and
the last one to arrive adds them up in the order of the splits and does the epilogue (`arrivals`). With `pdl` the first blocks
(`ahead`, 1) of weights are requested, into registers, before the kernel waits for the one before it.

With `slices` a block of k is divided among the warps of one program, as a batch of products whose sums are added up at the end:

    tl.dot(w[n, k], x[k, m])  -->  tl.sum(tl.dot(w[s, n, k / s], x[s, k / s, m]), axis=0)

so that few columns a program, with all of k, need no exchange between programs. A tile then has three axes, the first of size one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from topo_opt.codegen.kernel_source import KernelSource, Scratch
from topo_opt.codegen.triton import arrivals, f32_products
from topo_opt.codegen.triton.element_types import compute_type, signature_type
from topo_opt.codegen.triton.emit import Axis
from topo_opt.codegen.triton.gemm_base import Gemm
from topo_opt.codegen.triton.gemm_skinny_shapes import FLAT, SLICED, Shapes
from topo_opt.codegen.triton.gemm_terms import Place, Statistic
from topo_opt.codegen.triton.kernel import next_power_of_two
from topo_opt.codegen.triton.reductions import Combiner
from topo_opt.errors import UnsupportedError
from topo_opt.structured.index import symbol

SMALLEST_DOT = 8
"""Rows that a matrix instruction has at least."""
SMALLEST_K = 16
"""Steps of k that `tl.dot` takes at least."""
STATISTIC_REGISTERS = 16
"""Registers of a thread up to which a statistic is only reduced after the loop."""
PART_REGISTERS = 64
"""Registers of a thread up to which the parts of all splits are loaded at once."""


@dataclass(frozen=True)
class _Steps:
    """Axes of a block of k: along the weights and along the rows."""

    weights: str
    rows: str


_LATER, _BEFORE = _Steps("kw", "kx"), _Steps("", "ks")


def padded_rows(m: int) -> int:
    """Rows that a program holds for `m` rows."""
    return max(SMALLEST_DOT, next_power_of_two(m))


@dataclass(frozen=True)
class _Part:
    """What a program leaves for the last one: a variable, where it goes, and how parts combine (None: sums)."""

    name: str
    kind: str
    size: int
    lane: str
    combiner: Combiner | None

    @property
    def pointer(self) -> str:
        return f"part_{self.name}"

    def place(self, splits: int, split: str) -> str:
        """Source of the pointers of a split's part."""
        return f"{self.pointer} + (slot * {splits} + {split}) * {self.size} + {self.lane}"

    def combined(self, part: str) -> str:
        """Source of what is here combined with another part."""
        return self.combiner.combine(self.name, part) if self.combiner else f"{self.name} + {part}"


class Skinny(Gemm):
    """A block of columns and a share of k a program, all rows."""

    def _axes(self) -> dict[str, Axis]:
        packed = self.packed
        k = [self.axis(s.rows, self.k, self.tile["k"]) for s in (*self._early, _LATER, _BEFORE)]
        k += [
            self.axis(s.weights, self.k // packed, self.tile["k"] // packed) for s in (*self._early, _LATER)
        ]
        return {
            "n": self.axis("n", self.columns, self.tile["n"]),
            "m": self.axis("m", self.m, padded_rows(self.m)),
            **{a.name: a for a in k},
            **self.row_parts.axes(self.tile["n"]),
            "b": Axis("b", self.batch, "b", scalar=True),
        }

    @property
    def _slices(self) -> int:
        """Parts of a block of k; 1 where the product is not a batch."""
        return self.tile.get("slices", 1)

    @property
    def _shapes(self) -> Shapes:
        return SLICED if self._slices > 1 else FLAT

    @cached_property
    def _steps(self) -> int:
        """Blocks of k of a program."""
        return -(-self._all_steps // self.tile["split"])

    @property
    def _all_steps(self) -> int:
        return -(-self.k // self.tile["k"])

    @cached_property
    def _splits(self) -> int:
        """Programs that share a result, none of them without a block of k."""
        return -(-self._all_steps // self._steps)

    @cached_property
    def _early(self) -> list[_Steps]:
        """Blocks of k, the first ones, whose weights are requested before the wait and multiplied behind the others."""
        fewest = self._all_steps - (self._splits - 1) * self._steps
        return [_Steps(f"kw{i}", f"kx{i}") for i in range(min(self.tile.get("ahead", 1), fewest))]

    def lower(self) -> KernelSource:
        if self.tile["k"] // self._slices < SMALLEST_K:
            raise UnsupportedError(
                f"a product of {self.tile['k'] // self._slices} steps of k",
                hint=f"at least {SMALLEST_K} for each slice",
            )
        self.start()
        self._define_axes()
        places = self.places(symbol("m", self.m), symbol("n", self.columns))
        self.check_coverage(places, self.batch * self.m * self.columns)
        needs = self.emitter.rehearse(lambda: self._store(places))
        row = [symbol("m", self.m)]
        asked, beside, self._row_sums = self.sort(needs.reductions)
        self._accumulators = [self.accumulator(r, row) for r in asked]
        for i, steps in enumerate(self._early):
            self._define_block(steps, self._behind(i))
        operands = self.emitter.rehearse(lambda: [self._factors(s) for s in self._early])
        before, self._beside = self.order(operands.reductions, beside, symbol("ks", self.k))
        if self.pdl:
            self.load_now([load for load in (*operands.loads, *needs.loads) if load[0] in self.immutable])
        self.wait()
        if self._row_sums:
            # Asked for ahead of the products, behind which they are added up.
            self.load_now(self.emitter.rehearse(self._row_terms).loads)
        for level in before:
            self._reduce(level)
        self._multiply()
        blocks = -(-self.columns // self.tile["n"])
        scratch: list[tuple[str, Scratch]] = []
        if self._splits == 1:
            self._finish(places)
        else:
            scratch = self._combine(places, blocks)
        sizes = {"BLOCK_N": self.tile["n"], "BLOCK_M": padded_rows(self.m), "BLOCK_K": self.tile["k"]}
        if self._slices > 1:
            sizes |= {"SLICES": self._slices, "SLICE_K": self.tile["k"] // self._slices}
        return self.source(sizes, (blocks * self._splits, self.batch, 1), self.tile["stages"], scratch)

    # -- the space --------------------------------------------------------------------------------------------------

    def _define_axes(self) -> None:
        line, splits = self.writer.line, self._splits
        line(f"pid = tl.program_id(0){self.cast}")
        self.define_batch()
        if splits > 1:
            line(f"split = pid % {splits}")
            line(f"block = pid // {splits}")
        self.define(
            "n", f"{'block' if splits > 1 else 'pid'} * BLOCK_N + tl.arange(0, BLOCK_N){self._shapes.n}"
        )
        self.define("m", f"tl.arange(0, BLOCK_M){self._shapes.m}")
        self.row_parts.define("block" if splits > 1 else "pid", self._shapes.n)
        if splits > 1:
            line(f"start = split * {self._steps * self.tile['k']}")

    def _behind(self, blocks: int) -> str:
        """Where k is behind so many blocks of this program, as source."""
        if self._splits == 1:
            return str(blocks * self.tile["k"])
        if blocks == 0:
            return "start"
        return "start + BLOCK_K" + (f" * {blocks}" if blocks > 1 else "")

    def _define_block(self, steps: _Steps, start: str) -> None:
        offset = "" if start == "0" else f"{start} + "
        if steps.weights:
            divided = f" // {self.packed}" if self.packed > 1 else ""
            before = f"({start}){divided} + " if offset and divided else offset
            size = "SLICE_K" if self._slices > 1 else "BLOCK_K"
            size = f"({size}{divided})" if divided else size
            self.define(steps.weights, before + self._shapes.weights_k.format(k=size))
        self.define(steps.rows, f"{offset}{self._shapes.rows_k}")

    @property
    def _rest(self) -> tuple[str, str] | None:
        """First and last bound of k after the early blocks, as source; None when there is nothing."""
        early = len(self._early)
        if self._steps == early:
            return None
        chunk = self._steps * self.tile["k"]
        if self._splits == 1:
            return self._behind(early), str(self.k)
        even = self._all_steps % self._steps == 0
        return (
            self._behind(early),
            f"start + {chunk}" if even else f"tl.minimum(start + {chunk}, {self.k})",
        )

    # -- the main loop ----------------------------------------------------------------------------------------------

    def _factors(self, steps: _Steps) -> list[tuple[str, str]]:
        axes = self.emitter.axes
        found = []
        for accumulator in self._accumulators:
            right = self.weights(accumulator, symbol(steps.weights, self.k // self.packed))
            left = self.operand(accumulator, "left", symbol(steps.rows, self.k))
            found.append(
                (
                    self.packed_factor(right, axes[steps.weights].mask, steps.weights, {"n", steps.weights}, self._shapes.weights),
                    self.factor(left, axes[steps.rows].mask, steps.rows, {"m", steps.rows}, self._shapes.rows),
                )
            )  # fmt: skip
        return found

    def _multiply(self) -> None:
        """Defines the accumulators of all products and statistics of this program's share of k.

        The early blocks of k, which are requested before everything else, are multiplied last: the loop's own requests then start
        without waiting for them.
        """
        self._names = {a.request: f"acc{i}" for i, a in enumerate(self._accumulators)}
        self.load_now(self.emitter.rehearse(lambda: [self._factors(s) for s in self._early]).loads)
        if self._rest:
            self._start_sums()
            low, high = self._rest
            with self.emitter.scope(f"for k0 in range({low}, {high}, BLOCK_K):"):
                self._define_block(_LATER, "k0")
                self._step(_LATER, first=False)
        for i, steps in enumerate(self._early):
            self._step(steps, first=not self._rest and i == 0)
        for name in self._names.values() if self._slices > 1 else ():
            self.writer.line(f"{name} = tl.sum({name}, axis=0)[None, :, :]")
        for i, statistic in enumerate(self._beside):
            if self._reduced_late:
                self.writer.line(f"stat{i} = {self._down(statistic, f'stat{i}')}")

    def _start_sums(self) -> None:
        """What the loop adds to."""
        for name in self._names.values():
            self.writer.line(f"{name} = tl.zeros({self._shapes.sums}, tl.float32)")
        for i, statistic in enumerate(self._beside):
            shape = self._shapes.rows if self._reduced_late else self._shapes.row
            kind = compute_type(self.statistic_element(statistic))
            self.writer.line(f"stat{i} = tl.full({shape}, {statistic.combiner.identity}, {kind})")

    def _step(self, steps: _Steps, first: bool) -> None:
        for accumulator, (weights, rows) in zip(self._accumulators, self._factors(steps)):
            name = self._names[accumulator.request]
            total = f32_products.product(weights, rows, self.element, "" if first else name)
            self.writer.line(f"{name} = {total}")
        for i, statistic in enumerate(self._beside):
            term = self._term(statistic, steps)
            term = term if self._reduced_late else self._down(statistic, term)
            combined = term if first else statistic.combiner.combine(f"stat{i}", term)
            self.writer.line(f"stat{i} = {combined}")

    # -- statistics -------------------------------------------------------------------------------------------------

    @property
    def _reduced_late(self) -> bool:
        registers = self.tile["k"] * padded_rows(self.m) / (32 * self.tile["warps"])
        return registers * max(len(self._beside), 1) <= STATISTIC_REGISTERS

    def _term(self, statistic: Statistic, steps: _Steps) -> str:
        """A block of what a statistic combines, neutral past the end of k."""
        return self.block_of_terms(
            statistic, symbol(steps.rows, self.k), ("m", steps.rows), self._shapes.rows
        )

    def _row_terms(self) -> list[str]:
        """All parts of the rows."""
        shape = self._shapes.tile.replace("BLOCK_N", str(self.row_parts.block))
        part = symbol("s", self.row_parts.parts)
        return [self.block_of_terms(s, part, ("m", "s"), shape) for s in self._row_sums]

    def _down(self, statistic: Statistic, source: str) -> str:
        """A block reduced over k, kept as a row."""
        function = statistic.combiner.function
        shapes = self._shapes
        return (shapes.reduced if function is None else shapes.combined).format(source, function)

    def _reduce(self, level: Sequence[Statistic]) -> None:
        """Statistics that factors need: over all of k, by every program."""
        names = [self.writer.fresh("stat") for _ in level]
        for name, statistic in zip(names, level):
            kind = compute_type(self.statistic_element(statistic))
            self.writer.line(f"{name} = tl.full({self._shapes.rows}, {statistic.combiner.identity}, {kind})")
        with self.emitter.scope(f"for k0 in range(0, {self.k}, BLOCK_K):"):
            self._define_block(_BEFORE, "k0")
            for name, statistic in zip(names, level):
                term = self._term(statistic, _BEFORE)
                self.writer.line(f"{name} = {statistic.combiner.combine(name, term)}")
        for name, statistic in zip(names, level):
            self.seed_statistic(statistic, self.writer.bind(self._down(statistic, name)), ("m",))

    # -- results ----------------------------------------------------------------------------------------------------

    def _store(self, places: Sequence[Place]) -> None:
        self.store_all(places, ("n", "m"), self._shapes.tile)

    def _finish(self, places: Sequence[Place]) -> None:
        for accumulator in self._accumulators:
            self.seed_product(accumulator, self._names[accumulator.request], ("n", "m"))
        for i, statistic in enumerate(self._beside):
            self.seed_statistic(statistic, f"stat{i}", ("m",))
        for statistic, term in zip(self._row_sums, self._row_terms()):
            self.seed_statistic(statistic, self.writer.bind(self._down(statistic, term)), ("m",))
        self._store(places)

    def _combine(self, places: Sequence[Place], blocks: int) -> list[tuple[str, Scratch]]:
        """Writes this program's parts; the last program of a result adds them up and finishes."""
        line, slots = self.writer.line, blocks * self.batch
        line(f"slot = b * {blocks} + block" if self.batch > 1 else "slot = block")
        mask = self.emitter.axes["m"].mask
        guard = f", mask={mask}" if mask else ""
        line(f"lane = tl.arange(0, BLOCK_N){self._shapes.n} * {self.m} + m")
        parts = self._parts()
        for part in parts:
            line(f"tl.store({part.place(self._splits, 'split')}, {part.name}{guard})")
        arrivals.count_in(self.writer, "slot")
        with self.emitter.scope(f"if arrived == {self._splits - 1}:"):
            self.load_now(self.emitter.rehearse(lambda: self._store(places)).loads)
            self._add_up(parts, f'{guard}{", other=0" if mask else ""}, cache_modifier=".cg"')
            self._finish(places)
            arrivals.set_back(self.writer, "slot")
        scratch = [(p.pointer, Scratch(p.kind, slots * self._splits * p.size)) for p in parts]
        return [*scratch, (arrivals.COUNTERS, arrivals.counters(slots))]

    def _parts(self) -> list[_Part]:
        size = self.tile["n"] * self.m
        products = [_Part(name, "fp32", size, "lane", None) for name in self._names.values()]
        statistics = [
            _Part(f"stat{i}", signature_type(self.statistic_element(s)), self.m, "m", s.combiner)
            for i, s in enumerate(self._beside)
        ]
        return products + statistics

    def _add_up(self, parts: Sequence[_Part], options: str) -> None:
        """Combines the parts of all splits in order; all at once, or one split after the other where they are many."""
        line, splits = self.writer.line, self._splits

        def add(split: str) -> None:
            loaded = [(p, self.writer.fresh("p")) for p in parts]
            for part, name in loaded:
                line(f"{name} = tl.load({part.place(splits, split)}{options})")
            for part, name in loaded:
                line(f"{part.name} = {part.combined(name)}")

        for part in parts:
            line(f"{part.name} = tl.load({part.place(splits, '0')}{options})")
        held = len(self._accumulators) * self.tile["n"] * padded_rows(self.m) / (32 * self.tile["warps"])
        if held * splits <= PART_REGISTERS:
            for split in range(1, splits):
                add(str(split))
        else:
            with self.emitter.scope(f"for other_split in range(1, {splits}):"):
                add("other_split")
