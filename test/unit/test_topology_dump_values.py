"""Values in NCCL's XML that no machine has: said in a note, and taken as if they were missing."""

import pytest
from test_topology_dump_forms import gpu, link, nccl
from test_topology_import import links_of

from topo_opt.topology import library
from topo_opt.topology.graph import link_graph, path_class
from topo_opt.topology.importers import import_dump


def slots(**given):
    """Two GPUs below a switch with a NIC, their slots with other attributes where these are given."""
    plain = {"link_speed": "16.0 GT/s PCIe", "link_width": "16"}
    ends = {
        name: " ".join(f'{key}="{value}"' for key, value in (plain | given.get(name, {})).items())
        for name in ("gpu0", "gpu1", "nic", "switch")
    }
    gpus = "".join(
        f'<pci busid="0:{i + 2}:0.0" class="0x030200" {ends[f"gpu{i}"]}><gpu dev="{i}" sm="80" rank="{i}"/></pci>'
        for i in range(2)
    )
    nic = f'<pci busid="0:4:0.0" class="0x020000" {ends["nic"]}><nic><net name="mlx5_0" dev="0"/></nic></pci>'
    return nccl(
        f'<cpu numaid="0"><pci busid="0:1:0.0" class="0x060400" {ends["switch"]}>{gpus}{nic}</pci></cpu>'
    )


ODD_SLOTS = [
    ({"gpu0": {"link_speed": "fast"}}, "gpu0 has 'fast' for a link_speed, which is none of PCIe: not taken"),
    ({"gpu1": {"link_speed": "17 GT/s"}}, "gpu1 has '17 GT/s' for a link_speed"),
    ({"nic": {"link_speed": "-1"}}, "0:4:0.0 has '-1' for a link_speed"),
    ({"switch": {"link_speed": "16"}}, "0:1:0.0 has '16' for a link_speed"),
    ({"gpu0": {"link_width": "wide"}}, "gpu0 has 'wide' for a link_width, which is none of PCIe: taken as 16 lanes"),
    ({"gpu1": {"link_width": "63"}}, "gpu1 has '63' for a link_width"),
    ({"nic": {"link_width": "-8"}}, "0:4:0.0 has '-8' for a link_width"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "said"), ODD_SLOTS)
def test_what_no_slot_has_is_a_note(given, said):
    imported = import_dump(slots(**given), "m", device="nvidia-a100-pcie-80gb")
    assert [note.startswith(said) for note in imported.notes if "for a link_" in note] == [True]
    # What is not taken is that of the model, or the width that NCCL takes.
    assert {name: link.lanes for name, link in links_of(imported, "switch0").items()} == dict.fromkeys(
        ("gpu0", "gpu1", "nic0", "bridge0"), 16
    )
    rates = [links_of(imported, gpu)["switch0"].bytes_per_s.value for gpu in ("gpu0", "gpu1")]
    assert rates == [16 * library.link_figures("pcie4").bytes_per_s.value] * 2


@pytest.mark.parametrize("open_", ["", "Unknown", "Unknown speed"])
def test_a_speed_that_is_left_open_is_no_odd_one(open_):
    notes = import_dump(slots(gpu0={"link_speed": open_}), "m", device="nvidia-a100-pcie-80gb").notes
    assert not any("for a link_" in note for note in notes)


@pytest.mark.parametrize(
    ("count", "said"),
    [
        ("many", "'many' nvlinks of gpu0 are no number of links: left out"),
        ("-4", "'-4' nvlinks of gpu0 are no number of links: left out"),
        ("1.5", "'1.5' nvlinks of gpu0 are no number of links: left out"),
        ("0", "nvlinks of gpu0 are down"),
    ],
)
def test_a_count_that_is_none_is_a_note(count, said):
    peers = ["0000:01:00.0", "0000:00:00.0"]
    inside = [f'<nvlink target="{peers[0]}" count="{count}" tclass="0x030200"/>', link(peers[1], 2)]
    imported = import_dump(
        nccl(f'<cpu numaid="0">{"".join(gpu(i, x) for i, x in enumerate(inside))}</cpu>'), "m"
    )
    assert said in imported.notes
    # The other end says how many there are.
    assert links_of(imported, "gpu0")["gpu1"].lanes == 2


def test_a_count_that_is_missing_is_one():
    entry = '<nvlink target="0000:01:00.0" tclass="0x030200"/>'
    imported = import_dump(nccl(f'<cpu numaid="0">{gpu(0, entry)}{gpu(1)}</cpu>'), "m")
    assert links_of(imported, "gpu0")["gpu1"].lanes == 1


@pytest.mark.parametrize(
    "odd", ['bw="44712" count="five"', 'bw="44712" count="0"', 'bw="fast" count="5"', 'bw="-1"', ""]
)
def test_a_c2c_without_a_rate_is_left_out_with_a_note(odd):
    host = '<cpu numaid="{0}" arch="arm64" vendor="NVIDIA">{1}</cpu>'
    grace = nccl(
        host.format(0, gpu(0, f"<c2c {odd}/>")), host.format(1, gpu(1, '<c2c bw="44712" count="5"/>'))
    )
    imported = import_dump(grace, "m", device="nvidia-gb200")
    assert any(
        note.startswith("the c2c of gpu0 has ") and note.endswith("left out") for note in imported.notes
    )
    assert path_class(link_graph(imported.topology), "gpu0", "numa0") != "C2C"
    assert path_class(link_graph(imported.topology), "gpu1", "numa1") == "C2C"
