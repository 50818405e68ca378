"""The shipped topologies load, every kind of fault is named by its JSON pointer, and no mutated file gets past as a traceback."""

import copy
import json
import random

import pytest

from topo_opt import topology
from topo_opt.errors import TopoError
from topo_opt.topology.file import TopologyFile

# With every figure in the file, as a user would describe a machine that the library of devices does not have.
H200 = topology.load("h200-x1").model_dump_json(exclude_none=True, exclude_unset=True).encode()


def test_shipped_topologies_load_under_their_name():
    assert {"cpu", "h200-x1"} <= set(topology.names())
    for name in topology.names():
        assert topology.load(name).name == name


def test_h200_figures_are_those_of_the_recorded_benchmarks():
    device = topology.load("h200-x1").primary
    assert device.memory.read_write_bytes_per_s.value == 4.24e12
    assert device.ops_per_s("bf16") == 686e12
    assert device.ops_per_s("f16") == 989.5e12
    assert device.launch.replayed_ns.value == 1310
    assert device.target.capability == 90


def test_a_path_is_a_file_and_a_word_is_a_name(tmp_path):
    path = tmp_path / "mine.json"
    path.write_bytes(H200)
    assert topology.load(path).name == "h200-x1"
    with pytest.raises(TopoError, match="there is no topology 'h100'"):
        topology.load("h100")
    with pytest.raises(TopoError, match="No such file"):
        topology.load(str(tmp_path / "absent.json"))


def edited(*edits):
    """H200's JSON with `(path, value)` set; a value of `...` deletes."""
    data = json.loads(H200)
    for path, value in edits:
        *head, last = path
        node = data
        for part in head:
            node = node[part]
        if value is ...:
            del node[last]
        else:
            node[last] = value
    return json.dumps(data).encode()


MEMORY = ("devices", 0, "memory")
FAULTS = {
    "unknown key": ([(("devices", 0, "colour"), "red")], r"/devices/0/colour: is not a key"),
    "missing key": ([((*MEMORY, "capacity_bytes"), ...)], r"/devices/0/memory/capacity_bytes: is missing"),
    "negative rate": (
        [((*MEMORY, "peak_bytes_per_s", "value"), -1.0)],
        r"peak_bytes_per_s/value: .*greater than 0",
    ),
    "rate beyond physics": ([((*MEMORY, "peak_bytes_per_s", "value"), 1e30)], r"peak_bytes_per_s/value"),
    "text for a number": ([((*MEMORY, "peak_bytes_per_s", "value"), "4.8e12")], r"valid number"),
    "true for a number": ([(("devices", 0, "l2_bytes", "value"), True)], r"/devices/0/l2_bytes/value"),
    "no source": ([((*MEMORY, "peak_bytes_per_s", "source"), "")], r"peak_bytes_per_s/source"),
    "measured above peak": ([((*MEMORY, "read_write_bytes_per_s", "value"), 5e12)], r"above the peak"),
    "dangling link": (
        [(("links", 0, "ends"), ["gpu0", "gpu9"])],
        r"/links/0/ends/1: there is no device 'gpu9'",
    ),
    "link to itself": ([(("links", 0, "ends"), ["gpu0", "gpu0"])], r"/links/0/ends: .* itself"),
    "duplicate id": ([(("devices", 1, "id"), "gpu0")], r"/devices/1/id: 'gpu0' is the id of an earlier"),
    "unknown compute": ([(("compute",), ["tpu"])], r"/compute/0: there is no device 'tpu'"),
    "cuda without capability": ([(("devices", 0, "target"), {"backend": "cuda"})], r"'capability' belongs"),
    "other version": ([(("schema_version",), 2)], r"/schema_version"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named_by_its_pointer(fault):
    edits, message = FAULTS[fault]
    with pytest.raises(TopoError, match=message):
        topology.parse(edited(*edits), "h.json")


def test_text_that_is_not_json_of_the_allowed_kind():
    with pytest.raises(TopoError, match="NaN is not a JSON number"):
        topology.parse(H200.replace(b"4240000000000.0", b"NaN"), "h.json")
    with pytest.raises(TopoError, match="same key twice"):
        topology.parse(H200.replace(b'"name"', b'"schema_version": 1, "name"', 1), "h.json")
    with pytest.raises(TopoError, match="at most"):
        topology.parse(H200 + b" " * (4 << 20), "h.json")
    with pytest.raises(TopoError, match="deep"):
        topology.parse(b"[" * 100_000, "h.json")


def test_the_json_schema_describes_the_file():
    schema = json.loads(topology.json_schema())
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(TopologyFile.model_fields) >= set(json.loads(H200))


def mutate_text(rng, data):
    """Byte flips, cuts and repeats."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(out))
        kind = rng.randrange(4)
        if kind == 0:
            out[at] = rng.randrange(256)
        elif kind == 1:
            del out[at : at + rng.randint(1, 40)]
        elif kind == 2:
            out[at:at] = out[at : at + rng.randint(1, 40)]
        else:
            out[at:at] = rng.choice([b"null", b"1e999", b"-0", b'"\\ud800"', b"[[", b"{}", b"9" * 5000])
        if not out:
            break
    return bytes(out)


def mutate_tree(rng, data):
    """Well-formed JSON with one value or key replaced, dropped or moved."""
    root = json.loads(data)
    nodes = [root]
    for node in nodes:
        children = node.values() if isinstance(node, dict) else node
        nodes += [child for child in children if isinstance(child, dict | list) and child]
    node = rng.choice(nodes)
    key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
    strange = [None, True, -1, 0, 2**70, 1e308, "", "x" * 1000, [], {}, [[[]]], "\ud800", copy.deepcopy(root)]
    if rng.randrange(3):
        node[key] = rng.choice(strange)
    else:
        del node[key]
    return json.dumps(root).encode()


@pytest.mark.parametrize("mutate", [mutate_text, mutate_tree])
def test_mutated_files_load_or_are_refused(mutate):
    rng = random.Random(20)
    refused = 0
    for _ in range(600):
        data = mutate(rng, H200)
        try:
            topology.parse(data, "mutated.json")
        except TopoError as error:
            refused += 1
            assert len(error.render()) < 4000
    assert refused > 300
