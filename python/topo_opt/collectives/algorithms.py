"""Algorithms of collectives as schedules of moves on one group, in a table.

With n devices, N bytes, a latency alpha and a rate beta between all of them, the times are (Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", 2005):

    ring                  all_reduce 2 (n-1) (alpha + N / (n beta)), all_gather and reduce_scatter (n-1) (alpha + N / (n beta))
    binomial tree         all_reduce 2 log2(n) (alpha + N / beta), broadcast log2(n) (alpha + N / beta)
    double binary tree    all_reduce in 2 d stages, each rank inside of one of two trees of depth d with half of the bytes
    recursive doubling    all_reduce log2(n) (alpha + N / beta), all_gather log2(n) alpha + (n-1) N / (n beta)
    halving and doubling  all_reduce 2 log2(n) alpha + 2 (n-1) N / (n beta)
    one-shot              all_reduce alpha + (n-1) N / beta where a device has one link, alpha + N / beta where it has n-1
    two-shot              all_reduce 2 (alpha + (n-1) N / (n beta)), likewise
    direct                all_gather, reduce_scatter, all_to_all alpha + (n-1) N / (n beta), likewise
    in-switch             all_reduce alpha + (1 + 1/n) N / beta: a switch reduces what all devices hold, each device asks it for
                          its part (N out, N/n in) and has the part sent to all (N/n out, N in)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from topo_opt.collectives import trees
from topo_opt.collectives.protocols import Kernel
from topo_opt.collectives.schedule import Move, Phase

Group = tuple[str, ...]
Rings = tuple[tuple[Group, float], ...]


@dataclass(frozen=True)
class Place:
    """A group as an algorithm sees it: the devices in their order, rings through them with their shares, members by host,
    and whether they hang on one switch that reduces.
    """

    group: Group
    ring: Rings
    rings: Rings
    hosts: tuple[Group, ...]
    reducing_switch: bool

    @property
    def size(self) -> int:
        return len(self.group)


Builder = Callable[[Place], list[Phase]]


@dataclass(frozen=True)
class Algorithm:
    """A row of the table.

    `in_library`: whether NCCL or RCCL has it. `kernel`: what runs it, if none of the library's protocols does.
    """

    name: str
    builders: Mapping[str, Builder]
    applies: Callable[[Place], bool]
    in_library: bool = True
    kernel: Kernel | None = None


def _steps(rings: Rings, size: int, steps: int) -> list[Phase]:
    moves = [
        Move(a, b, share / size, channel=channel)
        for channel, (order, share) in enumerate(rings)
        for a, b in zip(order, (*order[1:], order[0]))
    ]
    return [Phase(tuple(moves), steps, ring=True)]


def _ring(steps_of: Callable[[int], int], several: bool) -> Builder:
    def build(place: Place) -> list[Phase]:
        return _steps(place.rings if several else place.ring, place.size, steps_of(place.size))

    return build


def _ring_table(several: bool) -> dict[str, Builder]:
    return {
        "all_reduce": _ring(lambda n: 2 * (n - 1), several),
        "all_gather": _ring(lambda n: n - 1, several),
        "reduce_scatter": _ring(lambda n: n - 1, several),
        "broadcast": lambda place: _chain(place.rings if several else place.ring, place.group[0]),
    }


def _chain(rings: Rings, root: str) -> list[Phase]:
    moves = []
    for channel, (order, share) in enumerate(rings):
        start = order.index(root)
        turned = order[start:] + order[:start]
        moves += [
            Move(a, b, share, stage, channel) for stage, (a, b) in enumerate(itertools.pairwise(turned))
        ]
    return [Phase(tuple(moves), pipelined=True)]


def _everyone(share: Callable[[int], float], rounds: int = 1) -> Builder:
    """Each device sends to every other one, `rounds` times."""

    def build(place: Place) -> list[Phase]:
        part = share(place.size)
        return [Phase(tuple([Move(a, b, part) for a in place.group for b in place.group if a != b]), rounds)]

    return build


def _pairs(place: Place, distance: int, share: float) -> Phase:
    group = place.group
    return Phase(tuple(Move(device, group[i ^ distance], share) for i, device in enumerate(group)))


def _distances(size: int) -> list[int]:
    return [1 << k for k in range(size.bit_length() - 1)]


def _doubling_all_reduce(place: Place) -> list[Phase]:
    return [_pairs(place, distance, 1.0) for distance in _distances(place.size)]


def _doubling_all_gather(place: Place) -> list[Phase]:
    return [_pairs(place, distance, distance / place.size) for distance in _distances(place.size)]


def _halving_reduce_scatter(place: Place) -> list[Phase]:
    return _doubling_all_gather(place)[::-1]


def _halving_and_doubling(place: Place) -> list[Phase]:
    return _halving_reduce_scatter(place) + _doubling_all_gather(place)


def _binomial_broadcast(place: Place) -> list[Phase]:
    group = place.group
    return [
        Phase(tuple(Move(group[a], group[b], 1.0) for a, b in pairs)) for pairs in trees.binomial(place.size)
    ]


def _binomial_all_reduce(place: Place) -> list[Phase]:
    group = place.group
    up = [
        Phase(tuple(Move(group[b], group[a], 1.0) for a, b in pairs))
        for pairs in reversed(trees.binomial(place.size))
    ]
    return up + _binomial_broadcast(place)


def _double_tree(place: Place) -> list[Phase]:
    order = place.ring[0][0]
    moves: list[Move] = []
    for channel, parents in enumerate(trees.double(place.size)):
        moves += _up_and_down(order, parents, 0.5, channel, 0)
    return [Phase(tuple(moves), pipelined=True)]


def _up_and_down(order: Group, parents: list[int], share: float, channel: int, start: int) -> list[Move]:
    depth = trees.depths(parents)
    deepest = max(depth)
    moves = []
    for rank, parent in enumerate(parents):
        if parent >= 0:
            up, down = start + deepest - depth[rank], start + deepest + depth[parent]
            moves.append(Move(order[rank], order[parent], share, up, channel))
            moves.append(Move(order[parent], order[rank], share, down, channel))
    return moves


def _tree_of_hosts(place: Place) -> list[Phase]:
    """Chains inside of hosts, double binary trees across: what NCCL calls a tree. One channel for every device of a host."""
    width, hosts = len(place.hosts[0]), place.hosts
    moves: list[Move] = []
    for first in range(width):
        chains = [host[first:] + host[:first] for host in hosts]
        leaders = tuple(chain[0] for chain in chains)
        for side, parents in enumerate(trees.double(len(hosts))):
            channel, share = 2 * first + side, 0.5 / width
            across = _up_and_down(leaders, parents, share, channel, width - 1)
            last = max(m.stage for m in across)
            for chain in chains:
                for i, (a, b) in enumerate(itertools.pairwise(chain)):
                    moves.append(Move(b, a, share, width - 2 - i, channel))
                    moves.append(Move(a, b, share, last + 1 + i, channel))
            moves += across
    return [Phase(tuple(moves), pipelined=True)]


def _in_switch(place: Place) -> list[Phase]:
    """Bytes to and from the switch as moves to the next device, which load each device's links alike."""
    group = place.group
    share = 1 + 1 / place.size
    return [Phase(tuple(Move(a, b, share) for a, b in zip(group, (*group[1:], group[0]))))]


