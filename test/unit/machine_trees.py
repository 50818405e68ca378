"""Random PCIe trees with the classes that follow from them, written in the three formats that importers read."""

import random
from dataclasses import dataclass, field
from itertools import count

ORDER = ("PIX", "PXB", "PHB", "NODE", "SYS")


@dataclass
class Place:
    """A node of the tree: the machine, a NUMA node, a host bridge, a switch, or a GPU or NIC (no children)."""

    kind: str
    name: str
    children: list["Place"] = field(default_factory=list)

    def leaves(self):
        """GPUs and NICs below, in order."""
        if self.kind in ("gpu", "nic"):
            yield self
        for child in self.children:
            yield from child.leaves()


def random_machine(rng: random.Random, *, bridges_per_numa: int = 3) -> Place:
    """One to three NUMA nodes with host bridges, switches up to three deep, GPUs and NICs; at least one GPU."""
    names = {kind: count() for kind in ("numa", "bridge", "switch", "gpu", "nic")}

    def make(kind, children=()):
        return Place(kind, f"{kind}{next(names[kind])}", list(children))

    def below(depth):
        roll = rng.random()
        if depth < 3 and roll < 0.35:
            return make("switch", [below(depth + 1) for _ in range(rng.randint(1, 3))])
        return make("gpu" if roll < 0.8 else "nic")

    numas = []
    for _ in range(rng.randint(1, 3)):
        bridges = [
            make("bridge", [below(0) for _ in range(rng.randint(1, 3))])
            for _ in range(rng.randint(1, bridges_per_numa))
        ]
        numas.append(make("numa", bridges))
    machine = Place("machine", "machine", numas)
    if not any(leaf.kind == "gpu" for leaf in machine.leaves()):
        return random_machine(rng, bridges_per_numa=bridges_per_numa)
    return machine


def expected_classes(machine: Place) -> dict[tuple[str, str], str]:
    """For every ordered pair of GPUs and NICs what `nvidia-smi topo -m` would say, from their paths to the root."""
    paths: dict[str, list[Place]] = {}

    def visit(place, path):
        if place.kind in ("gpu", "nic"):
            paths[place.name] = path
        for child in place.children:
            visit(child, [*path, place])

    visit(machine, [])
    out = {}
    for a, above_a in paths.items():
        for b, above_b in paths.items():
            if a == b:
                continue
            shared = [x for x, y in zip(above_a, above_b) if x is y]
            split = shared[-1]
            switches = [x for x in above_a[len(shared) :] + above_b[len(shared) :] if x.kind == "switch"]
            if split.kind == "machine":
                out[a, b] = "SYS"
            elif split.kind == "numa":
                out[a, b] = "NODE"
            elif split.kind == "bridge":
                out[a, b] = "PHB"
            else:
                out[a, b] = "PXB" if switches else "PIX"
    return out


def nccl_xml(machine: Place, rng: random.Random) -> str:
    """The tree as NCCL writes it: one `<cpu>` a NUMA node, host bridges left out."""
    bus = count(0x10)
    speeds = ("16.0 GT/s PCIe", "32.0 GT/s PCIe", "8 GT/s", "", "2.5 GT/s PCIe")

    def pci(kind, inside):
        speed, width = rng.choice(speeds), rng.choice((0, 1, 8, 16))
        head = (
            f'<pci busid="0000:{next(bus):02x}:00.0" class="{kind}" link_speed="{speed}" link_width="{width}"'
        )
        return f"{head}>{inside}</pci>"

    def write(place):
        if place.kind == "gpu":
            return pci("0x030200", f'<gpu dev="{place.name[3:]}" sm="90" rank="{place.name[3:]}" gdr="1"/>')
        if place.kind == "nic":
            number = place.name[3:]
            return pci(
                "0x020000", f'<nic><net name="mlx5_{number}" dev="{number}" speed="200000" port="1"/></nic>'
            )
        inside = "".join(write(child) for child in place.children)
        return pci("0x060400", inside) if place.kind == "switch" else inside

    cpus = "".join(
        f'<cpu numaid="{i}" affinity="ff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">{write(numa)}</cpu>'
        for i, numa in enumerate(machine.children)
    )
    return f'<system version="1">{cpus}</system>'


