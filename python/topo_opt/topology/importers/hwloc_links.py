"""The matrices of bandwidths between GPUs (and NVSwitches) that hwloc keeps beside the tree, in MB/s."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from xml.etree.ElementTree import Element

from topo_opt.topology.importers.sketch import Sketch, lane_rate, lanes_of, nvlink_figures, port_figures

_MAX_OBJECTS = 512
_MB = 1e6
# NVML gives the rate of an NVLink with or without what its coding adds: 25, 25.781 and 26.562 GB/s for the same kind.
_CODINGS = (1.0, 1.03125, 1.0625)


@dataclass(frozen=True)
class _Matrix:
    name: str
    objects: tuple[str, ...]
    values: tuple[int, ...]

    def between(self, i: int, j: int) -> int:
        """MB/s, the smaller of both directions."""
        n = len(self.objects)
        return min(self.values[i * n + j], self.values[j * n + i])


def wire_matrices(sketch: Sketch, root: Element, gpus: dict[Element, str], numas: dict[str, str]) -> None:
    """Adds the links between GPUs, to NVSwitches and processors, that the matrices of the file show.

    Args:
        gpus: the PCI objects of GPUs with their ids.
        numas: the NUMA node of a processor, by the name that matrices use for it ("Package:3").
    """
    owners = _owners(gpus)
    seen = False
    for matrix in _matrices(root):
        if matrix.name == "NVLinkBandwidth":
            seen = True
            _wire_nvlink(sketch, matrix, owners, numas)
        elif matrix.name == "XGMIBandwidth":
            seen = True
            _wire_xgmi(sketch, matrix, owners)
    if not seen and any(lanes_of(h, "nvlink") or lanes_of(h, "xgmi") for h in sketch.gpus.values()):
        sketch.note(
            "the file has no matrix of NVLink or XGMI bandwidths, which these GPUs may have: only PCIe is known"
        )


def _wire_nvlink(sketch: Sketch, matrix: _Matrix, owners: dict[str, str], numas: dict[str, str]) -> None:
    places = {i: owners[o] for i, o in enumerate(matrix.objects) if o in owners}
    for i, j in combinations(places, 2):
        if places[i] != places[j] and (rate := matrix.between(i, j)):
            _wire(sketch, places[i], places[j], places[i], rate)
    for j, name in enumerate(matrix.objects):
        for i in places:
            if name in numas and (rate := matrix.between(i, j)):
                source = "NVLinkBandwidth of hwloc in the dump: NVLinks to the processor"
                sketch.wire_at(places[i], numas[name], "c2c", rate * _MB, source)
    _wire_switches(sketch, matrix, places)


def _wire_switches(sketch: Sketch, matrix: _Matrix, places: dict[int, str]) -> None:
    # Switches with the same GPUs are the planes of one fabric, over which traffic is spread evenly: one node.
    planes: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for switch, name in enumerate(matrix.objects):
        reached = tuple(i for i in places if matrix.between(i, switch))
        if reached and switch not in places and name.startswith("PCIDev:"):
            planes[reached].append(switch)
    ids, rates = {}, {}
    for number, (reached, switches) in enumerate(planes.items()):
        name = "nvs" if len(planes) == 1 else f"nvs{number}"
        ids[reached] = sketch.node(name, "nvswitch", f"{len(switches)} NVSwitch chips")
        of_gpus = {i: sum(matrix.between(i, switch) for switch in switches) for i in reached}
        rates[reached] = sum(of_gpus.values())
        for i, rate in of_gpus.items():
            _wire(sketch, places[i], ids[reached], places[i], rate)
    for one, two in combinations(planes, 2):
        trunk = sum(matrix.between(i, j) for i in planes[one] for j in planes[two])
        if not trunk:
            trunk = min(rates[one], rates[two])
            sketch.note(
                f"hwloc does not list links between NVSwitches: {ids[one]} and {ids[two]} are joined by as many as the GPUs "
                "of one side have"
            )
        _wire(sketch, ids[one], ids[two], places[one[0]], trunk)


def _wire(sketch: Sketch, a: str, b: str, gpu: str, megabytes_per_s: int) -> None:
    """A link of so much; with lanes where the generation of the GPU's NVLinks is known."""
    if lanes_of(sketch.gpus[gpu], "nvlink") is not None:
        figures, lanes = _lanes(sketch, gpu, megabytes_per_s)
        sketch.wire(a, b, figures, lanes)
    else:
        sketch.wire_at(a, b, "nvlink", megabytes_per_s * _MB, "NVLinkBandwidth of hwloc in the dump")


def _wire_xgmi(sketch: Sketch, matrix: _Matrix, owners: dict[str, str]) -> None:
    places = {i: owners[o] for i, o in enumerate(matrix.objects) if o in owners}
    for i, j in combinations(places, 2):
        rate = matrix.between(i, j)
        if places[i] != places[j] and rate:
            figures = port_figures(sketch.gpus[places[i]], "xgmi", "xgmi-mi200")
            sketch.wire(places[i], places[j], figures, max(1, round(rate * _MB / lane_rate(figures))))


def _lanes(sketch: Sketch, gpu: str, megabytes_per_s: int) -> tuple[str, int]:
    """The generation and the number of links that carry so much: the coding for which the number is the most whole."""
    figures = nvlink_figures(sketch, gpu, 0)
    lanes = [megabytes_per_s * _MB / (lane_rate(figures) * coding) for coding in _CODINGS]
    best = min(lanes, key=lambda n: (abs(n - round(n)), -n))
    return figures, max(1, round(best))


def _matrices(root: Element) -> Iterator[_Matrix]:
    for element in root:
        if element.tag not in ("distances2", "distances2hetero"):
            continue
        kind = element.get("type", "")
        objects = [word if ":" in word else f"{kind}:{word}" for word in _words(element, "indexes")]
        values = [int(word) for word in _words(element, "u64values") if word.isdigit() and len(word) < 16]
        if 0 < len(objects) <= _MAX_OBJECTS and len(values) == len(objects) ** 2:
            yield _Matrix(element.get("name", ""), tuple(objects), tuple(values))


def _words(element: Element, tag: str) -> Iterator[str]:
    for part in element.findall(tag):
        yield from (part.text or "").split()


def _owners(gpus: dict[Element, str]) -> dict[str, str]:
    """Names that matrices use for a GPU: its own index and those of its operating system devices."""
    out = {}
    for pci, gpu in gpus.items():
        for element in pci.iter("object"):
            if index := element.get("gp_index"):
                out[f"{element.get('type')}:{index}"] = gpu
    return out
