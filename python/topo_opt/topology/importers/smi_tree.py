"""From the classes between devices to a tree of switches, host bridges and NUMA nodes that has exactly these classes.

Classes of PCIe nest: devices that are PIX to each other share a switch, those up to PXB a switch over them, up to PHB a
host bridge, up to NODE a NUMA node. So the groups of each class are the connected parts of "at most this class", and the
matrix is that of a tree when every pair is in one group of its own class and in none of a nearer one.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from topo_opt.errors import InputError
from topo_opt.topology.importers.models import recognise
from topo_opt.topology.importers.processors import UNKNOWN
from topo_opt.topology.importers.sketch import Sketch, lanes_of, nvlink_figures
from topo_opt.topology.library import device_figures

_NESTED = ("PIX", "PXB", "PHB", "NODE", "SYS")
_ORDER = {name: i for i, name in enumerate(("X", "NV", *_NESTED))}


@dataclass(frozen=True)
class Matrix:
    """Labels as in the text, the class of each pair as far as it is given, and CPU and NUMA affinity of each device."""

    labels: tuple[str, ...]
    classes: dict[tuple[str, str], str]
    affinity: dict[str, tuple[str, str]]

    def of(self, a: str, b: str) -> str | None:
        """The class between two devices."""
        return self.classes.get((a, b)) or self.classes.get((b, a))

    def farthest(self, pairs: Iterable[tuple[str, str]]) -> str:
        """The farthest class among some pairs, with NVLinks as NVL."""
        kinds = [_kind(self.of(*pair)) for pair in pairs]
        found = max((kind for kind in kinds if kind is not None), key=_ORDER.__getitem__)
        return "NVL" if found == "NV" else found

    def within(self, pair: tuple[str, str], farthest: str) -> bool:
        """Whether a pair is at most so far apart."""
        kind = _kind(self.of(*pair))
        return kind is not None and _ORDER[kind] <= _ORDER["NV" if farthest == "NVL" else farthest]

    def nvlinks(self, a: str, b: str) -> int:
        """How many NVLinks two devices have between each other."""
        cell = self.of(a, b) or ""
        return int(cell[2:]) if cell.startswith("NV") else 0

    def gpus(self) -> list[str]:
        """The labels of GPUs."""
        return [label for label in self.labels if label.startswith("GPU")]


def build_tree(sketch: Sketch, matrix: Matrix, names: dict[str, str], what: str) -> None:
    """Adds nodes and links to a sketch that has the GPUs; `names` are those of NICs in the legend.

    Raises:
        InputError: no tree of bridges has these classes, or NVLinks go through switches in a way that is not shown.
    """
    matrix, groups = _nested(sketch, matrix, what)
    ids = _node_ids(sketch, matrix, names)
    _wire_tree(sketch, matrix, groups, ids)
    _wire_nvlinks(sketch, matrix, ids, what)


def _nested(sketch: Sketch, matrix: Matrix, what: str) -> tuple[Matrix, dict[str, "_Groups"]]:
    """The groups of each class; without NICs whose classes fit no tree, which virtual machines show."""
    groups = _groups(matrix)
    if not any(_misfits(groups, matrix)):
        return matrix, groups
    fitting = replace(matrix, labels=tuple(matrix.gpus()))
    groups = _groups(fitting)
    for misfit in _misfits(groups, fitting):
        raise _contradiction(misfit, fitting, what)
    for nic in (label for label in matrix.labels if label not in fitting.labels):
        larger = replace(fitting, labels=(*fitting.labels, nic))
        of_larger = _groups(larger)
        if any(_misfits(of_larger, larger)):
            sketch.note(
                f"the classes of {nic} fit no tree of bridges with those of the others: it is left out"
            )
        else:
            fitting, groups = larger, of_larger
    return fitting, groups


def _groups(matrix: Matrix) -> dict[str, "_Groups"]:
    groups = {level: _Groups(matrix.labels) for level in _NESTED[:-1]}
    for a, b in combinations(matrix.labels, 2):
        kind = _kind(matrix.of(a, b))
        for level, of_level in groups.items():
            if kind is not None and kind != "NV" and _ORDER[kind] <= _ORDER[level]:
                of_level.join(a, b)
    _join_by_affinity(groups["NODE"], matrix)
    return groups


class _Groups:
    """Disjoint sets of labels, in the order of the matrix."""

    def __init__(self, labels: Iterable[str]):
        self._of: dict[str, tuple[str, ...]] = {label: (label,) for label in labels}
        self._rank = {label: i for i, label in enumerate(self._of)}

    def join(self, a: str, b: str) -> None:
        if self._of[a] is not self._of[b]:
            merged = tuple(sorted(self._of[a] + self._of[b], key=self._rank.__getitem__))
            for label in merged:
                self._of[label] = merged

    def of(self, label: str) -> tuple[str, ...]:
        return self._of[label]

    def among(self, labels: Iterable[str]) -> list[tuple[str, ...]]:
        """The groups that hold these labels, in order."""
        return list(dict.fromkeys(self._of[label] for label in labels))


def _kind(cell: str | None) -> str | None:
    return "NV" if cell is not None and cell.startswith("NV") else cell


def _node_ids(sketch: Sketch, matrix: Matrix, names: dict[str, str]) -> dict[str, str]:
    ids: dict[str, str] = {}
    for label in matrix.labels:
        if label.startswith("GPU"):
            ids[label] = label.lower()
        else:
            number = label.removeprefix("NIC")
            wanted = (
                f"nic{number}" if number.isdigit() else f"nic{sum(i.startswith('nic') for i in ids.values())}"
            )
            ids[label] = sketch.node(wanted, "nic", names.get(label, None if number.isdigit() else label))
    return ids


def _join_by_affinity(nodes: _Groups, matrix: Matrix) -> None:
    """NVLinks hide the class of PCIe; devices with the same affinity are then taken to be in one NUMA node."""
    for a, b in combinations(matrix.gpus(), 2):
        same = _numa(matrix, a) is not None and _numa(matrix, a) == _numa(matrix, b)
        apart = any(matrix.of(x, y) == "SYS" for x in nodes.of(a) for y in nodes.of(b))
        if same and _kind(matrix.of(a, b)) in ("NV", None) and not apart:
            nodes.join(a, b)


def _numa(matrix: Matrix, label: str) -> str | None:
    cpus, numa = matrix.affinity.get(label, ("", ""))
    return numa if numa not in ("", "N/A") else cpus if cpus not in ("", "N/A") else None


def _misfits(groups: dict[str, _Groups], matrix: Matrix) -> Iterator[tuple[str, str, str, str]]:
    """Pairs that are in groups of another class than their own: both labels, the class given, the class of the groups."""
    for a, b in combinations(matrix.labels, 2):
        given = _kind(matrix.of(a, b))
        derived = next((level for level in groups if b in groups[level].of(a)), "SYS")
        if given not in (None, "NV", derived):
            yield a, b, str(given), derived


def _contradiction(misfit: tuple[str, str, str, str], matrix: Matrix, what: str) -> InputError:
    a, b, given, derived = misfit
    others = (label for label in matrix.labels if label not in (a, b))
    near = (x for x in others if matrix.within((a, x), derived) and matrix.within((x, b), derived))
    return InputError(
        f"{what} contradicts itself: {a} and {b} are {given}, but both are at most {derived} from {next(near, 'others')}: no "
        "tree of bridges has these classes"
    )


def _wire_tree(sketch: Sketch, matrix: Matrix, groups: dict[str, _Groups], ids: dict[str, str]) -> None:
    numas: list[str] = []
    bridges = switches = 0
    for domain in groups["NODE"].among(matrix.labels):
        numa = sketch.node(_numa_id(sketch, matrix, domain), "numa")
        numas.append(numa)
        for below in groups["PHB"].among(domain):
            bridge = sketch.node(f"bridge{bridges}", "root_complex")
            bridges += 1
            sketch.wire(bridge, numa, "host-fabric")
            for shared in groups["PXB"].among(below):
                inner = groups["PIX"].among(shared)
                above = bridge
                if len(inner) > 1:
                    above = sketch.node(f"switch{switches}", "pcie_switch")
                    switches += 1
                    _wire_pcie(sketch, above, bridge, shared, ids)
                for members in inner:
                    place = above
                    if len(members) > 1 or len(inner) > 1:
                        place = sketch.node(f"switch{switches}", "pcie_switch")
                        switches += 1
                        _wire_pcie(sketch, place, above, members, ids)
                    for label in members:
                        _wire_pcie(sketch, ids[label], place, (label, *members), ids)
    _wire_sockets(sketch, numas)
    if len(numas) > 1:
        sketch.note("the matrix does not name the processors: the rate between NUMA nodes is nominal")


def _wire_sockets(sketch: Sketch, numas: list[str]) -> None:
    """Links between NUMA nodes; the parts of a split one (`numa0.1`) share those of its first part."""
    whole = [numa for numa in numas if "." not in numa]
    for a, b in combinations(whole, 2):
        sketch.wire(a, b, UNKNOWN)
    for part in numas:
        if part not in whole:
            sketch.wire(part, part.partition(".")[0], UNKNOWN)


def _numa_id(sketch: Sketch, matrix: Matrix, domain: tuple[str, ...]) -> str:
    votes = Counter(numa for label in domain if (numa := matrix.affinity.get(label, ("", ""))[1]).isdigit())
    if votes:
        number = votes.most_common(1)[0][0].lstrip("0") or "0"
        if f"numa{number}" not in sketch.nodes:
            return f"numa{number}"
        sketch.note(
            f"devices of NUMA node {number} are SYS to each other: the node is split into parts with links between them"
        )
        return next(f"numa{number}.{i}" for i in range(1, 1000) if f"numa{number}.{i}" not in sketch.nodes)
    used = {numa for cpus, numa in matrix.affinity.values()}
    return next(f"numa{i}" for i in range(1000) if str(i) not in used and f"numa{i}" not in sketch.nodes)


def _wire_pcie(sketch: Sketch, a: str, b: str, behind: tuple[str, ...], ids: dict[str, str]) -> None:
    for label in behind:
        hints = sketch.gpus.get(ids[label])
        model = recognise(hints) if hints else None
        port = device_figures(model).port("pcie") if model else None
        if port and port.figures:
            sketch.wire(a, b, port.figures, port.count.value)
            return
    sketch.note(
        "the matrix has no speeds of PCIe: links of devices whose model is not known are taken as 4.0 x16"
    )
    sketch.wire(a, b, "pcie4", 16)


def _wire_nvlinks(sketch: Sketch, matrix: Matrix, ids: dict[str, str], what: str) -> None:
    for number, (members, switched) in enumerate(_nvlink_domains(sketch, matrix, ids, what)):
        if switched:
            switch = sketch.node("nvs" if number == 0 else f"nvs{number}", "nvswitch")
        for i, a in enumerate(members):
            if switched:
                lanes = matrix.nvlinks(a, members[1 - min(i, 1)])
                sketch.wire(ids[a], switch, nvlink_figures(sketch, ids[a], lanes), lanes)
                continue
            for b in members[i + 1 :]:
                if lanes := matrix.nvlinks(a, b):
                    sketch.wire(ids[a], ids[b], nvlink_figures(sketch, ids[a], lanes), lanes)


def _nvlink_domains(
    sketch: Sketch, matrix: Matrix, ids: dict[str, str], what: str
) -> Iterator[tuple[tuple[str, ...], bool]]:
    """GPUs that NVLinks join, and whether through switches: then each has more links to peers than it has links."""
    linked = _Groups(matrix.gpus())
    for a, b in combinations(matrix.gpus(), 2):
        if matrix.nvlinks(a, b):
            linked.join(a, b)
    for members in linked.among(matrix.gpus()):
        if len(members) < 2:
            continue
        counts = {a: [matrix.nvlinks(a, b) for b in members if b != a] for a in members}
        most = {a: lanes_of(sketch.gpus[ids[a]], "nvlink") or _MOST_NVLINKS for a in members}
        switched = any(sum(counts[a]) > most[a] for a in members)
        if switched and any(0 in row for row in counts.values()):
            a, b = next((a, b) for a, b in combinations(members, 2) if not matrix.nvlinks(a, b))
            raise InputError(
                f"{what} is partial: NVLinks go through switches, since {members[0]} has {sum(counts[members[0]])} to "
                f"peers, but {a} and {b} do not reach each other over them; which links are down is not in the matrix",
                hint="NCCL's XML (NCCL_TOPO_DUMP_FILE) lists the links of each GPU",
            )
        yield members, switched


_MOST_NVLINKS = 18
