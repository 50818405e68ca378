"""What code generation must know of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topo_opt.topology.schema import Device


_FIRST_WITH_TANH, _FIRST_WITH_TMA, _WITH_WGMMA = 75, 90, 90
"""NVIDIA's compute capability from which on there is an instruction for tanh in f32, and hardware that copies blocks; the one with products of
warp groups (`wgmma`)."""


class Precision(IntEnum):
    """How exact functions of scalars have to be."""

    EXACT = 0
    """As exact as eager PyTorch's."""
    HALF = 1
    """Right far below the last digit of half precision."""
    BF16 = 2
    """Off by less than half a unit of bf16's last place at 0.01, behind products of bf16, which eager PyTorch rounds before."""


@dataclass(frozen=True)
class Target:
    """Limits and counts of one device that tiles depend on.

    The defaults only serve legality checks and IR that is lowered without a topology; a compile reads them from one.
    """

    cores: int = 132
    shared_bytes: int = 232448
    memory_bytes_per_s: float = 4.24e12
    has_tanh: bool = True
    """Whether it has PTX's `tanh.approx.f32`."""
    has_tma: bool = True
    """Whether its hardware copies blocks that a tensor descriptor says."""
    has_wgmma: bool = True
    """Whether four warps multiply together, with operands in shared memory."""

    @classmethod
    def named(cls, topology: str) -> Target:
        """The first compute device of a topology, by name or file."""
        from topo_opt.topology import load

        return cls.of(load(topology).primary)

    @classmethod
    def of(cls, device: Device) -> Target:
        """The figures of a device of a topology."""
        return cls(
            device.cores.count.value,
            device.cores.shared_memory_per_block_bytes.value,
            device.memory.read_write_bytes_per_s.value,
            has_tanh=(device.target.capability or 0) >= _FIRST_WITH_TANH,
            has_tma=(device.target.capability or 0) >= _FIRST_WITH_TMA,
            has_wgmma=device.target.capability == _WITH_WGMMA,
        )
