"""Meshes of devices and shardings of tensors, as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Combiner = Literal["add", "mul", "max", "min", "or", "and"]


@dataclass(frozen=True)
class Mesh:
    """Devices in a grid with named axes; `devices` are ids of the topology in row-major order."""

    axes: tuple[tuple[str, int], ...]
    devices: tuple[str, ...]
    name: str = "mesh"

    def __post_init__(self) -> None:
        names = [axis for axis, _ in self.axes]
        if len(set(names)) != len(names):
            raise ValueError(f"axes {names} are not distinct")
        if math.prod(size for _, size in self.axes) != len(self.devices):
            raise ValueError(f"a mesh of {dict(self.axes)} does not hold {len(self.devices)} devices")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    def size(self, axes: Sequence[str]) -> int:
        """How many parts a dimension split over these axes has."""
        sizes = dict(self.axes)
        return math.prod(sizes[axis] for axis in axes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Position of the device with that number (row-major) on every axis."""
        position = []
        for size in reversed(self.shape):
            rank, place = divmod(rank, size)
            position.append(place)
        return tuple(reversed(position))

    def groups(self, axes: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """The groups of devices that differ only on these axes; a group is in the order of its axes, the first one major."""
        names = [axis for axis, _ in self.axes]
        moving = [names.index(axis) for axis in axes]
        members: dict[tuple[int, ...], list[tuple[tuple[int, ...], str]]] = {}
        for rank, device in enumerate(self.devices):
            place = self.coordinates(rank)
            fixed = tuple(p for i, p in enumerate(place) if i not in moving)
            members.setdefault(fixed, []).append((tuple(place[i] for i in moving), device))
        return tuple(tuple(device for _, device in sorted(group)) for group in members.values())


@dataclass(frozen=True)
class Sharding:
    """How a tensor lies on a mesh.

    `dims` names, for every dimension, the axes it is split over, the major one first. Over the axes in `partial` every
    device holds a term, and the tensor is what `combiner` makes of all terms. Axes named nowhere hold copies.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()
    combiner: Combiner = "add"

    def __post_init__(self) -> None:
        used = [axis for axes in self.dims for axis in axes] + list(self.partial)
        if len(set(used)) != len(used):
            raise ValueError(f"an axis is used twice in {self.dims} with partial {self.partial}")

    @classmethod
    def replicated(cls, rank: int) -> Sharding:
        """A copy of a tensor with `rank` dimensions on every device."""
        return cls(((),) * rank)

    @property
    def is_replicated(self) -> bool:
        return not self.partial and not any(self.dims)

    def local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """The shape of one device's part: n elements in p parts are ceil(n / p), of which the last devices have fewer, and padding."""
        return tuple(-(-size // mesh.size(axes)) for size, axes in zip(shape, self.dims, strict=True))


@dataclass(frozen=True)
class ShardingPlan:
    """How one function is split over one mesh. Values and nodes are numbers of `structured.graph.read(func)`.

    A value is produced in the sharding that its op's assignment gives, converted once into the one in which it lies
    (`shardings`), and from there, where they differ, into what each reader takes, which its assignment gives again.
    """

    mesh: Mesh
    shardings: Mapping[int, Sharding]
    """How every tensor lies, function arguments and returned values included. What is made anew at every use (fills,
    constants) is not listed."""
    assignments: Mapping[int, Mapping[int, tuple[str, ...]]]
    """Node -> factor of its rule -> the axes over which it is split, the major one first. Factors that are whole are not listed."""
    terms: Mapping[int, tuple[str, ...]]
    """Node -> axes over which it takes its operands as terms of a sum and leaves its result so. Every element of such a
    sum is held by one device at most, the others hold zero, and the op gives zero for zeros."""
    seconds: float
    """Predicted time of one call."""
    memory_bytes: Mapping[str, int]
    """Device -> parameters, state, inputs and the most that intermediate results take at one time."""
    notes: tuple[str, ...] = ()
