"""Spellings and machines that dumps of the three kinds come in besides those of the files under dumps."""

import re

import pytest
from test_topology_import import classes, links_of

from topo_opt.errors import InputError
from topo_opt.topology.graph import link_graph, path_class
from topo_opt.topology.importers import import_dump

# DGX-1 with V100: a hybrid cube mesh, NICs named by their device, columns with several spaces.
DGX1 = """
        GPU0    GPU1    GPU2    GPU3    GPU4    GPU5    GPU6    GPU7    mlx5_0  mlx5_1  mlx5_2  mlx5_3  CPU Affinity
GPU0     X      NV1     NV1     NV2     NV2     SYS     SYS     SYS     PIX     PHB     SYS     SYS     0-19,40-59
GPU1    NV1      X      NV2     NV1     SYS     NV2     SYS     SYS     PIX     PHB     SYS     SYS     0-19,40-59
GPU2    NV1     NV2      X      NV2     SYS     SYS     NV1     SYS     PHB     PIX     SYS     SYS     0-19,40-59
GPU3    NV2     NV1     NV2      X      SYS     SYS     SYS     NV1     PHB     PIX     SYS     SYS     0-19,40-59
GPU4    NV2     SYS     SYS     SYS      X      NV1     NV1     NV2     SYS     SYS     PIX     PHB     20-39,60-79
GPU5    SYS     NV2     SYS     SYS     NV1      X      NV2     NV1     SYS     SYS     PIX     PHB     20-39,60-79
GPU6    SYS     SYS     NV1     SYS     NV1     NV2      X      NV2     SYS     SYS     PHB     PIX     20-39,60-79
GPU7    SYS     SYS     SYS     NV1     NV2     NV1     NV2      X      SYS     SYS     PHB     PIX     20-39,60-79
mlx5_0  PIX     PIX     PHB     PHB     SYS     SYS     SYS     SYS      X      PHB     SYS     SYS
mlx5_1  PHB     PHB     PIX     PIX     SYS     SYS     SYS     SYS     PHB      X      SYS     SYS
mlx5_2  SYS     SYS     SYS     SYS     PIX     PIX     PHB     PHB     SYS     SYS      X      PHB
mlx5_3  SYS     SYS     SYS     SYS     PHB     PHB     PIX     PIX     SYS     SYS     PHB      X
"""


def cells(text):
    """The matrix as its cells say it, by the ids that importers give."""
    rows = [line.split() for line in text.strip().splitlines()]
    labels = [word for word in rows[0] if re.fullmatch(r"(GPU|NIC|mlx5_)\d+", word)]
    ids = {label: re.sub("mlx5_|NIC", "nic", label).lower() for label in labels}
    out = {}
    for label, *row in rows[1 : 1 + len(labels)]:
        for other, cell in zip(labels, row):
            if cell != "X":
                out[ids[label], ids[other]] = "NVL" if cell.startswith("NV") else cell
    return out


def test_hybrid_cube_mesh():
    imported = import_dump(DGX1.encode(), "dgx1", device="nvidia-v100-sxm2-16gb")
    assert classes(imported) == cells(DGX1)
    lanes = {end: link.lanes for end, link in links_of(imported, "gpu0").items() if end.startswith("gpu")}
    assert lanes == {"gpu1": 1, "gpu2": 1, "gpu3": 2, "gpu4": 2}
    assert "nvs" not in {node.id for node in imported.topology.nodes}


