"""What the user decides: patterns of tensor names, and how those tensors must lie.

layers.*.q.weight=x,_        dimension 0 split over axis x, dimension 1 whole
*.keys=?,x+y,_,_             dimension 0 left to the planner, dimension 1 over x and, inside of it, y
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from topo_opt.errors import InputError, OptionError
from topo_opt.sharding.plan_graph import PlanGraph, PlanValue
from topo_opt.sharding.plan_problem import Pin
from topo_opt.sharding.spec import Mesh
from topo_opt.sharding.strategies import Axes, Layout

FREE = "?"
WHOLE = "_"


@dataclass(frozen=True)
class ShardingPin:
    """Tensors whose name matches `pattern` (`*` and `?` as in file names) lie as `dims` says: axes of every dimension, None for any."""

    pattern: str
    dims: tuple[tuple[str, ...] | None, ...]

    @classmethod
    def parse(cls, text: str) -> ShardingPin:
        """The pin in text as above.

        Raises:
            OptionError: it has no pattern or no dimensions.
        """
        pattern, equals, spec = text.rpartition("=")
        if not equals or not pattern or not spec:
            raise OptionError(
                f"'{text}' is no pin of a sharding", hint="write PATTERN=axis,_ with one entry a dimension"
            )
        return cls(pattern, tuple(_dimension(entry.strip(), text) for entry in spec.split(",")))

    def __str__(self) -> str:
        entries = (FREE if d is None else "+".join(d) or WHOLE for d in self.dims)
        return f"{self.pattern}={','.join(entries)}"


def _dimension(entry: str, text: str) -> tuple[str, ...] | None:
    if entry == FREE:
        return None
    if entry == WHOLE:
        return ()
    axes = tuple(entry.split("+"))
    if not all(axis.isidentifier() for axis in axes):
        raise OptionError(
            f"'{entry}' in '{text}' is no axis", hint="use axis names joined by +, _ for whole, ? for any"
        )
    return axes


def resolve(pins: Iterable[ShardingPin], graph: PlanGraph, mesh: Mesh) -> Mapping[int, Pin]:
    """The pins of every value of the graph; where several patterns match the last one counts.

    Raises:
        InputError: a pattern that matches nothing, a wrong number of dimensions, an axis that the mesh does not have or
            that is used twice, or a dimension that does not divide.
    """
    found: dict[int, Pin] = {}
    for pin in pins:
        matched = [i for i, value in enumerate(graph.values) if fnmatchcase(value.name, pin.pattern)]
        if not matched:
            names = sorted({v.name for v in graph.values if v.kind is not None})
            raise InputError(
                f"no tensor matches '{pin.pattern}'", hint=f"there are {', '.join(names[:4])}, ..."
            )
        for number in _results(graph, matched):
            found[number] = _pin(pin, graph.values[number], mesh)
    return found


def _results(graph: PlanGraph, matched: Sequence[int]) -> Sequence[int]:
    """Without what operators compute on their way, such as a bias in its storage type, which bears the name of the result: that is
    the last value of a name, and what else has its shape."""
    shapes = {graph.values[number].name: graph.values[number].shape for number in matched}

    def counts(number: int) -> bool:
        value = graph.values[number]
        return value.kind is not None or value.shape == shapes[value.name]

    return [number for number in matched if counts(number)]


def _pin(pin: ShardingPin, value: PlanValue, mesh: Mesh) -> Pin:
    if len(pin.dims) != len(value.shape):
        raise InputError(
            f"'{pin}' has {len(pin.dims)} dimensions, '{value.name}' is {list(value.shape)}",
            hint="give one entry a dimension",
        )
    numbers = {name: i for i, (name, _) in enumerate(mesh.axes)}
    dims: list[Axes | None] = []
    for axes in pin.dims:
        unknown = [a for a in axes or () if a not in numbers]
        if unknown:
            raise InputError(f"'{pin}' splits over '{unknown[0]}'", hint=f"the mesh has {', '.join(numbers)}")
        single = [a for a in axes or () if mesh.axes[numbers[a]][1] == 1]
        if single:
            raise InputError(
                f"'{pin}' splits over '{single[0]}', along which there is one device",
                hint="give a mesh with more devices along it, or leave the pin out",
            )
        dims.append(None if axes is None else tuple(numbers[a] for a in axes))
    used = [a for axes in dims for a in axes or ()]
    if len(set(used)) != len(used):
        raise InputError(f"'{pin}' uses an axis twice", hint="an axis splits one dimension")
    _check_divides(pin, value, mesh, dims)
    if None not in dims:
        only = Layout(tuple(d for d in dims if d is not None))
        return lambda layouts: (only,)

    def select(layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        kept = tuple(x for x in layouts if all(d is None or d == h for d, h in zip(dims, x.dims)))
        return kept or (Layout(tuple(d or () for d in dims)),)

    return select


def _check_divides(pin: ShardingPin, value: PlanValue, mesh: Mesh, dims: list[Axes | None]) -> None:
    for d, axes in enumerate(dims):
        parts = math.prod(mesh.shape[a] for a in axes or ())
        if value.shape[d] % parts:
            nearest = max(p for p in range(1, parts + 1) if value.shape[d] % p == 0)
            raise InputError(
                f"'{pin}': dimension {d} of '{value.name}' {list(value.shape)} does not divide into {parts} parts",
                hint=f"the nearest number that divides {value.shape[d]} is {nearest}",
            )
