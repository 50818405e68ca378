"""The links of a machine as resources that transfers share, and the routes that transfers take over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from topo_opt.collectives.protocols import Library, Protocol, RouteClass, route_class
from topo_opt.errors import InputError
from topo_opt.topology.graph import PATH_CLASSES, class_of_route, link_graph, routes_from
from topo_opt.topology.schema import Topology

Edge = tuple[str, str]


@dataclass(frozen=True)
class Resource:
    """One direction of a link, or another limit that transfers share.

    `edge` is its place in the link graph; (node, node) is the memory of a host, of kind "memory"; a limit of one pair of
    devices has the kind "staged".
    """

    edge: Edge
    kind: str
    bytes_per_s: float
    sustained_bytes_per_s: float

    @property
    def is_link(self) -> bool:
        """Whether it is an edge of the link graph."""
        return self.kind not in ("memory", "staged")


class Route(NamedTuple):
    """How bytes get from one device to another: indices of resources, the sum of stated latencies, and the class.

    `weights` counts how often a byte crosses each resource: twice for host memory, which is written and read.
    """

    resources: tuple[int, ...]
    weights: tuple[float, ...]
    latency_s: float
    route_class: RouteClass
    path_class: str


class Network:
    """Routes and capacities of a topology. Everything is found when it is first asked for, and kept."""

    def __init__(self, topology: Topology, library: Library | None) -> None:
        self.topology, self.library = topology, library
        self.graph: nx.DiGraph[str] = link_graph(topology)
        self.resources: list[Resource] = []
        self._index: dict[Edge, int] = {}
        self._routes: dict[Edge, Route] = {}
        self._hosts: dict[str, tuple[str, ...]] = {}
        self._capacities: NDArray[np.float64] = np.empty(0)
        access = topology.peer_access
        self._reach = PATH_CLASSES.index(access.farthest) if access else len(PATH_CLASSES)
        self._latency_s: list[float] = []
        self._kinds: dict[str, str] = dict(self.graph.nodes(data="kind"))
        self._classes: dict[frozenset[str], RouteClass] = {}
        self._path_classes: dict[tuple[str, ...], str] = {}
        for u, v, edge in self.graph.edges(data=True):
            self._latency_s.append(edge["latency_s"])
            self._index[u, v] = len(self.resources)
            self.resources.append(
                Resource((u, v), edge["kind"], edge["bytes_per_s"], edge["sustained_bytes_per_s"])
            )
        for device in topology.devices:
            if device.kind == "cpu":
                # A staged byte is written and read; both count against what the memory moves.
                rate = device.memory.read_write_bytes_per_s.value
                self._index[device.id, device.id] = self._add((device.id, device.id), "memory", rate)

    def _add(self, edge: Edge, kind: str, rate: float) -> int:
        self._latency_s.append(0.0)
        self.resources.append(Resource(edge, kind, rate, rate))
        return len(self.resources) - 1

    @property
    def capacities(self) -> NDArray[np.float64]:
        """Bytes per second of every resource: what the library reaches of a link, or all of it without one."""
        if len(self._capacities) != len(self.resources):
            self._capacities = np.array([self._capacity(resource) for resource in self.resources])
        return self._capacities

    def _capacity(self, resource: Resource) -> float:
        if self.library is None:
            return resource.sustained_bytes_per_s
        efficiency = self.library.efficiency(resource.kind)
        return min(resource.sustained_bytes_per_s, efficiency * resource.bytes_per_s)

    def hop_s(self, route: Route, protocol: Protocol | None) -> float:
        """Latency of a transfer: what the library needs for it, the links included, or what the links state if that is more."""
        if protocol is None or route.route_class not in protocol.hop_ns:
            return route.latency_s
        return max(protocol.hop_ns[route.route_class].value * 1e-9, route.latency_s)

    @cached_property
    def host_of(self) -> dict[str, int]:
        """Which host each node belongs to: the parts that remain when networks are cut, numbered in the order of the file."""
        inner: nx.Graph[str] = nx.Graph()
        inner.add_nodes_from(self.graph)
        inner.add_edges_from((u, v) for u, v, kind in self.graph.edges(data="kind") if kind != "network")
        return {node: i for i, part in enumerate(nx.connected_components(inner)) for node in part}

    def route(self, source: str, target: str) -> Route:
        """The route between two devices.

        Raises:
            InputError: no links lead from one to the other.
        """
        found = self._routes.get((source, target))
        if found is None:
            self.find_routes(source, (target,))
            found = self._routes[source, target]
        return found

    def find_routes(self, source: str, targets: Iterable[str]) -> None:
        """Looks for all these routes in one search."""
        missing = [t for t in targets if t != source and (source, t) not in self._routes]
        if not missing:
            return
        found = routes_from(self.graph, source, missing)
        for target in missing:
            if target not in found:
                raise InputError(
                    f"{self.topology.name} has no links from '{source}' to '{target}'",
                    hint="add the links, or leave out one of the devices",
                )
            name = self._path_class(found[target])
            beyond = name != "NET" and PATH_CLASSES.index(name) > self._reach
            self._routes[source, target] = (
                self._staged(source, target, name) if beyond else self._plain(found[target], name)
            )

    def _plain(self, nodes: Sequence[str], name: str) -> Route:
        indices = tuple([self._index[pair] for pair in pairwise(nodes)])
        latency_s = sum([self._latency_s[i] for i in indices])
        return Route(indices, (1.0,) * len(indices), latency_s, self._class(indices), name)

    def _class(self, indices: tuple[int, ...]) -> RouteClass:
        kinds = frozenset([self.resources[i].kind for i in indices])
        if kinds not in self._classes:
            self._classes[kinds] = route_class(kinds, staged=False)
        return self._classes[kinds]

    def _path_class(self, nodes: tuple[str, ...]) -> str:
        """The class of a route; routes over the same kinds of nodes and links have the same."""
        links = [self.resources[self._index[pair]].kind for pair in pairwise(nodes)]
        key = (*links, *[self._kinds[node] for node in nodes])
        if key not in self._path_classes:
            self._path_classes[key] = class_of_route(self.graph, nodes)
        return self._path_classes[key]

    def _staged(self, source: str, target: str, name: str) -> Route:
        """Through the host memory beside the receiver: written over the sender's links, read over the receiver's."""
        access = self.topology.peer_access
        assert access is not None
        memory = self._host_memory(target)
        there = routes_from(self.graph, source, (memory,)).get(memory)
        back = routes_from(self.graph, memory, (target,)).get(target)
        if there is None or back is None:
            raise InputError(
                f"{self.topology.name} has no peer access from '{source}' to '{target}' ({name}) and no way through host memory",
                hint="add the host's processor and the links to it",
            )
        crossings: dict[int, float] = {}
        for pair in (*pairwise(there), *pairwise(back)):
            crossings[self._index[pair]] = crossings.get(self._index[pair], 0.0) + 1.0
        if (memory, memory) in self._index:
            crossings[self._index[memory, memory]] = 2.0
        if access.staged_bytes_per_s is not None:
            crossings[self._add((source, target), "staged", access.staged_bytes_per_s.value)] = 1.0
        latency = sum(self._latency_s[i] * times for i, times in crossings.items())
        if access.staged_latency_ns is not None:
            latency = access.staged_latency_ns.value * 1e-9
        return Route(tuple(crossings), tuple(crossings.values()), latency, "staged", name)

    def _host_memory(self, device: str) -> str:
        """The memory beside a device: the processor that it reaches first, else the nearest NUMA node."""
        kinds = self.graph.nodes(data="kind")
        if not self._hosts:
            for kind in ("cpu", "numa"):
                self._hosts[kind] = tuple(node for node, k in kinds if k == kind)
        for kind in ("cpu", "numa"):
            routes = routes_from(self.graph, device, self._hosts[kind])
            if routes:
                return min(routes, key=lambda node: (len(routes[node]), self._hosts[kind].index(node)))
        raise InputError(
            f"{self.topology.name} has no peer access to '{device}' and no host memory to stage data in",
            hint="add the host's processor and the links to it",
        )
