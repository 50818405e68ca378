"""The machine as data: devices with their figures, and the links between them.

Every figure carries its source, so that a reader can tell a datasheet number from a measured one. Units are in the names
of the fields. The JSON Schema of a file is `Topology.model_json_schema()`.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")]
Text = Annotated[str, Field(min_length=1, max_length=500)]
Count = Annotated[int, Field(ge=1, le=2**48)]
DType = Literal["f64", "f32", "tf32", "bf16", "f16", "f8", "i8"]

MAX_DEVICES = 1024
MAX_LINKS = 65536
# Above every machine that exists by a factor of a thousand: a figure beyond is a slip of the unit.
MAX_RATE = 1e19
MAX_LATENCY_NS = 1e10


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Rate(_Strict):
    """A rate per second (bytes or operations, as the field says)."""

    value: float = Field(gt=0, le=MAX_RATE)
    source: Text


class Latency(_Strict):
    """A time in nanoseconds."""

    value: float = Field(ge=0, le=MAX_LATENCY_NS)
    source: Text


class Size(_Strict):
    """A number of bytes or of things."""

    value: Count
    source: Text


class Target(_Strict):
    """What Triton compiles for. `interpreter` runs the kernels on the CPU."""

    backend: Literal["cuda", "interpreter"]
    capability: int | None = Field(
        default=None, ge=70, le=200, description="compute capability times ten; cuda only"
    )
    warp_size: int = Field(default=32, ge=1, le=64)

    @model_validator(mode="after")
    def _capability_is_for_cuda(self) -> "Target":
        if (self.backend == "cuda") != (self.capability is not None):
            raise ValueError("'capability' belongs to backend 'cuda', and only to it")
        return self


class Memory(_Strict):
    """The main memory of a device. `read_write` is what a copy kernel reaches, bytes read plus bytes written."""

    capacity_bytes: Size
    peak_bytes_per_s: Rate
    read_write_bytes_per_s: Rate


class Cores(_Strict):
    """What one multiprocessor (or CPU core) offers a kernel."""

    count: Size
    shared_memory_per_block_bytes: Size
    registers_per_block: Size
    threads_per_core: Size


class Launch(_Strict):
    """What starting one kernel costs."""

    replayed_ns: Latency
    eager_ns: Latency


class Device(_Strict):
    """One processor that kernels run on, or the host that feeds it."""

    id: Identifier
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

    def ops_per_s(self, dtype: str) -> float:
        """The rate of a type: sustained where it was measured, else peak; the slowest known where the type is not listed."""
        for table in (self.sustained_ops_per_s, self.peak_ops_per_s):
            for key, rate in table.items():
                if key == dtype:
                    return rate.value
        return min(rate.value for rate in self.peak_ops_per_s.values())


class Link(_Strict):
    """A connection between two devices; the rate is that of one direction."""

    ends: tuple[Identifier, Identifier]
    kind: Literal["pcie", "nvlink", "c2c", "network"]
    bytes_per_s: Rate
    latency_ns: Latency | None = None


class Topology(_Strict):
    """A machine. Kernels are compiled for `compute`, the devices that the model is placed on."""

    schema_version: Literal[1]
    name: Identifier
    description: Text
    devices: tuple[Device, ...] = Field(min_length=1, max_length=MAX_DEVICES)
    links: tuple[Link, ...] = Field(default=(), max_length=MAX_LINKS)
    compute: tuple[Identifier, ...] = Field(min_length=1, max_length=MAX_DEVICES)

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
