"""Short forms, clusters, the library of figures, and what every topology of the package must keep to."""

import json
import random
import time

import jsonschema
import pytest
from test_topology import mutate_text, mutate_tree

from topo_opt import topology
from topo_opt.errors import InputError
from topo_opt.topology import library
from topo_opt.topology.graph import link_graph, path_class
from topo_opt.topology.loading import _read_shipped

RATE = {"value": 50e9, "source": "chosen"}
BOX = {
    "schema_version": 1,
    "name": "box",
    "description": "made for a test",
    "compute": ["gpu[0-3]"],
    "devices": [{"id": "gpu[0-3]", "figures": "nvidia-l20"}],
    "nodes": [{"id": "switch[0-1]", "kind": "pcie_switch"}, {"id": "bridge0", "kind": "root_complex"}],
    "links": [
        {"ends": ["gpu[0-3]", "switch[0-1]"], "figures": "pcie4", "lanes": 16},
        {"ends": ["switch[0-1]", "bridge0"], "figures": "pcie4", "lanes": 16},
    ],
}


def parse(data, **more):
    return topology.parse(json.dumps(data | more).encode(), "box.json")


def cluster(count, **network):
    return {"count": count, "network": {"link": {"bytes_per_s": RATE}} | network}


def test_ranges_are_dealt_out_in_runs():
    box = parse(BOX)
    assert box.compute == ("gpu0", "gpu1", "gpu2", "gpu3")
    ends = [link.ends for link in box.links]
    assert ends[:4] == [("gpu0", "switch0"), ("gpu1", "switch0"), ("gpu2", "switch1"), ("gpu3", "switch1")]
    assert ends[4:] == [("switch0", "bridge0"), ("switch1", "bridge0")]


def test_links_by_name_have_the_rate_of_their_lanes():
    link = parse(BOX).links[0]
    one = library.link_figures("pcie4")
    assert link.bytes_per_s.value == 16 * one.bytes_per_s.value
    assert link.sustained_bytes_per_s.value == pytest.approx(24e9)
    assert link.latency_ns == one.latency_ns
    assert "16 lanes" in link.bytes_per_s.source


def test_a_mesh_has_each_pair_once():
    linked = [{"among": "gpu[0-3]", "kind": "nvlink", "bytes_per_s": RATE}]
    box = parse(BOX, links=linked, nodes=[], devices=[{"id": "gpu[0-3]", "figures": "nvidia-h200-sxm"}])
    assert len({frozenset(link.ends) for link in box.links}) == len(box.links) == 6


def test_steps_of_a_range():
    box = parse(BOX, compute=["gpu[0-3:2]"])
    assert box.compute == ("gpu0", "gpu2")