SPELLINGS = {
    "tabs": lambda text: re.sub(" {2,}", "\t", text),
    "no escape before codes": lambda text: text.replace("GPU0    GPU1", "[4mGPU0    GPU1", 1).replace("Affinity", "Affinity[0m"),
    "escapes": lambda text: text.replace("GPU0    GPU1", "\x1b[4mGPU0    GPU1", 1).replace("Affinity", "Affinity\x1b[0m"),
    "line ends of Windows": lambda text: text.replace("\n", "\r\n"),
    "prompt and legend": lambda text: f"$ nvidia-smi topo -m{text}\nLegend:\n\n  X    = Self\n  PIX  = Connection\n",
    "code fence": lambda text: f"```\n{text}```\n",
    "quoted": lambda text: text.replace("\n", "\n| "),
    "table": lambda text: re.sub(" {2,}", " | ", text.replace("\nGPU0", "\n-- | -- | --\nGPU0", 1)),
    "indented": lambda text: text.replace("\n", "\n      "),
    "byte order mark": lambda text: "\ufeff" + text,
    "upper bound of width": lambda text: text.replace("    ", "          "),
    "fused cells": lambda text: text.replace("SYS     SYS", "SYSSYS").replace("PIX     PHB", "PIXPHB"),
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_a_matrix(spelling):
    text = SPELLINGS[spelling](DGX1)
    assert text != DGX1
    assert classes(import_dump(text.encode(), spelling, device="nvidia-v100-sxm2-16gb")) == cells(DGX1)


def test_utf16_of_windows():
    assert classes(import_dump(DGX1.encode("utf-16"), "utf-16")) == cells(DGX1)


def test_one_gpu_and_nothing_else():
    imported = import_dump(
        b"\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\t\tN/A\n", "one"
    )
    assert imported.topology.compute == ("gpu0",) and not classes(imported)


def test_numa_affinity_is_that_of_the_matrix_whatever_the_order_of_gpus():
    text = "      GPU0 GPU1 GPU2 CPU Affinity NUMA Affinity\nGPU0 X SYS SYS 24-31 3\nGPU1 SYS X SYS 0-7 0\nGPU2 SYS SYS X 8-15 1\n"
    graph = link_graph(import_dump(text.encode(), "m").topology)
    assert [path_class(graph, f"gpu{i}", f"numa{n}") for i, n in enumerate((3, 0, 1))] == ["PHB"] * 3


def test_a_numa_node_without_cpu_affinity():
    text = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \tNV4\t\t1\t\tN/A\nGPU1\tNV4\t X \t\t0\t\tN/A\n"
    graph = link_graph(import_dump(text.encode(), "m").topology)
    assert (path_class(graph, "gpu0", "numa1"), path_class(graph, "gpu1", "numa0")) == ("PHB", "PHB")


def test_peer_access_follows_the_second_matrix():
    matrix = "\tGPU0\tGPU1\tGPU2\nGPU0\t X \tPIX\tSYS\nGPU1\tPIX\t X \tSYS\nGPU2\tSYS\tSYS\t X\n"

    def access(*rows):
        peers = "\n \tGPU0\tGPU1\tGPU2\n" + "".join(f" GPU{i}\t{row}\n" for i, row in enumerate(rows))
        found = import_dump((matrix + peers).encode(), "m").topology.peer_access
        return found and found.farthest

    assert access("X\tOK\tOK", "OK\tX\tOK", "OK\tOK\tX") is None
    assert access("X\tOK\tCNS", "OK\tX\tCNS", "CNS\tCNS\tX") == "PIX"
    assert access("X\tNS\tNS", "NS\tX\tNS", "NS\tNS\tX") == "LOC"
    assert access("X\tDR\tGNS", "DR\tX\tDR", "GNS\tDR\tX") == "LOC"


def test_nics_that_fit_no_tree_are_left_out_and_said():
    text = """
        GPU0 GPU1 NIC0 NIC1
        GPU0 X SYS PIX NODE
        GPU1 SYS X SYS NODE
        NIC0 PIX SYS X NODE
        NIC1 NODE NODE NODE X
    """
    imported = import_dump(text.encode(), "m")
    assert {node.id for node in imported.topology.nodes if node.kind == "nic"} == {"nic0"}
    assert classes(imported)["gpu0", "gpu1"] == "SYS" and classes(imported)["gpu0", "nic0"] == "PIX"
    assert any("classes of NIC1 fit no tree" in note for note in imported.notes)


def test_names_of_gpus_and_mig_in_the_text():
    matrix = "\tGPU0\tGPU1\nGPU0\t X \tNV12\nGPU1\tNV12\t X\n"
    names = "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-1)\n  MIG 3g.40gb     Device  0: (UUID: MIG-2)\nGPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-3)\n"
    imported = import_dump((names + matrix).encode(), "m")
    assert [device.model for device in imported.topology.devices] == [
        "NVIDIA A100 SXM4 80GB",
        "NVIDIA A100 SXM4 40GB",
    ]
    assert any("MIG is on" in note for note in imported.notes)


def nccl(*hosts):
    return f'<system version="1">{"".join(hosts)}</system>'.encode()


def gpu(number, inner="", bus=None, rank=None):
    return (
        f'<pci busid="{bus or f"0000:{number:02x}:00.0"}" class="0x030200" vendor="0x10de" device="0x1db1" link_speed="8 GT/s" '
        f'link_width="16"><gpu dev="{number}" sm="70" rank="{number if rank is None else rank}">{inner}</gpu></pci>'
    )


def link(target, count=1, kind="0x030200", tag="nvlink"):
    return f'<{tag} target="{target}" count="{count}" tclass="{kind}"/>'


def test_direct_nvlinks_of_nccl():
    to = ["0000:00:00.0", "0000:01:00.0", "0000:02:00.0"]
    inside = [link(to[1], 2) + link(to[2]), link(to[0], 2), link(to[0])]
    imported = import_dump(
        nccl(f'<cpu numaid="0">{"".join(gpu(i, x) for i, x in enumerate(inside))}</cpu>'), "m"
    )
    assert {pair: kind for pair, kind in classes(imported).items() if pair[0] < pair[1]} == {
        ("gpu0", "gpu1"): "NVL",
        ("gpu0", "gpu2"): "NVL",
        ("gpu1", "gpu2"): "PHB",
    }
    assert links_of(imported, "gpu0")["gpu1"].lanes == 2


def test_nvlinks_to_the_processors_of_power9():
    host = '<cpu numaid="{0}" arch="ppc64" vendor="IBM">{1}</cpu>'
    entry = link("0004:00:00.0", 3, "0x068001")
    imported = import_dump(nccl(host.format(0, gpu(0, entry)), host.format(8, gpu(1, entry))), "m")
    graph = link_graph(imported.topology)
    assert path_class(graph, "gpu0", "numa0") == "C2C" and path_class(graph, "gpu0", "gpu1") == "SYS"
    assert graph.edges["gpu0", "numa0"]["bytes_per_s"] == 75e9
    assert graph.edges["numa0", "numa8"]["sustained_bytes_per_s"] == 32e9


def test_several_hosts_of_one_nvlink_fabric():
    host = '<cpu host_hash="{0}" numaid="0" arch="arm64" vendor="NVIDIA">{1}</cpu>'
    to_switch = link("fffffff:ffff:ff", 6, "0x068000")
    imported = import_dump(
        nccl(host.format("0xa", gpu(0, to_switch, rank=0)), host.format("0xb", gpu(0, to_switch, rank=1))),
        "m",
    )
    assert imported.topology.compute == ("gpu0", "gpu1")
    assert classes(imported)["gpu0", "gpu1"] == "NVL"
    apart = nccl(host.format("0xa", gpu(0, rank=0)), host.format("0xb", gpu(0, rank=1)))
    with pytest.raises(InputError, match="no links lead from 'gpu0' to 'gpu1'"):
        import_dump(apart, "m")


def test_gpus_that_nccl_left_out_are_said():
    spare = '<pci busid="0000:09:00.0" class="0x030200" vendor="0x10de" device="0x1db1"/>'
    imported = import_dump(nccl(f'<cpu numaid="0">{gpu(0)}{spare}</cpu>'), "m")
    assert imported.topology.compute == ("gpu0",)
    assert any("0000:09:00.0 is a GPU that NCCL did not use" in note for note in imported.notes)


def test_display_controllers_of_boards_are_no_gpus():
    board = '<pci busid="0000:09:00.0" class="0x030000" vendor="0x1a03" device="0x2000"/>'
    card = '<pci busid="0000:0a:00.0" class="0x030000" vendor="0x10de" device="0x2684" link_speed="16.0 GT/s PCIe" link_width="16"/>'
    imported = import_dump(nccl(f'<cpu numaid="0">{board}{card}</cpu>'), "m")
    assert [device.model for device in imported.topology.devices] == ["NVIDIA GeForce RTX 4090"]
    assert imported.topology.peer_access.farthest == "LOC"


@pytest.mark.parametrize(
    ("vendor", "model", "farthest"),
    [("GenuineIntel", "0x26ba", "PXB"), ("AuthenticAMD", "0x26ba", None), ("GenuineIntel", "0x2684", "LOC")],
)
def test_peer_access_is_limited_by_processors_and_models(vendor, model, farthest):
    card = f'<pci busid="0000:0a:00.0" class="0x030200" vendor="0x10de" device="{model}"/>'
    cpu = f'<cpu numaid="0" arch="x86_64" vendor="{vendor}" familyid="6" modelid="143">{card}</cpu>'
    access = import_dump(nccl(cpu), "m").topology.peer_access
    assert (access and access.farthest) == farthest


def hwloc(inside, after=""):
    return f'<topology version="2.0"><object type="Machine" nodeset="0x3">{inside}</object>{after}</topology>'.encode()


def package(number, inside):
    bit = f"{1 << number:#x}"
    return (
        f'<object type="Package" gp_index="{number + 1}" nodeset="{bit}"><object type="NUMANode" os_index="{number}" '
        f'nodeset="{bit}"/>{inside}</object>'
    )


def pci_gpu(index, name):
    return (
        f'<object type="Bridge" gp_index="{index}0" bridge_type="0-1"><object type="PCIDev" gp_index="{index}1" '
        f'pci_busid="000{index}:00:00.0" pci_type="0302 [10de:1db1] [0000:0000] a1 00" pci_link_speed="15.75">'
        f'<object type="OSDev" gp_index="{index}2" name="{name}" osdev_type="1"/></object></object>'
    )


def test_gpus_right_below_a_host_bridge_and_nvlinks_to_packages():
    matrix = (
        '<distances2hetero nbobjs="3" kind="25" name="NVLinkBandwidth"><indexes length="20">Package:1 OSDev:32 OSDev:42'
        '</indexes><u64values length="30">0 75000 0 75000 0 50000 0 50000 0</u64values></distances2hetero>'
    )
    data = hwloc(package(0, pci_gpu(3, "nvml0")) + package(1, pci_gpu(4, "nvml1")), matrix)
    imported = import_dump(data, "m")
    graph = link_graph(imported.topology)
    assert path_class(graph, "gpu0", "gpu1") == "NVL"
    assert links_of(imported, "gpu0")["gpu1"].lanes == 2
    assert path_class(graph, "gpu0", "numa0") == "C2C" and path_class(graph, "gpu1", "numa1") == "PHB"


def test_rates_of_unknown_gpus_are_those_of_the_matrix():
    matrix = (
        '<distances2 type="OSDev" nbobjs="2" kind="25" name="NVLinkBandwidth" indexing="gp"><indexes length="5">32 42'
        '</indexes><u64values length="20">0 40000 40000 0</u64values></distances2>'
    )
    data = hwloc(package(0, pci_gpu(3, "nvml0") + pci_gpu(4, "nvml1")), matrix).replace(
        b"10de:1db1", b"10de:15f9"
    )
    link = links_of(import_dump(data, "m"), "gpu0")["gpu1"]
    assert (link.kind, link.bytes_per_s.value, link.lanes) == ("nvlink", 40e9, None)


def test_gpus_are_numbered_by_the_driver_rather_than_by_cuda():
    both = '<object type="OSDev" gp_index="{0}7" name="nvml{1}" osdev_type="4"/></object></object>'
    gpus = [
        pci_gpu(index, f"cuda{cuda}")[: -len("</object></object>")] + both.format(index, nvml)
        for index, cuda, nvml in ((3, 1, 0), (4, 0, 1))
    ]
    imported = import_dump(hwloc(package(0, gpus[0]) + package(1, gpus[1])), "m")
    assert path_class(link_graph(imported.topology), "gpu0", "numa0") == "PHB"


def test_bridges_of_the_whole_machine_belong_to_all_its_numa_nodes():
    nodes = package(0, "") + package(1, "")
    imported = import_dump(hwloc(nodes + pci_gpu(3, "cuda1") + pci_gpu(4, "cuda0")), "m")
    graph = link_graph(imported.topology)
    assert path_class(graph, "gpu0", "gpu1") == "NODE"
    assert {path_class(graph, "gpu0", f"numa{i}") for i in range(2)} == {"PHB"}


PAIR = """
\tGPU0\tGPU1\tCPU Affinity
GPU0\t X \t{0}\t0-15
GPU1\t{0}\t X \t0-15
"""


@pytest.mark.parametrize("cell", ["NV0", "NV999999", "NV65"])
def test_numbers_of_nvlinks_that_no_gpu_has_are_refused(cell: str) -> None:
    with pytest.raises(InputError, match=f"the row of GPU0 has {cell} for GPU1"):
        import_dump(PAIR.format(cell).encode(), "dump")


def test_a_guessed_generation_of_nvlinks_is_a_note() -> None:
    notes = import_dump(PAIR.format("NV4").encode(), "dump").notes
    assert any("tells the generation of NVLinks: taken as nvlink2" in note for note in notes)
    named = import_dump(PAIR.format("NV4").encode(), "dump", device="nvidia-a100-sxm4-80gb").notes
    assert not any("generation of NVLinks" in note for note in named)


def test_a_model_against_the_dump_is_a_note() -> None:
    text = PAIR.format("PHB") + "GPU 0: NVIDIA H200 (UUID: a)\nGPU 1: NVIDIA H200 (UUID: b)\n"
    notes = import_dump(text.encode(), "dump", device="l20").notes
    assert "the dump says that gpu0 is a nvidia-h200-sxm: taken as a nvidia-l20, as was asked" in notes


def test_a_model_that_has_no_such_links_is_refused() -> None:
    said = "dump with --device l20 describes what cannot be: .*which has no nvlink, but pcie"
    with pytest.raises(InputError, match=said):
        import_dump(PAIR.format("NV4").encode(), "dump", device="l20")


def test_a_makers_name_alone_is_ambiguous() -> None:
    with pytest.raises(InputError, match="'nvidia' could be nvidia-"):
        import_dump(PAIR.format("PHB").encode(), "dump", device="nvidia")


@pytest.mark.parametrize("text", ["[1, 2]", "{}", ' {"devices": []}'])
def test_json_is_no_dump(text: str) -> None:
    with pytest.raises(InputError, match="is JSON"):
        import_dump(text.encode(), "dump")