def _send(place: Place) -> list[Phase]:
    return [Phase((Move(place.group[0], place.group[1], 1.0),))]


def _always(place: Place) -> bool:
    return True


def _switched(place: Place) -> bool:
    return place.reducing_switch


def _several_rings(place: Place) -> bool:
    return len(place.rings) > 1


def _power_of_two(place: Place) -> bool:
    return place.size.bit_count() == 1


def _equal_hosts(place: Place) -> bool:
    return len(place.hosts) > 1 and len({len(host) for host in place.hosts}) == 1


ALGORITHMS: tuple[Algorithm, ...] = (
    Algorithm("ring", _ring_table(False), _always),
    Algorithm("multi-ring", _ring_table(True), _several_rings),
    Algorithm("tree", {"all_reduce": _tree_of_hosts}, _equal_hosts),
    Algorithm("in-switch", {"all_reduce": _in_switch}, _switched, kernel="in_switch"),
    Algorithm("direct", {"all_to_all": _everyone(lambda n: 1 / n), "send": _send}, _always),
    Algorithm(
        "one-shot",
        {"all_reduce": _everyone(lambda n: 1.0)},
        _always,
        in_library=False,
        kernel="one_shot",
    ),
    Algorithm(
        "exchange",
        {
            "all_reduce": _everyone(lambda n: 1.0),
            "all_gather": _everyone(lambda n: 1 / n),
            "reduce_scatter": _everyone(lambda n: 1 / n),
            "all_to_all": _everyone(lambda n: 1 / n),
        },
        _always,
        in_library=False,
        kernel="exchange",
    ),
    Algorithm(
        "two-shot",
        {"all_reduce": _everyone(lambda n: 1 / n, rounds=2)},
        _always,
        in_library=False,
        kernel="two_shot",
    ),
    Algorithm(
        "direct",
        {"all_gather": _everyone(lambda n: 1 / n), "reduce_scatter": _everyone(lambda n: 1 / n)},
        _always,
        in_library=False,
    ),
    Algorithm(
        "binomial tree",
        {"all_reduce": _binomial_all_reduce, "broadcast": _binomial_broadcast},
        _always,
        in_library=False,
    ),
    Algorithm("double binary tree", {"all_reduce": _double_tree}, _always, in_library=False),
    Algorithm(
        "recursive doubling",
        {"all_reduce": _doubling_all_reduce, "all_gather": _doubling_all_gather},
        _power_of_two,
        in_library=False,
    ),
    Algorithm(
        "recursive halving",
        {"reduce_scatter": _halving_reduce_scatter},
        _power_of_two,
        in_library=False,
    ),
    Algorithm("halving and doubling", {"all_reduce": _halving_and_doubling}, _power_of_two, in_library=False),
)
