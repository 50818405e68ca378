"""Where the parts of a machine stand in a picture.

Each machine of a cluster is a block of rows: NVSwitches on top, GPUs and NICs below them in the order of the PCIe tree, then
PCIe switches by depth, host bridges, NUMA nodes and processors. A node of the tree stands in the middle above what hangs on
it. Network switches have rows of their own over all blocks.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import count
from typing import Any

import networkx as nx

from topo_opt.topology.graph import link_graph
from topo_opt.topology.schema import Topology

LEAF_WIDTH, LEAF_GAP, ROW, BOX_HEIGHT = 58.0, 10.0, 74.0, 30.0
MARGIN, BLOCK_GAP, HEADER, LEAST_WIDTH = 24.0, 46.0, 64.0, 640.0
MOST_MACHINES, FEW_MACHINES, MOST_NODES = 4, 2, 80
_TREE = ("pcie", "fabric", "c2c")
_ROOTS = ("numa", "cpu")


@dataclass(frozen=True)
class Box:
    """A node of the graph: its kind, its middle, and its width."""

    name: str
    kind: str
    x: float
    y: float
    width: float


@dataclass(frozen=True)
class Layout:
    """Boxes by id, the size of the picture, how many machines are not shown, and names of machines with their places."""

    boxes: dict[str, Box]
    width: float
    height: float
    hidden: int
    labels: tuple[tuple[str, float, float], ...] = ()


def lay_out(topology: Topology, machines: int | None = None) -> Layout:
    """The places of all nodes; of a cluster those of the first machines, `machines` of them, by default two of many."""
    graph = link_graph(topology)
    blocks = _machines(graph, ("net_switch",))
    shown = blocks[: machines or (len(blocks) if len(blocks) <= MOST_MACHINES else FEW_MACHINES)]
    hidden = len(blocks) - len(shown)
    if len(blocks) == 1 and machines is None and len(blocks[0]) > MOST_NODES:
        # One fabric of NVSwitches over many hosts: a rack. The first hosts stand for all of them.
        hosts = _machines(graph, ("net_switch", "nvswitch"))
        if len(hosts) > MOST_MACHINES:
            switches = [name for name in blocks[0] if graph.nodes[name]["kind"] == "nvswitch"]
            shown = [[*switches, *(name for host in hosts[:MOST_MACHINES] for name in host)]]
            hidden = len(hosts) - MOST_MACHINES
    boxes: dict[str, Box] = {}
    labels: list[tuple[str, float, float]] = []
    columns = _columns(len(shown))
    network = [n for n, kind in graph.nodes(data="kind") if kind == "net_switch"]
    top = HEADER + MARGIN + (2 * ROW if network else 0.0)
    left, lowest, right = MARGIN, top, 0.0
    for number, block in enumerate(shown):
        if number and number % columns == 0:
            left, top = MARGIN, lowest + BLOCK_GAP
        placed = _block(graph, block, left, top)
        boxes |= placed
        if len(blocks) > 1:
            labels.append(
                (block[0].partition(".")[0], left, max(box.y for box in placed.values()) + BOX_HEIGHT)
            )
        left = max(box.x + box.width / 2 for box in placed.values()) + BLOCK_GAP
        lowest = max(lowest, *(box.y + BOX_HEIGHT for box in placed.values()))
        right = max(right, left - BLOCK_GAP)
    boxes |= _network(graph, network, boxes, right)
    arcs = ROW if any(_far_apart(graph, shown[0], kind) for kind in _ROOTS) else 0.0
    size = max(right, LEAST_WIDTH) + MARGIN, lowest + MARGIN + arcs
    return Layout(boxes, *size, hidden, tuple(labels))


def _far_apart(graph: Any, names: list[str], kind: str) -> bool:
    """Whether more than two of a kind are linked to each other, so that links pass under boxes between them."""
    nodes = [name for name in names if graph.nodes[name]["kind"] == kind]
    return sum(1 for a in nodes for b in graph[a] if graph.nodes[b]["kind"] == kind) > 2


def _columns(blocks: int) -> int:
    return blocks if blocks <= 2 else 2 if blocks <= 4 else 4


def _machines(graph: "nx.DiGraph[str]", without: tuple[str, ...]) -> list[list[str]]:
    """What is joined without some kinds of switches, in the order of the file."""
    inner = graph.to_undirected()
    inner.remove_edges_from([(a, b) for a, b, kind in graph.edges(data="kind") if kind == "network"])
    inner.remove_nodes_from([n for n, kind in graph.nodes(data="kind") if kind in without])
    order = {name: i for i, name in enumerate(graph.nodes)}
    return sorted(
        (sorted(part, key=order.__getitem__) for part in nx.connected_components(inner)),
        key=lambda p: order[p[0]],
    )


def _block(whole: Any, names: list[str], left: float, top: float) -> dict[str, Box]:
    graph = whole.subgraph(names)
    kinds: dict[str, str] = {name: whole.nodes[name]["kind"] for name in names}
    children, depth = _tree(graph, kinds)
    deepest = max(depth.values(), default=0)
    switches = [name for name, kind in kinds.items() if kind == "nvswitch"]
    mesh_room = _arc_height(graph, kinds)
    leaf_y = top + (ROW if switches else mesh_room)
    leaves = [name for name in _leaf_order(children, depth, kinds) if name not in switches]
    x = {name: left + LEAF_WIDTH / 2 + i * (LEAF_WIDTH + LEAF_GAP) for i, name in enumerate(leaves)}
    boxes = {name: Box(name, kinds[name], x[name], leaf_y, LEAF_WIDTH) for name in leaves}
    for name in sorted((n for n in children if children[n]), key=lambda n: -depth[n]):
        below = [boxes[child] for child in children[name]]
        low, high = min(b.x - b.width / 2 for b in below), max(b.x + b.width / 2 for b in below)
        width = min(max(LEAF_WIDTH, (high - low) * 0.6), 3 * LEAF_WIDTH)
        boxes[name] = Box(name, kinds[name], (low + high) / 2, leaf_y + (deepest - depth[name]) * ROW, width)
    for name in switches:
        below = [boxes[peer] for peer in graph[name] if peer in boxes and kinds[peer] != "nvswitch"] or list(
            boxes.values()
        )
        low, high = min(b.x - b.width / 2 for b in below), max(b.x + b.width / 2 for b in below)
        boxes[name] = Box(name, "nvswitch", (low + high) / 2, top, high - low)
    return boxes


def _tree(graph: Any, kinds: dict[str, str]) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Children of each node in the tree that PCIe and the host's fabric make, from NUMA nodes and processors outwards."""
    roots = [name for name, kind in kinds.items() if kind == "numa"]
    roots += [name for name, kind in kinds.items() if kind == "cpu"]
    depth: dict[str, int] = {}
    children: dict[str, list[str]] = {name: [] for name in kinds}
    for root in roots:
        if root in depth:
            continue
        depth[root] = 0
        queue = [root]
        for node in queue:
            for peer in graph[node]:
                if (
                    peer not in depth
                    and graph[node][peer]["kind"] in _TREE
                    and kinds[peer] not in ("numa", "nvswitch")
                ):
                    depth[peer] = depth[node] + 1
                    children[node].append(peer)
                    queue.append(peer)
    for name in kinds:
        depth.setdefault(name, 1)
    return children, depth


