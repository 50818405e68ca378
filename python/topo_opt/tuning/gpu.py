"""Whether the machine that a compile is for is the one it runs on."""

from __future__ import annotations

import re

from topo_opt.topology import Device
from topo_opt.tuning.measure import GpuMeasurer, Measurer
from topo_opt.tuning.workers import WorkerDied


def find_gpu(device: Device) -> tuple[Measurer | None, str]:
    """A measurer for this device, or None and why there is none."""
    capability = device.target.capability
    if capability is None:
        return None, f"'{device.model}' runs kernels in the interpreter"
    import torch

    if not torch.cuda.is_available():
        return None, "there is no GPU here"
    measurer = GpuMeasurer(
        capability, device.cores.shared_memory_per_block_bytes.value, warp_size=device.target.warp_size
    )
    try:
        present = measurer.device()
    except WorkerDied as death:
        measurer.close()
        return None, f"the GPU cannot be used: {death}"
    if reason := difference(device, present):
        measurer.close()
        return None, reason
    return measurer, ""


def difference(device: Device, present: dict[str, object]) -> str:
    """Why times of the GPU that is present say nothing about a device; "" when they do.

    `present`: "name" as the driver gives it, "capability" times ten, "cores".
    """
    words = set(re.findall(r"[a-z0-9]+", device.model.lower()))
    name = str(present["name"])
    same = set(re.findall(r"[a-z0-9]+", name.lower())) <= words
    wanted = {"capability": device.target.capability, "cores": device.cores.count.value}
    for what, value in wanted.items():
        if present[what] != value:
            return f"the GPU here, {name}, has {what} {present[what]}, '{device.model}' has {value}"
    return "" if same else f"the GPU here is {name}, not '{device.model}'"
