"""Whether a variant is launched kernel by kernel on the caller's tensors, or as one graph on memory of its own.

A graph reads and writes fixed addresses: inputs are copied in and results copied out. Launches cost the host more, but nothing is
copied. The two are compared by an estimate of the time of a call in a loop.
"""

from __future__ import annotations

from typing import Literal

import torch

from topo_opt.runtime.plan import AtenStep, CopyStep, KernelStep, Variant

LaunchMode = Literal["auto", "graph", "direct"]

LAUNCH_US = 4.0
"""Host time of one prepared kernel launch."""
ATEN_US = 12.0
"""Host time of one ATen call."""
COPY_US = 4.0
"""Host time of one copy, or of one result's allocation and copy."""
REPLAY_US = 6.0
"""Host time of one graph replay."""
ALLOCATION_US = 1.5
"""Host time of one result's allocation."""


def bytes_per_us(device: torch.device) -> float:
    """Peak memory bandwidth of a GPU, from what its driver says of clock (kHz) and bus width (bits)."""
    properties = torch.cuda.get_device_properties(device)
    return 2.0 * properties.memory_clock_rate * properties.memory_bus_width / 8 / 1e3


def choose(variant: Variant, bandwidth: float) -> Literal["graph", "direct"]:
    """What takes less time. A variant with state of its own is a graph: its inputs are small beside that.

    Args:
        bandwidth: bytes a microsecond.
    """
    if variant.mutated_state:
        return "graph"
    return "direct" if direct_us(variant, bandwidth) <= graph_us(variant, bandwidth) else "graph"


def graph_us(variant: Variant, bandwidth: float) -> float:
    """What a call as a graph takes beside its kernels: copies read and write every byte."""
    given = [leaf for leaf in variant.inputs if leaf.buffer is not None]
    back = [leaf for leaf in given if leaf.mutated]
    results = {leaf.buffer for leaf in variant.outputs if leaf.buffer is not None}
    moved = sum(variant.buffers[leaf.buffer].nbytes for leaf in (*given, *back) if leaf.buffer is not None)
    moved += sum(variant.buffers[b].nbytes for b in results)
    calls = len({leaf.dtype for leaf in given}) + len(back) + len(results)
    return max(2 * moved / bandwidth, COPY_US * calls) + REPLAY_US


def direct_us(variant: Variant, bandwidth: float) -> float:
    """What single launches take beside their kernels: the host's time, as far as the kernels don't hide it."""
    kernels = sum(isinstance(s, KernelStep) for s in variant.steps)
    calls = sum(isinstance(s, AtenStep) for s in variant.steps)
    copies = sum(isinstance(s, CopyStep) for s in variant.steps)
    results = {leaf.buffer for leaf in variant.outputs if leaf.buffer is not None}
    host = LAUNCH_US * kernels + ATEN_US * calls + COPY_US * copies + ALLOCATION_US * len(results)
    counted = ("param", "buffer", "constant", "input", "output")
    busy = sum(b.nbytes for b in variant.buffers if b.kind in counted and b.splat is None) / bandwidth
    return max(host - busy, LAUNCH_US)
