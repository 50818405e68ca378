"""`topo-hw show`: shows a topology, or a dump as import reads it: devices, links, the class between each two devices.

Classes are those of nvidia-smi topo -m, NV18 for eighteen NVLinks; --svg draws the link graph, --json gives all as data.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topo_opt.errors import InputError
from topo_opt.tools.hw_tables import Table, print_table
from topo_opt.tools.output import check_destination, write_output

if TYPE_CHECKING:
    import networkx as nx

    from topo_opt.topology import Topology

MOST_ROWS = 32
_LEGEND = {
    "NVL": "NVLinks only, through NVSwitches or not; NV# with their number",
    "XGMI": "Infinity Fabric links of AMD",
    "HCCS": "links of Ascend processors",
    "C2C": "the link of a module",
    "PIX": "at most one PCIe switch",
    "PXB": "several PCIe switches, no host bridge",
    "PHB": "a PCIe host bridge",
    "NODE": "several host bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
    "NET": "a network",
    "DIS": "no path",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `topo-hw show`."""
    parser.add_argument("source", metavar="NAME|FILE", help="topology by name or file, or a dump")
    parser.add_argument("--device", metavar="MODEL", help="model of the GPUs of a dump")
    parser.add_argument("--svg", metavar="FILE", help="draw the link graph into this file")
    parser.add_argument("--json", action="store_true", help="print data instead of tables")
    parser.add_argument(
        "--all", action="store_true", help=f"all rows of the matrix, also more than {MOST_ROWS}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Shows it; returns the exit code.

    Raises:
        InputError: no such topology, or a file that cannot be read or written.
    """
    from topo_opt.topology.graph import link_graph

    check_destination(arguments.svg)
    topology = _load(arguments)
    graph = link_graph(topology)
    if arguments.svg:
        from topo_opt.topology.drawing import draw

        write_output(draw(topology).encode(), arguments.svg)
    if arguments.json:
        print(json.dumps(_data(topology, graph), indent=1))
    elif arguments.svg != "-":
        _print(topology, graph, arguments.all)
    return 0


def _load(arguments: argparse.Namespace) -> Topology:
    from topo_opt import topology
    from topo_opt.topology.importers import import_file

    path = Path(arguments.source)
    if arguments.source in topology.names() and not path.is_file():
        return _without_device(arguments, topology.load(arguments.source))
    if not path.is_file() and "/" not in arguments.source:
        return topology.load(arguments.source)
    try:
        with path.open("rb") as stream:
            head = stream.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    if head.startswith(b"{"):
        return _without_device(arguments, topology.load(path.resolve()))
    imported = import_file(path, device=arguments.device)
    for note in imported.notes:
        print(f"note: {note}", file=sys.stderr)
    return imported.topology


def _without_device(arguments: argparse.Namespace, found: Topology) -> Topology:
    if arguments.device is not None:
        raise InputError(
            f"--device {arguments.device}: {found.name} is a topology and names its models",
            hint="it is for dumps",
        )
    return found


def _shown(topology: Topology) -> list[str]:
    return [*topology.compute, *(node.id for node in topology.nodes if node.kind == "nic")]


def _print(topology: Topology, graph: nx.DiGraph[str], everything: bool) -> None:
    print(f"{topology.name}: {topology.description}\n")
    print_table(_devices(topology))
    if topology.links:
        print()
        print_table(_links(topology))
    names = _shown(topology)
    shown = names if everything else names[:MOST_ROWS]
    if len(names) > 1:
        print()
        table, used = _matrix(topology, graph, shown)
        print_table(table, whole=True)
        if len(shown) < len(names):
            print(f"\n{len(names) - len(shown)} more devices and NICs; --all shows them")
        print("\n" + "\n".join(f"{name:<4} {text}" for name, text in _LEGEND.items() if name in used))
    if (access := topology.peer_access) is not None:
        print(f"\nGPUs reach each other's memory up to {access.farthest}: {access.source}")
    if (measured := topology.measured) is not None:
        curves = f"{len(measured.collectives)} of collectives, {len(measured.gemms)} of products, {len(measured.copies)} of copies"
        print(f"\nMeasured {measured.date}: curves {curves}")


def _devices(topology: Topology) -> Table:
    rows = []
    models = Counter((device.model, device.id in topology.compute) for device in topology.devices)
    for (model, computes), number in models.items():
        device = next(d for d in topology.devices if d.model == model)
        rate = device.sustained_ops_per_s.get("bf16") or device.peak_ops_per_s.get("bf16")
        rows.append(
            (
                model,
                str(number) if computes else f"{number} (host)",
                f"{device.memory.capacity_bytes.value / 1e9:.4g} GB",
                f"{device.memory.peak_bytes_per_s.value / 1e12:.4g} TB/s",
                f"{rate.value / 1e12:.4g}" if rate else "-",
            )
        )
    return Table(("devices", "number", "memory", "rate", "bf16 Tops/s"), tuple(rows), frozenset({1, 2, 3, 4}))


def _links(topology: Topology) -> Table:
    kinds = Counter(
        (
            link.kind,
            link.bytes_per_s.value,
            link.sustained_bytes_per_s and link.sustained_bytes_per_s.value,
            link.lanes,
        )
        for link in topology.links
    )
    rows = [
        (
            kind,
            str(number),
            str(lanes or "-"),
            f"{rate / 1e9:.4g}",
            f"{reached / 1e9:.4g}" if reached else "-",
        )
        for (kind, rate, reached, lanes), number in kinds.items()
    ]
    return Table(
        ("links", "number", "lanes", "GB/s each way", "sustained"), tuple(rows), frozenset({1, 2, 3, 4})
    )


def _matrix(topology: Topology, graph: nx.DiGraph[str], names: list[str]) -> tuple[Table, set[str]]:
    rows, used = [], set()
    for a in names:
        cells = _cells(topology, graph, a, names)
        used |= {name for name, _ in cells}
        rows.append((a, *(cell for _, cell in cells)))
    return Table(("", *names), tuple(rows), centre=frozenset(range(1, len(names) + 1))), used


def _cells(topology: Topology, graph: nx.DiGraph[str], a: str, names: list[str]) -> list[tuple[str, str]]:
    """Class and cell for each of `names`."""
    from topo_opt.topology.graph import class_of_route, routes_from

    routes = routes_from(graph, a, names)
    out = []
    for b in names:
        route = routes.get(b)
        kind = "DIS" if route is None else class_of_route(graph, route)
        cell = "X" if a == b else kind
        if kind == "NVL" and route is not None:
            lanes = [topology.links[graph.edges[pair]["link"]].lanes for pair in pairwise(route)]
            known = [number for number in lanes if number is not None]
            cell = f"NV{min(known)}" if known else kind
        out.append((kind, cell))
    return out


def _data(topology: Topology, graph: nx.DiGraph[str]) -> dict[str, Any]:
    names = _shown(topology)
    return {
        "name": topology.name,
        "description": topology.description,
        "devices": [{"id": d.id, "kind": d.kind, "model": d.model} for d in topology.devices],
        "nodes": [node.model_dump(mode="json", exclude_none=True) for node in topology.nodes],
        "links": [link.model_dump(mode="json", exclude_none=True) for link in topology.links],
        "compute": list(topology.compute),
        "labels": names,
        "classes": [[kind for kind, _ in _cells(topology, graph, a, names)] for a in names],
    }
