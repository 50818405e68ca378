"""The links between GPUs that NCCL's XML lists under each `<gpu>`: NVLink, XGMI, and NVLink-C2C to the processor."""

from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from topo_opt.topology.importers.sketch import Sketch, lane_rate, lanes_of, nvlink_figures, port_figures
from topo_opt.topology.importers.xml_input import whole

_SWITCH_CLASS, _PROCESSOR_CLASS = "068000", "068001"
_GPU_CLASSES = ("03", "12")
_C2C_UNIT = 1e6  # NCCL gives the rate of one C2C link in MB/s


@dataclass(frozen=True)
class _Entry:
    """One `<nvlink>` or `<xgmi>`: from a GPU to a device of some class, so many links."""

    gpu: str
    kind: str
    target: str
    target_class: str
    count: int


def wire_gpu_links(sketch: Sketch, gpus: dict[Element, str], numa_of: dict[str, str]) -> None:
    """Adds the links of all GPUs.

    Args:
        gpus: the `<pci>` of GPUs with their ids.
        numa_of: the NUMA node of each GPU.
    """
    by_bus = {pci.get("busid", "").lower(): gpu for pci, gpu in gpus.items()}
    direct: dict[tuple[str, str, str], int] = {}
    switched: dict[str, int] = {}
    for entry in _entries(sketch, gpus):
        peer = by_bus.get(entry.target)
        if peer == entry.gpu:
            sketch.note(
                f"{entry.count} {entry.kind}s of {entry.gpu} lead to itself in the file: where they lead is not known"
            )
        elif peer is not None:
            key = (entry.gpu, peer, entry.kind)
            direct[key] = direct.get(key, 0) + entry.count
        elif entry.target_class.startswith(_PROCESSOR_CLASS):
            _to_processor(sketch, entry, numa_of[entry.gpu])
        elif entry.target_class.startswith(_GPU_CLASSES):
            sketch.note(
                f"{entry.count} {entry.kind}s of {entry.gpu} lead to the GPU {entry.target[:20]}, which is not in the "
                "file: left out"
            )
        else:
            # A target that the machine does not show has no class, or a wrong one; like NCCL, take it for an NVSwitch.
            switched[entry.gpu] = switched.get(entry.gpu, 0) + entry.count
            if entry.target_class and not entry.target_class.startswith(_SWITCH_CLASS):
                sketch.note(
                    f"{entry.count} {entry.kind}s of {entry.gpu} lead to {entry.target[:20]} of class "
                    f"{entry.target_class[:8]}, which is no NVSwitch: taken for one, as NCCL does"
                )
    _wire_switched(sketch, switched)
    _wire_direct(sketch, direct)
    for pci, gpu in gpus.items():
        for c2c in pci.iter("c2c"):
            count = _count(c2c)
            rate = (whole(c2c, "bw", 0) or 0) * _C2C_UNIT
            if count and rate > 0:
                sketch.wire_at(gpu, numa_of[gpu], "c2c", rate * count, "the rate of <c2c> in the dump")
            else:
                given = f"count '{c2c.get('count', '')[:20]}' and bw '{c2c.get('bw', '')[:20]}'"
                sketch.note(f"the c2c of {gpu} has {given}, which is no rate: left out")


def _entries(sketch: Sketch, gpus: dict[Element, str]) -> Iterator[_Entry]:
    for pci, gpu in gpus.items():
        for element in pci.iter():
            if element.tag not in ("nvlink", "xgmi"):
                continue
            given, count = element.get("count", ""), _count(element)
            target_class = element.get("tclass", "").lower().removeprefix("0x")
            if count > 0:
                yield _Entry(gpu, element.tag, element.get("target", "").lower(), target_class, count)
            elif given.strip() == "0":
                sketch.note(f"{element.tag}s of {gpu} are down")
            else:
                sketch.note(f"'{given[:20]}' {element.tag}s of {gpu} are no number of links: left out")


def _count(element: Element) -> int:
    """The number of links of an element: 1 where it does not say it, 0 where it is none."""
    given = element.get("count", "").strip()
    return max(whole(element, "count", 0) or 0, 0) if given else 1


def _wire_switched(sketch: Sketch, switched: dict[str, int]) -> None:
    if not switched:
        return
    # NCCL takes all NVSwitches of a machine for one; so does a topology, since traffic is spread over them evenly.
    sketch.node("nvs", "nvswitch")
    for gpu, count in sorted(switched.items(), key=lambda item: int(item[0].removeprefix("gpu"))):
        most = lanes_of(sketch.gpus[gpu], "nvlink")
        if most is not None and count > most:
            sketch.note(f"{gpu} has {count} NVLinks in the file and {most} by its model: {most} are taken")
            count = most
        elif most is not None and count < most:
            sketch.note(f"{gpu} has {count} of {most} NVLinks: the others are down or not in the file")
        sketch.wire(gpu, "nvs", nvlink_figures(sketch, gpu, count), count)


def _wire_direct(sketch: Sketch, direct: dict[tuple[str, str, str], int]) -> None:
    done = set()
    for (gpu, peer, kind), count in sorted(direct.items()):
        if (peer, gpu, kind) in done:
            continue
        done.add((gpu, peer, kind))
        back = direct.get((peer, gpu, kind), count)
        if back != count:
            sketch.note(
                f"{gpu} has {count} {kind}s to {peer}, which has {back} back: {min(count, back)} are taken"
            )
        lanes = min(count, back)
        if kind == "nvlink":
            figures = nvlink_figures(sketch, gpu, lanes)
        else:
            figures = port_figures(sketch.gpus[gpu], "xgmi", "xgmi-mi200")
        sketch.wire(gpu, peer, figures, lanes)


def _to_processor(sketch: Sketch, entry: _Entry, numa: str) -> None:
    figures = nvlink_figures(sketch, entry.gpu, entry.count)
    source = f"{entry.count} NVLinks to the processor in the dump, each with the rate of {figures}"
    sketch.wire_at(entry.gpu, numa, "c2c", lane_rate(figures) * entry.count, source)
