"""Mutated `.pt2` files and ATen programs: every outcome is success or one TopoError, soon and in little memory.

Seeded, so a failure repeats; the message gives the seed and the kind of the mutation.
"""

import copy
import json
import random
import resource
import time

import pt2_samples
import pytest
import torch

from topo_opt.errors import TopoError
from topo_opt.frontend.archive_scan import scan
from topo_opt.frontend.aten_export import export_aten
from topo_opt.frontend.isolate import Limits, run_isolated
from topo_opt.frontend.load import load_scanned
from topo_opt.runtime.aten_program import AtenProgram

SAMPLES = ("mixed", "sizes", "cond", "keywords")
SCANS_PER_SAMPLE = 400
LOADS = 60
PROGRAMS = 600
MAX_SECONDS = 10.0
HOSTILE = [
    None,
    True,
    -1,
    0,
    1 << 70,
    1e308,
    "",
    "x" * 10_000,
    "a=0):\n  pass\nimport os\ndef f(",
    "__import__('os').system('true')",
    "torch.ops.aten.from_file.default",
    "s0**s0**s0",
    "../../etc/passwd",
    "\ud800",
    "\0",
    [],
    [[]],
    {},
    {"as_int": -5},
    {"as_expr": {"expr_str": "9**9**9"}},
    {"__enum__": True, "fqn": "os:x"},
]


# Mutations of bytes


def flip(data, rng):
    data = bytearray(data)
    for _ in range(rng.choice((1, 2, 16))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def truncate(data, rng):
    return data[: rng.randrange(len(data))]


def insert(data, rng):
    at = rng.randrange(len(data))
    return data[:at] + rng.randbytes(rng.choice((1, 8, 300))) + data[at:]


def remove(data, rng):
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.choice((1, 8, 300)) :]


def blank(data, rng):
    at = rng.randrange(len(data))
    size = min(rng.choice((4, 64, 1000)), len(data) - at)
    return data[:at] + rng.choice((b"\0", b"\xff")) * size + data[at + size :]


def flip_in_directory(data, rng):
    at = rng.randrange(data.rindex(b"PK\x01\x02", 0, data.index(b"PK\x01\x02") + 500), len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


BYTES = (flip, truncate, insert, remove, blank, flip_in_directory)


# Mutations of JSON and of entries


def places(value, found):
    """All (container, key) pairs of a document."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        found.append((value, key))
        places(item, found)
    return found


def change_json(document, rng):
    for _ in range(rng.choice((1, 1, 3))):
        found = places(document, [])
        if not found:
            return
        container, key = rng.choice(found)
        action = rng.randrange(4)
        if action == 0:
            container[key] = copy.deepcopy(rng.choice(HOSTILE))
        elif action == 1 and isinstance(container, dict):
            container[rng.choice(("x", "as_graph", "a'b", str(key) + "_"))] = container.pop(key)
        elif action == 2:
            container[key] = [container[key], container[key]]
        elif isinstance(container, dict):
            del container[key]
        else:
            container.insert(key, container[rng.randrange(len(container))])


def mutate_json(contents, rng):
    name = rng.choice([name for name in contents if name.endswith(".json")])
    document = json.loads(contents[name])
    change_json(document, rng)
    return {**contents, name: json.dumps(document).encode()}


def rename_entry(contents, rng):
    name = rng.choice(sorted(contents))
    new = rng.choice(
        (name + "x", "../" + name, name.upper(), "data/aotinductor/a.so", "extra/é", name[:-1], "!" + name)
    )
    return {(new if key == name else key): data for key, data in contents.items()}


def drop_entry(contents, rng):
    name = rng.choice(sorted(contents))
    return {key: data for key, data in contents.items() if key != name}


def swap_entries(contents, rng):
    left, right = rng.sample(sorted(contents), 2)
    return {**contents, left: contents[right], right: contents[left]}


def cut_entry(contents, rng):
    name = rng.choice(sorted(contents))
    return {**contents, name: truncate(contents[name] or b"x", rng)}


ENTRIES = (mutate_json, mutate_json, mutate_json, rename_entry, drop_entry, swap_entries, cut_entry)


def mutant(path, source, contents, seed):
    """Writes mutant number `seed` and returns what was done."""
    rng = random.Random(seed)
    if rng.random() < 0.4:
        kind = rng.choice(BYTES)
        path.write_bytes(kind(source, rng))
    else:
        kind = rng.choice(ENTRIES)
        pt2_samples.write(path, kind(contents, rng))
    return kind.__name__


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    return {name: pt2_samples.save(name, folder) for name in SAMPLES}


def outcome(action, what):
    """True when `action` succeeds, False when it ends with a proper error."""
    start = time.process_time()
    try:
        action()
        return True
    except TopoError as exc:
        assert exc.message and "\n" not in exc.render(), f"{what}: {exc.render()}"
        return False
    except Exception as exc:
        raise AssertionError(f"{what}: {type(exc).__name__}: {exc}") from exc
    finally:
        assert time.process_time() - start < MAX_SECONDS, what


@pytest.mark.filterwarnings("ignore")
def test_scan_of_mutants(sources, tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    accepted = refused = 0
    for number, (name, path) in enumerate(sources.items()):
        source, contents = path.read_bytes(), pt2_samples.entries(path)
        for seed in range(number * SCANS_PER_SAMPLE, (number + 1) * SCANS_PER_SAMPLE):
            target = tmp_path / "m.pt2"
            kind = mutant(target, source, contents, seed)
            if outcome(lambda target=target: scan(target), f"{name}, seed {seed}, {kind}"):
                accepted += 1
            else:
                refused += 1
    assert accepted + refused >= 1000
    assert refused > accepted > 20, "some mutants must be harmless, most must not"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 512, f"{grown} MiB"


@pytest.mark.filterwarnings("ignore")
def test_load_of_mutants_that_pass_the_scan(sources, tmp_path):
    """What the scan lets through is at worst an inconsistent program: torch raises, nothing dies."""
    chosen = []
    for seed in range(100_000, 110_000):
        if len(chosen) == LOADS:
            break
        name = SAMPLES[seed % len(SAMPLES)]
        target = tmp_path / f"{seed}.pt2"
        kind = mutant(target, sources[name].read_bytes(), pt2_samples.entries(sources[name]), seed)
        try:
            chosen.append((scan(target), f"{name}, seed {seed}, {kind}"))
        except TopoError:
            target.unlink()
    assert len(chosen) == LOADS

    def load_all():
        return [outcome(lambda info=info: load_scanned(info), what) for info, what in chosen]

    results = run_isolated(load_all, stage="fuzz", limits=Limits(memory_bytes=2 << 30, wall_seconds=120))
    assert len(results) == LOADS and True in results and False in results


def test_mutated_aten_programs():
    """A damaged program is refused when it is read, or fails as one error when it runs."""
    documents = []
    for name in ("sizes", "cond", "specials"):
        program = pt2_samples.export(name).run_decompositions({})
        documents.append((name, json.dumps(export_aten(program.graph_module, program.graph_signature))))
    accepted = 0
    for seed in range(PROGRAMS):
        rng = random.Random(seed)
        name, text = documents[seed % len(documents)]
        document = json.loads(text)
        change_json(document, rng)

        def run(document=document):
            program = AtenProgram(document)
            program.run([torch.ones(4, 6)] * len(program.inputs))

        accepted += outcome(run, f"{name}, seed {seed}")
    assert 10 < accepted < PROGRAMS
