"""Regular clusters: one machine repeated, and the switches between the NICs.

The i-th machine is `node<i>`: its parts are `node3.gpu5`, `node3.nic0`. Switches are `leaf<group>` or, with a switch for
each rail, `leaf<group>.rail<i>`; where several of them meet it is in `spine`.
"""

from collections.abc import Iterator, Sequence

from topo_opt.errors import InputError
from topo_opt.topology.expand import Misfit, link_between
from topo_opt.topology.file import AddedNics, Cluster, NetworkLink
from topo_opt.topology.schema import (
    MAX_COMPUTE,
    MAX_DEVICES,
    MAX_LINKS,
    MAX_NODES,
    Link,
    Node,
    Topology,
)

_PER = {"gpu": 1, "pair": 2}


def build_cluster(cluster: Cluster, machine: Topology, name: str, description: str) -> Topology:
    """`cluster.count` times `machine`, joined by the network. Curves measured on one machine stay those of `node0`.

    Raises:
        Misfit: a machine without NICs, a missing uplink, names that the library does not have, more parts than a
            topology may have.
    """
    if cluster.network.nics is not None:
        machine = _with_nics(machine, cluster.network.nics)
    nics = [node.id for node in machine.nodes if node.kind == "nic"]
    if not nics:
        raise Misfit("/cluster/network/nics", f"is needed: '{machine.name}' has no NICs of its own")
    _check_size(cluster.count, machine)
    prefixes = [f"node{i}." for i in range(cluster.count)]
    switches, cables = _network(cluster, prefixes, nics)
    measured = machine.measured
    return Topology(
        schema_version=1,
        name=name,
        description=description,
        devices=tuple(d.model_copy(update={"id": at + d.id}) for at in prefixes for d in machine.devices),
        nodes=(
            *(n.model_copy(update={"id": at + n.id}) for at in prefixes for n in machine.nodes),
            *switches,
        ),
        links=(
            *(
                link.model_copy(update={"ends": (at + link.ends[0], at + link.ends[1])})
                for at in prefixes
                for link in machine.links
            ),
            *cables,
        ),
        compute=tuple(at + identifier for at in prefixes for identifier in machine.compute),
        peer_access=machine.peer_access,
        measured=measured and measured.renamed(lambda identifier: prefixes[0] + identifier),
    )


def _check_size(count: int, machine: Topology) -> None:
    parts = (
        ("devices", len(machine.devices), MAX_DEVICES),
        ("nodes", len(machine.nodes), MAX_NODES),
        ("links", len(machine.links), MAX_LINKS),
        ("compute devices", len(machine.compute), MAX_COMPUTE),
    )
    for what, each, most in parts:
        if each * count > most:
            raise Misfit(
                "/cluster/count", f"{count} machines have {each * count} {what}, at most {most} are allowed"
            )


def _with_nics(machine: Topology, added: AddedNics) -> Topology:
    if any(node.kind == "nic" for node in machine.nodes):
        raise Misfit("/cluster/network/nics", f"'{machine.name}' has NICs of its own")
    share = _PER.get(added.per, len(machine.compute))
    first_gpus = machine.compute[::share]
    nodes = tuple(Node(id=f"nic{i}", kind="nic") for i in range(len(first_gpus)))
    links = [
        _link((node.id, _neighbour(machine, gpu)), added.pcie, added.lanes, "/cluster/network/nics/pcie")
        for node, gpu in zip(nodes, first_gpus)
    ]
    return machine.model_copy(update={"nodes": machine.nodes + nodes, "links": (*machine.links, *links)})


def _neighbour(machine: Topology, gpu: str) -> str:
    for kind in ("pcie", "c2c"):
        for link in machine.links:
            if link.kind == kind and gpu in link.ends:
                return link.ends[0] if link.ends[1] == gpu else link.ends[1]
    raise Misfit(
        "/cluster/network/nics", f"'{gpu}' of '{machine.name}' has no PCIe link that a NIC could stand beside"
    )


def _network(cluster: Cluster, prefixes: Sequence[str], nics: Sequence[str]) -> tuple[list[Node], list[Link]]:
    network = cluster.network
    group = network.nodes_per_leaf or cluster.count
    leaves: dict[str, None] = {}
    cables = []
    template = _cable(network.link, "/cluster/network/link")
    for i, at in enumerate(prefixes):
        for rail, nic in enumerate(nics):
            leaf = f"leaf{i // group}" + (f".rail{rail}" if network.rails else "")
            leaves[leaf] = None
            cables.append(template.model_copy(update={"ends": (at + nic, leaf)}))
    switches = [Node(id=leaf, kind="net_switch") for leaf in leaves]
    if network.uplink is not None and len(leaves) > 1:
        switches.append(Node(id="spine", kind="net_switch"))
        cables += _uplinks(_cable(network.uplink, "/cluster/network/uplink"), leaves)
    elif network.uplink is not None:
        raise Misfit("/cluster/network/uplink", "leads nowhere: there is one switch")
    elif group < cluster.count:
        raise Misfit("/cluster/network/uplink", f"is missing: {len(leaves)} switches have to meet")
    return switches, cables


def _uplinks(template: Link, leaves: dict[str, None]) -> Iterator[Link]:
    for leaf in leaves:
        yield template.model_copy(update={"ends": (leaf, "spine")})


def _cable(link: NetworkLink, pointer: str) -> Link:
    if link.figures is not None:
        return _link(("a", "b"), link.figures, link.lanes, f"{pointer}/figures", kind="network")
    assert link.bytes_per_s is not None
    return Link(
        ends=("a", "b"),
        kind="network",
        bytes_per_s=link.bytes_per_s,
        sustained_bytes_per_s=link.sustained_bytes_per_s,
        latency_ns=link.latency_ns,
        lanes=link.lanes,
    )


def _link(ends: tuple[str, str], name: str, lanes: int | None, pointer: str, kind: str = "pcie") -> Link:
    try:
        link = link_between(ends, name, lanes)
    except InputError as error:
        raise Misfit(pointer, str(error)) from None
    if link.kind != kind:
        raise Misfit(pointer, f"'{name}' is a {link.kind} link, a {kind} link is needed")
    return link
