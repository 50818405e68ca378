"""NCCL's topology XML, as `NCCL_TOPO_DUMP_FILE` writes it and clouds ship it; RCCL's version 2 with XGMI links as well.

In these files `<cpu>` is a NUMA node with all its host bridges in one, and a `<pci>` of class 0604 a PCIe switch; paths
through a `<cpu>` are therefore of class PHB, as NCCL itself counts them, and never NODE.
"""

from dataclasses import dataclass
from itertools import combinations
from xml.etree.ElementTree import Element

from topo_opt.errors import InputError
from topo_opt.topology.importers.models import Hints, recognise, with_model
from topo_opt.topology.importers.nccl_links import wire_gpu_links
from topo_opt.topology.importers.pcie import WIDTHS, figures_of, generation_of
from topo_opt.topology.importers.processors import UNKNOWN, peer_limit, socket_link
from topo_opt.topology.importers.sketch import Sketch
from topo_opt.topology.importers.xml_input import whole
from topo_opt.topology.library import device_figures, link_figures

_NVIDIA, _AMD = "0x10de", "0x1002"
_OLD_GCN = {"910": "90a", "940": "942"}  # numbers that older versions of RCCL write
_UNSAID = ("", "0", "Unknown", "Unknown speed")  # how sysfs and virtual machines leave speeds and widths open
_FULL_WIDTH = 16  # what NCCL takes for a width of 0, which virtual machines report


@dataclass(frozen=True)
class Slot:
    """A PCIe device or switch of the file: its element, the link to what is above it, and what it became."""

    element: Element
    generation: int | None
    width: int

    @property
    def emulated(self) -> bool:
        """A bridge that a hypervisor made: they say one lane of the first generation, whatever is behind them."""
        return self.generation == 1 and self.width == 1


def read_nccl(root: Element, what: str, device: str | None) -> Sketch:
    """The machine of an NCCL topology file.

    Raises:
        InputError: no GPU can be told from the other devices, or the file has no processors.
    """
    hosts = [element for element in root if element.tag == "cpu"]
    if not hosts:
        raise InputError(f"{what} has no <cpu>, under which NCCL lists a machine")
    gpus = _gpu_ids(root, what)
    reader = _Reader(Sketch(), gpus, device)
    numas = [reader.host(cpu, index) for index, cpu in enumerate(hosts)]
    for index, cpu in enumerate(hosts):
        bridge = f"bridge{numas[index].removeprefix('numa')}"
        for child in cpu:
            reader.attach(child, bridge)
    if missing := [gpu for pci, gpu in gpus.items() if gpu not in reader.sketch.gpus]:
        raise InputError(f"{what} has {missing[0]} outside of <cpu> and <pci>, where NCCL does not list GPUs")
    _order_gpus(reader.sketch)
    _sockets(reader.sketch, hosts, numas)
    reader.sketch.peer_farthest = peer_limit(hosts[0].get("arch", ""), hosts[0].get("vendor", ""))
    above = {gpus[pci]: numas[i] for i, cpu in enumerate(hosts) for pci in cpu.iter("pci") if pci in gpus}
    wire_gpu_links(reader.sketch, gpus, above)
    if root.find(".//gpu") is None and _expects_nvlink(reader.sketch):
        reader.sketch.note(
            "the file has no NVLinks, which these GPUs have: it is a template that NCCL completes on the machine; "
            "only classes of PCIe are known"
        )
    return reader.sketch


