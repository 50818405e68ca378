"""Scaled dot product attention with whatever is computed on the way in and out, in one pass over the keys.

A program holds a block of query rows of one key head and walks over blocks of keys with an online softmax. The rows are
`shared * M` rows: all query heads that read the same keys, packed (`pack` = `shared`), so that few query rows still read every
key once; or the rows of one query head (`pack` = 1). Few programs on long keys split the keys (`splits`): each writes its
partial result and the last one to finish combines them (`attention_split`). Where the kernel in front writes one row of the keys
at most, the first blocks of the others are requested before it has finished (`attention_early`).

`topo.kernel` of this family: `tile` = `m` (rows), `n` (keys), `warps`, `stages`, `pack`, `splits`, and
`bounds` (1: look for the keys that a boolean mask allows first, see `attention_bounds`),
`tma` (1: keys and values through tensor descriptors, see `attention_descriptors`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from topo_opt.codegen.kernel_source import KernelSource, Param
from topo_opt.codegen.triton import attention_bounds, attention_descriptors, f32_products
from topo_opt.codegen.triton.attention_early import EarlyKeys
from topo_opt.codegen.triton.attention_scores import NEVER, Bounds
from topo_opt.codegen.triton.attention_space import MOST_ROWS
from topo_opt.codegen.triton.attention_split import Split, exponential
from topo_opt.codegen.triton.dependent_launch import WAIT, WAIT_IN_LOOP
from topo_opt.codegen.triton.element_types import storage_type
from topo_opt.codegen.triton.emit import Axis, Value
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.errors import UnsupportedError
from topo_opt.structured.access import forward_indices
from topo_opt.structured.graph import element_bytes
from topo_opt.structured.index import Expr

_KEPT_BYTES = 16 << 20
"""Keys and values that programs which take turns may read: a third of an H200's L2."""


def lower(kernel: Kernel) -> KernelSource:
    """The Triton kernel of a function of family `attention`.

    Raises:
        UnsupportedError: element types without a kernel, or a result that is not one-to-one with the attention's.
    """
    return _Attention(kernel).lower()


