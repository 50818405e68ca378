"""Which collectives turn one sharding of a tensor into another, and the ops that say so.

The steps are planned on plain values: what costs nothing comes first, the cut of a dimension; then partial terms are joined, by a reduce-scatter where the tensor is wanted split over
the same axes, then axes move from one dimension to another (all-to-all), and last what is split too far is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch_mlir import ir

from topo_opt.sharding.rule_assignment import Axes
from topo_opt.sharding.spec import Combiner, Mesh, Sharding

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "all_slice"]

REDUCTIONS: dict[Combiner, str] = {
    "add": "sum",
    "mul": "product",
    "max": "max",
    "min": "min",
    "or": "bitwise_or",
    "and": "bitwise_and",
}
"""Combiner -> upstream's name of the reduction."""

COLLECTIVES = ("shard.all_reduce", "shard.reduce_scatter", "shard.all_gather", "shard.all_to_all")
"""Ops that communicate. `shard.all_slice` is local."""


@dataclass(frozen=True)
class Step:
    """One collective over `axes`, the major one first. `dim` is gathered, scattered or cut; an all-to-all cuts `dim` and joins `source`."""

    kind: Kind
    axes: Axes
    dim: int = 0
    source: int = 0
    combiner: Combiner = "add"


def steps(have: Sharding, want: Sharding, uneven: frozenset[int] = frozenset()) -> list[Step]:
    """How to get from one sharding to another. Terms that both have stay terms.

    Dimensions that are `uneven` in either are split by all their axes at once, and put together from all of them: what a device has over
    some of its axes is no part of what it has over fewer.

    Where terms are wanted of a tensor of which every device has a copy, the copy will do: who takes terms asks for the elements that it owns
    and for no others.
    """
    dims = [list(axes) for axes in have.dims]
    found = _cut(dims, want, uneven, taken=have.partial)
    found += _join(have, want, dims, uneven)
    found += _cut(dims, want, uneven, taken=want.partial)
    while moved := _move(dims, want, uneven):
        found.append(moved)
    found += _cut(dims, want, uneven)
    found += _gather(dims, want, uneven)
    return found + _cut(dims, want, uneven)


def _join(have: Sharding, want: Sharding, dims: list[list[str]], uneven: frozenset[int]) -> list[Step]:
    found: list[Step] = []
    waiting = [axis for axis in have.partial if axis not in want.partial]
    for dim, axes in enumerate(want.dims):
        start = len(dims[dim])
        run = []
        for axis in axes[start:]:
            if axis not in waiting:
                break
            run.append(axis)
        if dim in uneven and (start or len(run) < len(axes)):
            continue
        if run and list(axes[:start]) == dims[dim]:
            found.append(Step("reduce_scatter", tuple(run), dim, combiner=have.combiner))
            dims[dim] += run
            waiting = [axis for axis in waiting if axis not in run]
    if waiting:
        found.append(Step("all_reduce", tuple(waiting), combiner=have.combiner))
    return found


def _move(dims: list[list[str]], want: Sharding, uneven: frozenset[int]) -> Step | None:
    """The inner axes of a dimension that are wanted next in another one, as many as there are."""
    for source, axes in enumerate(dims):
        kept = _kept(source, axes, want.dims[source], uneven)
        for first in range(kept, len(axes)):
            run = axes[first:]
            if source in uneven and first:
                break
            for dim, wanted in enumerate(want.dims):
                moved = [*dims[dim], *run]
                if dim in uneven and (dims[dim] or moved != list(wanted)):
                    continue
                if dim != source and list(wanted[: len(moved)]) == moved:
                    dims[source], dims[dim] = axes[:first], moved
                    return Step("all_to_all", tuple(run), dim, source)
    return None


def _shared(axes: Sequence[str], wanted: Sequence[str]) -> int:
    """How many axes two dimensions have in common, from the outer one on."""
    return next((i for i, (a, b) in enumerate(zip(axes, wanted)) if a != b), min(len(axes), len(wanted)))


def _kept(dim: int, axes: Sequence[str], wanted: Sequence[str], uneven: frozenset[int]) -> int:
    """How many of its axes a dimension keeps."""
    shared = _shared(axes, wanted)
    return shared if dim not in uneven or len(axes) == len(wanted) == shared else 0


