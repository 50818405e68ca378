"""Filling in shardings: from what is annotated to everything else, by the rules of the ops.

What is annotated stays. Sweeps over the functions, forwards and backwards in turn, give every op the assignment that agrees with
the tensors around it, the annotated ones before weights, weights before other tensors, larger ones before smaller ones; and give
tensors that are open the axes that the assignment has for them, until nothing changes.

A reduction that is split never splits its result over the same axis, so no sharding travels through it; a tensor is
not taken back to a copy by a reader that wants one. Both keep gathers out that nobody asked for: a product whose inner
dimension is split leaves one sum of the size of its local result.

Parameters and state of one name lie the same way in all functions, and so do a state buffer and its new value. What the caller gets
lies as it is computed unless an annotation says otherwise; inputs that are rewritten are whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from topo_opt.errors import InputError
from topo_opt.sharding.annotate import RETURN, Annotations
from topo_opt.sharding.not_split import tell
from topo_opt.sharding.rule import DimFactors, Rule
from topo_opt.sharding.rule_assignment import Assignment, Axes, assign, axes_of
from topo_opt.sharding.rules import FREE_OPS, sharding_rules
from topo_opt.sharding.signature import slots
from topo_opt.sharding.spec import Mesh, Sharding
from topo_opt.structured.graph import Graph, Node

_SHARED_KINDS = ("param", "buffer", "constant")
_MOST_SWEEPS = 64


@dataclass
class _Function:
    """A function on the way: `dims` of values that have axes or are fixed; of the others nothing is known."""

    graph: Graph
    rules: list[Rule]
    given: Annotations
    dims: dict[int, tuple[Axes, ...]] = field(default_factory=dict)
    fixed: set[int] = field(default_factory=set)
    terms: dict[int, Sharding] = field(default_factory=dict)
    """Annotated values that lie as terms of a sum."""
    names: dict[int, str] = field(default_factory=dict)
    """Arguments that are one tensor in all functions, and new values of them."""
    returns: dict[int, Sharding] = field(default_factory=dict)
    """Returned position -> how it is returned, where that is fixed."""
    free: set[int] = field(default_factory=set)
    is_weight: set[int] = field(default_factory=set)


def propagate(functions: Sequence[tuple[Graph, Annotations]], mesh: Mesh) -> list[Annotations]:
    """Complete annotations of the functions of a module.

    Raises:
        InputError: an annotation that does not fit its tensor, with the numbers; or two for tensors that must lie alike.
    """
    prepared = [_prepared(graph, given, mesh) for graph, given in functions]
    shared: dict[str, tuple[Axes, ...]] = {}
    fixed_names: dict[str, tuple[Axes, ...]] = {}
    for function in prepared:
        for value, name in function.names.items():
            if value in function.fixed:
                dims = function.dims[value]
                if fixed_names.setdefault(name, dims) != dims:
                    raise InputError(f"'{name}' is annotated as {fixed_names[name]} and as {dims}")
    for function in prepared:
        for value, name in function.names.items():
            if name in fixed_names:
                function.dims[value] = fixed_names[name]
                function.fixed.add(value)
    for sweep in range(_MOST_SWEEPS):
        changed = False
        for function in prepared:
            changed |= _exchange(function, shared)
            changed |= _sweep(function, mesh, backwards=bool(sweep % 2))
            changed |= _exchange(function, shared)
        # Both directions have found nothing more.
        if not changed and sweep % 2:
            break
    return [_finished(function, mesh) for function in prepared]


def _prepared(graph: Graph, given: Annotations, mesh: Mesh) -> _Function:
    function = _Function(graph, sharding_rules(graph), given)
    for node in graph.nodes:
        if node.name in FREE_OPS:
            function.free.update(node.results)
    for value, sharding in given.values.items():
        check_fit(graph, value, sharding, mesh)
        if sharding.partial:
            function.terms[value] = sharding
        function.dims[value] = sharding.dims
        function.fixed.add(value)
    for (reader, operand), sharding in given.uses.items():
        value = graph.returns[operand] if reader == RETURN else graph.nodes[reader].operands[operand]
        check_fit(graph, value, sharding, mesh)
    _bind_arguments(function)
    return function


def _bind_arguments(function: _Function) -> None:
    graph, given = function.graph, function.given
    arguments, results = slots(graph.func, "arguments"), slots(graph.func, "results")
    kinds = {slot.name: slot.kind for slot in arguments if slot.name is not None}
    rewritten = {slot.name for slot in results if slot.kind == "mutation"}
    for value, slot in zip(graph.arguments, arguments, strict=True):
        if slot.kind in _SHARED_KINDS and slot.name is not None:
            function.names[value] = slot.name
            function.is_weight.add(value)
        is_rewritten = slot.kind not in _SHARED_KINDS and slot.name in rewritten
        if (is_rewritten or slot.kind == "coordinate") and value not in function.fixed:
            function.dims[value] = ((),) * len(graph.values[value].shape or ())
            function.fixed.add(value)
    for position, (value, slot) in enumerate(zip(graph.returns, results, strict=True)):
        said = given.uses.get((RETURN, position))
        if said is not None:
            function.returns[position] = said
        elif slot.kind == "mutation" and slot.name is not None and kinds.get(slot.name) in _SHARED_KINDS:
            function.names.setdefault(value, slot.name)
        elif slot.kind == "mutation":
            function.returns[position] = Sharding.replicated(len(graph.values[value].shape or ()))


def check_fit(graph: Graph, value: int, sharding: Sharding, mesh: Mesh, name: str = "") -> None:
    """Whether a tensor, `name` where it has one, can be split so.

    Raises:
        ShardingFault: another number of dimensions, or one with fewer elements than there are devices to split it over.
    """
    shape = graph.values[value].shape
    if shape is None or len(sharding.dims) != len(shape):
        raise ShardingFault(
            f"a sharding of {len(sharding.dims)} dimensions stands at a value of type {graph.handles[value].type}",
            location=_location(graph, value),
        )
    for dim, axes in enumerate(sharding.dims):
        if shape[dim] < mesh.size(axes) > 1:
            raise ShardingFault(
                f"{name or graph.handles[value].type} cannot be split as {describe(sharding)}: dimension {dim} of {list(shape)} has fewer "
                f"elements than {'x'.join(axes)} has devices ({mesh.size(axes)})",
                location=_location(graph, value),
                hint=_fewer(shape[dim], mesh),
            )


def _fewer(size: int, mesh: Mesh) -> str:
    """Over what a dimension of this size can be split on a mesh."""
    fitting = [
        axes
        for count in range(1, len(mesh.axes) + 1)
        for axes in combinations([a for a, _ in mesh.axes], count)
        if 1 < mesh.size(axes) <= size
    ]
    text = ", ".join(f"{a}={n}" for a, n in mesh.axes)
    if not fitting:
        return f"no axis of the mesh ({text}) has at most {size} devices: leave the dimension whole"
    nearest = max(fitting, key=mesh.size)
    return f"the mesh is {text}; over {'+'.join(nearest)} ({mesh.size(nearest)} devices) it can be split"


class ShardingFault(InputError):
    """A sharding that does not fit; `location` is that of the op whose result it is about, or of the function."""

    def __init__(self, message: str, *, location: Any, hint: str | None = None):
        super().__init__(message, hint=hint)
        self.location = location


def _location(graph: Graph, value: int) -> Any:
    producer = graph.producer(value)
    return (graph.func if producer is None else producer.op).location


def describe(sharding: Sharding) -> str:
    """`data,_` as on the command line: the axes of every dimension, `+` between several of one, `_` for none."""
    return ",".join("+".join(axes) or "_" for axes in sharding.dims) or "a scalar"


def _exchange(function: _Function, shared: dict[str, tuple[Axes, ...]]) -> bool:
    """Tensors of one name tell each other what is known of them."""
    changed = False
    for value, name in function.names.items():
        mine = function.dims.get(value)
        known = shared.get(name)
        if mine is not None and (known is None or value in function.fixed or _finer(mine, known)):
            shared[name] = mine
        elif known is not None and mine != known and value not in function.fixed:
            function.dims[value] = known
            changed = True
    return changed


def _finer(one: tuple[Axes, ...], other: tuple[Axes, ...]) -> bool:
    """Whether the first splits all that the second splits, and more."""
    return one != other and all(a[: len(b)] == b for a, b in zip(one, other, strict=True))


def _sweep(function: _Function, mesh: Mesh, *, backwards: bool) -> bool:
    changed = False
    nodes = function.graph.nodes
    for node in reversed(nodes) if backwards else nodes:
        if node.name in FREE_OPS:
            continue
        rule = function.rules[node.id]
        assignment = _assignment(function, node, rule, mesh)
        for value, dims in _tensors(node, rule):
            changed |= _refine(function, value, axes_of(dims, assignment))
    return changed


def _tensors(node: Node, rule: Rule) -> Iterator[tuple[int, DimFactors]]:
    yield from zip(node.operands, rule.operands, strict=True)
    yield from zip(node.results, rule.results, strict=True)


def _refine(function: _Function, value: int, wanted: tuple[Axes, ...]) -> bool:
    """Gives an open value more axes; whether that changed it."""
    if value in function.fixed or value in function.free or not any(wanted):
        return False
    known = function.dims.get(value)
    if known is None or _finer(wanted, known):
        function.dims[value] = wanted
        return True
    return False


def _assignment(function: _Function, node: Node, rule: Rule, mesh: Mesh) -> dict[int, Axes]:
    """What agrees with the tensors around a node, by their order."""
    graph, given = function.graph, function.given
    ranked: list[tuple[tuple[bool, bool, bool, int], DimFactors, tuple[Axes, ...]]] = []
    for position, (value, dims) in enumerate(zip(node.operands, rule.operands, strict=True)):
        use = given.uses.get((node.id, position))
        known = use.dims if use is not None else function.dims.get(value)
        if known is not None:
            pinned = use is not None or value in given.values
            weight = value in function.is_weight
            ranked.append(((not pinned, not weight, False, -graph.values[value].nbytes), dims, known))
    for value, dims in zip(node.results, rule.results, strict=True):
        known = function.dims.get(value)
        if known is not None:
            pinned = value in given.values
            ranked.append(((not pinned, True, True, -graph.values[value].nbytes), dims, known))
    ranked.sort(key=lambda entry: entry[0])
    uses = (given.uses.get((node.id, position)) for position in range(len(node.operands)))
    terms = tuple(axis for use in uses if use is not None for axis in use.partial)
    return assign(rule, [(dims, known) for _, dims, known in ranked], mesh, terms)


def _finished(function: _Function, mesh: Mesh) -> Annotations:
    graph = function.graph
    found = Annotations()
    for value, info in enumerate(graph.values):
        if info.shape is None or value in function.free:
            continue
        lies = Sharding(function.dims.get(value, ((),) * len(info.shape)))
        found.values[value] = function.terms.get(value, lies)
    for node in graph.nodes:
        if node.name in FREE_OPS:
            continue
        rule = function.rules[node.id]
        assignment: Assignment = _assignment(function, node, rule, mesh)
        for position, (value, dims) in enumerate(zip(node.operands, rule.operands, strict=True)):
            if graph.values[value].shape is not None:
                given = function.given.uses.get((node.id, position))
                terms = given.partial if given is not None else ()
                found.uses[node.id, position] = Sharding(axes_of(dims, assignment), terms)
        _keep_uncovered(function, node, rule, assignment, found)
    for position, value in enumerate(graph.returns):
        if graph.values[value].shape is not None:
            found.uses[RETURN, position] = function.returns.get(
                position, found.values.get(value)
            ) or Sharding.replicated(len(graph.values[value].shape or ()))
    tell(graph, function.rules, found, set(function.given.values), mesh)
    return found


def _keep_uncovered(
    function: _Function, node: Node, rule: Rule, assignment: Assignment, found: Annotations
) -> None:
    """An op leaves its results as its assignment says; a value that no annotation asks to lie otherwise lies so."""
    for value, dims in zip(node.results, rule.results, strict=True):
        if value not in function.fixed and function.graph.values[value].shape is not None:
            found.values[value] = Sharding(axes_of(dims, assignment))
