"""What a communication library adds to the figures of links: latencies, and the share of a link's rate that it reaches.

The figures are data (`hw_topologies/protocols/*.json`), each with its source.
"""

from functools import cache
from importlib.resources import files
from typing import Annotated, Literal

from pydantic import Field

from topo_opt.topology.figures import Identifier, Latency, Size, Strict, Text
from topo_opt.topology.schema import LinkKind

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
    drains: bool = Field(description="whether data land in a buffer of the library, to be copied out")
    hop_ns: dict[RouteClass, Latency] = Field(description="routes that are not listed cannot use it")


class Library(Strict):
    """A communication library. `symmetric` are kernels that read the memory of peers directly."""

    name: Identifier
    description: Text
    link_efficiency: dict[LinkKind, Share] = Field(description="of the datasheet rate, large transfers")
    drain_share: Share = Field(description="of the last step's bytes, copied out after they have arrived")
    drain_bytes: dict[RouteClass, Size] = Field(description="in flight in the buffers, copied out likewise")
    tree_chunk_bytes: Size
    protocols: dict[Identifier, Protocol]
    symmetric: dict[Literal["one_shot", "two_shot"], Protocol]

    def efficiency(self, kind: str) -> float:
        """The share of the datasheet rate that large transfers reach; one for what is no link."""
        found = {str(k): share.value for k, share in self.link_efficiency.items()}
        return found.get(kind, 1.0)

    def drained(self, step_bytes: float, route: RouteClass) -> float:
        """How many steps' time the way out of the buffers takes behind the last step of `step_bytes` bytes: at most one."""
        in_flight = self.drain_bytes[route].value
        return min(1.0, self.drain_share.value + in_flight / step_bytes) if step_bytes else 0.0


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
