"""Meshes and shardings as a user writes them: `data=2,model=4`, and `layers.*.q.weight=model,_` for tensors by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from topo_opt.errors import InputError, OptionError
from topo_opt.sharding.annotate import RETURN, Annotations
from topo_opt.sharding.propagate import check_fit, describe
from topo_opt.sharding.signature import slots
from topo_opt.sharding.spec import Mesh, Sharding
from topo_opt.structured.graph import Graph

_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MOST_DEVICES = 1 << 16


@dataclass(frozen=True)
class Pattern:
    """Tensors whose name matches `name` (`*` and `?` as in file names), and the axes of each of their dimensions."""

    name: str
    dims: tuple[tuple[str, ...], ...]

    @property
    def text(self) -> str:
        return f"{self.name}={describe(Sharding(self.dims))}"


def parse_mesh(text: str, devices: Sequence[str] = ()) -> Mesh:
    """A mesh from `data=2,model=4`, the outer axis first.

    Args:
        devices: ids of the devices in row-major order; numbers when there are none.

    Raises:
        OptionError: another form.
        InputError: another number of devices.
    """
    axes = []
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not equals or not _AXIS.fullmatch(name) or not size.isdigit() or int(size) < 1:
            raise OptionError(
                f"'{part.strip()}' is no axis of a mesh", hint="expected NAME=SIZE, such as data=2,model=4"
            )
        axes.append((name, int(size)))
    count = prod(size for _, size in axes)
    if count > MOST_DEVICES:
        raise OptionError(f"a mesh of {count} devices is larger than {MOST_DEVICES}")
    if devices and len(devices) < count:
        raise InputError(
            f"a mesh of {count} devices ({text}) does not fit a machine with {len(devices)}",
            hint="choose a smaller mesh or a larger topology",
        )
    try:
        return Mesh(tuple(axes), tuple(devices[:count]) or tuple(str(i) for i in range(count)))
    except ValueError as error:
        raise OptionError(f"mesh '{text}': {error}") from None


def parse_patterns(text: str) -> list[Pattern]:
    """Patterns separated by `;`.

    Raises:
        OptionError: one that has another form.
    """
    return [parse_pattern(part) for part in text.split(";") if part.strip()]


def parse_pattern(text: str) -> Pattern:
    """`layers.*.q.weight=model,_`: a name and for each dimension its axes, `+` between several, `_` for none.

    Raises:
        OptionError: another form.
    """
    name, equals, dims = text.strip().rpartition("=")
    parts = [part.strip() for part in dims.split(",")]
    split = [() if part == "_" else tuple(part.split("+")) for part in parts]
    if not equals or not name or not all(_AXIS.fullmatch(axis) for axes in split for axis in axes):
        raise OptionError(
            f"'{text.strip()}' does not say how a tensor is split",
            hint="expected NAME=AXIS,... with one entry a dimension, such as 'layers.*.q.weight=model,_'",
        )
    used = [axis for axes in split for axis in axes]
    if len(set(used)) != len(used):
        raise OptionError(f"'{text.strip()}' splits two dimensions over one axis")
    return Pattern(name.strip(), tuple(split))


def annotate_names(
    functions: Sequence[tuple[Graph, Annotations]], patterns: Sequence[Pattern], mesh: Mesh
) -> None:
    """Annotates arguments, and results as `output.0`, that patterns name; the last pattern that matches holds.

    Raises:
        InputError: a pattern that matches nothing, another number of dimensions, or an axis that the mesh lacks.
    """
    axes = {axis for axis, _ in mesh.axes}
    matched: set[Pattern] = set()
    names: set[str] = set()
    for pattern in patterns:
        if lacking := sorted({a for dim in pattern.dims for a in dim} - axes):
            raise InputError(
                f"'{pattern.text}' names the axis '{lacking[0]}'",
                hint=f"the mesh has {', '.join(sorted(axes))}",
            )
    for graph, found in functions:
        for value, slot in zip(graph.arguments, slots(graph.func, "arguments"), strict=True):
            name = slot.name or ""
            names.add(name)
            for pattern in patterns:
                if fnmatchcase(name, pattern.name):
                    found.values[value] = _fitting(pattern, name, graph, value, mesh)
                    matched.add(pattern)
        for position, (value, slot) in enumerate(
            zip(graph.returns, slots(graph.func, "results"), strict=True)
        ):
            if slot.kind not in (None, "output"):
                continue
            name = f"output.{slot.name or position}"
            names.add(name)
            for pattern in patterns:
                if fnmatchcase(name, pattern.name):
                    found.uses[RETURN, position] = _fitting(pattern, name, graph, value, mesh)
                    matched.add(pattern)
    for pattern in patterns:
        if pattern not in matched:
            some = ", ".join(sorted(names)[:8])
            raise InputError(
                f"no tensor is named '{pattern.name}'",
                hint=f"there are {some}{', ...' if len(names) > 8 else ''}",
            )


def _fitting(pattern: Pattern, name: str, graph: Graph, value: int, mesh: Mesh) -> Sharding:
    shape = graph.values[value].shape or ()
    if len(pattern.dims) != len(shape):
        raise InputError(
            f"'{pattern.text}' has {len(pattern.dims)} dimensions, '{name}' is of shape {list(shape)}"
        )
    sharding = Sharding(pattern.dims)
    check_fit(graph, value, sharding, mesh, f"'{name}'")
    return sharding


def keep_results_whole(graph: Graph, annotations: Annotations) -> None:
    """Every device returns all of what no annotation asks otherwise of. New values of state lie as the state does."""
    for position, (value, slot) in enumerate(zip(graph.returns, slots(graph.func, "results"), strict=True)):
        shape = graph.values[value].shape
        if shape is not None and slot.kind in (None, "output") and value not in annotations.values:
            annotations.uses.setdefault((RETURN, position), Sharding.replicated(len(shape)))