@dataclass
class _Attention(EarlyKeys):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.described: dict[int, str] = {}
        if self.kernel.attributes["tile"].get("tma", 0):
            self._describe()

    def _describe(self) -> None:
        """Descriptors of k and v, by operand position."""
        blocks = ((1, "keys", "n", "dk", self.block_d), (2, "values", "nv", "e", self.block_e))
        for position, name, key, depth, block in blocks:
            indices = self.problem.key_indices(
                self._symbol("b"), self._head, self._symbol(key), self._symbol(depth)
            )
            operand = self.problem.node.operands[position]
            found = attention_descriptors.find(self.emitter, operand, indices, key, depth, frozenset("bg"))
            self.params.append(found.param(self.kernel.graph, name, (self.block_n, block)))
            outer = self.emitter.index(found.outer) if found.outer.is_constant else found.outer.source()
            outer = f"({outer}).to(tl.int32)" if self.kernel.wide else outer
            shape = f"(BLOCK_N, {'BLOCK_D' if position == 1 else 'BLOCK_E'})"
            self.described[position] = f"{name}.load([{outer}, n0, 0]).reshape{shape}"

    # -- the kernel ---------------------------------------------------------------------------------------------------

    def lower(self) -> KernelSource:
        self._define_program()
        if self.early:
            self._visit_early()
        else:
            query = self._query()
            self._begin()
            for bounds in self._loops():
                self._visit(query, bounds)
        if self._adds_up_late:
            self.writer.line("total += tl.sum(weight_sums, 1)")
        if self.splits > 1:
            self.split.store(self.writer)
            with self.writer.block(f"if arrived == {self.splits - 1}:"):
                self.split.combine(self.writer)
                self._finish_combined()
        else:
            self._finish("acc", "total", "(BLOCK_M, BLOCK_E)")
        return self._source()

    def _query(self) -> str:
        """The block of queries."""
        rows = [self._head, self._query_row]
        return self._tile(self.problem.node.operands[0], rows, "row", "d", "(BLOCK_M, BLOCK_D)")

    def _begin(self) -> None:
        """The softmax of no keys."""
        line = self.writer.line
        line(f"best = tl.full((BLOCK_M,), {NEVER}, tl.float32)")
        line("total = tl.zeros((BLOCK_M,), tl.float32)")
        line("acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)")
        if self._adds_up_late:
            line("weight_sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)")

    @property
    def _adds_up_late(self) -> bool:
        """Whether weights are added up over the keys of a block behind the loop: in blocks of few rows warps divide the keys, and would
        wait for each other in every turn. It takes registers, so that tiles may say no (`late` = 0)."""
        tile = self.kernel.attributes["tile"]
        return self.block_m <= MOST_ROWS and tile["warps"] > 1 and bool(tile.get("late", 1))

    def _visit_early(self) -> None:
        """The loop over keys, whose first blocks are requested before the kernel waits for the one before it. Programs that see
        no keys wait behind it."""
        self._begin()
        self.writer.line(f"query = tl.zeros((BLOCK_M, BLOCK_D), {storage_type(self.problem.element)})")
        (bounds,) = self._loops()
        self._define_written()
        self._visit("query", bounds)
        self.writer.line(WAIT)

    def _define_program(self) -> None:
        line, wide = self.writer.line, ".to(tl.int64)" if self.kernel.wide else ""
        line("pid = tl.program_id(0)")
        if self.row_blocks > 1:
            group, block = f"pid // {self.row_blocks}", f"pid % {self.row_blocks}"
            if self.problem.high:
                group, block = self._longest_first()
            line(f"group = {group}")
            line(f"row0 = ({block}) * BLOCK_M")
            if self.range.is_bounded and self.pack == 1:
                line("first_row = row0")
                line(f"last_row = tl.minimum(row0 + BLOCK_M, {self.rows}) - 1")
        else:
            line("group = pid")
            line("row0 = 0")
        line(f"b = (group // {self.groups}){wide}" if wide else f"b = group // {self.groups}")
        line(f"g = (group % {self.groups}){wide}" if wide else f"g = group % {self.groups}")
        self._define("row", "row0 + tl.arange(0, BLOCK_M)[:, None]")
        self._define("d", "tl.arange(0, BLOCK_D)[None, :]")
        self._define("dk", "tl.arange(0, BLOCK_D)[:, None]")
        self._define("e", "tl.arange(0, BLOCK_E)[None, :]")

    def _longest_first(self) -> tuple[str, str]:
        """Sources of the group and of the block of rows: where later rows see more keys, the last blocks of many groups come first,
        so that the machine ends with short ones. So many groups as have their keys and values in L2 take turns."""
        problem, blocks = self.problem, self.row_blocks
        groups = problem.batch * self.groups
        width = element_bytes(problem.element) * (problem.depth + problem.width)
        most = max(1, _KEPT_BYTES // (problem.keys * width))
        together = max(n for n in range(1, groups + 1) if groups % n == 0 and n <= most)
        if together == groups:
            return f"pid % {groups}", f"{blocks - 1} - pid // {groups}"
        turn = together * blocks
        group = f"pid // {turn} * {together} + pid % {together}"
        return group, f"{blocks - 1} - pid % {turn} // {together}"

    def _loops(self) -> list[Bounds]:
        """The loops over keys. Blocks that every row sees whole need no test; with many rows they have a loop of their own."""
        keys, line = self.problem.keys, self.writer.line
        ragged, bounded = bool(keys % self.block_n), self.range.is_bounded
        first, last = self._ends()
        if self.splits > 1:
            length, start = str(self.chunk), ""
            if (first, last) != ("0", str(keys)):
                length, start = "length", f"{first} + "
                line(f"length = tl.cdiv({last} - {first}, {self.splits} * BLOCK_N) * BLOCK_N")
            line(f"low = {start}tl.program_id(1) * {length}")
            line(f"high = tl.minimum(low + {length}, {last})")
            return [Bounds("low", "high", ragged, bounded)]
        if bounded and self.pack == 1 and not self.bounded and not self.early:
            return self._regions(first, last, ragged)
        if bounded or self.bounded or not ragged or self.early:
            return [Bounds(first, last, ragged, bounded)]
        full_end = keys // self.block_n * self.block_n
        tail = Bounds(str(full_end), last, True, False)
        return [Bounds("0", str(full_end), False, False), tail] if full_end else [tail]

    def _ends(self) -> tuple[str, str]:
        """The first key to look at, at the start of a block, and one past the last: literals or names."""
        keys, line, emitter = self.problem.keys, self.writer.line, self.emitter
        if self.range.is_bounded:
            self.range.define(emitter, self.axes["row"].mask)
        low, high = self.range.first(emitter), self.range.last(emitter)
        if self.bounded:
            attention_bounds.emit(emitter, self._allowed, self.block_s, keys, wide=self.kernel.wide)
            low = "first" if low == "0" else f"tl.maximum(first, {low})"
            high = "last" if high == str(keys) else f"tl.minimum(last, {high})"
        if low != "0":
            line(f"start = {low} // BLOCK_N * BLOCK_N")
            low = "start"
        if not high.isdigit():
            line(f"end = {high}")
            high = "end"
        return low, high

    def _regions(self, first: str, last: str, ragged: bool) -> list[Bounds]:
        """Keys before, in and after the blocks that every row of the block sees whole."""
        line, keys = self.writer.line, self.problem.keys // self.block_n * self.block_n
        regions, inside = [], first
        if self.problem.low:
            line(
                f"inside = tl.minimum(tl.cdiv({self.range.all_from(self.emitter)}, BLOCK_N) * BLOCK_N, {last})"
            )
            regions.append(Bounds(first, "inside", ragged, True))
            inside = "inside"
        whole = self.range.all_before(self.emitter)
        whole = f"tl.minimum({whole}, {keys})" if ragged else whole
        line(f"outside = tl.maximum(tl.minimum({whole}, {last}) // BLOCK_N * BLOCK_N, {inside})")
        regions.append(Bounds(inside, "outside", False, False))
        return [*regions, Bounds("outside", last, ragged, True)]

    def _allowed(self) -> str:
        """The mask over the keys from `at` on, where they exist."""
        self._define("ns", f"at + tl.arange(0, {self.block_s})[None, :]")
        mask = self.emitter.tensor(self._mask(self._symbol("ns")))
        exists = self.emitter.axes["ns"].mask
        return self.writer.bind(f"{mask} & {exists}" if exists else mask, "c")

    @contextmanager
    def _unmasked_keys(self, masked: bool) -> Iterator[None]:
        """Key axes without their mask where a loop stays inside."""
        saved = self.emitter.axes
        if not masked:
            free = {name: Axis(name, self.axes[name].size, name) for name in ("n", "nv")}
            self.emitter.axes = {**saved, **free}
        try:
            yield
        finally:
            self.emitter.axes = saved

    def _visit(self, query: str, bounds: Bounds) -> None:
        """One loop over blocks of keys: scores, their softmax so far, and the weighted sum of values."""
        line, bind, problem = self.writer.line, self.writer.bind, self.problem
        ahead = self._reads_mask_ahead
        if ahead:
            # Every loop has a name of its own for its first keys: equal text would stand for the value of the loop before.
            keys = self.writer.fresh("nf")
            self.emitter.axes = {**self.emitter.axes, "nf": Axis("nf", problem.keys, keys, f"{keys}_mask")}
            self._define("nf", f"{bounds.low} + tl.arange(0, BLOCK_N)[None, :]")
            line(f"allowed = {self._mask_of('nf')}")
        with (
            self._unmasked_keys(bounds.keys),
            self.emitter.scope(f"for n0 in range({bounds.low}, {bounds.high}, BLOCK_N):"),
        ):
            self._define("n", "n0 + tl.arange(0, BLOCK_N)[None, :]")
            self._define("nv", "n0 + tl.arange(0, BLOCK_N)[:, None]")
            if ahead:
                self._define("nx", "n0 + BLOCK_N + tl.arange(0, BLOCK_N)[None, :]")
                line(f"allowed_next = {self._mask_of('nx')}")
            if self.early:
                with self.emitter.scope(f"if n0 == {bounds.low}:"):
                    line(WAIT_IN_LOOP)
                    self._admit(self._query(), bounds)
            keys, tests = self._keys()
            scores = bind(f32_products.product(query, keys, problem.element), "qk")
            scores = self._masked_scores(scores, bounds, tests)
            line(f"new_best = tl.maximum(best, tl.max({scores}, 1){self._before})")
            shift = "new_best"
            if self._may_see_nothing:
                shift = bind(f"tl.where(new_best == {NEVER}, 0.0, new_best)", "shift")
            line(f"weights = {exponential(f'{scores}{self._before} - {shift}[:, None]', self._after)}")
            line(f"decay = {exponential(f'best - {shift}', self._after)}")
            if self._adds_up_late:
                line("total = total * decay")
                line("weight_sums = weight_sums * decay[:, None] + weights")
            else:
                line("total = total * decay + tl.sum(weights, 1)")
            line("acc = acc * decay[:, None]")
            values = self._values()
            narrow = "" if problem.element == "f32" else f".to({storage_type(problem.element)})"
            line(f"acc = {f32_products.product(f'weights{narrow}', values, problem.element, 'acc')}")
            line("best = new_best")
            if ahead:
                line("allowed = allowed_next")

    def _keys(self) -> tuple[str, list[str]]:
        """The keys of a block, and the tests of those whose scores count."""
        if 1 in self.described:
            return self.writer.bind(f"{self.described[1]}.T", "k"), []
        with self._settled("n") as tests:
            indices = [self._head, self._symbol("n")]
            return self._tile(self.problem.node.operands[1], indices, "dk", "n", "(BLOCK_D, BLOCK_N)"), tests

    def _values(self) -> str:
        """The values of a block of keys."""
        if 2 in self.described:
            return self.writer.bind(self.described[2], "v")
        with self._settled("nv"):
            indices = [self._head, self._symbol("nv")]
            return self._tile(self.problem.node.operands[2], indices, "nv", "e", "(BLOCK_N, BLOCK_E)")

    def _tile(self, number: int, place: list[Expr], first: str, second: str, shape: str) -> str:
        """A block of q, k or v in its storage type over two axes; what lies past the end of either is zero where a product
        would see it."""
        head, position = place
        depth = self._symbol({"row": "d", "dk": "dk", "nv": "e"}[first])
        is_query = first == "row"
        indices = self.problem.key_indices(self._symbol("b"), head, position, depth)
        if is_query:
            indices[1] = head
        value = self.emitter.real(number, indices)
        return self._stored(value, first, second, shape)

    def _stored(self, value: Value, first: str, second: str, shape: str) -> str:
        bind, element, axes = self.writer.bind, self.problem.element, self.emitter.axes
        narrow = value.narrow if value.element == element else None
        source = narrow or f"{self.emitter.tensor(value)}.to({storage_type(element)})"
        names = {first, second}
        if value.is_literal or not names <= value.depends:
            source = f"tl.broadcast_to({bind(source)}, {shape})"
        # Sums over d and over the keys of v must not see what lies past the end; the other axes end in masked stores.
        loaded = value.depends if value.is_load else frozenset()
        ends = [m for a in ("d", "dk", "nv") if a in names - loaded and (m := axes[a].mask)]
        if ends:
            source = f"tl.where({' & '.join(ends)}, {bind(source)}, 0.0).to({storage_type(element)})"
        return source if source.isidentifier() else bind(source)

    # -- results ------------------------------------------------------------------------------------------------------

    def _finish_combined(self) -> None:
        """As `_finish`, for the rows that the combining program holds."""
        block = self.split.rows_block
        row = Axis("row", self.rows, "out_row", "out_row_mask" if self.rows % block else None)
        self.emitter = replace(self.emitter, axes={**self.axes, "row": row}, seeds={}, _memo=[{}])
        self._define("row", f"row0 + tl.arange(0, {block})[:, None]")
        self._finish("sum_acc", "sum_total", f"({block}, BLOCK_E)")

    def _finish(self, acc: str, total: str, shape: str) -> None:
        """Divides by the sum of weights, seeds the result and stores every returned value at its place."""
        bind, graph, problem = self.writer.bind, self.kernel.graph, self.problem
        if self._may_be_empty:
            total = bind(f"tl.where({total} == 0.0, 1.0, {total})")
        result = bind(f"{acc} / {total}[:, None]")
        indices = [self._symbol("b"), self._head, self._query_row, self._symbol("e")]
        anchor = problem.node.results[0]
        self.emitter.seeds[(anchor, tuple(indices))] = Value(result, problem.element, frozenset(("row", "e")))
        places = forward_indices(graph, anchor, indices)
        for position, value in enumerate(graph.returns):
            if value not in places:
                raise UnsupportedError(
                    "a result of an attention kernel that is not one-to-one with the attention's"
                )
            self.emitter.store(f"out{position}", value, places[value], ("row", "e"), shape)

    def _source(self) -> KernelSource:
        kernel, tile = self.kernel, self.kernel.attributes["tile"]
        blocks = {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_D": self.block_d,
            "BLOCK_E": self.block_e,
        }
        programs = self.problem.batch * self.groups * self.row_blocks
        text = self.writer.text()
        params = tuple(p for p in self.params if re.search(rf"\b{p.name}\b", text))
        scratch = self.split.scratch(programs) if self.splits > 1 else ()
        params += tuple(Param(n, "scratch", i, s.dtype) for i, (n, s) in enumerate(zip(Split.NAMES, scratch)))
        return KernelSource(
            name=kernel.name,
            source=kernel.define(params, blocks, self.writer.lines),
            params=params,
            grid=(programs, self.splits, 1),
            num_warps=tile["warps"],
            num_stages=tile["stages"],
            constexprs=blocks,
            scratch=scratch,
            pdl=kernel.pdl,
            family="attention",
        )


__all__ = ["lower"]
