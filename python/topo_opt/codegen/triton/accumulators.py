"""What a loop over the blocks of a row keeps: lanes of one block's size, collapsed to a column at the end.

A column of every program of a split row is a lane of the program that puts them together, so `collapse` serves both;
more parts than lanes are merged a block of lanes at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from topo_opt.codegen.triton.element_types import compute_type
from topo_opt.codegen.triton.emit import Value
from topo_opt.codegen.triton.online import Pair
from topo_opt.codegen.triton.reductions import Combiner, recognise

if TYPE_CHECKING:
    from topo_opt.codegen.triton.loops import Loops, Request

_MINUS_INFINITY = "float('-inf')"
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class State:
    """A value that is kept: its MLIR element type, and what leaves the result as it is."""

    element: str
    identity: str


@dataclass
class Accumulator(ABC):
    """One or more reductions of a row in one read. Between `start` and `finish`, `step` is called once a block.

    `lanes`: names of the states in the source.
    """

    loops: Loops
    lanes: list[str] = field(default_factory=list, init=False)
    forward_only = False
    """Blocks must be visited in the order of the columns."""

    @property
    @abstractmethod
    def states(self) -> tuple[State, ...]:
        """What is kept."""

    @abstractmethod
    def step(self) -> None:
        """Takes the current block in."""

    @abstractmethod
    def collapse(self, lanes: Sequence[str]) -> list[str]:
        """Names of the columns that stand for all lanes, one a state."""

    @abstractmethod
    def merge(self, kept: Sequence[str], lanes: Sequence[str]) -> list[str]:
        """Sources of lanes that stand for two sets of lanes of one size, one a state."""

    @abstractmethod
    def seed(self, columns: Sequence[str]) -> None:
        """Makes the results known to the emitter."""

    @property
    def lane_states(self) -> tuple[State, ...]:
        """What the loop itself keeps: the first of `states`."""
        return self.states

    def start(self) -> None:
        """Defines the lanes before the loop."""
        for state in self.lane_states:
            self.lanes.append(self.loops.writer.fresh("acc"))
            tile, kind = self.loops.tile_shape, compute_type(state.element)
            self.loops.writer.line(f"{self.lanes[-1]} = tl.full({tile}, {state.identity}, {kind})")

    def finish(self, columns_read: str) -> list[str]:
        """Collapses the lanes after the loop.

        Args:
            columns_read: source of the number of columns that the program read.
        """
        return self.collapse(self.lanes)

    def result(self, request: Request) -> tuple[int, tuple]:
        """The emitter's key of a reduction."""
        number, position, indices = request
        return self.loops.kernel.graph.nodes[number].results[position], indices


@dataclass
class Plain(Accumulator):
    """One reduction whose body combines in any order."""

    request: Request
    combiner: Combiner = field(init=False)

    def __post_init__(self) -> None:
        node = self.loops.kernel.graph.nodes[self.request[0]]
        known = recognise(node, self.request[1], self._element)
        self.combiner = known.combiner if known else Combiner("+", "0", None)

    @property
    def _element(self) -> str:
        graph = self.loops.kernel.graph
        return graph.values[graph.nodes[self.request[0]].results[self.request[1]]].element

    @property
    def states(self) -> tuple[State, ...]:
        return (State(self._element, self.combiner.identity),)

    def step(self) -> None:
        number, position, indices = self.request
        found = self.loops.term(self.loops.kernel.graph.nodes[number], position, indices)
        assert found is not None
        (name,) = self.lanes
        self.loops.writer.line(f"{name} = {self.combiner.combine(name, found[0].source)}")

    def collapse(self, lanes: Sequence[str]) -> list[str]:
        return [self.loops.writer.bind(self.combiner.reduce(lanes[0]))]

    def merge(self, kept: Sequence[str], lanes: Sequence[str]) -> list[str]:
        return [self.combiner.combine(kept[0], lanes[0])]

    def seed(self, columns: Sequence[str]) -> None:
        number, position, indices = self.request
        node = self.loops.kernel.graph.nodes[number]
        value = self.loops.finish(node, position, indices, columns[0], self.combiner)
        self.loops.emitter.seeds[self.result(self.request)] = value


