"""Meshes worth planning for: which devices, in which order, along which axes.

Devices are clustered by how near the link graph puts them: NVLink islands, PCIe switches, root complexes, nodes. Written
down cluster by cluster, neighbours in the order are near each other, so that the last axis of a mesh stays inside the
smallest clusters and the first one crosses the slowest links. A mesh that prices collectives along its axes as another one
does is that one again. Where a cluster is not uniform (a link is down, some pairs have more links than others) devices are
exchanged as long as that makes the collectives along the axes cheaper.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from topo_opt.errors import InputError
from topo_opt.sharding.cost import Prices, picoseconds
from topo_opt.sharding.spec import Mesh

Closeness = dict[tuple[str, str], tuple[int, float]]
"""Pair of devices that a route connects -> (rank of the path class, inverse of the route's rate): the smaller, the nearer."""

APART = (1 << 30, math.inf)
"""Of pairs that no route connects."""
PROBE_BYTES = (65_536, 67_108_864)
"""Sizes by which axes are compared: one bound by latency, one by bandwidth."""
AXIS_NAMES = ("x", "y", "z", "w")
MAX_SEARCHED = 16
"""Devices of a mesh up to which orders inside an uneven cluster are searched."""


@dataclass(frozen=True)
class Cluster:
    """Devices that are nearer to each other than to all others; `parts` are the clusters within."""

    devices: tuple[str, ...]
    parts: tuple[Cluster, ...] = ()


def cluster(devices: Sequence[str], closeness: Closeness) -> Cluster:
    """The nested clusters of `devices`: at every level those that links of that closeness connect."""
    pairs = (_pair(a, b) for a, b in itertools.combinations(devices, 2))
    levels = sorted({closeness[pair] for pair in pairs if pair in closeness})
    current = [Cluster((d,)) for d in devices]
    for level in levels:
        current = _joined(current, closeness, level)
        if len(current) == 1:
            break
    if len(current) > 1:
        names = ["{" + ", ".join(c.devices[:4]) + "}" for c in current]
        raise InputError(
            f"no links lead from {names[0]} to {names[1]}",
            hint=f"plan for one part, such as {len(max(current, key=lambda c: len(c.devices)).devices)} devices",
        )
    return current[0]


def _joined(clusters: list[Cluster], closeness: Closeness, level: tuple[int, float]) -> list[Cluster]:
    groups: list[list[Cluster]] = []
    for one in clusters:
        near = [g for g in groups if any(_near(one, other, closeness, level) for other in g)]
        merged = [c for g in near for c in g] + [one]
        groups = [g for g in groups if not any(g is n for n in near)] + [merged]
    found = []
    for group in groups:
        if len(group) == 1:
            found.append(group[0])
        else:
            members = tuple(d for c in group for d in c.devices)
            found.append(Cluster(members, tuple(group)))
    return found


def _near(a: Cluster, b: Cluster, closeness: Closeness, level: tuple[int, float]) -> bool:
    return any(closeness.get(_pair(x, y), APART) <= level for x in a.devices for y in b.devices)


def _pair(a: str, b: str) -> tuple[str, str]:
    return (a, b) if a < b else (b, a)


def is_uneven(root: Cluster, devices: Sequence[str], closeness: Closeness) -> bool:
    """Whether some cluster without clusters inside, as far as it is among `devices`, has pairs that are nearer than others."""
    if any(part.parts for part in root.parts):
        return any(is_uneven(part, devices, closeness) for part in root.parts)
    inside = [d for d in root.devices if d in set(devices)]
    return len({closeness.get(_pair(a, b), APART) for a, b in itertools.combinations(inside, 2)}) > 1


def choose_devices(root: Cluster, count: int) -> tuple[str, ...]:
    """`count` devices as near to each other as they come: of the smallest cluster that has so many, its parts one by one."""
    while True:
        inside = [part for part in root.parts if len(part.devices) >= count]
        if not inside:
            break
        root = min(inside, key=lambda c: len(c.devices))
    if len(root.devices) == count or not root.parts:
        return root.devices[:count]
    chosen: list[str] = []
    for part in sorted(root.parts, key=lambda c: -len(c.devices)):
        room = count - len(chosen)
        if room >= len(part.devices):
            chosen.extend(part.devices)
        elif room:
            chosen.extend(choose_devices(part, room))
    return tuple(chosen)


@lru_cache(maxsize=1024)
def factorizations(count: int, axes: int) -> tuple[tuple[int, ...], ...]:
    """All ordered products of at most `axes` factors above one that give `count`; one axis of one for a single device."""
    if count == 1:
        return ((1,),)
    found: list[tuple[int, ...]] = [(count,)]
    if axes > 1:
        for first in range(2, count // 2 + 1):
            if count % first == 0:
                found += [(first, *rest) for rest in factorizations(count // first, axes - 1)]
    return tuple(found)


def axis_costs(mesh: Mesh, prices: Prices) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Size, and picoseconds of an all-reduce of both probe sizes, for every set of axes of the mesh."""
    names = [name for name, _ in mesh.axes]
    found = []
    for count in range(1, len(names) + 1):
        for axes in itertools.combinations(names, count):
            groups = mesh.groups(axes)
            costs = tuple(
                picoseconds(prices.collective("all_reduce", n, groups).seconds) for n in PROBE_BYTES
            )
            found.append((mesh.size(axes), costs))
    return tuple(found)


def make_mesh(shape: Sequence[int], devices: Sequence[str]) -> Mesh:
    """The mesh of that shape with the usual names of axes."""
    return Mesh(tuple(zip(AXIS_NAMES, shape)), tuple(devices))


def straddles(shape: Sequence[int], levels: Sequence[int]) -> bool:
    """Whether an axis lies partly inside clusters of some level and partly across them; a single axis may."""
    inner = math.prod(shape)
    for size in shape:
        outer, inner = inner, inner // size
        if len(shape) > 1 and any(inner < level < outer for level in levels):
            return True
    return False


def levels_of(root: Cluster) -> list[int]:
    """Sizes of clusters, level by level, as long as those of a level are alike."""
    found, current = list[int](), [root]
    while current and len({len(c.devices) for c in current}) == 1:
        found.append(len(current[0].devices))
        current = [part for c in current for part in c.parts if part.parts]
    return found


def candidate_meshes(
    prices: Prices, closeness: Closeness, counts: Iterable[int], max_axes: int
) -> list[Mesh]:
    """Meshes of `counts` devices without repetitions, the largest and flattest first.

    Of more than `MAX_SEARCHED` devices only meshes whose axes do not straddle the levels of clusters.

    Raises:
        InputError: the devices are not connected.
    """
    found: list[Mesh] = []
    root = cluster(prices.devices, closeness)
    levels = levels_of(root)
    for count in sorted(set(counts), reverse=True):
        devices = choose_devices(root, count)
        seen: set[object] = set()
        spare = [d for d in root.devices if d not in devices]
        uneven = is_uneven(root, root.devices, closeness)
        for shape in factorizations(count, max_axes):
            if count > MAX_SEARCHED and straddles(shape, levels):
                continue
            meshes = [make_mesh(shape, devices)]
            if 1 < count <= MAX_SEARCHED and uneven:
                better = [exchanged(meshes[0], prices, closeness, spare, cost) for cost in (_both, _small)]
                meshes = [*better, *meshes]
            for mesh in meshes:
                signature = tuple(sorted(axis_costs(mesh, prices)))
                if signature not in seen:
                    seen.add(signature)
                    found.append(mesh)
    return found


def exchanged(
    mesh: Mesh,
    prices: Prices,
    closeness: Closeness,
    spare: Sequence[str],
    compared: Callable[[int, int], int],
) -> Mesh:
    """The mesh after exchanging devices, with each other and with `spare` ones, as long as collectives get cheaper.

    `compared` joins the costs of the small and of the large probe. Only devices that differ in what is near them are exchanged.
    """
    profile = {
        d: tuple(sorted(closeness.get(_pair(d, o), APART) for o in prices.devices if o != d))
        for d in prices.devices
    }
    best, cost = mesh, _total(mesh, prices, compared)
    for _ in range(2):
        before = cost
        devices = list(best.devices)
        pool = [*devices, *spare][: 2 * MAX_SEARCHED]
        for i, j in itertools.combinations(range(len(pool)), 2):
            if i >= len(devices) or (
                profile[pool[i]] == profile[pool[j]] and _same_side(pool, i, j, closeness)
            ):
                continue
            trial = list(pool)
            trial[i], trial[j] = trial[j], trial[i]
            candidate = make_mesh(best.shape, trial[: len(devices)])
            price = _total(candidate, prices, compared)
            if price < cost:
                best, cost, pool = candidate, price, trial
        if cost == before:
            break
        spare = pool[len(devices) :]
    return best


def _same_side(pool: Sequence[str], i: int, j: int, closeness: Closeness) -> bool:
    """Whether two devices see all others of the pool alike, so that exchanging them changes nothing."""
    return all(
        closeness.get(_pair(pool[i], d), APART) == closeness.get(_pair(pool[j], d), APART)
        for d in pool
        if d not in (pool[i], pool[j])
    )


def _total(mesh: Mesh, prices: Prices, compared: Callable[[int, int], int]) -> int:
    """What orders are compared by, summed over all sets of axes."""
    return sum(compared(costs[0], costs[1]) for _, costs in axis_costs(mesh, prices))


def _both(small: int, large: int) -> int:
    return math.isqrt(small * large)


def _small(small: int, large: int) -> int:
    """Latency first: a link may be faster for large transfers and slower for small ones than the way round it."""
    return small * 1_000_000 + large // 1_000_000
