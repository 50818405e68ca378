"""What the types of a topology cannot say: names that must agree, and figures that must fit each other."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from topo_opt.topology.schema import Device, Link, Topology

Fault = tuple[str, str]  # JSON pointer, sentence
_JOINS: dict[str, tuple[str, ...]] = {
    "pcie": ("gpu", "cpu", "nic", "pcie_switch", "root_complex", "numa"),
    "nvlink": ("gpu", "cpu", "nvswitch"),
    "c2c": ("gpu", "cpu", "numa"),
    "xgmi": ("gpu", "cpu", "numa"),
    "hccs": ("gpu", "cpu"),
    "fabric": ("cpu", "numa", "root_complex"),
    "smp": ("cpu", "numa"),
    "network": ("gpu", "cpu", "nic", "net_switch"),
}
_PORTS: dict[str, tuple[str, ...]] = {
    "nvlink": ("nvlink",),
    "xgmi": ("xgmi",),
    "hccs": ("hccs",),
    "c2c": ("c2c", "nvlink"),
}
"""Ports that a link of a kind needs one of. POWER9 is on the NVLinks of its GPUs; PCIe is how any GPU may appear to its host, one
behind C2C too."""


def faults(topology: Topology) -> Iterator[Fault]:
    """Every contradiction, in the order of the file."""
    kinds: dict[str, str] = {device.id: device.kind for device in topology.devices}
    kinds |= {node.id: node.kind for node in topology.nodes}
    yield from _duplicates(topology)
    for i, device in enumerate(topology.devices):
        yield from _device_faults(f"/devices/{i}", device)
    dangling = list(_link_ends(topology, kinds))
    yield from dangling
    yield from _repeated_links(topology)
    yield from _without_port(topology)
    yield from _too_many_lanes(topology)
    for i, name in enumerate(topology.compute):
        if kinds.get(name) not in ("gpu", "cpu"):
            yield f"/compute/{i}", f"there is no device '{name}'"
    if not dangling:
        yield from _separate(topology)
    yield from _measurements(topology)


def _duplicates(topology: Topology) -> Iterator[Fault]:
    seen: Counter[str] = Counter()
    ids = [(f"/devices/{i}/id", device.id) for i, device in enumerate(topology.devices)]
    ids += [(f"/nodes/{i}/id", node.id) for i, node in enumerate(topology.nodes)]
    for pointer, identifier in ids:
        seen[identifier] += 1
        if seen[identifier] > 1:
            yield pointer, f"'{identifier}' is the id of an earlier device or node"
    for name, times in Counter(topology.compute).items():
        if times > 1:
            yield "/compute", f"'{name}' is named {times} times"


def _link_ends(topology: Topology, kinds: dict[str, str]) -> Iterator[Fault]:
    for i, link in enumerate(topology.links):
        for side, end in enumerate(link.ends):
            if end not in kinds:
                yield f"/links/{i}/ends/{side}", f"there is no device '{end}'"
            elif kinds[end] not in _JOINS[link.kind]:
                joined = ", ".join(_JOINS[link.kind])
                yield f"/links/{i}/ends/{side}", f"'{end}' is a {kinds[end]}; {link.kind} joins {joined}"
        if link.ends[0] == link.ends[1]:
            yield f"/links/{i}/ends", f"device '{link.ends[0]}' is linked to itself"
        if link.sustained_bytes_per_s and link.sustained_bytes_per_s.value > link.bytes_per_s.value:
            yield f"/links/{i}/sustained_bytes_per_s", "is above the rate of the lanes"


def _repeated_links(topology: Topology) -> Iterator[Fault]:
    first_of: dict[tuple[frozenset[str], str], int] = {}
    for i, link in enumerate(topology.links):
        earlier = first_of.setdefault((frozenset(link.ends), link.kind), i)
        if earlier == i:
            continue
        a, b = link.ends
        if difference := _difference(topology.links[earlier], link):
            yield f"/links/{i}", f"'{a}' and '{b}' have a {link.kind} link at /links/{earlier}, {difference}"
        else:
            yield f"/links/{i}", f"'{a}' and '{b}' have two {link.kind} links; give one with the sum"


def _difference(one: Link, other: Link) -> str:
    for field in ("bytes_per_s", "sustained_bytes_per_s", "latency_ns", "lanes"):
        before, here = (
            getattr(figure, "value", figure) for figure in (getattr(one, field), getattr(other, field))
        )
        if before != here:
            return f"where {field} is {before}, not {here}; a link has one rate for both directions"
    return ""


def _without_port(topology: Topology) -> Iterator[Fault]:
    """Links of a kind that a device's model has no port for; a model and kind are named once, many devices may have them."""
    devices = {device.id: device for device in topology.devices if device.ports}
    named: set[tuple[str, str]] = set()
    for i, link in enumerate(topology.links):
        for end in link.ends:
            if link.kind not in _PORTS or end not in devices:
                continue
            device, have = devices[end], [port.kind for port in devices[end].ports]
            if not set(have) & set(_PORTS[link.kind]) and (device.model, link.kind) not in named:
                named.add((device.model, link.kind))
                said = f"'{end}' is a {device.model}, which has no {link.kind}, but {', '.join(have)}"
                yield f"/links/{i}", said