@dataclass
class Exponentials(Accumulator):
    """Maximum, and sum of exponentials of what is left above it: the sum is rescaled when the maximum rises."""

    pair: Pair

    @property
    def states(self) -> tuple[State, ...]:
        return State("f32", _MINUS_INFINITY), State("f32", "0.0")

    def _combiner(self) -> Combiner:
        number, position, _ = self.pair.first
        known = recognise(self.loops.kernel.graph.nodes[number], position, "f32")
        assert known is not None
        return known.combiner

    def _shift(self, peak: str, depends: frozenset[str]) -> str:
        """What is subtracted before the exponential when the maximum is `peak`."""
        with self.loops.emitter.assuming({self.result(self.pair.first): Value(peak, "f32", depends)}):
            place = self.pair.shift
            return self.loops.emitter.tensor(
                self.loops.region_value(place.node, list(place.loop), place.value)
            )

    def _factor(self, peak: str, old: str, new: str) -> str:
        """What a sum is scaled by. Equal shifts may be infinite; a sum of nothing stays zero whatever it is scaled by."""
        same = f"({old} == {new}) | ({peak} == {_MINUS_INFINITY})"
        return self.loops.writer.bind(f"tl.where({same}, 1.0, tl.exp2(({old} - {new}) * {_LOG2_E}))")

    def step(self) -> None:
        loops, writer, tile = self.loops, self.loops.writer, frozenset("xr")
        graph, (peak, total) = loops.kernel.graph, self.lanes
        number, position, indices = self.pair.first
        found = loops.term(graph.nodes[number], position, indices)
        assert found is not None
        best = writer.fresh("best")
        writer.line(f"{best} = {self._combiner().combine(peak, found[0].source)}")
        old = self._shift(peak, tile)
        with loops.emitter.assuming({self.result(self.pair.first): Value(best, "f32", tile)}):
            number, position, indices = self.pair.second
            power = loops.term(graph.nodes[number], position, indices)
        assert power is not None
        factor = self._factor(peak, old, self._shift(best, tile))
        # A row that starts with minus infinity has nothing to add so far.
        power_source = f"tl.where({best} == {_MINUS_INFINITY}, 0.0, {power[0].source})"
        writer.line(f"{total} = {total} * {factor} + {power_source}")
        writer.line(f"{peak} = {best}")

    def collapse(self, lanes: Sequence[str]) -> list[str]:
        writer = self.loops.writer
        peak = writer.bind(self._combiner().reduce(lanes[0]))
        shifts = self._shift(lanes[0], frozenset("xr")), self._shift(peak, frozenset("x"))
        factor = self._factor(lanes[0], *shifts)
        return [peak, writer.bind(f"tl.sum({lanes[1]} * {factor}, axis=1)[:, None]")]

    def merge(self, kept: Sequence[str], lanes: Sequence[str]) -> list[str]:
        tile = frozenset("xr")
        peak = self.loops.writer.bind(self._combiner().combine(kept[0], lanes[0]))
        shift = self._shift(peak, tile)
        sums = [f"{t} * {self._factor(p, self._shift(p, tile), shift)}" for p, t in (kept, lanes)]
        return [peak, " + ".join(sums)]

    def seed(self, columns: Sequence[str]) -> None:
        for request, column in zip((self.pair.first, self.pair.second), columns):
            self.loops.emitter.seeds[self.result(request)] = Value(column, "f32", frozenset("x"))


