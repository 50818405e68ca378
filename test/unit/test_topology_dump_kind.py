"""A dump of a machine where a topology is expected: told by its content, with what makes a topology of it."""

import shlex
from pathlib import Path

import pytest
from test_topology_dump_forms import DGX1, SPELLINGS
from test_topology_import import DUMPS

from topo_opt.errors import InputError
from topo_opt.tools import hw
from topo_opt.topology import load
from topo_opt.topology.dump_kind import dump_kind
from topo_opt.topology.importers import import_file

FORMS = {
    "nvidia-smi topo -m": ["nvsmi_8gpu_4numa.txt", "h200x2_smi.txt"],
    "NCCL topology XML": ["h200x2_nccl.xml", "azure_ndv4-topo.xml", "rccl_topo_8p_pcie.xml"],
    "hwloc XML": ["hwloc_nvidiaDGX2.xml"],
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in FORMS.items() for name in names])
def test_a_dump_in_place_of_a_topology_is_named_with_what_to_do(kind: str, name: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = Path("a machine" + Path(name).suffix)
    given.write_bytes((DUMPS / name).read_bytes())
    with pytest.raises(InputError, match="is a dump") as refused:
        load(str(given))
    assert f"{given} is a dump ({kind}), not a topology" in str(refused.value)
    # What the message says is what helps.
    words = shlex.split(refused.value.hint or "")
    assert words[:2] == ["topo-hw", "import"] and hw.main(words[1:5]) == 0
    assert load(words[4]).compute == import_file(given).topology.compute


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_a_matrix_is_told(spelling):
    assert dump_kind(SPELLINGS[spelling](DGX1).encode()) == "nvidia-smi topo -m"
    assert dump_kind(SPELLINGS[spelling](DGX1).encode("utf-16")) == "nvidia-smi topo -m"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[",
        "GPU0 GPU1\n",
        "<graphs/>",
        "<",
        "<!-- <system> -->",
        "cpu",
        "GPU0 fails with X11",
        "GPU0 " * 800_000,
    ],
)
def test_what_is_no_dump(text):
    assert dump_kind(text.encode()) is None


@pytest.mark.parametrize(
    "text",
    [
        '<?xml version="1.0"?>\n<!-- a <x> --><system version="1">',
        "\ufeff<system/>",
        "<!DOCTYPE t [<!ENTITY a 'b'>]><system>",
    ],
)
def test_the_root_is_behind_declarations(text):
    assert dump_kind(text.encode()) == "NCCL topology XML"
