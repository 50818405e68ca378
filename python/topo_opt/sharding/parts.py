"""Which part of a tensor a device holds, by the sharding of the tensor and the coordinates of the device."""

from __future__ import annotations

from collections.abc import Sequence

from topo_opt.sharding.spec import Mesh

Dims = Sequence[Sequence[str]]
"""For every dimension the axes that split it, the major one first."""


def position(mesh: Mesh, axes: Sequence[str], rank: int) -> int:
    """Place of a device in its group over `axes`, which is in row-major order of these axes."""
    names = [axis for axis, _ in mesh.axes]
    place = mesh.coordinates(rank)
    found = 0
    for axis in axes:
        found = found * mesh.size([axis]) + place[names.index(axis)]
    return found


def part(dims: Dims, shape: Sequence[int], mesh: Mesh, rank: int) -> tuple[tuple[int, int], ...]:
    """(first, count) along every dimension of a tensor of this global shape: what device `rank` holds.

    Of n elements in p parts every device has room for ceil(n / p); the last ones hold fewer, or none.

    Raises:
        ValueError: another number of dimensions.
    """
    found = []
    for axes, size in zip(dims, shape, strict=True):
        room = -(-size // mesh.size(axes))
        first = min(position(mesh, axes, rank) * room, size)
        found.append((first, min(room, size - first)))
    return tuple(found)


def global_shape(
    dims: Dims, local: Sequence[int], mesh: Mesh, whole: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The shape of the tensor of which `local` is the shape of one part: `whole` where that does not divide."""
    if whole is not None:
        return tuple(whole)
    return tuple(size * mesh.size(axes) for axes, size in zip(dims, local, strict=True))


def groups(mesh: Mesh, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """`Mesh.groups` by the numbers of the devices."""
    numbers = {device: rank for rank, device in enumerate(mesh.devices)}
    return tuple(tuple(numbers[device] for device in group) for group in mesh.groups(axes))
