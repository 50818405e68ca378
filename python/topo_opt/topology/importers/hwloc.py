"""XML of hwloc, versions 2 and 3, as `lstopo` writes it.

hwloc lists bridges: a host bridge, below it root ports, below a root port the upstream port of a switch, below that its
downstream ports, and so on by turns. A switch of the topology is an upstream port with its downstream ports; root ports are
part of the host bridge. Bandwidths between GPUs and NVSwitches come from matrices beside the tree.
"""

import re
from collections.abc import Iterator
from itertools import combinations
from xml.etree.ElementTree import Element

from topo_opt.errors import InputError
from topo_opt.topology.importers.hwloc_links import wire_matrices
from topo_opt.topology.importers.models import Hints, with_model
from topo_opt.topology.importers.pcie import figures_of, lanes_at
from topo_opt.topology.importers.processors import UNKNOWN, peer_limit, socket_link
from topo_opt.topology.importers.sketch import Sketch, port_figures
from topo_opt.topology.importers.xml_input import whole

_PCI_TYPE = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\]", re.IGNORECASE)
_GPU_VENDORS = ("10de", "1002")
_GPU_CLASSES = ("0300", "0302", "0380", "1200")
# Drivers number GPUs by their buses, programming interfaces perhaps not.
_OS_NAMES = tuple(re.compile(rf"{name}(\d+)$") for name in ("nvml", "rsmi", "cuda", "hip", r"opencl\d+d"))
_GB = 1e9


def read_hwloc(root: Element, what: str, device: str | None) -> Sketch:
    """The machine of an hwloc file.

    Raises:
        InputError: it is of version 1, has no I/O objects, or no GPU.
    """
    version = root.get("version", "")
    if not version.startswith(("2.", "3.")):
        raise InputError(
            f"{what} is of hwloc {version or '1'}, read are 2 and 3",
            hint="lstopo of hwloc 2 converts it: lstopo -i old new",
        )
    machine = root.find("object")
    if machine is None:
        raise InputError(f"{what} has no objects")
    found = [pci for pci in machine.iter("object") if _is_gpu(pci)]
    if not found:
        bridges = any(element.get("type") == "Bridge" for element in machine.iter("object"))
        reason = "none of its PCI devices is a GPU of NVIDIA or AMD" if bridges else "it has no I/O objects"
        raise InputError(f"{what} has no GPU: {reason}", hint="dump with lstopo --whole-io, GPUs visible")
    reader = _Reader(Sketch(), _gpu_ids(found), device)
    reader.numa_nodes(machine)
    reader.walk(machine, [])
    reader.sketch.gpus = dict(
        sorted(reader.sketch.gpus.items(), key=lambda item: int(item[0].removeprefix("gpu")))
    )
    if missing := [gpu for gpu in reader.gpus.values() if gpu not in reader.sketch.gpus]:
        raise InputError(
            f"{what} has {missing[0]} outside of a host bridge, where hwloc does not list PCI devices"
        )
    wire_matrices(reader.sketch, root, reader.gpus, reader.processors)
    return reader.sketch