def _cut(dims: list[list[str]], want: Sharding, uneven: frozenset[int], taken: Axes = ()) -> list[Step]:
    """Cuts by axes that no other dimension and none of `taken` has."""
    found = []
    for dim, wanted in enumerate(want.dims):
        here = dims[dim]
        elsewhere = {*taken, *(axis for d, axes in enumerate(dims) if d != dim for axis in axes)}
        more: list[str] = []
        for axis in wanted[len(here) :]:
            if axis in elsewhere:
                break
            more.append(axis)
        if dim in uneven and (here or len(more) < len(wanted)):
            continue
        if more and list(wanted[: len(here)]) == here:
            found.append(Step("all_slice", tuple(more), dim))
            here += more
    return found


def _gather(dims: list[list[str]], want: Sharding, uneven: frozenset[int]) -> list[Step]:
    found = []
    for dim, wanted in enumerate(want.dims):
        here = dims[dim]
        kept = _kept(dim, here, wanted, uneven)
        if kept < len(here):
            found.append(Step("all_gather", tuple(here[kept:]), dim))
            del here[kept:]
    return found


def emit(value: ir.Value, step: Step, mesh: Mesh) -> ir.Value:
    """The op of a step at the insertion point; its result is the local tensor afterwards."""
    kind = ir.RankedTensorType(value.type)
    shape = list(kind.shape)
    parts = mesh.size(step.axes)
    names = [axis for axis, _ in mesh.axes]
    axes = ", ".join(str(names.index(axis)) for axis in step.axes)
    attributes = {
        "grid": ir.FlatSymbolRefAttr.get(mesh.name),
        "grid_axes": ir.Attribute.parse(f"array<i16: {axes}>"),
    }
    index = ir.IndexType.get()
    dim = ir.IntegerAttr.get(index, step.dim)
    if step.kind in ("all_reduce", "reduce_scatter"):
        attributes["reduction"] = ir.Attribute.parse(f"#shard<partial {REDUCTIONS[step.combiner]}>")
    if step.kind == "all_gather":
        attributes["gather_axis"] = dim
        shape[step.dim] *= parts
    elif step.kind == "all_to_all":
        attributes["split_axis"], attributes["concat_axis"] = dim, ir.IntegerAttr.get(index, step.source)
        shape[step.dim] //= parts
        shape[step.source] *= parts
    elif step.kind in ("reduce_scatter", "all_slice"):
        attributes["scatter_dim" if step.kind == "reduce_scatter" else "slice_axis"] = dim
        shape[step.dim] //= parts
    result = ir.RankedTensorType.get(shape, kind.element_type)
    return ir.Operation.create(f"shard.{step.kind}", [result], [value], attributes).results[0]


def read(op: ir.Operation, mesh: Mesh) -> Step:
    """The step that an op of `emit` says."""
    names = [axis for axis, _ in mesh.axes]
    attributes = op.attributes
    text = str(attributes["grid_axes"]).removeprefix("array<i16").removesuffix(">").lstrip(":")
    axes = tuple(names[int(n)] for n in text.split(",") if n.strip())
    kind: Kind = op.name.removeprefix("shard.")  # type: ignore[assignment]
    numbers = {name: ir.IntegerAttr(attributes[name]).value for name in _DIMS if name in attributes}
    combiner: Combiner = "add"
    if "reduction" in attributes:
        word = str(attributes["reduction"]).removeprefix("#shard<partial ").removesuffix(">")
        combiner = next(c for c, name in REDUCTIONS.items() if name == word)
    source = numbers.pop("concat_axis", 0)
    return Step(kind, axes, next(iter(numbers.values()), 0), source, combiner)


_DIMS = ("gather_axis", "split_axis", "concat_axis", "scatter_dim", "slice_axis")


def position_terms(mesh: Mesh, axes: Sequence[str]) -> list[tuple[int, int]]:
    """(place of an axis in the mesh, step): the position of a device in its group is the sum of coordinate times step."""
    names = [axis for axis, _ in mesh.axes]
    found, step = [], 1
    for axis in reversed(axes):
        found.append((names.index(axis), step))
        step *= mesh.size([axis])
    return found[::-1]