@dataclass
class Moments(Accumulator):
    """Mean and sum of squared differences from it, with the number of columns of every lane."""

    pair: Pair
    forward_only = True

    @property
    def states(self) -> tuple[State, ...]:
        return State("f32", "0.0"), State("f32", "0.0"), State("f32", "0.0")

    @property
    def lane_states(self) -> tuple[State, ...]:
        return self.states[:2]  # a lane's columns are counted after the loop

    def step(self) -> None:
        loops, writer = self.loops, self.loops.writer
        number, position, indices = self.pair.first
        value = loops.spread(loops.unmasked_term(loops.kernel.graph.nodes[number], position, indices))
        mean, moment = self.lanes
        mask = loops.emitter.axes["r"].mask
        if mask:
            value = writer.bind(f"tl.where({mask}, {value}, {mean})")
        share = writer.bind("1.0 / (r0 // RBLOCK + 1)", "share")
        off, moved = writer.fresh("off"), writer.fresh("mean")
        writer.line(f"{off} = {value} - {mean}")
        writer.line(f"{moved} = {mean} + {off} * {share}")
        writer.line(f"{moment} = {moment} + {off} * ({value} - {moved})")
        writer.line(f"{mean} = {moved}")

    def finish(self, columns_read: str) -> list[str]:
        writer = self.loops.writer
        count = writer.bind(
            f"(({columns_read} - tl.arange(0, RBLOCK)[None, :] + RBLOCK - 1) // RBLOCK).to(tl.float32)",
            "count",
        )
        # Known, and not added up: Triton may compute the counts once more for that, all of them in every thread.
        columns = writer.bind(f"tl.full((1, 1), {columns_read}, tl.float32)", "columns")
        mean, moment = self.lanes
        return self._collapse(mean, moment, count, columns)

    def collapse(self, lanes: Sequence[str]) -> list[str]:
        mean, moment, count = lanes
        columns = self.loops.writer.bind(f"tl.sum({count}, axis=1)[:, None]")
        return self._collapse(mean, moment, count, columns)

    def _collapse(self, mean: str, moment: str, count: str, columns: str) -> list[str]:
        bind = self.loops.writer.bind
        middle = bind(f"tl.sum({mean} * {count}, axis=1)[:, None] / {columns}")
        off = bind(f"{mean} - {middle}")
        return [middle, bind(f"tl.sum({moment} + {count} * {off} * {off}, axis=1)[:, None]"), columns]

    def merge(self, kept: Sequence[str], lanes: Sequence[str]) -> list[str]:
        """T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm" (1979)."""
        bind = self.loops.writer.bind
        (mean, moment, count), (other, further, more) = kept, lanes
        columns = bind(f"{count} + {more}")
        share = bind(f"{more} / tl.maximum({columns}, 1.0)")
        off = bind(f"{other} - {mean}")
        return [
            f"{mean} + {off} * {share}",
            f"{moment} + {further} + {off} * {off} * {count} * {share}",
            columns,
        ]

    def seed(self, columns: Sequence[str]) -> None:
        loops = self.loops
        total = loops.writer.bind(f"{columns[0]} * {float(loops.space.col_count)}")
        for request, column in ((self.pair.first, total), (self.pair.second, columns[1])):
            loops.emitter.seeds[self.result(request)] = Value(column, "f32", frozenset("x"))


