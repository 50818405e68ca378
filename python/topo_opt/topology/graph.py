"""The link graph of a machine: routes between devices, and the classes that `nvidia-smi topo -m` gives to them."""

from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, get_args

import networkx as nx

from topo_opt.topology.schema import PathClass, Topology

PATH_CLASSES: tuple[str, ...] = get_args(PathClass)
"""From the nearest to none: the first ones stay within a device and on links made for GPUs, the next follow PCIe outwards."""

# Traffic takes the route with the fewest crossings of the outermost kind. The steps between kinds are larger than any number
# of crossings in one machine. Between switches of a network one more costs less than a host's fabric: data leave a machine
# by the NIC next to their GPU, and enter another one by the NIC next to theirs.
_OUTERMOST = {
    "nvlink": 1,
    "xgmi": 1,
    "hccs": 1,
    "c2c": 100,
    "pcie": 10_000,
    "fabric": 100_000_000,
    "smp": 10_000_000_000,
    "network": 1_000_000_000_000,
}
_BETWEEN_SWITCHES = 1_000_000
# GPUs forward nothing by themselves. Only where no other route exists (a ring, a torus) a route passes through them.
_FORWARDING = 10**17
_GPU_LINKS = {"nvlink": "NVL", "xgmi": "XGMI", "hccs": "HCCS"}


def link_graph(topology: Topology) -> "nx.DiGraph[str]":
    """Devices and the nodes between them; each link is two edges, one a direction.

    Node attribute `kind`: gpu, cpu, nvswitch, pcie_switch, root_complex, numa, nic, net_switch. Edge attributes:
    `bytes_per_s` (of the lanes), `sustained_bytes_per_s` (of large transfers; the same where it is not known),
    `latency_s` (0 where it is not known), `kind`, and `link`, the index in `topology.links`. Of two links of different
    kinds between the same ends the one that traffic prefers is in the graph.
    """
    graph: nx.DiGraph[str] = nx.DiGraph(name=topology.name)
    graph.add_nodes_from((device.id, {"kind": device.kind}) for device in topology.devices)
    graph.add_nodes_from((node.id, {"kind": node.kind}) for node in topology.nodes)
    for index, link in enumerate(topology.links):
        rate = link.bytes_per_s.value
        edge = {
            "bytes_per_s": rate,
            "sustained_bytes_per_s": link.sustained_bytes_per_s.value if link.sustained_bytes_per_s else rate,
            "latency_s": link.latency_ns.value * 1e-9 if link.latency_ns else 0.0,
            "kind": link.kind,
            "link": index,
        }
        first, second = link.ends
        present = graph.get_edge_data(first, second)
        if present is None or _OUTERMOST[link.kind] < _OUTERMOST[present["kind"]]:
            graph.add_edge(first, second, **edge)
            graph.add_edge(second, first, **edge)
    return graph


def routes_from(
    graph: "nx.DiGraph[str]", source: str, targets: Iterable[str] | None = None
) -> dict[str, tuple[str, ...]]:
    """The route that traffic takes from `source` to every node it reaches, both ends included.

    Routes leave the machine's inner links as late as they can: GPU links first, then PCIe, the host's fabric, the link
    between sockets, the network. Among equals the one with the least transfer time wins, then the order of the file.
    With `targets` only these are searched for.
    """
    wanted = set(targets) if targets is not None else None
    parents: dict[str, str | None] = {}
    heap: list[tuple[int, float, int, str, str | None]] = [(0, 0.0, 0, source, None)]
    order = 0
    adjacency: Any = graph._adj  # the views of networkx cost more than the search
    nodes: Any = graph._node
    while heap:
        outer, seconds, _, node, parent = heappop(heap)
        if node in parents:
            continue
        parents[node] = parent
        if wanted is not None:
            wanted.discard(node)
            if not wanted:
                break
        if node != source and nodes[node]["kind"] == "gpu":
            outer += _FORWARDING
        in_network = nodes[node]["kind"] == "net_switch"
        for neighbour, edge in adjacency[node].items():
            if neighbour not in parents:
                order += 1
                inner = in_network and nodes[neighbour]["kind"] == "net_switch"
                step = outer + (_BETWEEN_SWITCHES if inner else _OUTERMOST[edge["kind"]])
                heappush(heap, (step, seconds + 1.0 / edge["bytes_per_s"], order, neighbour, node))
    found = parents if targets is None else [t for t in targets if t in parents]
    return {target: _walk(parents, target) for target in found}


def route(graph: "nx.DiGraph[str]", a: str, b: str) -> tuple[str, ...] | None:
    """The nodes from `a` to `b`, both included; None where no links lead there."""
    return routes_from(graph, a, (b,)).get(b)


def path_class(graph: "nx.DiGraph[str]", a: str, b: str) -> str:
    """How far apart two nodes are, in the words of `nvidia-smi topo -m` (and NET, DIS of NCCL): one of PATH_CLASSES.

    LOC the node itself; NVL, XGMI, HCCS only links of that kind, switches included; C2C a module's own link; PIX at most
    one PCIe switch; PXB several; PHB a host bridge; NODE several of one NUMA node; SYS the link between NUMA nodes; NET a
    network; DIS no route.
    """
    nodes = route(graph, a, b)
    return "DIS" if nodes is None else class_of_route(graph, nodes)


def class_of_route(graph: "nx.DiGraph[str]", nodes: tuple[str, ...]) -> str:
    """The class of a route as `routes_from` gives it."""
    if len(nodes) == 1:
        return "LOC"
    links = {graph.edges[pair]["kind"] for pair in pairwise(nodes)}
    between = [graph.nodes[node]["kind"] for node in nodes[1:-1]]
    if len(links) == 1 and (only := next(iter(links))) in _GPU_LINKS:
        return _GPU_LINKS[only]
    if "network" in links:
        return "NET"
    if "smp" in links:
        return "SYS"
    if links == {"c2c"}:
        return "C2C"
    bridges = between.count("root_complex")
    if bridges > 1:
        return "NODE"
    if bridges or "numa" in between or "cpu" in between:
        return "PHB"
    return "PXB" if between.count("pcie_switch") > 1 else "PIX"


def _walk(parents: dict[str, str | None], node: str) -> tuple[str, ...]:
    out = [node]
    while (parent := parents[out[-1]]) is not None:
        out.append(parent)
    return tuple(reversed(out))
