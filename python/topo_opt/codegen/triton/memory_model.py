"""How fast programs that stream memory go: what the cost models of tiles share."""

from __future__ import annotations

from math import exp

from topo_opt.codegen.triton.target import Target

Ranked = list[tuple[float, dict[str, int]]]
"""Tiles with their estimated times, in ns where nothing else is said."""

REGISTERS = 200
"""Registers of a thread that a tile may need, by estimate; the limit is 255, and beyond it values spill."""
CORE_BYTES_PER_NS = 62.0
"""What a core reads from L2 and memory together."""
READING = 1.13
"""The rate of programs that only read, of that of reading and writing."""
SECTOR_BYTES = 32
"""Bytes that memory hands out at a time."""
LATENCY_NS = 1650.0
"""From a load to its data on a busy machine."""
ALONE = 1.5
"""What a core draws from memory when the others rest, of its part when they don't."""
_REGISTERS_PER_CORE, _THREADS_PER_CORE, _PROGRAMS_PER_CORE = 65536, 2048, 32


def resident(registers: float, warps: int, shared_bytes: int = 0, shared_limit: int = 1) -> int:
    """Programs that a core holds at once."""
    by_registers = int(_REGISTERS_PER_CORE / (max(registers, 24) * 32 * warps))
    by_threads = _THREADS_PER_CORE // (32 * warps)
    by_shared = shared_limit // shared_bytes if shared_bytes else _PROGRAMS_PER_CORE
    return max(1, min(by_registers, by_threads, by_shared, _PROGRAMS_PER_CORE))


def core_rate(target: Target) -> float:
    """Bytes per ns that a core reads from memory at most."""
    return READING * target.memory_bytes_per_s / target.cores / 1e9


def in_flight(flight_bytes: float, target: Target) -> float:
    """Share of the memory rate that a core reaches with so many bytes requested at once; saturates smoothly."""
    wanted = target.memory_bytes_per_s / target.cores * LATENCY_NS * 1e-9
    return 1.0 - exp(-2.0 * max(flight_bytes, 1.0) / wanted)


def share(programs: int, target: Target) -> float:
    """Programs whose time a launch takes, one after the other at a core's part of the memory rate.

    Cores that have no more programs leave their part to the others, which can use some of it.
    """
    return max(programs / target.cores, -(-programs // target.cores) / ALONE)
