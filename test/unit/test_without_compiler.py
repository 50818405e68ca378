"""Machines that only run bundles: no MLIR, for topo-run not even what topo-hw needs; a command that compiles says so in one line."""

import json
import os
import subprocess
import sys

import pytest
import test_bundle

from topo_opt.report_page import times

RUN_NEEDS_NOT = ("pydantic", "networkx", "highspy", "jinja2", "rich", "defusedxml")
RUNS = """
import sys
import torch
import topo_opt.runtime
from topo_opt.tools import run, run_bench

run_bench.BENCH_S = 0.02
folder, needs_not = sys.argv[1], sys.argv[2].split(",")
program = topo_opt.runtime.load(folder, "cpu", random_weights=0)
program.decode(torch.ones(1, 8), torch.tensor([1]))
for options in (["--check", "--kernels"], ["--bench"]):
    assert run.main([folder, "--device", "cpu", "--random-weights", "1", *options]) == 0, options
ours = ["topo_opt." + name for name in ("codegen", "frontend", "passes", "dialects", "pipeline", "topology")]
found = [m for m in sys.modules if m.split(".")[0] in needs_not or ".".join(m.split(".")[:2]) in ours]
assert not found, found
assert run.main([folder, "--device", "cpu", "--random-weights", "1", "--bench", "--page", sys.argv[4] + ".html"]) == 0
found = [m for m in sys.modules if ".".join(m.split(".")[:2]) in ours]
assert not found, found

import topo_opt.collectives, topo_opt.sharding, topo_opt.topology
from topo_opt.tools import hw, hw_calibrate

hw_calibrate.CPU_PRODUCTS, hw_calibrate.CPU_COPIES = [[32, 64, 64]], [65536]
dump, out = sys.argv[3:]
for words in (["list"], ["list", "--devices"], ["show", "hgx-h100-x8", "--svg", out + ".svg"], ["schema"], ["import", dump, "-o", out],
              ["calibrate", "--topology", "cpu", "--repeats", "4", "-o", out]):
    assert hw.main(words) == 0, words
try:
    hw.main(["calibrate", "--help"])
except SystemExit as end:
    assert end.code == 0
"""
COMPILES = """
import sys
from topo_opt.tools import opt
from topo_opt.tuning import kernel_ir

model, mlir = sys.argv[1:]
for tool, words in ((opt, [model, "--topology", "cpu"]), (opt, [model, "--topology", "cpu", "--mesh", "x=2"]), (opt, [mlir, "-p", "cse"]),
                    (opt, [model, "--topology", "cpu", "--explain=sharding"]), (opt, ["--list-passes"]), (kernel_ir, [mlir])):
    assert tool.main(words) == 1, words
"""


@pytest.fixture
def without(tmp_path):
    """Runs Python where torch-mlir is not installed, in processes that are started too."""
    absent = tmp_path / "absent"
    absent.mkdir()
    (absent / "torch_mlir.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch_mlir'\", name='torch_mlir')\n"
    )

    def python(code, *arguments):
        return subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(absent)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return python


def test_running_and_measuring_need_no_compiler(without, tmp_path):
    folder = test_bundle.write(
        tmp_path / "bundle",
        report={"functions": [{"function": "decode", "bucket": {}, "unpredicted": "made by hand"}]},
        page=f"{times.BEGIN}{times.END}",
    )
    dump = os.path.join(os.path.dirname(__file__), "dumps", "h200x2_smi.txt")
    out = tmp_path / "out.json"
    ended = without(RUNS, folder, ",".join(RUN_NEEDS_NOT), dump, out)
    assert ended.returncode == 0, ended.stderr
    assert "check passed" in ended.stdout and "hgx-h100-x8" in ended.stdout
    assert "<td>direct call</td>" in (tmp_path / "out.json.html").read_text()
    measured = json.loads(out.read_text())["measured"]
    assert measured["gemms"] and measured["copies"]


def test_compiling_says_in_one_line_what_is_missing(without, tmp_path):
    model, mlir = tmp_path / "m.pt2", tmp_path / "m.mlir"
    model.write_bytes(b"")
    mlir.write_text("module {}")
    ended = without(COMPILES, model, mlir)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stderr.splitlines()
    assert len(lines) == 6, ended.stderr
    assert all("needs torch_mlir for this, and it is not installed here" in line for line in lines)
