"""How near the devices of a topology are to each other, from the routes of its link graph."""

from __future__ import annotations

from itertools import pairwise

from topo_opt.sharding.meshes import Closeness
from topo_opt.topology import Topology
from topo_opt.topology.graph import PATH_CLASSES, class_of_route, link_graph, routes_from


def closeness(topology: Topology, devices: tuple[str, ...]) -> Closeness:
    """For every pair that a route connects the class of the route, then the inverse of the least rate on it."""
    graph = link_graph(topology)
    found: Closeness = {}
    for index, source in enumerate(devices):
        for target, nodes in routes_from(graph, source, devices[index + 1 :]).items():
            rate = min(graph.edges[edge]["sustained_bytes_per_s"] for edge in pairwise(nodes))
            rank = PATH_CLASSES.index(class_of_route(graph, nodes))
            pair = (source, target) if source < target else (target, source)
            found[pair] = (rank, 1.0 / rate)
    return found
