"""The sum of costs that a plan for one mesh minimises, as tables over variables.

    minimise   sum over operations i   compute(i, s_i)
             + sum over values v       convert(produced(v, s_producer) -> c_v)
             + sum over readers        convert(c_v -> taken(reader, s_reader))

s_i is the strategy of operation i. c_v says how value v lies; it is a variable where a value has several readers, is an
argument or a result, or passes a seam between layers. Where there is one reader the two conversions are one, between the
strategies. A new value of an argument lies as the argument does. Memory is a second sum over the same variables, over c_v of
arguments and of what is alive at a point, see `plan_memory.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from topo_opt.sharding.cost import Prices, compute_table, device_kinds, picoseconds, settled
from topo_opt.sharding.cost_reshard import Conversions
from topo_opt.sharding.plan_graph import PlanGraph, PlanOp, PlanValue, Work
from topo_opt.sharding.solver import FORBIDDEN, Problem, Solution, Table
from topo_opt.sharding.spec import Mesh
from topo_opt.sharding.strategies import Axes, Layout, Strategy, divisibility, replicated, strategies

Pin = Callable[[tuple[Layout, ...]], tuple[Layout, ...]]
"""The layouts that a pinned value may lie in, given those that it could lie in without the pin."""


class Costs:
    """Tables for one mesh, each made once for all operations and values that are alike."""

    def __init__(self, mesh: Mesh, prices: Prices):
        self.mesh, self.prices, self.sizes = mesh, prices, mesh.shape
        names = [name for name, _ in mesh.axes]
        self._groups: dict[Axes, tuple[tuple[str, ...], ...]] = {}
        self._names = names
        self.conversions = Conversions(self.sizes, self._price, self._cut)
        self.kinds = device_kinds(prices, mesh.devices)
        self._strategies: dict[int, tuple[list[Strategy], Table]] = {}
        self._form: dict[int, int] = {}
        self._forms: dict[object, int] = {}
        self._choices: list[list[Strategy]] = []
        self._tables: dict[tuple[int, Work], Table] = {}
        self._lists: dict[tuple[Layout, ...], tuple[Layout, ...]] = {}
        self._layouts: dict[tuple[int, int, str], tuple[Layout, ...]] = {}
        self.tables: dict[object, Table] = {}

    def groups(self, axes: Axes) -> tuple[tuple[str, ...], ...]:
        known = self._groups.get(axes)
        if known is None:
            known = self._groups[axes] = self.mesh.groups([self._names[a] for a in axes])
        return known

    def _price(self, kind: str, axes: Axes, nbytes: int) -> int:
        return picoseconds(self.prices.collective(kind, nbytes, self.groups(axes)).seconds)

    def _cut(self, nbytes: int) -> int:
        """A kernel that a collective takes a tensor out of becomes two: one more start, and the tensor written and read."""
        return max(
            picoseconds(self.prices.launch(d) + self.prices.compute(0.0, 2.0 * nbytes, "f32", d))
            for d in self.kinds
        )

    def strategies(self, graph: PlanGraph, index: int) -> tuple[list[Strategy], Table]:
        """The strategies of an operation of the graph that the costs are used for, and what they cost to compute."""
        kind = graph.kinds[index]
        known = self._strategies.get(kind)
        if known is None:
            op = graph.ops[index]
            form = self._form_of(op)
            work = settled(op.work, self.prices, self.kinds[0])
            table = self._tables.get((form, work))
            if table is None:
                alike = replace(op, work=work)
                table = compute_table(alike, self._choices[form], self.sizes, self.prices, self.kinds)
                self._tables[form, work] = table
            self._form[kind] = form
            known = self._strategies[kind] = (self._choices[form], table)
        return known

    def _form_of(self, op: PlanOp) -> int:
        """A number that operations with equal strategies share, whatever their sizes and costs."""
        key = (divisibility(op.rule, self.sizes), op.rule.operands, op.rule.results, op.terms, op.owns)
        form = self._forms.setdefault(key, len(self._forms))
        if form == len(self._choices):
            self._choices.append(strategies(op, self.sizes))
        return form

    def side(self, graph: PlanGraph, index: int, position: int, which: str) -> tuple[Layout, ...]:
        """The layout of an operand or result under every strategy. Equal ones are one object."""
        choices, _ = self.strategies(graph, index)
        key = (self._form[graph.kinds[index]], position, which)
        known = self._layouts.get(key)
        if known is None:
            made = tuple(getattr(s, which)[position] for s in choices)
            known = self._layouts[key] = self._lists.setdefault(made, made)
        return known


@dataclass
class MeshProblem:
    """The problem of one mesh. `op_variables` and `value_variables` number the variables; -1 for values without one.

    `preferences` decide between plans that take equally long; they are in the problem's costs and no part of the time.
    """

    graph: PlanGraph
    costs: Costs
    problem: Problem
    op_variables: list[int]
    op_choices: list[list[Strategy]]
    value_variables: list[int]
    value_layouts: list[tuple[Layout, ...]]
    preferences: dict[int, Table]

    def time(self, solution: Solution) -> int:
        """Picoseconds of a call."""
        if not solution.feasible:
            return solution.cost
        return solution.cost - sum(int(table[solution.choice[v]]) for v, table in self.preferences.items())

    def strategies_of(self, choice: Sequence[int]) -> list[Strategy]:
        return [c[choice[v]] for v, c in zip(self.op_variables, self.op_choices)]

    def layouts_of(self, choice: Sequence[int], chosen: Sequence[Strategy]) -> list[Layout]:
        """How every value lies: a value without a variable in what its reader takes, or as it is made when nobody reads it."""
        found = []
        for number, (value, variable, layouts) in enumerate(
            zip(self.graph.values, self.value_variables, self.value_layouts)
        ):
            if variable >= 0:
                found.append(layouts[choice[variable]])
            elif value.uses:
                op, position = value.uses[0]
                found.append(chosen[op].operands[position])
            else:
                op = value.producer
                found.append(chosen[op].results[self.graph.ops[op].results.index(number)])
        return found

    def stored_bytes(self, number: int) -> Table:
        """Bytes of a value on one device for every layout of its variable."""
        return self.bytes_of(number, self.value_layouts[number])

    def bytes_of(self, number: int, layouts: tuple[Layout, ...]) -> Table:
        """Bytes of a value on one device for each of some layouts. Equal arguments give the same object."""
        nbytes, sizes = self.graph.values[number].nbytes, self.costs.sizes
        key = ("bytes", layouts, nbytes)
        known = self.costs.tables.get(key)
        if known is None:
            parts = [layout.parts(sizes) for layout in layouts]
            known = self.costs.tables[key] = np.array([-(-nbytes // p) for p in parts], dtype=np.int64)
        return known


def build(
    graph: PlanGraph,
    costs: Costs,
    *,
    pins: Mapping[int, Pin] | None = None,
    layer_of: Sequence[int] | None = None,
    whole_results: bool = False,
) -> MeshProblem:
    """The problem of `graph` on the mesh of `costs`.

    Args:
        pins: value -> which layouts it may lie in.
        layer_of: layer of every operation, -1 outside.
        whole_results: results lie whole on every device.
    """
    return _Builder(graph, costs, pins or {}, layer_of, whole_results).build()


class _Builder:
    def __init__(
        self,
        graph: PlanGraph,
        costs: Costs,
        pins: Mapping[int, Pin],
        layer_of: Sequence[int] | None,
        whole_results: bool,
    ):
        self.graph, self.costs, self.pins = graph, costs, pins
        self.whole_results = whole_results
        # What lies before and behind all layers is a part as well: only values that pass from part to part are seams.
        outside = len(graph.ops)
        self.layer_of = [outside if layer < 0 else layer for layer in layer_of or [-1] * outside]
        self.problem = Problem()

    def build(self) -> MeshProblem:
        graph, problem = self.graph, self.problem
        self.op_variables: list[int] = []
        self.op_choices: list[list[Strategy]] = []
        for index in range(len(graph.ops)):
            choices, table = self.costs.strategies(graph, index)
            variable = problem.variable(len(choices))
            problem.layers[variable] = self.layer_of[index]
            problem.add((variable,), table)
            self.op_variables.append(variable)
            self.op_choices.append(choices)
        self.preferences: dict[int, Table] = {}
        self.value_variables = [-1] * len(graph.values)
        self.value_layouts: list[tuple[Layout, ...]] = [()] * len(graph.values)
        for number in range(len(graph.values)):
            self._value(number)
        for number, value in enumerate(graph.values):
            if value.rewrites >= 0:
                self._tie(number, value.rewrites)
        return MeshProblem(
            graph,
            self.costs,
            problem,
            self.op_variables,
            self.op_choices,
            self.value_variables,
            self.value_layouts,
            self.preferences,
        )

    def _value(self, number: int) -> None:
        graph, problem, tables = self.graph, self.problem, self.costs.conversions
        value = graph.values[number]
        taken = [self.costs.side(graph, op, position, "operands") for op, position in value.uses]
        produced: tuple[Layout, ...] = ()
        maker = -1
        if value.producer >= 0:
            place = graph.ops[value.producer].results.index(number)
            produced = self.costs.side(graph, value.producer, place, "results")
            maker = self.op_variables[value.producer]
        layers = {self.layer_of[op] for op, _ in value.uses} | (
            {self.layer_of[value.producer]} if value.producer >= 0 else set()
        )
        if not self._needs_variable(number, value, layers):
            if value.uses:
                reader = self.op_variables[value.uses[0][0]]
                problem.add(
                    (maker, reader), tables.table(produced, taken[0], value.moved_bytes, value.inside)
                )
            return
        layouts = self._domain(number, value, produced, taken)
        variable = self.value_variables[number] = problem.variable(len(layouts))
        self.value_layouts[number] = layouts
        problem.layers[variable] = layers.pop() if len(layers) == 1 else -1
        if value.kind is not None:
            self.preferences[variable] = self._preference(value, layouts)
            problem.add((variable,), self.preferences[variable])
        if maker >= 0:
            problem.add((maker, variable), tables.table(produced, layouts, value.moved_bytes, value.inside))
        for (op, _), side in zip(value.uses, taken):
            table = tables.table(layouts, side, value.moved_bytes, value.inside)
            problem.add((variable, self.op_variables[op]), table)

    def _preference(self, value: PlanValue, layouts: tuple[Layout, ...]) -> Table:
        """Of plans that take equally long the one with the smallest arguments wins: a picosecond a mebibyte."""
        key = ("preference", layouts, value.nbytes)
        known = self.costs.tables.get(key)
        if known is None:
            parts = [layout.parts(self.costs.sizes) for layout in layouts]
            known = np.array([(value.nbytes // p) >> 20 for p in parts], dtype=np.int64)
            self.costs.tables[key] = known
        return known

    def _needs_variable(self, number: int, value: PlanValue, layers: set[int]) -> bool:
        return (
            value.kind is not None
            or value.returned
            or len(value.uses) > 1
            or value.rewrites >= 0
            or len(layers) > 1
            or number in self.pins
        )

    def _domain(
        self,
        number: int,
        value: PlanValue,
        produced: tuple[Layout, ...],
        taken: Sequence[tuple[Layout, ...]],
    ) -> tuple[Layout, ...]:
        """The layouts that a value may lie in: what readers take, what its operation makes, and whole."""
        rank = len(value.shape)
        found = dict.fromkeys([replicated(rank)])
        for side in taken:
            found.update(dict.fromkeys(side))
        for layout in produced:
            found[layout] = None
            found[Layout(layout.dims)] = None
        fixed = value.kind is not None or value.returned
        layouts = [x for x in found if not (fixed and x.pending)]
        if value.kind is not None:  # of layouts that cost the same the one that takes the least memory
            layouts.sort(key=lambda x: -x.parts(self.costs.sizes))
        if self.whole_results and value.returned and value.rewrites < 0 and value.kind is None:
            layouts = [replicated(rank)]
        pin = self.pins.get(number)
        return tuple(layouts) if pin is None else pin(tuple(layouts))

    def _tie(self, number: int, argument: int) -> None:
        """The new value of an argument lies as the argument."""
        mine, other = self.value_layouts[number], self.value_layouts[argument]
        key = ("tie", mine, other)
        table = self.costs.tables.get(key)
        if table is None:
            equal = [[x == y for y in other] for x in mine]
            table = self.costs.tables[key] = np.where(equal, 0, FORBIDDEN).astype(np.int64)
        self.problem.add((self.value_variables[number], self.value_variables[argument]), table)
