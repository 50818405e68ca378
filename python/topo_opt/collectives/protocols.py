"""What a communication library adds to the figures of links: latencies, and the share of a link's rate that it reaches.

The figures are data (`hw_topologies/protocols/*.json`), each with its source.
"""

from functools import cache
from importlib.resources import files
from typing import Annotated, Literal

from pydantic import Field

from topo_opt.topology.figures import Identifier, Latency, Size, Strict, Text
from topo_opt.topology.schema import LinkKind

Kernel = Literal["one_shot", "two_shot", "in_switch", "exchange"]
RouteClass = Literal["nvlink", "pcie", "staged", "network"]
"""What a transfer is like for a library: over links made for GPUs, over PCIe, through host memory, over a network."""

_CLASS_OF_LINK: dict[str, RouteClass] = {
    "nvlink": "nvlink",
    "xgmi": "nvlink",
    "hccs": "nvlink",
    "c2c": "nvlink",
    "pcie": "pcie",
    "fabric": "pcie",
    "smp": "pcie",
    "network": "network",
}
_ORDER: tuple[RouteClass, ...] = ("nvlink", "pcie", "staged", "network")


class Share(Strict):
    """A part of one."""

    value: Annotated[float, Field(gt=0, le=1)]
    source: Text


class Protocol(Strict):
    """One way to move data: `base_ns` once a call, `hop_ns` for each transfer, a share of what a link sustains."""

    base_ns: Latency
    rate_share: Share
    drains: Literal["nothing", "buffers", "last step"] = Field(
        description="what is copied out of the library's buffers behind the last arrival: what is in flight, or also a share of the last step"
    )
    hop_ns: dict[RouteClass, Latency] = Field(description="routes that are not listed cannot use it")


class Library(Strict):
    """A communication library. `kernels` are those that don't use its protocols: one-shot and two-shot kernels read the
    memory of peers, in-switch ones let an NVSwitch reduce (NVLink SHARP, NVLS). An exchange is what generated kernels do by themselves.
    """

    name: Identifier
    description: Text
    link_efficiency: dict[LinkKind, Share] = Field(description="of the datasheet rate, large transfers")
    drain_share: Share = Field(description="of the last step's bytes, copied out after they have arrived")
    drain_bytes: dict[RouteClass, Size] = Field(description="in flight in the buffers, copied out likewise")
    tree_chunk_bytes: Size
    protocols: dict[Identifier, Protocol]
    kernels: dict[Kernel, Protocol]

    def efficiency(self, kind: str) -> float:
        """The share of the datasheet rate that large transfers reach; one for what is no link."""
        found = {str(k): share.value for k, share in self.link_efficiency.items()}
        return found.get(kind, 1.0)

    def drained(self, protocol: Protocol, step_bytes: float, route: RouteClass) -> float:
        """How many steps' time the way out of the buffers takes behind the last step of `step_bytes` bytes: at most one."""
        if protocol.drains == "nothing" or not step_bytes:
            return 0.0
        share = self.drain_share.value if protocol.drains == "last step" else 0.0
        return min(1.0, share + self.drain_bytes[route].value / step_bytes)


def route_class(kinds: frozenset[str], staged: bool) -> RouteClass:
    """The class of a route over links of these kinds: that of its slowest kind."""
    classes: set[RouteClass] = {_CLASS_OF_LINK[kind] for kind in kinds}
    if staged:
        classes.add("staged")
    return max(classes, key=_ORDER.index)


@cache
def library(name: str = "nccl") -> Library:
    """The library of that name among those of the package."""
    return Library.model_validate_json(
        files("topo_opt.hw_topologies").joinpath("protocols", f"{name}.json").read_bytes()
    )
