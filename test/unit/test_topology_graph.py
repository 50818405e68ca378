"""Routes and classes on small machines whose answers are known, and faults of links and nodes."""

import json

import pytest

from topo_opt.errors import InputError
from topo_opt.topology import load, parse
from topo_opt.topology.graph import PATH_CLASSES, link_graph, path_class, route, routes_from

GPU = load("h200-x1").primary.model_dump(mode="json", exclude_none=True)


def machine(gpus, nodes, links, **more):
    """A topology of `gpus` GPUs; nodes as {id: kind}, links as (end, end, kind, bytes_per_s)."""
    names = [f"gpu{i}" for i in range(gpus)]
    data = {
        "schema_version": 1,
        "name": "sample",
        "description": "made for a test",
        "compute": names,
        "devices": [GPU | {"id": name} for name in names],
        "nodes": [{"id": name, "kind": kind} for name, kind in nodes.items()],
        "links": [
            {"ends": [a, b], "kind": kind, "bytes_per_s": {"value": rate, "source": "chosen"}}
            for a, b, kind, rate in links
        ],
    }
    return parse(json.dumps(data | more).encode(), "sample")


def two_sockets():
    """Six GPUs: 0, 1 behind one switch, 2 a switch further, 3 on the same bridge, 4 on another, 5 on the other socket."""
    nodes = {"s0": "pcie_switch", "s1": "pcie_switch", "rc0": "root_complex", "rc1": "root_complex"}
    nodes |= {"rc2": "root_complex", "numa0": "numa", "numa1": "numa"}
    ends = [("gpu0", "s0"), ("gpu1", "s0"), ("s1", "s0"), ("gpu2", "s1"), ("s0", "rc0"), ("gpu3", "rc0")]
    ends += [("gpu4", "rc1"), ("gpu5", "rc2")]
    links = [(a, b, "pcie", 64e9) for a, b in ends]
    links += [(f"rc{i}", f"numa{i // 2}", "fabric", 200e9) for i in range(3)]
    links += [("numa0", "numa1", "smp", 60e9)]
    return nodes, links


def test_classes_of_a_pcie_machine():
    graph = link_graph(machine(6, *two_sockets()))
    expected = {"gpu0": "LOC", "gpu1": "PIX", "gpu2": "PXB", "gpu3": "PHB", "gpu4": "NODE", "gpu5": "SYS"}
    assert {gpu: path_class(graph, "gpu0", gpu) for gpu in expected} == expected
    assert {gpu: path_class(graph, gpu, "gpu0") for gpu in expected} == expected


def test_gpu_links_come_before_pcie_and_are_not_passed_on_by_gpus():
    nodes, links = two_sockets()
    links += [("gpu0", "gpu5", "nvlink", 25e9), ("gpu5", "gpu4", "nvlink", 25e9)]
    graph = link_graph(machine(6, nodes, links))
    assert path_class(graph, "gpu0", "gpu5") == "NVL"
    assert path_class(graph, "gpu0", "gpu4") == "NODE"


def test_a_switch_of_gpu_links_is_the_route_even_where_pcie_is_wider():
    links = [(f"gpu{i}", "nvs", "nvlink", 20e9) for i in range(2)]
    links += [(f"gpu{i}", "s0", "pcie", 64e9) for i in range(2)]
    graph = link_graph(machine(2, {"nvs": "nvswitch", "s0": "pcie_switch"}, links))
    assert route(graph, "gpu0", "gpu1") == ("gpu0", "nvs", "gpu1")


def test_gpus_forward_only_where_nothing_else_leads_there():
    ring = [(f"gpu{i}", f"gpu{(i + 1) % 5}", "nvlink", 25e9) for i in range(5)]
    graph = link_graph(machine(5, {}, ring))
    assert route(graph, "gpu0", "gpu2") == ("gpu0", "gpu1", "gpu2")
    assert route(graph, "gpu0", "gpu3") == ("gpu0", "gpu4", "gpu3")


def test_the_network_is_crossed_on_the_rail_of_the_gpu():
    nodes = {"leaf0": "net_switch", "leaf1": "net_switch", "spine": "net_switch"}
    links = [("leaf0", "spine", "network", 50e9), ("leaf1", "spine", "network", 50e9)]
    for host in range(2):
        links += [(f"gpu{2 * host}", f"gpu{2 * host + 1}", "nvlink", 400e9)]
        for rail in range(2):
            nic = f"nic{host}.{rail}"
            nodes[nic] = "nic"
            links += [(f"gpu{2 * host + rail}", nic, "pcie", 64e9), (nic, f"leaf{rail}", "network", 50e9)]
    graph = link_graph(machine(4, nodes, links))
    assert route(graph, "gpu0", "gpu2") == ("gpu0", "nic0.0", "leaf0", "nic1.0", "gpu2")
    assert "spine" in route(graph, "gpu0", "gpu3")
    assert path_class(graph, "gpu0", "gpu3") == "NET"


