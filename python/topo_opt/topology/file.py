"""What a topology file says: a machine with short forms for what repeats, or a cluster of equal machines.

`gpu[0-7]` stands for `gpu0` to `gpu7`, `gpu[0-6:2]` for every second of them. Of the two ends of a link that has several on both sides, the shorter side is dealt
out in runs: `["gpu[0-7]", "switch[0-3]"]` joins gpu0 and gpu1 to switch0. `expand` turns a file into a flat `Topology`.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from topo_opt.topology.device import Device
from topo_opt.topology.figures import Identifier, Latency, Rate, Strict, Text
from topo_opt.topology.measured import Measurements
from topo_opt.topology.schema import (
    MAX_COMPUTE,
    MAX_DEVICES,
    MAX_LINKS,
    MAX_NODES,
    Lanes,
    LinkKind,
    NodeKind,
    PeerAccess,
)

Pattern = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}(\[[0-9]{1,5}-[0-9]{1,5}(:[1-9][0-9]{0,4})?\][A-Za-z0-9_.-]{0,32})?$"
    ),
]
BY_NAME, INLINE = "(figures)", "(inline)"


class NamedDevice(Strict):
    """Devices whose figures are those of a file of `hw_topologies/devices`."""

    id: Pattern
    figures: Identifier


class FileNode(Strict):
    """Nodes of one kind."""

    id: Pattern
    kind: NodeKind
    model: Text | None = None


class LinkFigures(Strict):
    """The figures of a link: by name, or given here."""

    figures: Identifier | None = None
    bytes_per_s: Rate | None = None
    sustained_bytes_per_s: Rate | None = None
    latency_ns: Latency | None = None
    lanes: Lanes | None = None


class FileLink(LinkFigures):
    """Links between `ends`, or between all pairs `among` some devices, with figures by name (a file of
    `hw_topologies/links`, those of one lane) or given here (those of the whole link)."""

    ends: tuple[Pattern, Pattern] | None = None
    among: Pattern | None = None
    kind: LinkKind | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.ends is None) == (self.among is None):
            raise ValueError("a link has 'ends', or 'among' for all pairs of some devices")
        here = (self.kind, self.bytes_per_s, self.sustained_bytes_per_s, self.latency_ns)
        if self.figures is None and (self.kind is None or self.bytes_per_s is None):
            raise ValueError("a link has 'kind' and 'bytes_per_s', or 'figures' by name")
        if self.figures is not None and any(here):
            raise ValueError("'figures' by name and figures given here exclude each other")
        return self


class NetworkLink(LinkFigures):
    """A link of the network, by name or given here."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.figures is None) == (self.bytes_per_s is None):
            raise ValueError("a link has 'bytes_per_s', or 'figures' by name")
        return self


class AddedNics(Strict):
    """NICs that the machine's own description lacks, each beside its GPUs: on the same switch, bridge or processor."""

    per: Literal["gpu", "pair", "node"]
    pcie: Identifier = Field(description="figures of the link between NIC and machine")
    lanes: Lanes | None = None


class Network(Strict):
    """How the NICs of the machines are joined.

    Without `nodes_per_leaf` and `rails` there is one switch for all. `rails` gives the i-th NICs of all machines a
    switch of their own. `nodes_per_leaf` divides the machines into groups, each with its own switches. Several switches
    meet in one spine, which stands for all its parallel switches; `uplink` is the link of one switch to it.
    """

    link: NetworkLink = Field(description="of a NIC to its switch")
    rails: bool = False
    nodes_per_leaf: int | None = Field(default=None, ge=1, le=1024)
    uplink: NetworkLink | None = None
    nics: AddedNics | None = None


class Cluster(Strict):
    """Equal machines and the network between them: `count` times the machine named by `node`, or the rest of the file."""

    count: int = Field(ge=2, le=1024)
    node: Identifier | None = Field(default=None, description="a topology of the package")
    network: Network


def _device_form(value: Any) -> str:
    given = value if isinstance(value, dict) else value.__dict__ if isinstance(value, Strict) else {}
    return BY_NAME if "figures" in given else INLINE


FileDevice = Annotated[
    Annotated[NamedDevice, Tag(BY_NAME)] | Annotated[Device, Tag(INLINE)], Discriminator(_device_form)
]


class TopologyFile(Strict):
    """A topology file. Kernels are compiled for `compute`, the devices that the model is placed on."""

    schema_version: Literal[1]
    name: Identifier
    description: Text
    devices: tuple[FileDevice, ...] = Field(default=(), max_length=MAX_DEVICES)
    nodes: tuple[FileNode, ...] = Field(default=(), max_length=MAX_NODES)
    links: tuple[FileLink, ...] = Field(default=(), max_length=MAX_LINKS)
    compute: tuple[Pattern, ...] = Field(default=(), max_length=MAX_COMPUTE)
    peer_access: PeerAccess | None = Field(
        default=None, description="without it, every device reaches all memories that it has a path to"
    )
    measured: Measurements | None = None
    cluster: Cluster | None = None

    @model_validator(mode="after")
    def _one_machine(self) -> Self:
        own = (self.devices, self.nodes, self.links, self.compute, self.peer_access, self.measured)
        if self.cluster is not None and self.cluster.node is not None:
            if any(own):
                raise ValueError("a cluster of a named 'node' has no devices, nodes or links of its own")
        elif not self.devices:
            raise ValueError("'devices' is missing: a list of {id, figures}")
        elif not self.compute:
            raise ValueError("'compute' is missing: the ids of the devices that a model is placed on")
        return self