FAULTS = {
    "backwards": ({"compute": ["gpu[3-0]"]}, r"/compute/0: the range of 'gpu\[3-0\]' runs backwards"),
    "uneven": (
        {"links": [{"ends": ["gpu[0-3]", "switch[0-2]"], "figures": "pcie4"}]},
        r"/links/0/ends: 4 and 3 ends cannot be dealt out evenly",
    ),
    "unknown model": (
        {"devices": [{"id": "gpu0", "figures": "nvidia-h900"}]},
        r"/devices/0/figures: there is no device model 'nvidia-h900' \(known are amd-",
    ),
    "unknown link": (
        {"links": [{"ends": ["gpu0", "gpu1"], "figures": "pcie9"}]},
        r"/links/0/figures: there is no kind of link 'pcie9'",
    ),
    "both forms": (
        {"links": [{"ends": ["gpu0", "gpu1"], "figures": "pcie4", "kind": "pcie"}]},
        r"/links/0: .*exclude each other",
    ),
    "neither form": ({"links": [{"ends": ["gpu0", "gpu1"]}]}, r"/links/0: .*'kind' and 'bytes_per_s'"),
    "key of a named device": (
        {"devices": [{"id": "gpu0", "figures": "nvidia-l20", "colour": 1}]},
        r"/devices/0/colour: is not a key of the schema",
    ),
    "fault in a later part": (
        {"links": [*BOX["links"], {"ends": ["gpu[0-3]", "switch7"], "figures": "pcie4"}]},
        r"/links/2/ends/1: there is no device 'switch7'",
    ),
    "no such port": (
        {"links": [*BOX["links"], {"among": "gpu[0-3]", "figures": "nvlink4"}]},
        r"^box.json is not a topology: /links/2: 'gpu0' is a NVIDIA L20, which has no nvlink, but pcie$",
    ),
    "no such port of its maker": (
        {"links": [*BOX["links"], {"ends": ["gpu0", "gpu1"], "kind": "xgmi", "bytes_per_s": RATE}]},
        r"/links/2: 'gpu0' is a NVIDIA L20, which has no xgmi, but pcie$",
    ),
    "too many": ({"devices": [{"id": "gpu[0-9999]", "figures": "nvidia-l20"}]}, r"/devices: are more than 4096"),
    "long ids": ({"compute": ["g" * 63 + "[0-1]x"]}, r"/compute/0: .*longer than 64"),
    "no uplink": ({"cluster": cluster(4, nodes_per_leaf=2, nics={"per": "gpu", "pcie": "pcie4"})}, r"/cluster/network/uplink: is missing"),
    "no NICs": ({"cluster": cluster(2)}, r"/cluster/network/nics: is needed: 'box' has no NICs"),
    "not a cable": (
        {"cluster": cluster(2, nics={"per": "gpu", "pcie": "ib-ndr"})},
        r"/cluster/network/nics/pcie: 'ib-ndr' is a network link, a pcie link is needed",
    ),
    "too large": (
        {"cluster": cluster(1000, nics={"per": "gpu", "pcie": "pcie4"})},
        r"/cluster/count: 1000 machines have 4000 compute devices, at most 1024",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_short_forms(fault):
    change, message = FAULTS[fault]
    with pytest.raises(InputError, match=message):
        parse(BOX, **change)


def test_a_cluster_of_another_topology_is_a_few_lines():
    data = {"schema_version": 1, "name": "many", "description": "1,024 GPUs"}
    network = {
        "rails": True,
        "nodes_per_leaf": 32,
        "link": {"figures": "ib-ndr"},
        "uplink": {"bytes_per_s": RATE},
    }
    start = time.process_time()
    many = topology.parse(
        json.dumps(data | {"cluster": {"count": 128, "node": "hgx-h100-x8", "network": network}}).encode(),
        "many",
    )
    assert time.process_time() - start < 2
    assert len(many.compute) == 1024 and many.compute[29] == "node3.gpu5"
    graph = link_graph(many)
    assert path_class(graph, "node3.gpu5", "node3.gpu0") == "NVL"
    assert path_class(graph, "node3.gpu5", "node127.gpu5") == "NET"
    assert sorted(graph["leaf3.rail7"]) == sorted([*(f"node{i}.nic7" for i in range(96, 128)), "spine"])
    with pytest.raises(InputError, match="/cluster/node: 'hgx-h100-x8-ib-x16' is a cluster itself"):
        nested = {"count": 2, "node": "hgx-h100-x8-ib-x16", "network": network}
        topology.parse(json.dumps(data | {"cluster": nested}).encode(), "many")


def test_a_cluster_of_the_file_itself_with_added_nics():
    nics = {"per": "pair", "pcie": "pcie4", "lanes": 16}
    flat = parse(BOX, cluster=cluster(3, nics=nics))
    assert [node.id for node in flat.nodes if node.kind == "nic"][:3] == [
        "node0.nic0",
        "node0.nic1",
        "node1.nic0",
    ]
    graph = link_graph(flat)
    assert set(graph["node1.nic1"]) == {"node1.switch1", "leaf0"}
    assert path_class(graph, "node0.gpu1", "node0.nic0") == "PIX"


def test_rails_without_a_spine_are_reached_through_the_machine():
    flat = parse(BOX, cluster=cluster(2, rails=True, nics={"per": "pair", "pcie": "pcie4", "lanes": 16}))
    assert path_class(link_graph(flat), "node0.gpu0", "node1.gpu3") == "NET"


def test_ten_thousand_devices_are_refused_quickly():
    device = topology.load("h200-x1").primary.model_dump(mode="json", exclude_none=True)
    listed = [{"id": f"gpu{i}", "figures": "nvidia-l20"} for i in range(10_000)]
    inline = [device | {"id": f"gpu{i}"} for i in range(10_000)]
    for devices in (listed, inline):
        start = time.process_time()
        with pytest.raises(InputError, match=r"/devices: .*at most 4096|has \d+ bytes, a topology at most"):
            parse(BOX, devices=devices)
        assert time.process_time() - start < 2


def test_shipped_files_keep_to_the_json_schema_and_to_canonical_ids():
    schema = json.loads(topology.json_schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for name in topology.names():
        validator.validate(json.loads(_read_shipped(name)))


def test_the_json_schema_refuses_what_the_loader_refuses():
    validator = jsonschema.Draft202012Validator(json.loads(topology.json_schema()))
    for change in (
        {"colour": 1},
        {"devices": [{"id": "gpu0", "figures": "nvidia-l20", "x": 1}]},
        {"compute": [""]},
    ):
        assert not validator.is_valid(BOX | change)
    assert validator.is_valid(BOX)


def test_all_topologies_of_the_issue_are_there_and_connected():
    wanted = (
        "h200-x1 h200-x2 hgx-h200-x8 hgx-h100-x8 dgx-a100-x8 dgx2-v100-x16 b200-x8 gb200-nvl72 mi300x-x8 "
    )
    wanted += "rtx4090-x8-pcie l20-x8-pcie ascend-910b-x8 hgx-h100-x8-ib-x16"
    assert set(wanted.split()) <= set(topology.names())
    for name in wanted.split():
        machine = topology.load(name)
        graph = link_graph(machine)
        assert all(path_class(graph, machine.compute[0], gpu) != "DIS" for gpu in machine.compute)


def test_classes_of_shipped_machines():
    def row(name, *others):
        graph = link_graph(topology.load(name))
        return [path_class(graph, "gpu0", other) for other in others]

    assert row("dgx2-v100-x16", "gpu1", "gpu15", "nic0", "nic1", "nic2", "nic4") == [
        "NVL",
        "NVL",
        "PIX",
        "PXB",
        "NODE",
        "SYS",
    ]
    assert row("l20-x8-pcie", "gpu1", "gpu2", "gpu4") == ["PIX", "NODE", "SYS"]
    assert row("rtx4090-x8-pcie", "gpu1", "gpu4") == ["PHB", "SYS"]
    assert row("mi300x-x8", "gpu7", "nic0", "nic1", "nic4") == ["XGMI", "PIX", "NODE", "SYS"]
    assert row("gb200-nvl72", "gpu71", "grace0") == ["NVL", "C2C"]
    assert topology.load("rtx4090-x8-pcie").peer_access.farthest == "LOC"


def test_lanes_of_gpus_are_those_of_their_models():
    for name in topology.names():
        machine = topology.load(name)
        for device in machine.devices:
            for port in device.ports:
                lanes = sum(
                    link.lanes or 0
                    for link in machine.links
                    if device.id in link.ends and link.kind == port.kind
                )
                assert lanes in (0, port.count.value), (name, device.id, port.kind)
                assert port.figures is None or library.link_figures(port.figures).kind == port.kind


def test_mi300x_says_how_it_is_divided():
    gpu = topology.load("mi300x-x8").primary
    assert gpu.dies.count.value == 8 and gpu.dies.selectable
    assert [level.name for level in gpu.memory.levels] == ["stack", "channel"]
    assert [mode.name for mode in gpu.partition_modes if mode.active] == ["SPX-NPS1"]
    assert {mode.memory for mode in gpu.partition_modes} == {1, 4}


def test_measured_curves_count_whole_tensors():
    curves = topology.load("h200-x2").measured.collectives
    sizes = {(c.kind, c.algorithm): (c.points[0].bytes, len(c.points)) for c in curves}
    assert sizes == {
        ("all_reduce", "library"): (8192, 9),
        ("all_gather", "library"): (16384, 9),
        ("reduce_scatter", "library"): (16384, 9),
        ("all_reduce", "one_shot"): (8192, 6),
        ("all_reduce", "two_shot"): (8192, 6),
    }


@pytest.mark.parametrize("name", ["rtx4090-x8-pcie", "dgx-a100-x8", "h200-x2", "hgx-h100-x8-ib-x16"])
def test_mutated_short_forms_load_or_are_refused(name):
    rng = random.Random(name)
    data = _read_shipped(name)
    refused = 0
    for mutate in (mutate_text, mutate_tree):
        for _ in range(200):
            try:
                topology.parse(mutate(rng, data), "mutated.json")
            except InputError as error:
                refused += 1
                assert len(error.render()) < 4000
    assert refused > 200
