"""Importers against dumps of real machines, and against random trees whose classes are known."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
from machine_trees import expected_classes, hwloc_xml, nccl_xml, nvlink_islands, random_machine, smi_text

from topo_opt.errors import InputError
from topo_opt.topology.graph import link_graph, path_class
from topo_opt.topology.importers import import_dump, import_file

DUMPS = Path(__file__).parent / "dumps"


def classes(imported):
    """Classes of all ordered pairs of GPUs and NICs."""
    graph = link_graph(imported.topology)
    names = [*imported.topology.compute, *(n.id for n in imported.topology.nodes if n.kind == "nic")]
    return {(a, b): path_class(graph, a, b) for a in names for b in names if a != b}


@pytest.mark.parametrize("dump", sorted(path.name for path in DUMPS.glob("*smi*.txt")))
def test_matrices_of_nvidia_smi_come_back(dump):
    lines = (DUMPS / dump).read_text().splitlines()
    labels = [word for word in lines[0].split() if word.startswith(("GPU", "NIC")) and word != "GPU"]
    found = classes(import_file(DUMPS / dump))
    for line in lines[1 : 1 + len(labels)]:
        label, *cells = (cell.strip() for cell in line.split("\t")[: 1 + len(labels)])
        for other, cell in zip(labels, cells):
            if cell != "X":
                assert found[label.lower(), other.lower()] == ("NVL" if cell.startswith("NV") else cell), (
                    label,
                    other,
                )


def rows(dump, *devices, **options):
    """The classes from each of some devices to all others, as one line of text each."""
    found = classes(import_file(DUMPS / dump, **options))
    return [" ".join(value for (a, _), value in found.items() if a == device) for device in devices]


def test_nccl_files_have_the_classes_that_nccl_counts():
    nvl, phb, sys = ["NVL"] * 7, ["PHB"] * 3, ["SYS"] * 4
    assert rows("ibmcloud_gx3d_8xh100_vm_nccl.xml", "gpu0", "nic7") == [
        " ".join([*nvl, "PIX", *phb, *sys]),
        " ".join(["PIX", *phb, *sys, *phb, *sys]),
    ]
    assert rows("h200_baremetal_partial.xml", "gpu1") == ["NVL NVL PHB PIX PHB"]
    assert rows("h200x2_nccl.xml", "gpu0", "nic0") == ["NVL PHB", "PHB PHB"]
    assert rows("azure_ncv4-topo.xml", "gpu0") == ["SYS SYS SYS PHB"]
    assert rows("aws_p4d-24xl-topo.xml", "gpu2") == ["PHB PHB PIX SYS SYS SYS SYS PHB PIX SYS SYS"]
    assert rows("azure_ndv5-topo.xml", "gpu0", device="nvidia-h100-sxm") == [
        " ".join([*phb, *sys, "PIX", *phb, *sys])
    ]
    assert rows("rccl_topo_8p_940.xml", "gpu0") == [" ".join(["XGMI"] * 7 + ["PXB", *phb, *sys])]
    assert rows("rccl_topo_8p_pcie.xml", "gpu0", "nic0") == [
        "PXB PXB PXB PHB PHB PHB PHB PXB",
        "PXB PXB PXB PXB PHB PHB PHB PHB",
    ]
    assert rows("rccl_topo_8p_rome_4nics.xml", "gpu0") == ["XGMI XGMI XGMI SYS SYS SYS SYS PXB SYS SYS SYS"]


def test_gpus_of_a_template_are_numbered_by_their_bus():
    # The file lists the devices of NUMA node 0 first, whose buses are higher: 0003, 0004 are GPUs 2 and 3.
    assert rows("azure_ndv4-topo.xml", "gpu0")[0].split()[:3] == ["PIX", "SYS", "SYS"]
    imported = import_file(DUMPS / "azure_ndv4-topo.xml")
    graph = link_graph(imported.topology)
    assert "bridge1" in graph and path_class(graph, "gpu0", "numa1") == "PHB"
    assert path_class(graph, "gpu2", "numa0") == "PHB"


def test_a_template_without_classes_is_refused_with_the_reason():
    with pytest.raises(
        InputError, match=r"is a template: 9 devices have neither a class nor a <gpu>.*NCCL_TOPO_DUMP_FILE"
    ):
        import_file(DUMPS / "aws_g5.48xl-topo.xml")


def test_dgx2_of_hwloc_is_the_machine_that_nvidia_describes():
    imported = import_file(DUMPS / "hwloc_nvidiaDGX2.xml")
    graph = link_graph(imported.topology)
    assert {path_class(graph, "gpu0", f"gpu{i}") for i in range(1, 16)} == {"NVL"}
    edges = [edge for *edge, data in graph.edges(data=True) if data["kind"] == "nvlink"]
    lanes = {imported.topology.links[graph.edges[tuple(e)]["link"]].lanes for e in edges if "gpu0" in e}
    assert lanes == {6}
    graph.remove_edges_from([tuple(edge) for edge in edges])
    pcie = [path_class(graph, "gpu0", f"gpu{i}") for i in (1, 2, 3, 4, 7, 8, 15)]
    assert pcie == ["PIX", "PXB", "PXB", "NODE", "NODE", "SYS", "SYS"]
    assert any("does not list links between NVSwitches" in note for note in imported.notes)


MODELS = {
    "h200x2_nccl.xml": "NVIDIA H200 SXM",
    "h200x2_smi.txt": "NVIDIA H200 SXM",
    "ibmcloud_gx3d_8xh100_vm_nccl.xml": "NVIDIA H100 SXM",
    "aws_p4d-24xl-topo.xml": "NVIDIA A100 SXM4 40GB",
    "azure_ncv4-topo.xml": "NVIDIA A100 PCIe 80GB",
    "rccl_topo_8p_940.xml": "AMD Instinct MI300X",
    "rccl_topo_8p_rome_4nics.xml": "AMD Instinct MI100",
    "hwloc_nvidiaDGX2.xml": "NVIDIA Tesla V100 SXM3 32GB",
}


@pytest.mark.parametrize("dump", MODELS)
def test_models_are_recognised(dump):
    imported = import_file(DUMPS / dump)
    assert {device.model for device in imported.topology.devices} == {MODELS[dump]}


def test_an_unknown_model_is_said_and_asked_for():
    unknown = import_file(DUMPS / "nvsmi_8x4090_pcie.txt")
    assert any("name the model with --device" in note for note in unknown.notes)
    assert unknown.topology.primary.target.backend == "none"
    assert unknown.topology.primary.memory.capacity_bytes.source.startswith("unspecified")
    named = import_file(DUMPS / "nvsmi_8x4090_pcie.txt", device="GeForce RTX 4090")
    assert not any("--device" in note for note in named.notes)
    assert named.topology.peer_access.farthest == "LOC"
    short = import_file(DUMPS / "nvsmi_8x4090_pcie.txt", device="4090")
    assert short.topology.devices == named.topology.devices
    with pytest.raises(InputError, match=r"'H100' could be nvidia-h100-pcie, nvidia-h100-sxm"):
        import_file(DUMPS / "nvsmi_8x4090_pcie.txt", device="H100")
    with pytest.raises(InputError, match=r"there is no device model .GTX 9999.*known are .*nvidia-rtx4090"):
        import_file(DUMPS / "nvsmi_8x4090_pcie.txt", device="GTX 9999")


def links_of(imported, end):
    return {
        next(e for e in link.ends if e != end): link for link in imported.topology.links if end in link.ends
    }


def test_rates_of_virtual_machines_are_those_of_what_is_behind():
    imported = import_file(DUMPS / "ibmcloud_gx3d_8xh100_vm_nccl.xml")
    bridge = links_of(imported, "switch0")["bridge0"]
    assert bridge.bytes_per_s.value == pytest.approx(63e9, rel=0.01)  # not the 0.25 GB/s that the bridge says
    assert links_of(imported, "gpu0")["nvs"].lanes == 18
    assert links_of(imported, "numa0")["numa1"].sustained_bytes_per_s.value == 22e9
    assert links_of(import_file(DUMPS / "h200x2_nccl.xml"), "gpu0")["bridge0"].lanes == 16


def test_direct_links_have_their_lanes_and_kind():
    imported = import_file(DUMPS / "rccl_topo_8p_940.xml")
    assert {link.kind for end, link in links_of(imported, "gpu0").items() if end.startswith("gpu")} == {
        "xgmi"
    }
    cube = ["\tGPU0\tGPU1\tGPU2", "GPU0\t X \tNV1\tNV2", "GPU1\tNV1\t X \tSYS", "GPU2\tNV2\tSYS\t X"]
    imported = import_dump("\n".join(cube).encode(), "cube", device="nvidia-v100-sxm2-16gb")
    assert {
        end: link.lanes for end, link in links_of(imported, "gpu0").items() if end in ("gpu1", "gpu2")
    } == {"gpu1": 1, "gpu2": 2}


def matrix(*cells, names=None):
    names = names or [f"GPU{i}" for i in range(len(cells))]
    return "\n".join(
        ["\t" + "\t".join(names), *(f"{n}\t" + "\t".join(c.split()) for n, c in zip(names, cells))]
    ).encode()


def test_gpus_whose_nvlinks_are_down_are_reached_over_pcie():
    imported = import_dump(
        matrix("X NV18 SYS NV18", "NV18 X NODE NV18", "SYS NODE X SYS", "NV18 NV18 SYS X"),
        "m",
        device="H100 80GB HBM3",
    )
    found = classes(imported)
    assert found["gpu0", "gpu3"] == found["gpu0", "gpu1"] == "NVL"
    assert (found["gpu0", "gpu2"], found["gpu1", "gpu2"], found["gpu3", "gpu2"]) == ("SYS", "NODE", "SYS")
    assert "nvs" not in links_of(imported, "gpu2")


REFUSED = {
    "missing row": (matrix("X PIX", "PIX X").rsplit(b"\n", 1)[0], r"is partial: the matrix has no row for GPU1"),
    "missing cell": (matrix("X PIX", "PIX"), r"the row of GPU1 has 1 of 2 classes"),
    "strange cell": (matrix("X FOO", "FOO X"), r"the row of GPU0 has 'FOO' for GPU1 \(expected X, NV#"),
    "asymmetric": (matrix("X PIX", "SYS X"), r"contradicts itself: GPU0 to GPU1 is PIX, GPU1 to GPU0 is SYS"),
    "no tree": (
        matrix("X PIX SYS", "PIX X PIX", "SYS PIX X"),
        r"contradicts itself: GPU0 and GPU2 are SYS, but both are at most PIX from GPU1",
    ),
    "switch with a hole": (
        matrix("X NV18 SYS", "NV18 X NV18", "SYS NV18 X"),
        r"is partial: NVLinks go through switches.*GPU0 and GPU2 do not reach each other",
    ),
    "wrong diagonal": (matrix("SYS SYS", "SYS X"), r"GPU0 is SYS to itself, expected X"),
    "twice": (matrix("X PIX", "PIX X", names=["GPU0", "GPU0"]), r"names a column of the matrix twice"),
    "no matrix": (b"hello\nworld\n", r"has no matrix of nvidia-smi"),
    "binary": (bytes(range(256)) * 4, r"has no matrix of nvidia-smi"),
    "own format": (b'{"schema_version": 1}', r"is JSON, perhaps a topology already"),
    "not XML": (b"<system><cpu></system>", r"is not well-formed XML"),
    "other XML": (b"<html/>", r"is XML with the root <html>"),
    "graphs": (b'<graphs version="1"/>', r"NCCL's rings and trees"),
    "entities": (b'<!DOCTYPE s [<!ENTITY a "b">]><system>&a;</system>', r"declares what a dump does not need: EntitiesForbidden"),
    "deep": (b"<system>" + b"<pci>" * 500 + b"</pci>" * 500 + b"</system>", r"nested more than 64 elements deep"),
    "large": (b"<system>" + b"<pci/>" * 200_000 + b"</system>", r"has more than 100000 elements"),
    "no cpu": (b"<system/>", r"has no <cpu>"),
    "no gpu": (b'<system><cpu><pci class="0x010802" busid="0:0:0.0"/></cpu></system>', r"has no GPU: no <gpu> and no device of class"),
    "hwloc 1": (b"<topology><object type='Machine'/></topology>", r"is of hwloc 1, read are 2 and 3"),
    "hwloc without I/O": (b"<topology version='2.0'><object type='Machine'/></topology>", r"it has no I/O objects"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_partial_and_foreign_files_are_refused_with_the_reason(fault):
    data, message = REFUSED[fault]
    with pytest.raises(InputError, match=message):
        import_dump(data, "dump")


def test_links_of_nccl_that_lead_nowhere_are_said():
    head = '<system version="1"><cpu numaid="-1">'
    gpu = '<pci busid="0:{0}:0.0" class="0x030200"><gpu dev="{0}" sm="90" rank="{0}">{1}</gpu></pci>'
    to_switch = '<nvlink target="0:9:0.0" count="18" tclass="0x068000"/>'
    strange = '<nvlink target="0:8:0.0" count="18" tclass="0x060400"/>'
    unseen = '<nvlink target="fffffff:ffff:ff" count="9"/>'
    down = '<nvlink target="0:9:0.0" count="0" tclass="0x068000"/>'
    gpus = [gpu.format(i, inner) for i, inner in enumerate((to_switch, strange, unseen, down))]
    imported = import_dump(f"{head}{''.join(gpus)}</cpu></system>".encode(), "m", device="nvidia-h100-sxm")
    assert [links_of(imported, f"gpu{i}").get("nvs") is not None for i in range(4)] == [
        True,
        True,
        True,
        False,
    ]
    assert links_of(imported, "gpu2")["nvs"].lanes == 9
    notes = "\n".join(imported.notes)
    assert "18 nvlinks of gpu1 lead to 0:8:0.0 of class 060400, which is no NVSwitch" in notes
    assert "gpu2 has 9 of 18 NVLinks" in notes and "nvlinks of gpu3 are down" in notes


def test_processors_on_the_module_are_reached_over_their_own_links():
    grace = (
        '<system version="1"><cpu numaid="0" arch="arm64" vendor="NVIDIA"><pci busid="8:1:0.0" class="0x030200" '
        'vendor="0x10de" device="0x2941" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="0" sm="100" rank="0">'
        '<nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000"/><c2c bw="44712" count="5"/><c2c bw="44712" count="5"/>'
        "</gpu></pci></cpu></system>"
    )
    imported = import_dump(grace.encode(), "grace")
    graph = link_graph(imported.topology)
    assert path_class(graph, "gpu0", "numa0") == "C2C"
    assert graph.edges["gpu0", "numa0"]["bytes_per_s"] == pytest.approx(447.12e9)


@pytest.mark.parametrize("seed", range(40))
def test_random_trees_come_back_from_every_format(seed):
    rng = random.Random(seed)
    machine = random_machine(rng)
    expected = expected_classes(machine)
    assert classes(import_dump(smi_text(machine, rng).encode(), "smi")) == expected
    assert classes(import_dump(hwloc_xml(machine).encode(), "hwloc")) == expected
    # NCCL's XML has no host bridges: what is NODE elsewhere is PHB there.
    nccl = {pair: "PHB" if value == "NODE" else value for pair, value in expected.items()}
    assert classes(import_dump(nccl_xml(machine, rng).encode(), "nccl")) == nccl


@pytest.mark.parametrize("seed", range(40))
def test_nvlinks_over_a_tree_hide_no_other_class(seed):
    rng = random.Random(1000 + seed)
    machine = random_machine(rng)
    nvlinks = nvlink_islands(machine, rng)
    expected = expected_classes(machine) | dict.fromkeys(nvlinks, "NVL")
    assert classes(import_dump(smi_text(machine, rng, nvlinks).encode(), "smi")) == expected


def test_imported_files_are_topologies_with_figures_by_name(tmp_path):
    imported = import_file(DUMPS / "ibmcloud_gx3d_8xh100_vm_nccl.xml", name="mine")
    assert imported.file["name"] == imported.topology.name == "mine"
    with pytest.raises(InputError, match=r"'no name' cannot name a topology"):
        import_file(DUMPS / "ibmcloud_gx3d_8xh100_vm_nccl.xml", name="no name")
    assert imported.file["devices"][0] == {"id": "gpu0", "figures": "nvidia-h100-sxm"}
    assert all(a.ends != b.ends for a, b in pairwise(imported.topology.links))


def mutated(rng, data):
    out = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(out):
            out[at] = rng.randrange(256)
        elif kind == 1:
            del out[at : at + rng.randint(1, 60)]
        elif kind == 2:
            out[at:at] = out[at : at + rng.randint(1, 200)]
        elif kind == 3:
            tokens = [
                b"-1",
                b"999999999999999999999",
                b"NV99",
                b"SYS",
                b"\xff",
                b'"',
                b"<gpu/>",
                b"0x030200",
                b"",
                b"X",
            ]
            out[at:at] = rng.choice(tokens)
        elif lines := out.splitlines(keepends=True):
            lines.pop(rng.randrange(len(lines)))
            out = bytearray(b"".join(lines))
    return bytes(out)


@pytest.mark.parametrize(
    "dump", sorted(path.name for path in DUMPS.iterdir() if path.suffix in (".xml", ".txt"))
)
def test_mutated_dumps_are_read_or_refused(dump):
    rng = random.Random(dump)
    data = (DUMPS / dump).read_bytes()
    for _ in range(75):
        try:
            import_dump(mutated(rng, data), "mutated")
        except InputError as error:
            assert len(error.render()) < 2000
