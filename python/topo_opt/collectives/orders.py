"""Which devices follow each other in the rings of a group, and how a group falls into clusters of near devices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from topo_opt.collectives.network import Network
from topo_opt.collectives.rings import best_order, channels
from topo_opt.topology.graph import PATH_CLASSES

Group = tuple[str, ...]
MAX_PAIRWISE = 96
"""Groups up to this size on one host are ordered by the costs of all pairs."""
MAX_SEARCHED = 16
"""Groups up to this size are searched for more than one ring."""
MAX_RINGS = 16
MAX_HOSTS = 32
"""Up to so many hosts are ordered by what lies between them; more are passed in the order of the group."""
_CLUSTER_CLASSES = ("NET", "SYS", "NODE", "PHB")


class Orders:
    """Rings of groups on a network, found once."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._rings: dict[tuple[Group, bool], tuple[tuple[Group, float], ...]] = {}

    def rings(self, group: Group, several: bool) -> tuple[tuple[Group, float], ...]:
        """Rings through all devices of a group, each with its share of the bytes. Without `several` only the best one."""
        if (group, several) not in self._rings:
            self._rings[group, several] = self._find(group, several)
        return self._rings[group, several]

    def _find(self, group: Group, several: bool) -> tuple[tuple[Group, float], ...]:
        hosts = self.hosts(group)
        if len(hosts) > 1 and len(group) > len(hosts):
            return self._across_hosts(hosts, several)
        if len(group) > MAX_PAIRWISE:
            return ((group, 1.0),)
        cost, capacity = self._pairs(group)
        if not several or not 3 <= len(group) <= MAX_SEARCHED:
            order = best_order(cost) or tuple(range(len(group)))
            return ((tuple(group[i] for i in order), 1.0),)
        whole = self._network.capacities
        left = whole.copy()

        def spend(order: tuple[int, ...]) -> tuple[float, NDArray[np.float64]]:
            crossings = np.zeros_like(left)
            for a, b in zip(order, (*order[1:], order[0])):
                route = self._network.route(group[a], group[b])
                np.add.at(crossings, list(route.resources), route.weights)
            used = crossings > 0
            rate = float((left[used] / crossings[used]).min())
            left[used] -= rate * crossings[used]
            left[left < 1e-6 * whole] = 0.0
            return rate, self._capacity(group, left)

        found = channels(capacity, cost, spend, MAX_RINGS)
        total = sum(rate for _, rate in found)
        return tuple((tuple(group[i] for i in order), rate / total) for order, rate in found)

    def hosts(self, group: Group) -> tuple[Group, ...]:
        """The members of a group by the host that they are in, in the order of the group."""
        hosts: dict[int, list[str]] = {}
        for device in group:
            hosts.setdefault(self._network.host_of[device], []).append(device)
        return tuple(tuple(members) for members in hosts.values())

    def _across_hosts(self, hosts: tuple[Group, ...], several: bool) -> tuple[tuple[Group, float], ...]:
        """A ring enters each host at one device and leaves it at another; further rings are rotated inside of the hosts.

        Every second host is passed backwards, so that a ring stays on one rail from one host to the next.
        """
        inside = [self.rings(host, False)[0][0] for host in hosts]
        if 2 < len(hosts) <= MAX_HOSTS:
            cost, _ = self._pairs(tuple(order[0] for order in inside))
            inside = [inside[i] for i in best_order(cost) or range(len(hosts))]
        width = min(len(order) for order in inside)
        turns = width if several and width == max(len(order) for order in inside) else 1
        rings = []
        for turn in range(min(turns, MAX_RINGS)):
            ring: list[str] = []
            for place, order in enumerate(inside):
                turned = order[turn:] + order[:turn]
                ring.extend(reversed(turned) if place % 2 else turned)
            rings.append((tuple(ring), 1.0 / min(turns, MAX_RINGS)))
        return tuple(rings)

    def _pairs(self, group: Group) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Seconds that a byte takes over all links between each pair, and the bottleneck's rate."""
        n = len(group)
        cost = np.zeros((n, n))
        for source in group:
            self._network.find_routes(source, group)
        rates = self._network.capacities
        inverse = (1.0 / rates).tolist()
        for i, source in enumerate(group):
            for j, target in enumerate(group):
                if i != j:
                    route = self._network.route(source, target)
                    cost[i, j] = sum([inverse[r] for r in route.resources])
        return cost, self._capacity(group, rates)

    def _capacity(self, group: Group, left: NDArray[np.float64]) -> NDArray[np.float64]:
        n, rates = len(group), left.tolist()
        out = np.zeros((n, n))
        for i, source in enumerate(group):
            for j, target in enumerate(group):
                if i != j:
                    out[i, j] = min([rates[r] for r in self._network.route(source, target).resources])
        return out

    def partitions(self, group: Group) -> tuple[tuple[Group, ...], ...]:
        """Ways to cut a group into equal clusters of devices that are nearer to each other than to the rest.

        One for every class of routes that separates some: network, sockets, host bridges. In a cluster the order of the
        group is kept, so that members of equal rank face each other (the rails of a cluster of machines).
        """
        out: list[tuple[Group, ...]] = []
        for name in _CLUSTER_CLASSES:
            clusters = self._nearer_than(group, name)
            sizes = {len(cluster) for cluster in clusters}
            if len(sizes) == 1 and 1 < len(clusters) < len(group) and clusters not in out:
                out.append(clusters)
        return tuple(out)

    def _nearer_than(self, group: Group, name: str) -> tuple[Group, ...]:
        if name == "NET":
            return self.hosts(group)
        if len(group) > MAX_PAIRWISE:
            return (group,)
        limit = PATH_CLASSES.index(name)
        clusters: list[list[str]] = []
        for device in group:
            self._network.find_routes(device, group)
            for cluster in clusters:
                route = self._network.route(cluster[0], device)
                if PATH_CLASSES.index(route.path_class) < limit:
                    cluster.append(device)
                    break
            else:
                clusters.append([device])
        return tuple(tuple(cluster) for cluster in clusters)
