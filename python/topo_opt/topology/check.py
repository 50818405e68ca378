"""What the types of a topology cannot say: names that must agree, and figures that must fit each other."""

from collections import Counter
from collections.abc import Iterator

from topo_opt.topology.schema import Device, Topology

Fault = tuple[str, str]  # JSON pointer, sentence


def faults(topology: Topology) -> Iterator[Fault]:
    """Every contradiction, in the order of the file."""
    known = {device.id for device in topology.devices}
    yield from _duplicates(topology)
    for i, device in enumerate(topology.devices):
        yield from _device_faults(f"/devices/{i}", device)
    pairs: set[tuple[str, str, str]] = set()
    for i, link in enumerate(topology.links):
        for side, end in enumerate(link.ends):
            if end not in known:
                yield f"/links/{i}/ends/{side}", f"there is no device '{end}'"
        if link.ends[0] == link.ends[1]:
            yield f"/links/{i}/ends", f"device '{link.ends[0]}' is linked to itself"
        first, second = sorted(link.ends)
        if (first, second, link.kind) in pairs:
            yield f"/links/{i}", f"'{first}' and '{second}' have two {link.kind} links; give one with the sum"
        pairs.add((first, second, link.kind))
    for i, name in enumerate(topology.compute):
        if name not in known:
            yield f"/compute/{i}", f"there is no device '{name}'"


def _duplicates(topology: Topology) -> Iterator[Fault]:
    seen: Counter[str] = Counter()
    for i, device in enumerate(topology.devices):
        seen[device.id] += 1
        if seen[device.id] > 1:
            yield f"/devices/{i}/id", f"'{device.id}' is the id of an earlier device"
    for name, times in Counter(topology.compute).items():
        if times > 1:
            yield "/compute", f"'{name}' is named {times} times"


def _device_faults(pointer: str, device: Device) -> Iterator[Fault]:
    memory = device.memory
    if memory.read_write_bytes_per_s.value > memory.peak_bytes_per_s.value:
        yield f"{pointer}/memory/read_write_bytes_per_s", "is above the peak of the memory"
    for dtype, rate in device.sustained_ops_per_s.items():
        peak = device.peak_ops_per_s.get(dtype)
        if peak is None:
            yield f"{pointer}/sustained_ops_per_s/{dtype}", "has no peak figure beside it"
        elif rate.value > peak.value:
            yield f"{pointer}/sustained_ops_per_s/{dtype}", "is above the peak"
    if device.l2_bytes.value > memory.capacity_bytes.value:
        yield f"{pointer}/l2_bytes", "is larger than the memory"
    if device.kind == "gpu" and device.target.backend == "interpreter":
        yield f"{pointer}/target/backend", "a gpu runs compiled kernels, not the interpreter"
