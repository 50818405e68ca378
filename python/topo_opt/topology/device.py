"""One processor: its memory, its cores, its rates, and how it is divided inside."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from topo_opt.topology.figures import DType, Identifier, Latency, Rate, Size, Strict, Text

PciId = Annotated[str, Field(pattern=r"^[0-9a-f]{4}:[0-9a-f]{4}$")]
Parts = Annotated[int, Field(ge=1, le=1024)]
PathClass = Literal["LOC", "NVL", "XGMI", "HCCS", "C2C", "PIX", "PXB", "PHB", "NODE", "SYS", "NET", "DIS"]
PortKind = Literal["pcie", "nvlink", "c2c", "xgmi", "hccs"]


class Target(Strict):
    """What Triton compiles for. `interpreter` runs the kernels on the CPU; for `none` there is no code generation, only planning."""

    backend: Literal["cuda", "hip", "interpreter", "none"]
    capability: int | None = Field(
        default=None, ge=70, le=200, description="compute capability times ten; cuda only"
    )
    architecture: str | None = Field(
        default=None, pattern=r"^gfx[0-9a-f]{3,5}$", description="processor name of AMD's compiler; hip only"
    )
    warp_size: int = Field(default=32, ge=1, le=64)

    @model_validator(mode="after")
    def _names_of_a_backend(self) -> Self:
        if (self.backend == "cuda") != (self.capability is not None):
            raise ValueError("'capability' belongs to backend 'cuda', and only to it")
        if (self.backend == "hip") != (self.architecture is not None):
            raise ValueError("'architecture' belongs to backend 'hip', and only to it")
        return self


class MemoryLevel(Strict):
    """One step of the division of a memory: stacks, channels in each stack, banks in each channel."""

    name: Literal["stack", "channel", "pseudo_channel", "bank"]
    count: Size = Field(
        description="in one unit of the level before it, or in the whole memory for the first"
    )
    interleave_bytes: Size | None = Field(
        default=None, description="addresses move on to the next unit after so many bytes"
    )
    selectable: bool = Field(description="whether software may choose the unit that an address is in")


class Memory(Strict):
    """The main memory of a device. `read_write` is what a copy kernel reaches, bytes read plus bytes written."""

    capacity_bytes: Size
    peak_bytes_per_s: Rate
    read_write_bytes_per_s: Rate
    levels: tuple[MemoryLevel, ...] = Field(default=(), max_length=4, description="outermost first")


class Cores(Strict):
    """What one multiprocessor (or CPU core) offers a kernel."""

    count: Size
    shared_memory_per_block_bytes: Size
    registers_per_block: Size
    threads_per_core: Size


class Dies(Strict):
    """Dies that a device is made of, where they matter for placement."""

    name: Identifier = Field(description="the vendor's word: XCD, die, chiplet")
    count: Size
    l2_bytes: Size | None = Field(default=None, description="of one die, where the cache is not shared")
    bytes_per_s: Rate | None = Field(default=None, description="between two dies, one direction")
    selectable: bool = Field(description="whether software may choose the die that work runs on")


class PartitionMode(Strict):
    """A way in which the driver can divide a device: AMD's NPS and compute modes, NVIDIA's MIG."""

    name: Identifier
    compute: Parts = Field(description="devices that the operating system sees")
    memory: Parts = Field(description="memories with addresses of their own")
    active: bool
    source: Text


class Port(Strict):
    """Links that a device has of one kind, whatever they lead to."""

    kind: PortKind
    count: Size
    figures: Identifier | None = Field(
        default=None, description="of one link: a file of `hw_topologies/links`"
    )


class PeerAccess(Strict):
    """How far a GPU reaches into another one's memory. Beyond it, data are staged: copied to host memory and from there.

    The classes are those of `graph.path_class`, and the limit means what NCCL_P2P_LEVEL means: `LOC` is no peer access.
    """

    farthest: PathClass
    source: Text
    staged_bytes_per_s: Rate | None = Field(
        default=None, description="what one staged transfer reaches where it is below the links' rates"
    )
    staged_latency_ns: Latency | None = None


class Recognition(Strict):
    """What a model is called in dumps of machines."""

    names: tuple[Text, ...] = Field(
        default=(), max_length=16, description="by the driver, without the vendor"
    )
    pci: tuple[PciId, ...] = Field(default=(), max_length=16, description="vendor:device")


class Launch(Strict):
    """What starting one kernel costs: of a CUDA graph, and by itself."""

    replayed_ns: Latency
    dependent_ns: Latency | None = Field(
        default=None,
        description="of a CUDA graph, where a kernel starts while the one before it ends (programmatic dependent launch)",
    )
    eager_ns: Latency


class DeviceFigures(Strict):
    """Everything about a processor but its place in a machine: the content of `hw_topologies/devices/*.json`."""

    kind: Literal["gpu", "cpu"]
    model: Text
    target: Target
    memory: Memory
    l2_bytes: Size
    cores: Cores
    launch: Launch
    peak_ops_per_s: dict[DType, Rate] = Field(min_length=1, description="dense, a multiply-add counts as two")
    sustained_ops_per_s: dict[DType, Rate] = Field(
        default_factory=dict, description="what a large matrix product reaches"
    )
    dies: Dies | None = None
    partition_modes: tuple[PartitionMode, ...] = Field(default=(), max_length=32)
    ports: tuple[Port, ...] = Field(default=(), max_length=8)
    peer_access: PeerAccess | None = Field(
        default=None, description="what machines of this model have unless they say otherwise"
    )
    recognised_by: Recognition | None = None

    def ops_per_s(self, dtype: str) -> float:
        """The rate of a type: sustained where it was measured, else peak; the slowest known where the type is not listed."""
        for table in (self.sustained_ops_per_s, self.peak_ops_per_s):
            for key, rate in table.items():
                if key == dtype:
                    return rate.value
        return min(rate.value for rate in self.peak_ops_per_s.values())

    def port(self, kind: str) -> Port | None:
        """The links of one kind that the device has, None when it has none or they are not known."""
        return next((port for port in self.ports if port.kind == kind), None)


class Device(DeviceFigures):
    """One processor that kernels run on, or the host that feeds it."""

    id: Identifier
