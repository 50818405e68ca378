"""Measuring a machine: two processes over gloo, what becomes of it, and ranks that fail or never come."""

import argparse
import json
import os
import subprocess
import sys
import time
from importlib.resources import files

import pytest

from topo_opt.collectives import CollectiveModel, calibration
from topo_opt.collectives.measure import Plan
from topo_opt.errors import InputError
from topo_opt.tools import hw_calibrate
from topo_opt.topology import load

SMALL = Plan(devices=2, sizes=[8192, 65536], groups=[2], products=[[32, 64, 64]], copies=[65536], repeats=5)


@pytest.fixture
def pair(tmp_path):
    """Two processors of one host, as a topology file."""
    raw = json.loads(files("topo_opt.hw_topologies").joinpath("cpu.json").read_bytes())
    raw["name"], raw["compute"] = "pair", ["cpu0", "cpu1"]
    raw["devices"] = [raw["devices"][0], {**raw["devices"][0], "id": "cpu1"}]
    rate = {"value": 1e10, "source": "nominal: memory of one host"}
    raw["links"] = [{"ends": ["cpu0", "cpu1"], "kind": "smp", "bytes_per_s": rate}]
    path = tmp_path / "pair.json"
    path.write_text(json.dumps(raw))
    return path


def run(*words):
    parser = argparse.ArgumentParser()
    hw_calibrate.add_arguments(parser)
    return hw_calibrate.run(parser.parse_args(list(words)))


def test_two_processes(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(hw_calibrate, "CPU_PRODUCTS", [[32, 64, 64], [64, 64, 64]])
    monkeypatch.setattr(hw_calibrate, "CPU_COPIES", [65536, 262144])
    out = tmp_path / "out.json"
    assert run("--topology", str(pair), "--sizes", "8K,64K", "--repeats", "5", "-o", str(out)) == 0
    topology = load(out)
    measured = topology.measured
    assert {c.kind for c in measured.collectives} >= {"all_reduce", "all_gather", "broadcast"}
    assert all([p.bytes for p in c.points] == [8192, 65536] for c in measured.collectives)
    assert all(p.low_s <= p.seconds <= p.high_s for c in measured.collectives for p in c.points)
    assert "gloo" in measured.collectives[0].source and measured.versions["torch"]
    assert measured.gemms[0].dtype == "f32" and len(measured.gemms[0].points) == 2
    assert measured.copies[0].ends == ("cpu0", "cpu0")
    # What was measured is what the model says then.
    model = CollectiveModel(topology)
    found = model.cost("all_reduce", 65536, (("cpu0", "cpu1"),)).seconds
    seconds = next(c for c in measured.collectives if c.kind == "all_reduce").points[1].seconds
    assert 0.4 < found / seconds < 2.5


def test_a_rank_that_never_comes(tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({**SMALL.__dict__, "quiet_s": 4.0}))
    place = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(calibration._free_port()),
    }
    start = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "topo_opt.collectives.measure", str(plan), str(tmp_path / "result.json")],
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1 and time.monotonic() - start < 30
    assert "error: rank 0" in ended.stderr
    assert not (tmp_path / "result.json").exists()


LEAVES = """
import os, sys, torch.distributed as dist
from topo_opt.collectives import measure
if os.environ["RANK"] == "1":
    gone = lambda *_: os._exit(7)
    measure._call = gone
sys.exit(measure.main(sys.argv[1:]))
"""


def test_a_rank_that_dies_ends_the_others(tmp_path, monkeypatch):
    """Rank 1 dies in the middle of the first collective; rank 0 would wait for it."""
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    popen = subprocess.Popen

    def start(command, **more):
        return popen([command[0], str(script), *command[3:]], **more)

    monkeypatch.setattr(calibration.subprocess, "Popen", start)
    begun = time.monotonic()
    with pytest.raises(InputError, match=r"rank [01] ended with"):
        calibration.calibrate(SMALL)
    assert time.monotonic() - begun < 30


def test_processes_are_ended_when_one_fails():
    waits = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    fails = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(3)"])
    assert calibration._first_failure([waits, fails]) == 1
    calibration._end([waits, fails])
    assert waits.poll() is not None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--sizes", "8,zero"], "--sizes 8,zero: bytes from 64"),
        (["--sizes", "0"], "--sizes 0: bytes from 64"),
        (["--groups", "3"], "--groups 3: 2 devices are measured"),
        (["--devices", "cpu0,cpu9"], "does not compute on 'cpu9'"),
        (["--devices", "cpu0,cpu0"], "named twice"),
        (["--repeats", "1"], "quartiles need at least 4"),
        (["--out", "/nosuch/out.json"], "there is no folder"),
    ],
)
def test_options(pair, words, expected):
    with pytest.raises(InputError, match=expected):
        run("--topology", str(pair), *words)


def test_gpus_that_are_not_here(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="PyTorch finds none here"):
        run("--topology", "h200-x2")


def test_the_wrong_number_of_processes(pair, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InputError, match="torchrun started 3 processes, the topology has 2"):
        run("--topology", str(pair))