def test_data_enter_a_machine_by_the_nic_next_to_their_gpu():
    graph = link_graph(load("hgx-h100-x8-ib-x16"))
    way = route(graph, "node0.gpu0", "node1.gpu3")
    assert [node for node in way if "nic" in node or "leaf" in node or node == "spine"] == [
        "node0.nic0",
        "leaf0.rail0",
        "spine",
        "leaf0.rail3",
        "node1.nic3",
    ]
    assert route(graph, "node0.gpu0", "node1.gpu0")[2:5] == ("node0.nic0", "leaf0.rail0", "node1.nic0")


def test_edges_carry_the_figures_of_the_link_in_both_directions():
    data = machine(2, {}, [("gpu1", "gpu0", "nvlink", 25e9)]).model_dump(mode="json")
    data["links"][0] |= {
        "latency_ns": {"value": 700.0, "source": "chosen"},
        "sustained_bytes_per_s": {"value": 20e9, "source": "chosen"},
    }
    graph = link_graph(parse(json.dumps(data).encode(), "sample"))
    assert graph.edges["gpu0", "gpu1"] == graph.edges["gpu1", "gpu0"]
    edge = graph.edges["gpu0", "gpu1"]
    assert (edge["bytes_per_s"], edge["sustained_bytes_per_s"], edge["kind"], edge["link"]) == (
        25e9,
        20e9,
        "nvlink",
        0,
    )
    assert edge["latency_s"] == pytest.approx(700e-9)


def test_routes_do_not_depend_on_which_targets_are_asked_for():
    graph = link_graph(machine(6, *two_sockets()))
    everything = routes_from(graph, "gpu2")
    for target in graph.nodes:
        assert routes_from(graph, "gpu2", [target]) == {target: everything[target]}
    assert all(path_class(graph, "gpu2", node) in PATH_CLASSES for node in graph.nodes)


PAIR = [("gpu0", "gpu1", "nvlink", 25e9)]
FAULTS = {
    "disconnected": ((3, {}, PAIR), r"/compute/2: no links lead from 'gpu0' to 'gpu2'"),
    "given twice": ((2, {}, PAIR + PAIR), r"/links/1: .* two nvlink links; give one with the sum"),
    "swapped with another rate": (
        (2, {}, [*PAIR, ("gpu1", "gpu0", "nvlink", 50e9)]),
        r"/links/1: .* at /links/0, where bytes_per_s is 25000000000.0, not 50000000000.0",
    ),
    "wrong end": (
        (2, {"n": "numa"}, [*PAIR, ("gpu0", "n", "nvlink", 1e9)]),
        r"/links/1/ends/1: 'n' is a numa",
    ),
    "id of a device": ((2, {"gpu0": "nic"}, PAIR), r"/nodes/0/id: 'gpu0' is the id of an earlier"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_graph(fault):
    arguments, message = FAULTS[fault]
    with pytest.raises(InputError, match=message):
        machine(*arguments)


def test_more_lanes_than_the_model_has():
    data = machine(2, {}, PAIR).model_dump(mode="json", exclude_none=True)
    data["links"][0]["lanes"] = 19
    with pytest.raises(
        InputError, match=r"/devices/0/ports/1/count: 'gpu0' is on 19 lanes of nvlink, its model has 18"
    ):
        parse(json.dumps(data).encode(), "sample")


def test_curves_name_devices_of_the_machine():
    point = {"bytes": 8192, "seconds": 1e-5}
    curve = {"kind": "all_reduce", "algorithm": "library", "participants": ["gpu0", "gpu7"], "source": "s"}
    measured = {"date": "2026-11-29", "collectives": [curve | {"points": [point]}]}
    with pytest.raises(InputError, match="/measured/collectives/0/participants/1: there is no device 'gpu7'"):
        machine(2, {}, PAIR, measured=measured)
    late = curve | {"participants": ["gpu0", "gpu1"], "points": [point | {"low_s": 2e-5}]}
    with pytest.raises(InputError, match="outside of its quartiles"):
        machine(2, {}, PAIR, measured={"date": "2026-11-29", "collectives": [late]})