class _Reader:
    def __init__(self, sketch: Sketch, gpus: dict[Element, str], device: str | None):
        self.sketch, self.gpus, self.device = sketch, gpus, device
        self.switches = self.nics = 0

    def host(self, cpu: Element, index: int) -> str:
        """Adds the nodes of a `<cpu>`; returns the NUMA node's id."""
        number = whole(cpu, "numaid", -1)
        wanted = f"numa{number if number is not None and number >= 0 else index}"
        if wanted in self.sketch.nodes:
            wanted = f"numa{index}.{number}"
        numa = self.sketch.node(wanted, "numa")
        bridge = self.sketch.node(f"bridge{wanted.removeprefix('numa')}", "root_complex")
        self.sketch.wire(bridge, numa, "host-fabric")
        return numa

    def attach(self, element: Element, above: str) -> None:
        """Adds what an element holds, below the node `above`."""
        if element.tag == "nic":
            self._nic(element, None, above)
        elif element.tag == "pci":
            if element in self.gpus:
                self._gpu(element, above)
            elif _is_nic(element):
                self._nic(element, self._slot(element, _place(element)), above)
            elif _is_bridge(element):
                self._switch(element, above)
            elif _has_gpu_class(element):
                self.sketch.note(
                    f"{element.get('busid', 'a GPU')[:20]} is a GPU that NCCL did not use: left out"
                )

    def _gpu(self, element: Element, above: str) -> None:
        gpu, inner = self.gpus[element], element.find("gpu")
        hints = with_model(_hints(element, inner), self.device)
        self.sketch.gpus[gpu] = hints
        slot = self._slot(element, gpu)
        generation = slot.generation or _generation_of_model(hints)
        if generation is None:
            generation = 3  # as NCCL
            self.sketch.note(
                "some links of PCIe have no speed in the file: taken as generation 3, as NCCL does"
            )
        self.sketch.wire(gpu, above, figures_of(generation), slot.width)

    def _nic(self, element: Element, slot: Slot | None, above: str) -> None:
        nets = list(element.iter("net"))
        names = ", ".join(net.get("name", "")[:40] for net in nets)
        index = whole(nets[0], "dev") if nets else None
        wanted = f"nic{self.nics if index is None else index}"
        while wanted in self.sketch.nodes:
            self.nics += 1
            wanted = f"nic{self.nics}"
        self.nics += 1
        nic = self.sketch.node(wanted, "nic", names or None)
        speed = sum(whole(net, "speed", 0) or 0 for net in nets)
        if slot is not None:
            self.sketch.wire(nic, above, figures_of(slot.generation or 3), slot.width)
        elif speed > 0:
            self.sketch.wire_at(
                nic, above, "pcie", speed * 1e6 / 8, "the speed of the network device in the dump"
            )
        else:
            self.sketch.wire(nic, above, figures_of(3), _FULL_WIDTH)

    def _switch(self, element: Element, above: str) -> None:
        inside = [child for child in element if self._holds_devices(child)]
        if not inside:
            return
        switch = self.sketch.node(f"switch{self.switches}", "pcie_switch", _model(element))
        self.switches += 1
        slot = self._slot(element, _place(element))
        if slot.emulated or slot.generation is None:
            slot = max((_slot(child) for child in inside if child.tag == "pci"), key=_rate, default=slot)
            self.sketch.note(
                "bridges without a real speed (2.5 GT/s x1 of a virtual machine, or none): they carry what is behind them"
            )
        self.sketch.wire(switch, above, figures_of(slot.generation or 3), slot.width)
        for child in inside:
            self.attach(child, switch)

    def _slot(self, element: Element, name: str) -> Slot:
        """The slot of a device, with notes of what it says and PCIe does not have."""
        speed, width = (element.get(key, "").strip() for key in ("link_speed", "link_width"))
        if generation_of(speed) is None and speed not in _UNSAID:
            self.sketch.note(f"{name} has '{speed[:30]}' for a link_speed, which is none of PCIe: not taken")
        if width not in _UNSAID and whole(element, "link_width") not in WIDTHS:
            self.sketch.note(
                f"{name} has '{width[:30]}' for a link_width, which is none of PCIe: taken as {_FULL_WIDTH} lanes"
            )
        return _slot(element)

    def _holds_devices(self, element: Element) -> bool:
        return element.tag == "nic" or any(e in self.gpus or _is_nic(e) for e in element.iter("pci"))


def _gpu_ids(root: Element, what: str) -> dict[Element, str]:
    marked = [pci for pci in root.iter("pci") if pci.find("gpu") is not None]
    found = marked or sorted((pci for pci in root.iter("pci") if _has_gpu_class(pci)), key=_bus)
    if not found:
        silent = [pci.get("busid", "?") for pci in root.iter("pci") if not pci.get("class")]
        if silent:
            reason = f"{len(silent)} devices have neither a class nor a <gpu> ({', '.join(silent[:3])}): which are GPUs is "
            reason += "left for NCCL to find on the machine"
            raise InputError(
                f"{what} is a template: {reason}", hint="dump one there with NCCL_TOPO_DUMP_FILE"
            )
        raise InputError(f"{what} has no GPU: no <gpu> and no device of class 0x0302")
    for attribute in ("dev", "rank"):
        numbers = [whole(gpu, attribute, -1) for pci in marked for gpu in pci.findall("gpu")[:1]]
        if (
            marked
            and len(set(numbers)) == len(numbers)
            and all(n is not None and 0 <= n < 10**6 for n in numbers)
        ):
            return {pci: f"gpu{number}" for pci, number in zip(marked, numbers)}
    return {pci: f"gpu{index}" for index, pci in enumerate(found)}