def hwloc_xml(machine: Place) -> str:
    """The tree as hwloc writes it: switches are an upstream port with a downstream port for each child."""
    index, bus = count(10), count(0x10)

    def bridge(kind, inside):
        return (
            f'<object type="Bridge" gp_index="{next(index)}" bridge_type="{kind}" pci_busid="0000:{next(bus):02x}:00.0" '
            f'pci_type="0604 [10b5:9781] [10b5:9781] b0 00" pci_link_speed="15.753846">{inside}</object>'
        )

    def write(place):
        if place.kind == "switch":
            return bridge("1-1", "".join(bridge("1-1", write(child)) for child in place.children))
        gpu = place.kind == "gpu"
        what = "0302 [10de:2330] [10de:1234] a1 00" if gpu else "0200 [15b3:1021] [15b3:1021] a1 00"
        name = f"nvml{place.name[3:]}" if gpu else f"mlx5_{place.name[3:]}"
        return (
            f'<object type="PCIDev" gp_index="{next(index)}" pci_busid="0000:{next(bus):02x}:00.0" pci_type="{what}" '
            f'pci_link_speed="31.507692"><object type="OSDev" gp_index="{next(index)}" name="{name}" osdev_type="1"/></object>'
        )

    packages = ""
    for i, numa in enumerate(machine.children):
        hosts = "".join(
            bridge("0-1", "".join(bridge("1-1", write(child)) for child in host.children))
            for host in numa.children
        )
        packages += (
            f'<object type="Package" os_index="{i}" nodeset="{1 << i:#010x}"><object type="NUMANode" os_index="{i}" '
            f'nodeset="{1 << i:#010x}"/>{hosts}</object>'
        )
    nodes = (1 << len(machine.children)) - 1
    return (
        '<?xml version="1.0"?><!DOCTYPE topology SYSTEM "hwloc2.dtd"><topology version="2.0">'
        f'<object type="Machine" os_index="0" nodeset="{nodes:#010x}">{packages}</object></topology>'
    )


def nvlink_islands(machine: Place, rng: random.Random) -> dict[tuple[str, str], str]:
    """Some GPUs in groups of two or more, each with the same number of NVLinks to all others of its group."""
    gpus = [leaf.name for leaf in machine.leaves() if leaf.kind == "gpu"]
    rng.shuffle(gpus)
    cells = {}
    while len(gpus) > 1 and rng.random() < 0.8:
        island = [gpus.pop() for _ in range(rng.randint(2, min(4, len(gpus))))]
        cell = f"NV{rng.choice((12, 18))}"
        cells |= {(a, b): cell for a in island for b in island if a != b}
    return cells


def smi_text(machine: Place, rng: random.Random, nvlinks: dict[tuple[str, str], str] | None = None) -> str:
    """The classes as a matrix, spelled in one of the ways that dumps are found in; NVLinks hide classes of PCIe."""
    classes = expected_classes(machine) | (nvlinks or {})
    leaves = sorted(machine.leaves(), key=lambda leaf: (leaf.kind, int(leaf.name[3:])))
    names = [leaf.name for leaf in leaves]
    numa_of = {leaf.name: i for i, numa in enumerate(machine.children) for leaf in numa.leaves()}
    style = rng.choice(("tabs", "spaces", "bars", "fused", "underlined"))
    affinity = rng.choice(("full", "cpu", "empty", "none"))
    headers = {"full": ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"], "cpu": ["CPU Affinity"]}
    header = headers.get(affinity, ["CPU Affinity", "NUMA Affinity"] if affinity == "empty" else [])
    between = {"tabs": "\t", "underlined": "\t", "bars": " | "}.get(style, "   ")
    lines = [between.join(["", *map(str.upper, names), *header])]
    if style == "underlined":
        lines = [f"\x1b[4m{lines[0]}\x1b[0m"]
    if style == "bars":
        lines.append(" | ".join(["--"] * (len(names) + 1)))
    for a in names:
        cells = [" X " if a == b else classes[a, b] for b in names]
        tail = []
        if a.startswith("gpu"):
            low = numa_of[a] * 32
            tail = {"full": [f"{low}-{low + 31}", str(numa_of[a]), "N/A"], "cpu": [f"{low}-{low + 31}"]}.get(
                affinity, []
            )
        body = " " + "".join(cells) if style == "fused" and len(names) > 2 else between.join(cells)
        lines.append(between.join([a.upper(), body, *tail]))
    if rng.random() < 0.5:
        lines += [
            "",
            "Legend:",
            "",
            "  X    = Self",
            "  PIX  = Connection traversing at most a single PCIe bridge",
        ]
    before = ["$ nvidia-smi topo -m"] if rng.random() < 0.5 else []
    return "\n".join([*before, *lines]) + "\n"
