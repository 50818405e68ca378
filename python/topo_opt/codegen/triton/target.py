"""What code generation must know of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topo_opt.topology.schema import Device


@dataclass(frozen=True)
class Target:
    """Limits and counts of one device that tiles depend on.

    The defaults only serve legality checks and IR that is lowered without a topology; a compile reads them from one.
    """

    cores: int = 132
    shared_bytes: int = 232448
    memory_bytes_per_s: float = 4.24e12

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
        )