def _too_many_lanes(topology: Topology) -> Iterator[Fault]:
    used: Counter[tuple[str, str]] = Counter()
    for link in topology.links:
        for end in link.ends:
            used[end, link.kind] += link.lanes or 0
    for i, device in enumerate(topology.devices):
        for j, port in enumerate(device.ports):
            if port.kind != "pcie" and used[device.id, port.kind] > port.count.value:
                lanes = f"'{device.id}' is on {used[device.id, port.kind]} lanes of {port.kind}"
                yield f"/devices/{i}/ports/{j}/count", f"{lanes}, its model has {port.count.value}"


def _separate(topology: Topology) -> Iterator[Fault]:
    if len(topology.compute) < 2:
        return
    neighbours: defaultdict[str, list[str]] = defaultdict(list)
    for link in topology.links:
        first, second = link.ends
        neighbours[first].append(second)
        neighbours[second].append(first)
    start = topology.compute[0]
    reached, waiting = {start}, [start]
    while waiting:
        for neighbour in neighbours[waiting.pop()]:
            if neighbour not in reached:
                reached.add(neighbour)
                waiting.append(neighbour)
    for i, name in enumerate(topology.compute):
        if name not in reached:
            yield f"/compute/{i}", f"no links lead from '{start}' to '{name}'"


def _measurements(topology: Topology) -> Iterator[Fault]:
    if topology.measured is None:
        return
    devices = {device.id for device in topology.devices}
    for i, collective in enumerate(topology.measured.collectives):
        for j, name in enumerate(collective.participants):
            if name not in devices:
                yield f"/measured/collectives/{i}/participants/{j}", f"there is no device '{name}'"
        if len(set(collective.participants)) != len(collective.participants):
            yield f"/measured/collectives/{i}/participants", "names a device twice"
    for i, gemm in enumerate(topology.measured.gemms):
        if gemm.device not in devices:
            yield f"/measured/gemms/{i}/device", f"there is no device '{gemm.device}'"
    for i, copy in enumerate(topology.measured.copies):
        for j, name in enumerate(copy.ends):
            if name not in devices:
                yield f"/measured/copies/{i}/ends/{j}", f"there is no device '{name}'"


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
    for i, mode in enumerate(device.partition_modes):
        if mode.active and any(other.active for other in device.partition_modes[:i]):
            yield f"{pointer}/partition_modes/{i}/active", "another mode is active"
    if device.kind == "gpu" and device.target.backend == "interpreter":
        yield f"{pointer}/target/backend", "a gpu runs compiled kernels, not the interpreter"