def _order_gpus(sketch: Sketch) -> None:
    sketch.gpus = dict(sorted(sketch.gpus.items(), key=lambda item: int(item[0].removeprefix("gpu"))))


def _sockets(sketch: Sketch, hosts: list[Element], numas: list[str]) -> None:
    machines: dict[str, list[int]] = {}
    for index, cpu in enumerate(hosts):
        machines.setdefault(cpu.get("host_hash", ""), []).append(index)
    for members in machines.values():
        for a, b in combinations(members, 2):
            figures = _socket_link(hosts[a])
            if figures == UNKNOWN:
                sketch.note("the file does not name the processors: the rate between NUMA nodes is nominal")
            sketch.wire(numas[a], numas[b], figures)


def _socket_link(cpu: Element) -> str:
    arch, vendor = cpu.get("arch", ""), cpu.get("vendor", "")
    return socket_link(arch, vendor, whole(cpu, "familyid"), whole(cpu, "modelid"))


def _place(element: Element) -> str:
    return element.get("busid", "").strip()[:20] or "a device without a busid"


def _slot(element: Element) -> Slot:
    width = whole(element, "link_width", 0)
    usable = width if width in WIDTHS else 0
    return Slot(element, generation_of(element.get("link_speed", "")), usable or _FULL_WIDTH)


def _rate(slot: Slot) -> float:
    return slot.width * link_figures(figures_of(slot.generation or 3)).bytes_per_s.value


def _hints(element: Element, inner: Element | None) -> Hints:
    vendor, device = element.get("vendor", ""), element.get("device", "")
    pci = (
        f"{vendor[2:]}:{device[2:]}".lower()
        if vendor in (_NVIDIA, _AMD) and device.startswith("0x")
        else None
    )
    if inner is None:
        return Hints(pci=pci)
    if inner.get("gcn"):
        gcn = inner.get("gcn", "").split(":")[0]
        architecture = gcn if gcn.startswith("gfx") else f"gfx{_OLD_GCN.get(gcn, gcn)}"
        return Hints(pci=pci, architecture=architecture, cores=whole(inner, "sm"))
    return Hints(pci=pci, capability=whole(inner, "sm"))


def _generation_of_model(hints: Hints) -> int | None:
    model = recognise(hints)
    port = device_figures(model).port("pcie") if model else None
    return int(port.figures.removeprefix("pcie")) if port and port.figures else None


def _expects_nvlink(sketch: Sketch) -> bool:
    models = {recognise(hints) for hints in sketch.gpus.values()}
    return not sketch.gpus or any(
        model is None or device_figures(model).port("nvlink") or device_figures(model).port("xgmi")
        for model in models
    )


def _class(element: Element) -> str:
    return element.get("class", "").lower().removeprefix("0x")


def _has_gpu_class(element: Element) -> bool:
    kind, vendor = _class(element), element.get("vendor", "").lower()
    if vendor in (_NVIDIA, _AMD):
        return kind.startswith(("0300", "0302", "0380", "1200"))
    return vendor == "" and kind.startswith(("0302", "1200"))


def _is_nic(element: Element) -> bool:
    return element.find("nic") is not None or _class(element).startswith("02")


def _is_bridge(element: Element) -> bool:
    return _class(element).startswith("0604") or any(child.tag == "pci" for child in element)


def _model(element: Element) -> str | None:
    vendor, device = element.get("vendor", ""), element.get("device", "")
    return (
        f"{vendor[2:]}:{device[2:]}"[:40]
        if vendor.startswith("0x") and vendor not in ("0x0000", "0xffff")
        else None
    )


def _bus(element: Element) -> tuple[int, ...]:
    parts = element.get("busid", "").replace(".", ":").split(":")
    try:
        return tuple(int(part, 16) for part in parts)
    except ValueError:
        return ()
