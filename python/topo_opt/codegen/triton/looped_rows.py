"""Rows that do not fit in one block: passes over their columns, and programs that share them.

Reductions that wait for each other need a pass each, unless `online` knows how one read serves both. Passes go over the
columns in turn from the front and from the back: what was read last is most likely still in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from topo_opt.codegen.kernel_source import Param, Scratch
from topo_opt.codegen.triton.accumulators import PAIRS, Accumulator, Plain
from topo_opt.codegen.triton.emit import Scalar, Value
from topo_opt.codegen.triton.kernel import next_power_of_two
from topo_opt.codegen.triton.online import Pair, match
from topo_opt.codegen.triton.reductions import recognise
from topo_opt.codegen.triton.row_split import COMBINED, RowSplit
from topo_opt.codegen.triton.writer import Writer
from topo_opt.errors import UnsupportedError
from topo_opt.structured.graph import Node, element_bytes
from topo_opt.structured.index import Expr

if TYPE_CHECKING:
    from topo_opt.codegen.triton.loops import Loops, Request

UNROLLED_COLUMNS = 32
"""Up to so many columns, visited one at a time, are written out: their loads don't wait for each other."""


@dataclass
class LoopedRows:
    """Writes the passes of one kernel; `params` and `scratch` are what shared rows need besides its own parameters."""

    loops: Loops
    params: list[Param] = field(default_factory=list)
    scratch: list[Scratch] = field(default_factory=list)
    _passes: int = 0

    def lower(self) -> None:
        loops = self.loops
        returns = loops.kernel.graph.returns
        full = [p for p, v in enumerate(returns) if loops.is_full(v)]
        levels, pairs = self.levels()
        if loops.space.q_count > 1 and (
            pairs or loops.space.parts > 1 or loops.space.r_block < loops.space.r_count
        ):
            raise UnsupportedError("columns in lines, where they are shared, in blocks or counted")
        if loops.space.parts > 1:
            self._lower_shared(levels, pairs, bool(full))
            return
        for level in levels:
            self._reduce_level(level, pairs)
        if full:

            def store_full() -> None:
                for position in full:
                    loops.store(position)

            self._loop(store_full)
        for position in range(len(returns)):
            if position not in full:
                loops.store(position)

    def _loop(self, body: Callable[[], object], forward: bool = False) -> None:
        """One pass over the columns of the program."""
        space = self.loops.space
        if space.q_count > 1:
            with self.loops.emitter.scope(f"for q in range(0, {space.q_count}):"):
                self.loops.define_cols("tl.arange(0, RBLOCK)[None, :]")
                body()
            return
        span = space.part_columns if space.parts > 1 else space.col_count
        backward = not forward and self._passes % 2 == 1
        self._passes += 1
        unrolled = space.r_block == 1 and span <= UNROLLED_COLUMNS and space.parts == 1
        steps = "tl.static_range" if unrolled else "range"
        with self.loops.emitter.scope(f"for r0 in {steps}(0, {span}, RBLOCK):"):
            start = f"{(-(-span // space.r_block) - 1) * space.r_block} - r0" if backward else "r0"
            if space.parts > 1:
                start = f"tl.program_id(1) * {span} + {start}"
            self.loops.define_cols(f"{start} + tl.arange(0, RBLOCK)[None, :]")
            self.loops.emitter.steps = frozenset("r" if unrolled else "")
            body()
            self.loops.emitter.steps = frozenset()

    # -- what there is to reduce ------------------------------------------------------------------------------------

    def levels(self) -> tuple[list[list[Request]], dict[Request, Pair]]:
        """Reductions by the pass that they are made in, and the pairs among them by either member."""
        loops = self.loops
        graph = loops.kernel.graph
        depth: dict[Request, int] = {}
        pairs: dict[Request, Pair] = {}

        def visit(request: Request) -> int:
            if request not in depth:
                node, position, indices = request
                nested = self._discover(lambda: loops.term(graph.nodes[node], position, indices))
                depth[request] = 1 + max((visit(n) for n in nested), default=-1)
                if len(nested) == 1 and nested[0] not in pairs:
                    pair = match(loops, nested[0], request)
                    if pair is not None:
                        pairs[request] = pairs[nested[0]] = pair
                        depth[request] = depth[nested[0]]
            return depth[request]

        for value in graph.returns:
            for request in self.asked_by(value):
                visit(request)
        levels: list[list[Request]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
        for request, level in depth.items():
            levels[level].append(request)
        return levels, pairs

    def asked_by(self, value: int) -> list[Request]:
        """The reductions that a value at the block's rows and columns needs directly."""
        loops = self.loops
        return self._discover(partial(loops.emitter.value, value, loops.result_indices(value)))

    def _discover(self, ask: Callable[[], object]) -> list[Request]:
        """The reductions that `ask` needs directly; nothing is written."""
        loops = self.loops
        found: dict[Request, None] = {}

        def record(node: Node, position: int, indices: tuple[Expr, ...]) -> Scalar:
            if any({"q", "r"} & i.symbols for i in indices):
                raise UnsupportedError("a reduction is read at another row than the kernel's own")
            found[(node.id, position, indices)] = None
            element = loops.kernel.graph.values[node.results[position]].element
            return Value(f"pending{len(found)}", element, frozenset("x"))

        saved, loops.writer = loops.writer, Writer()
        try:
            with loops.emitter.rehearsal(loops.writer, record):
                ask()
        finally:
            loops.writer = saved
        return list(found)

    def _accumulators(
        self, level: Sequence[Request], pairs: dict[Request, Pair]
    ) -> tuple[list[Accumulator], dict[tuple[int, tuple[Expr, ...]], list[Request]]]:
        """What a pass keeps, and the reductions (by node and indices) whose bodies only run column by column."""
        loops = self.loops
        graph = loops.kernel.graph
        kept: dict[Request, Accumulator] = {}
        sequential: dict[tuple[int, tuple[Expr, ...]], list[Request]] = {}
        for request in level:
            node = graph.nodes[request[0]]
            pair = pairs.get(request)
            if pair is not None:
                kept.setdefault(pair.first, PAIRS[pair.kind](loops, pair))
            elif node.name == "linalg.contract" or recognise(
                node, request[1], graph.values[node.results[request[1]]].element
            ):
                kept[request] = Plain(loops, request)
            else:
                sequential.setdefault((request[0], request[2]), []).append(request)
        return list(kept.values()), sequential

    def sequential_of(self, level: Sequence[Request], pairs: dict[Request, Pair]) -> bool:
        """Whether a pass has reductions that only run column by column."""
        return bool(self._accumulators(level, pairs)[1])

    # -- one program a row ------------------------------------------------------------------------------------------

    def _reduce_level(self, level: Sequence[Request], pairs: dict[Request, Pair]) -> None:
        loops = self.loops
        accumulators, sequential = self._accumulators(level, pairs)
        if accumulators:
            self._accumulate(accumulators)
            for accumulator in accumulators:
                accumulator.seed(accumulator.finish(str(loops.space.col_count)))
        for (number, indices), requests in sequential.items():
            node = loops.kernel.graph.nodes[number]
            results = loops.sequential(node, indices)
            for _, position, _ in requests:
                loops.emitter.seeds[(node.results[position], indices)] = results[position]

    def _accumulate(self, accumulators: Sequence[Accumulator]) -> None:
        for accumulator in accumulators:
            accumulator.start()
        self._loop(
            lambda: [a.step() for a in accumulators], forward=any(a.forward_only for a in accumulators)
        )

    # -- several programs a row -------------------------------------------------------------------------------------

    def _lower_shared(self, levels: list[list[Request]], pairs: dict[Request, Pair], full: bool) -> None:
        """Every program reduces its part of the columns; the last one to arrive stores the results."""
        loops, space = self.loops, self.loops.space
        accumulators, sequential = self._accumulators(levels[0] if levels else [], pairs)
        if full or len(levels) != 1 or sequential:
            raise UnsupportedError(
                "rows are shared by programs where one pass over the columns is not enough"
            )
        blocks = space.blocks
        lanes = max(1, next_power_of_two(COMBINED * 32 * loops.tile["warps"] // space.x_block))
        split = RowSplit(
            space.parts, blocks, space.x_block, lanes, "tl.program_id(0)", self.params, self.scratch
        )
        self._accumulate(accumulators)
        read = (
            f"tl.minimum({space.col_count} - tl.program_id(1) * {space.part_columns}, {space.part_columns})"
        )
        buffers = split.store(loops.writer, [(a, a.finish(read)) for a in accumulators])
        with loops.emitter.scope(split.last):
            whole = split.combine(loops.emitter, list(zip(accumulators, buffers)))
            for accumulator, lanes_of in zip(accumulators, whole):
                accumulator.seed(accumulator.collapse(lanes_of))
            for position in range(len(loops.kernel.graph.returns)):
                loops.store(position)
            split.reset(loops.writer)


def passes(loops: Loops) -> tuple[int, bool]:
    """How many passes the reductions of a kernel need, and whether all of them combine in any order."""
    looped = LoopedRows(loops)
    levels, pairs = looped.levels()
    return len(levels), not any(looped.sequential_of(level, pairs) for level in levels)


def combines_plainly(loops: Loops) -> bool:
    """Whether every reduction combines its columns in any order, and needs no other one."""
    looped = LoopedRows(loops)
    levels, pairs = looped.levels()
    return len(levels) == 1 and not pairs and not looped.sequential_of(levels[0], pairs)


def kept_words(loops: Loops) -> int:
    """Words of 4 bytes that the first pass keeps for every element of a block."""
    looped = LoopedRows(loops)
    levels, pairs = looped.levels()
    kept, _ = looped._accumulators(levels[0], pairs)
    return sum(-(-element_bytes(s.element) // 4) for a in kept for s in a.states)
