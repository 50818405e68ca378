"""The machine as data: devices with their figures, what stands between them, and links.

Every figure carries its source, so that a reader can tell a datasheet number from a measured one. Units are in the names
of the fields. `topo-hw schema` prints the JSON Schema of a file.
"""

from typing import Annotated, Literal

from pydantic import Field

from topo_opt.topology.device import (
    Cores,
    Device,
    DeviceFigures,
    Launch,
    Memory,
    PathClass,
    PeerAccess,
    Target,
)
from topo_opt.topology.figures import Identifier, Latency, Rate, Size, Strict, Text
from topo_opt.topology.measured import Measurements

__all__ = [
    "Cores",
    "Device",
    "DeviceFigures",
    "Latency",
    "Launch",
    "Link",
    "Memory",
    "Node",
    "PathClass",
    "PeerAccess",
    "Rate",
    "Size",
    "Target",
    "Topology",
]

MAX_COMPUTE = 1024
MAX_DEVICES = 4096
MAX_NODES = 16384
MAX_LINKS = 65536
NodeKind = Literal["nvswitch", "pcie_switch", "root_complex", "numa", "nic", "net_switch"]
LinkKind = Literal["pcie", "nvlink", "c2c", "xgmi", "hccs", "fabric", "smp", "network"]


Lanes = Annotated[int, Field(ge=1, le=4096)]


class Node(Strict):
    """What stands between devices. Switches that share traffic evenly (the planes of an NVSwitch fabric) are one node."""

    id: Identifier
    kind: NodeKind
    model: Text | None = None


class Link(Strict):
    """A connection between two ends, all its lanes together; rates are those of one direction.

    `pcie` also joins a switch or device to its root complex, `fabric` a root complex to its NUMA node and that to the
    processor, `smp` the NUMA nodes of a host, `c2c` a processor to the GPU on its module, `network` NICs and switches.
    """

    ends: tuple[Identifier, Identifier]
    kind: LinkKind
    bytes_per_s: Rate = Field(description="what the lanes carry: datasheet")
    sustained_bytes_per_s: Rate | None = Field(
        default=None, description="what large transfers reach, where it is known"
    )
    latency_ns: Latency | None = Field(default=None, description="of one crossing of the link")
    lanes: Lanes | None = Field(default=None, description="links or lanes that this one bundles")


class Topology(Strict):
    """A machine. Kernels are compiled for `compute`, the devices that the model is placed on."""

    schema_version: Literal[1]
    name: Identifier
    description: Text
    devices: tuple[Device, ...] = Field(min_length=1, max_length=MAX_DEVICES)
    nodes: tuple[Node, ...] = Field(default=(), max_length=MAX_NODES)
    links: tuple[Link, ...] = Field(default=(), max_length=MAX_LINKS)
    compute: tuple[Identifier, ...] = Field(min_length=1, max_length=MAX_COMPUTE)
    peer_access: PeerAccess | None = Field(
        default=None, description="without it, every device reaches all memories that it has a path to"
    )
    measured: Measurements | None = None

    def device(self, identifier: str) -> Device:
        """The device of that id; a KeyError when there is none, which a loaded topology rules out for its own names."""
        for device in self.devices:
            if device.id == identifier:
                return device
        raise KeyError(identifier)

    @property
    def primary(self) -> Device:
        """The device that one-device programs are compiled for."""
        return self.device(self.compute[0])
