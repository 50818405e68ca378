"""Keys and values that an attention kernel requests before the kernel in front of it has finished.

A decoder's step writes one row to its caches, the new token's, and its attention reads all of them. What the kernel in front does
not write is complete before the wait (`topo-mark-written-rows`), so the loop over keys leaves that one out, and the wait stands
inside the loop, where its first block meets the queries:

    for n0 in ...: if n0 == low: gdc_wait(); query = ...; best, total, acc = softmax of the written key
                   keys = tl.load(..., mask=n != written); ...

The blocks of keys and values that Triton's pipeliner copies ahead of the first turn are then requested before the wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from topo_opt.codegen.triton.attention_scores import NEVER, AttentionScores, Bounds
from topo_opt.codegen.triton.attention_space import MOST_ROWS
from topo_opt.codegen.triton.attention_split import exponential
from topo_opt.codegen.triton.emit import Axis
from topo_opt.codegen.triton.recorded_loads import single_load
from topo_opt.errors import UnsupportedError
from topo_opt.structured.graph import Graph
from topo_opt.structured.index import Expr, contiguous_strides, symbol

_ROWS = ((1, "n", "dk"), (2, "nv", "e"))
"""Operand, axis of keys and axis of depth of the blocks of keys and of values."""


@dataclass
class EarlyKeys(AttentionScores):
    """Reads of keys and values before the wait.

    `early`: whether there are any. `written_by` is then the position of the argument that says which key the kernel in front writes;
    None where it writes none of them.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        indices = self._written_keys()
        self.early = indices is not None
        self.written_by = min(indices) if indices else None

    def _written_keys(self) -> frozenset[int] | None:
        """Arguments with the number of a key that the kernel in front writes, one or none; None where all reads must wait.

        They must where it is not known which keys are written, or where the masks and what the loop's bounds are read from are not
        complete before the wait. Blocks of many rows wait as well: the loops around their asynchronous products stay as they are.
        """
        kernel, problem, tile = self.kernel, self.problem, self.kernel.attributes["tile"]
        requests_ahead = tile["stages"] > 1 and not tile.get("tma", 0)
        if not kernel.pdl or not requests_ahead or self.block_m > MOST_ROWS or self.row_blocks > 1:
            return None
        found = [self._written_of(*row) for row in _ROWS]
        indices = frozenset[int]().union(*(f for f in found if f is not None))
        read = [v for v in (problem.mask, problem.positions) if v is not None]
        known = {*indices, *_arguments_of(kernel.graph, read)} <= kernel.known_early
        return indices if known and None not in found and len(indices) < 2 else None

    def _written_of(self, operand: int, key: str, depth: str) -> frozenset[int] | None:
        """As above, of keys or of values alone: they must be rows of an argument."""
        kernel, graph = self.kernel, self.kernel.graph
        try:
            number, position = single_load(
                self.emitter, *self._row(operand, self._symbol(key), self._symbol(depth))
            )
        except UnsupportedError:
            return None
        if graph.arguments.index(number) in kernel.known_early:
            return frozenset()
        for argument, index, dim in kernel.written:
            if graph.arguments[argument] == number:
                shape = graph.values[number].shape or ()
                row = position // contiguous_strides(shape)[dim] % shape[dim]
                return frozenset({index}) if row == self._symbol(key) else None
        return None

    def _row(self, operand: int, key: Expr, depth: Expr) -> tuple[int, list[Expr]]:
        """Keys (or values) and where they are asked for."""
        return self.problem.node.operands[operand], self.problem.key_indices(
            self._symbol("b"), self._head, key, depth
        )

    def _define_written(self) -> None:
        """Writes `written`, the number of the written key; -1 for a row that does not exist, which no kernel writes."""
        if self.written_by is None:
            return
        pointer = self.emitter.pointers[self.kernel.graph.arguments[self.written_by]]
        self.writer.line(f"place = tl.load({pointer})")
        exists = f"(place >= 0) & (place < {self.problem.keys})"
        self.writer.line(f"written = tl.where({exists}, place, -1).to(tl.int32)")

    @contextmanager
    def _settled(self, axis: str) -> Iterator[list[str]]:
        """Loads inside leave out the written key; gives the tests of the others."""
        if self.written_by is None:
            yield []
            return
        test = self.writer.bind(f"{axis} != written", "c")
        with self.emitter.predicate([test], frozenset({axis})):
            yield [test]

    def _admit(self, query: str, bounds: Bounds) -> None:
        """Writes `query`, and `best`, `total` and `acc` of the written key alone, in the programs whose keys it is among.

        In others its score is minus infinity, as at the start of any loop.
        """
        line, bind, emitter = self.writer.line, self.writer.bind, self.emitter
        line(f"query = {query}")
        if self.written_by is None:
            return
        line(f"here = (written >= {bounds.low}) & (written < {bounds.high})")
        others, emitter.axes = (
            emitter.axes,
            {**emitter.axes, "nw": Axis("nw", self.problem.keys, "written", "here", scalar=True)},
        )
        key = symbol("nw", self.problem.keys)
        keys, values = (
            emitter.tensor(emitter.real(*self._row(n, key, self._symbol(d)))) for n, d in ((1, "d"), (2, "e"))
        )
        products = bind(f"tl.sum(query.to(tl.float32) * {keys}, 1)[:, None]", "qk")
        scores, tests = self._seen_scores(products, key)
        scores = self._where(["here", *tests, *(self._bound_tests("written") if bounds.rows else ())], scores)
        emitter.axes = others
        line(f"best = tl.max({scores}, 1){self._before}")
        shift = bind(f"tl.where(best == {NEVER}, 0.0, best)", "shift")
        line(f"total = {exponential(f'best - {shift}', self._after)}")
        line(f"acc = total[:, None] * {values}")


def _arguments_of(graph: Graph, values: Sequence[int]) -> Iterator[int]:
    """Positions of the arguments that values are computed from."""
    waiting, seen = list(values), set(values)
    while waiting:
        value = waiting.pop()
        producer = graph.producer(value)
        if producer is None:
            yield graph.arguments.index(value)
            continue
        waiting += set(producer.operands) - seen
        seen |= set(producer.operands)