def _leaf_order(children: dict[str, list[str]], depth: dict[str, int], kinds: dict[str, str]) -> list[str]:
    parented = {child for below in children.values() for child in below}
    out: list[str] = []

    def visit(name: str) -> None:
        if not children[name]:
            out.append(name)
        for child in sorted(children[name], key=lambda n: kinds[n] == "nic"):
            visit(child)

    for name in sorted((n for n in kinds if n not in parented), key=lambda n: depth[n]):
        visit(name)
    return out


def _arc_height(graph: Any, kinds: dict[str, str]) -> float:
    direct = sum(1 for a, b in graph.edges if kinds[a] == kinds[b] == "gpu")
    return 1.6 * ROW if direct else 0.0


def _network(graph: Any, network: list[str], boxes: dict[str, Box], right: float) -> dict[str, Box]:
    spines = [n for n in network if all(graph.nodes[peer]["kind"] == "net_switch" for peer in graph[n])]
    rows: defaultdict[bool, list[str]] = defaultdict(list)
    for name in network:
        if boxes and (name in spines or any(peer in boxes for peer in graph[name])):
            rows[name in spines].append(name)
    out = {}
    for is_spine, names in rows.items():
        y = HEADER + MARGIN + (0.0 if is_spine else ROW)
        step = (right - MARGIN) / len(names)
        for i, name in zip(count(), names):
            width = min(step - LEAF_GAP, 260.0 if is_spine else 110.0)
            out[name] = Box(name, "net_switch", MARGIN + (i + 0.5) * step, y, max(width, 12.0))
    return out