class _Reader:
    def __init__(self, sketch: Sketch, gpus: dict[Element, str], device: str | None):
        self.sketch, self.gpus, self.device = sketch, gpus, device
        self.numas: dict[int, str] = {}
        self.processors: dict[str, str] = {}
        self.bridges = self.switches = self.nics = 0

    def numa_nodes(self, machine: Element) -> None:
        """Adds the NUMA nodes and the links between them."""
        for element in machine.iter("object"):
            if element.get("type") == "NUMANode":
                number = whole(element, "os_index", len(self.numas)) or 0
                if number >= 0 and number not in self.numas:
                    self.numas[number] = self.sketch.node(f"numa{number}", "numa")
        if not self.numas:
            self.numas[0] = self.sketch.node("numa0", "numa")
        processor = _processor(machine)
        self.sketch.peer_farthest = peer_limit(*processor[:2])
        figures = socket_link(*processor)
        if figures == UNKNOWN and len(self.numas) > 1:
            self.sketch.note("the file does not name the processors: the rate between NUMA nodes is nominal")
        for a, b in combinations(self.numas.values(), 2):
            self.sketch.wire(a, b, figures)

    def walk(self, element: Element, above: list[str]) -> None:
        """Looks for host bridges; `above` are the NUMA nodes of the innermost object that has any."""
        here = self._local(element) or above
        if here and (index := element.get("gp_index")):
            self.processors[f"{element.get('type')}:{index}"] = here[0]
        for child in element.findall("object"):
            if child.get("type") == "Bridge" and child.get("bridge_type", "").startswith("0"):
                self._host_bridge(child, here)
            else:
                self.walk(child, here)

    def _local(self, element: Element) -> list[str]:
        bits = _bitmap(element.get("nodeset", ""))
        return [name for number, name in self.numas.items() if bits >> number & 1]

    def _host_bridge(self, element: Element, numas: list[str]) -> None:
        if not self._holds_devices(element):
            return
        bridge = self.sketch.node(f"bridge{self.bridges}", "root_complex")
        self.bridges += 1
        for numa in numas or list(self.numas.values()):
            self.sketch.wire(bridge, numa, "host-fabric")
        self._below(element, bridge)

    def _below_port(self, element: Element, above: str) -> None:
        if element in self.gpus:
            self._gpu(element, above)
        elif element.get("type") == "Bridge":
            self._switch(element, above)
        elif _pci(element)[0].startswith("02"):
            self._nic(element, above)

    def _switch(self, element: Element, above: str) -> None:
        if not self._holds_devices(element):
            return
        switch = self.sketch.node(
            f"switch{self.switches}", "pcie_switch", ":".join(_pci(element)[1:]) or None
        )
        self.switches += 1
        self._wire(switch, above, element, None)
        self._below(element, switch)

    def _below(self, element: Element, above: str) -> None:
        """What hangs on a host bridge or a switch, whose ports are bridges too."""
        for child in element.findall("object"):
            for device in child.findall("object") if child.get("type") == "Bridge" else [child]:
                self._below_port(device, above)

    def _gpu(self, element: Element, above: str) -> None:
        gpu, (_, vendor, model) = self.gpus[element], _pci(element)
        name = next(
            (i.get("value") for i in element.iter("info") if i.get("name") in ("GPUModel", "PCIDevice")), None
        )
        hints = with_model(Hints(name=name, pci=f"{vendor}:{model}"), self.device)
        self.sketch.gpus[gpu] = hints
        self._wire(gpu, above, element, hints)

    def _nic(self, element: Element, above: str) -> None:
        names = [o.get("name", "")[:40] for o in element.iter("object") if o.get("type") == "OSDev"]
        nic = self.sketch.node(f"nic{self.nics}", "nic", ", ".join(filter(None, names)) or None)
        self.nics += 1
        self._wire(nic, above, element, None)

    def _wire(self, name: str, above: str, element: Element, hints: Hints | None) -> None:
        speed = _number(element.get("pci_link_speed", ""))
        if speed > 0:
            link = lanes_at(speed * _GB)
            if link is not None:
                self.sketch.wire(name, above, figures_of(link[0]), link[1])
            else:
                self.sketch.wire_at(name, above, "pcie", speed * _GB, "pci_link_speed of hwloc in the dump")
            return
        self.sketch.note(
            "some links of PCIe have no speed in the file: those of the GPU's model, or 3.0 x16, are taken"
        )
        self.sketch.wire(name, above, port_figures(hints, "pcie", "pcie3") if hints else "pcie3", 16)

    def _holds_devices(self, element: Element) -> bool:
        return any(e in self.gpus or _pci(e)[0].startswith("02") for e in element.iter("object"))


def _gpu_ids(found: list[Element]) -> dict[Element, str]:
    for pattern in _OS_NAMES:
        numbers = [_number_of(pci, pattern) for pci in found]
        if None not in numbers and len(set(numbers)) == len(numbers):
            return {pci: f"gpu{number}" for pci, number in zip(found, numbers)}
    return {pci: f"gpu{i}" for i, pci in enumerate(sorted(found, key=lambda pci: pci.get("pci_busid", "")))}


def _number_of(pci: Element, pattern: re.Pattern[str]) -> int | None:
    names = (pattern.match(o.get("name", "")) for o in pci.iter("object") if o.get("type") == "OSDev")
    return next((int(match.group(1)) for match in names if match and len(match.group(1)) < 6), None)


def _processor(machine: Element) -> tuple[str, str, int | None, int | None]:
    """Architecture, vendor, family and model, as far as the file says them."""
    for package in machine.iter("object"):
        if package.get("type") in ("Package", "Machine"):
            said = {info.get("name"): info.get("value", "") for info in package.findall("info")}
            if vendor := said.get("CPUVendor"):
                family, model = (said.get(f"CPU{part}Number") or "" for part in ("Family", "Model"))
                arch = "aarch64" if "arm" in vendor.lower() else "x86_64"
                return arch, vendor, _integer(family), _integer(model)
            if "POWER9" in (said.get("CPUModel") or ""):
                return "ppc64le", "IBM", None, None
    return "", "", None, None


def _is_gpu(element: Element) -> bool:
    if element.get("type") != "PCIDev":
        return False
    kind, vendor, _ = _pci(element)
    return kind in _GPU_CLASSES and vendor in _GPU_VENDORS


def _pci(element: Element) -> tuple[str, str, str]:
    """Class, vendor and device of a PCI object, in lower case; empty for others."""
    match = _PCI_TYPE.match(element.get("pci_type", ""))
    return (match.group(1).lower(), match.group(2).lower(), match.group(3).lower()) if match else ("", "", "")


def _bitmap(text: str) -> int:
    """A set of hwloc: words of 32 bits, the most significant first ("0x00000003", "0xff,0x0"); 0 for infinite ones."""
    bits = 0
    for word in _words(text):
        bits = bits << 32 | word
    return bits


def _words(text: str) -> Iterator[int]:
    for word in text.split(",")[:64]:
        try:
            yield int(word, 16) & 0xFFFFFFFF if word else 0
        except ValueError:
            return


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 < value < 1e6 else 0.0


def _integer(text: str) -> int | None:
    return int(text) if text.isdigit() and len(text) < 6 else None