@dataclass
class Places(Accumulator):
    """Largest (smallest) value, and the first place of it: places of smaller ones are dropped when the value changes."""

    pair: Pair

    def _combiner(self, request: Request) -> Combiner:
        graph = self.loops.kernel.graph
        node = graph.nodes[request[0]]
        known = recognise(node, request[1], graph.values[node.results[request[1]]].element)
        assert known is not None
        return known.combiner

    @property
    def states(self) -> tuple[State, ...]:
        first, second = self._combiner(self.pair.first), self._combiner(self.pair.second)
        return State("f32", first.identity), State("i64", second.identity)

    def step(self) -> None:
        loops, writer, tile = self.loops, self.loops.writer, frozenset("xr")
        nodes, (peak, place) = loops.kernel.graph.nodes, self.lanes
        number, position, indices = self.pair.first
        found = loops.term(nodes[number], position, indices)
        assert found is not None
        best = writer.fresh("best")
        writer.line(f"{best} = {self._combiner(self.pair.first).combine(peak, found[0].source)}")
        with loops.emitter.assuming({self.result(self.pair.first): Value(best, "f32", tile)}):
            number, position, indices = self.pair.second
            here = loops.term(nodes[number], position, indices)
        assert here is not None
        # A peak that is no number stays.
        kept = f"({best} == {peak}) | ({peak} != {peak})"
        earlier = self._combiner(self.pair.second).combine(place, here[0].source)
        writer.line(f"{place} = tl.where({kept}, {earlier}, {here[0].source})")
        writer.line(f"{peak} = {best}")

    def collapse(self, lanes: Sequence[str]) -> list[str]:
        writer, second = self.loops.writer, self._combiner(self.pair.second)
        peak = writer.bind(self._combiner(self.pair.first).reduce(lanes[0]))
        kept = f"({lanes[0]} == {peak}) | ({lanes[0]} != {lanes[0]})"
        place = writer.bind(f"tl.where({kept}, {lanes[1]}, {self.states[1].identity})")
        return [peak, writer.bind(second.reduce(place))]

    def merge(self, kept: Sequence[str], lanes: Sequence[str]) -> list[str]:
        writer, second = self.loops.writer, self._combiner(self.pair.second)
        peak = writer.bind(self._combiner(self.pair.first).combine(kept[0], lanes[0]))
        # A peak that is no number stays.
        places = [
            f"tl.where(({p} == {peak}) | ({p} != {p}), {i}, {self.states[1].identity})"
            for p, i in (kept, lanes)
        ]
        return [peak, second.combine(writer.bind(places[0]), writer.bind(places[1]))]

    def seed(self, columns: Sequence[str]) -> None:
        for request, column, state in zip((self.pair.first, self.pair.second), columns, self.states):
            self.loops.emitter.seeds[self.result(request)] = Value(column, state.element, frozenset("x"))


@dataclass
class FirstPlaces(Places):
    """As `Places`, where places are columns: a lane sees them in their order, so a value counts only when it is better."""

    forward_only = True
    _NOWHERE = 2**31 - 1

    @property
    def states(self) -> tuple[State, ...]:
        return State("f32", self._combiner(self.pair.first).identity), State("i32", str(self._NOWHERE))

    def step(self) -> None:
        loops, writer, (peak, place) = self.loops, self.loops.writer, self.lanes
        number, position, indices = self.pair.first
        found = loops.term(loops.kernel.graph.nodes[number], position, indices)
        assert found is not None
        value = found[0].source
        no_better = "<=" if self._combiner(self.pair.first).symbol == "max" else ">="
        # What is no number is better than any, and then stays.
        better = writer.bind(f"~({value} {no_better} {peak}) & ({peak} == {peak})", "better")
        writer.line(f"{place} = tl.where({better}, r, {place})")
        writer.line(f"{peak} = tl.where({better}, {value}, {peak})")

    def seed(self, columns: Sequence[str]) -> None:
        # Where nothing was better than the identity, every column has it.
        place = self.loops.writer.bind(
            f"tl.where({columns[1]} == {self._NOWHERE}, 0, {columns[1]}).to(tl.int64)"
        )
        for request, column, element in (
            (self.pair.first, columns[0], "f32"),
            (self.pair.second, place, "i64"),
        ):
            self.loops.emitter.seeds[self.result(request)] = Value(column, element, frozenset("x"))


PAIRS: dict[str, type[Exponentials] | type[Moments] | type[Places]] = {
    "exponentials": Exponentials,
    "moments": Moments,
    "places": Places,
    "first_places": FirstPlaces,
}
