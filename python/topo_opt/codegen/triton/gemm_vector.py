"""The vector form: very few rows. Weights are streamed once, with full-width loads, through registers; no tensor cores.

A program computes `repeat` blocks of `n` columns for all rows. Blocks of k are unrolled, so that weights are on their way
some blocks ahead of their use, and rows and statistics are read once for all blocks of columns; past `UNROLLED` blocks k
is a loop over groups of them. With `pdl` the first weights are requested before the kernel waits for the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton.contraction import VECTOR_ROWS
from topo_opt.codegen.triton.element_types import compute_type
from topo_opt.codegen.triton.emit import Axis, Value
from topo_opt.codegen.triton.gemm_base import Gemm
from topo_opt.codegen.triton.gemm_terms import Accumulator, Place, Statistic
from topo_opt.codegen.triton.rehearsal import Load, Request
from topo_opt.errors import UnsupportedError
from topo_opt.structured.graph import element_bytes
from topo_opt.structured.index import Expr, const, symbol

UNROLLED = 8
"""Blocks of k up to which there is no loop."""
GROUP = 4
"""Blocks of k of one round of the loop."""
AHEAD_REGISTERS = 64
"""Registers of a thread that may hold weights on their way."""


@dataclass(frozen=True)
class _Block:
    """A block of k: its indices, and the axis that masks the last one; both again where the packed steps are one."""

    k: Expr
    axis: str
    step: Expr
    packed_axis: str


@dataclass(frozen=True)
class _Columns:
    """A block of columns: its axis, what it computes and where it goes."""

    axis: str
    places: list[Place]
    accumulators: list[Accumulator]


class Vector(Gemm):
    """A few blocks of columns a program, all rows and all of k."""

    @property
    def _repeat(self) -> int:
        return self.tile.get("repeat", 1)

    def _axes(self) -> dict[str, Axis]:
        block, step = self.tile["k"], self.tile["n"] * self._repeat
        return {
            **{f"n{r}": self.axis(f"n{r}", self.columns, step) for r in range(self._repeat)},
            "k": Axis("k", block, "k"),
            "kt": Axis("kt", self.k % block, "k", "k_mask"),
            "kp": Axis("kp", block // self.packed, "kp"),
            "kpt": Axis("kpt", self.k % block // self.packed, "kp", "kp_mask"),
            "kc": Axis("kc", self.k, "kc", scalar=True),
            "b": Axis("b", self.batch, "b", scalar=True),
        }

    def lower(self) -> KernelSource:
        if self.m > VECTOR_ROWS:
            raise UnsupportedError(f"the vector form takes up to {VECTOR_ROWS} rows, not {self.m}")
        if self.row_parts.chunks:
            raise UnsupportedError("a result of the vector form that is reduced")
        self.start()
        self._define_axes()
        self._started: set[str] = set()
        self._names: dict[Request, str] = {}
        self._blocks = self._make_blocks()
        columns = [self._columns(r) for r in range(self._repeat)]
        self._first = columns[0]
        asked = [self._reductions(c) for c in columns]
        epilogue = list(dict.fromkeys(r for a in asked for r in a if not self.is_product(r)))
        first = self._blocks[0]
        operands = self.emitter.rehearse(lambda: [self._factors(c, first) for c in columns]).reductions
        before, self._beside = self.order(operands, epilogue, first.k)
        self._request_early(columns)
        for level in before:
            self._reduce(level)
        self._multiply(columns)
        step = self.tile["n"] * self._repeat
        blocks = {"BLOCK_N": self.tile["n"], "BLOCK_K": self.tile["k"]}
        return self.source(blocks, (-(-self.columns // step), self.batch, 1), self.tile.get("stages", 1))

    # -- the space --------------------------------------------------------------------------------------------------

    def _define_axes(self) -> None:
        self.define_batch()
        line, repeat = self.writer.line, self._repeat
        start = f"tl.program_id(0){self.cast} * "
        if repeat == 1:
            self.define("n0", f"{start}BLOCK_N + tl.arange(0, BLOCK_N)[:, None]")
        else:
            self.define("n0", f"{start}(BLOCK_N * {repeat}) + tl.arange(0, BLOCK_N)[:, None]")
            for r in range(1, repeat):
                self.define(f"n{r}", f"n0 + BLOCK_N * {r}" if r > 1 else "n0 + BLOCK_N")
        line("k = tl.arange(0, BLOCK_K)[None, :]")
        if self.k % self.tile["k"]:
            line(f"k_mask = k < {self.k % self.tile['k']}")
        if self.packed > 1:
            line(f"kp = tl.arange(0, BLOCK_K // {self.packed})[None, :]")
            if self.k % self.tile["k"]:
                line(f"kp_mask = kp < {self.k % self.tile['k'] // self.packed}")

    def _make_blocks(self) -> list[_Block]:
        block = self.tile["k"]
        full, rest = divmod(self.k, block)
        found = [self._block(i * block) for i in range(full)]
        return found + ([self._block(full * block, rest)] if rest else [])

    def _block(self, start: Expr | int, rest: int = 0) -> _Block:
        """A block of k from `start` on, whole or with the last `rest` steps."""
        size, packed = rest or self.tile["k"], self.packed
        plain, together = ("kt", "kpt") if rest else ("k", "kp")
        k = symbol(plain, size) + start
        if packed == 1:
            return _Block(k, plain, k, plain)
        first = start // packed
        return _Block(k, plain, symbol(together, size // packed) + first, together)

    @property
    def _looped(self) -> bool:
        return len(self._blocks) > UNROLLED

    def _groups(self, emit: Callable[[Sequence[_Block]], None]) -> None:
        """Has all blocks of k emitted, in one go or with a loop over groups between the first and the last."""
        if not self._looped:
            emit(self._blocks)
            return
        block = self.tile["k"]
        step, rounds = GROUP * block, self.k // (GROUP * block)
        emit(self._blocks[:GROUP])
        with self.emitter.scope(f"for kc in range({step}, {rounds * step}, {step}):"):
            start = symbol("kc", (rounds - 1) * step + 1)
            emit([self._block(start + i * block) for i in range(GROUP)])
        if rest := self._blocks[rounds * GROUP :]:
            emit(rest)

    # -- what is needed ---------------------------------------------------------------------------------------------

    def _columns(self, r: int) -> _Columns:
        rows = [const(row) for row in range(self.m)]
        n = symbol(f"n{r}", self.columns)
        places = [p for row in rows for p in self.places(row, n)]
        self.check_coverage(places, self.batch * self.columns)
        found = _Columns(f"n{r}", places, [])
        requests = [q for q in self._reductions(found) if self.is_product(q)]
        found.accumulators.extend(self.accumulator(q, rows) for q in requests)
        return found

    def _reductions(self, columns: _Columns) -> list[Request]:
        return self.emitter.rehearse(lambda: self._store(columns)).reductions

    def _factors(self, columns: _Columns, block: _Block) -> list[tuple[list[Value], Value]]:
        return [(self.weights(a, block.step), self.operand(a, "left", block.k)) for a in columns.accumulators]

    def _weights(self, columns: _Columns, block: _Block) -> list[Load]:
        """Loads for the larger factors."""
        return self.emitter.rehearse(
            lambda: [self.weights(a, block.step) for a in columns.accumulators]
        ).loads

    @property
    def _ahead(self) -> int:
        """Blocks of weights that are requested ahead of their use."""
        graph = self.kernel.graph
        values = {a.contraction.operand("right")[1] for a in self._first.accumulators}
        count = max(len({(a.contraction.node.id, a.column) for a in self._first.accumulators}), 1)
        bytes_each = max((element_bytes(graph.values[v].element) for v in values), default=4)
        elements = self.tile["n"] * self.tile["k"] / (32 * self.tile["warps"])
        return max(1, int(AHEAD_REGISTERS / max(count * elements * bytes_each / 4, 1)))

    # -- emission ---------------------------------------------------------------------------------------------------

    def _request_early(self, columns: Sequence[_Columns]) -> None:
        """Loads that start first: weights, before the wait where nothing writes them, then rows and what the epilogue reads."""
        blocks = self._blocks[:GROUP] if self._looped else self._blocks
        steps = [(c, b) for c in columns for b in blocks][: self._ahead]
        early = [load for c, b in steps for load in self._weights(c, b)]
        rows = self.emitter.rehearse(lambda: [self._factors(c, b) for c, b in steps]).loads
        late = self.emitter.rehearse(lambda: self._store(*columns)).loads
        if self.pdl:
            fixed = self.immutable
            self.load_now([load for load in (*early, *rows, *late) if load[0] in fixed])
        self.wait()
        self.load_now(early)
        self.load_now(rows)
        self.load_now(late)

    def _reduce(self, level: Sequence[Statistic]) -> None:
        """Statistics that are known before anything is multiplied."""
        self._start_statistics(level)

        def emit(blocks: Sequence[_Block]) -> None:
            for block in blocks:
                for statistic in level:
                    self._accumulate_statistic(statistic, block)

        self._groups(emit)
        for statistic in level:
            self._seed(statistic)

    def _multiply(self, columns: Sequence[_Columns]) -> None:
        if not self._looped:
            steps = [(c, b) for c in columns for b in self._blocks]
            self._steps(steps, lambda c, b: self._finish(c) if b == self._blocks[-1] else None)
            return
        for found in columns:
            for accumulator in found.accumulators:
                self._start(self._name(accumulator.request), f"tl.zeros({self._shape}, tl.float32)")
            if found is columns[0]:
                self._start_statistics(self._beside)
            self._groups(partial(self._products, found))
            self._finish(found)

    def _products(self, columns: _Columns, blocks: Sequence[_Block]) -> None:
        self._steps([(columns, b) for b in blocks], lambda c, b: None)

    def _steps(
        self, steps: Sequence[tuple[_Columns, _Block]], after: Callable[[_Columns, _Block], None]
    ) -> None:
        """Multiplies block by block, weights some blocks ahead."""
        ahead = self._ahead
        for columns, block in steps[:ahead]:
            self.load_now(self._weights(columns, block))
        for number, (columns, block) in enumerate(steps):
            for later in steps[number + ahead : number + ahead + 1]:
                self.load_now(self._weights(*later))
            for accumulator, (weights, left) in zip(columns.accumulators, self._factors(columns, block)):
                axis, name = block.packed_axis, self._name(accumulator.request)
                sources = [self._masked(right, axis) for right in weights]
                for right, source, (row, spread) in zip(weights, sources, self._rows(left, block)):
                    product = f"{source} * {row}"
                    if not {columns.axis, axis} <= self._spread(right, axis) | spread:
                        product = f"tl.broadcast_to({product}, {self._shape})"
                    self._accumulate(name, product, "{} + {}")
            if columns is self._first:
                for statistic in self._beside:
                    self._accumulate_statistic(statistic, block)
            after(columns, block)

    def _finish(self, columns: _Columns) -> None:
        for accumulator in columns.accumulators:
            total = self.writer.bind(f"tl.sum({self._name(accumulator.request)}, axis=1)[:, None]")
            self.seed_product(accumulator, total, (columns.axis,))
        if columns is self._first:
            for statistic in self._beside:
                self._seed(statistic)
        self._store(columns)

    def _store(self, *columns: _Columns) -> None:
        for block in columns:
            self.store_all(block.places, (block.axis,), "(BLOCK_N, 1)")

    @property
    def _shape(self) -> str:
        """Of what products are added to."""
        return f"(BLOCK_N, BLOCK_K // {self.packed})" if self.packed > 1 else "(BLOCK_N, BLOCK_K)"

    def _rows(self, left: Value, block: _Block) -> list[tuple[str, frozenset[str]]]:
        """What each of the packed steps is multiplied with, and the axes that it spans."""
        source, spread = self._masked(left, block.axis), self._spread(left, block.axis)
        if self.packed == 1 or block.axis not in spread:
            return [(source, spread)] * self.packed
        halves = ", ".join(["2"] * (self.packed.bit_length() - 1))
        parts = [f"tl.reshape({source}, (1, BLOCK_K // {self.packed}, {halves}))"]
        while len(parts) < self.packed:
            names = [(self.writer.fresh("x"), self.writer.fresh("x")) for _ in parts]
            for part, (even, odd) in zip(parts, names):
                self.writer.line(f"{even}, {odd} = tl.split({part})")
            # The last dimension is the last bit of the step, so that the parts of the first split come first.
            parts = [even for even, _ in names] + [odd for _, odd in names]
        return [(part, spread - {block.axis} | {block.packed_axis}) for part in parts]

    # -- accumulators -----------------------------------------------------------------------------------------------

    def _name(self, request: Request) -> str:
        if request not in self._names:
            kind = "acc" if self.is_product(request) else "stat"
            self._names[request] = f"{kind}{sum(n.startswith(kind) for n in self._names.values())}"
        return self._names[request]

    def _start(self, name: str, value: str) -> None:
        self.writer.line(f"{name} = {value}")
        self._started.add(name)

    def _start_statistics(self, statistics: Sequence[Statistic]) -> None:
        """Gives statistics their first value where a loop updates them."""
        for statistic in statistics if self._looped else ():
            kind = compute_type(self.statistic_element(statistic))
            value = f"tl.full((1, BLOCK_K), {statistic.combiner.identity}, {kind})"
            self._start(self._name(statistic.request), value)

    def _accumulate(self, name: str, term: str, combination: str) -> None:
        if name in self._started:
            self.writer.line(f"{name} = {combination.format(name, term)}")
        else:
            self._start(name, term)

    def _accumulate_statistic(self, statistic: Statistic, block: _Block) -> None:
        value = self.term(statistic, block.k)
        source = self._masked(value, block.axis, statistic.combiner.identity)
        if block.axis not in self._spread(value, block.axis):
            source = f"tl.broadcast_to({source}, (1, BLOCK_K))"
        self._accumulate(self._name(statistic.request), source, statistic.combiner.combine("{}", "{}"))

    def _seed(self, statistic: Statistic) -> None:
        total = self.writer.bind(statistic.combiner.reduce(self._name(statistic.request)))
        self.seed_statistic(statistic, total, ())

    def _masked(self, value: Value, axis: str, neutral: str = "0.0") -> str:
        """Source of a value that is neutral past the end of k."""
        source, mask = self.emitter.tensor(value), self.emitter.axes[axis].mask
        zero = value.is_load and axis in value.depends and neutral in ("0", "0.0")
        return self.writer.bind(f"tl.where({mask}, {source}, {neutral})") if mask and not zero else source

    def _spread(self, value: Value, axis: str) -> frozenset[str]:
        """Axes that the source of a masked value spans."""
        return value.depends | ({axis} if self.emitter.axes[axis].mask else frozenset())
