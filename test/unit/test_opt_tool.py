"""`topo-opt` on models: what it writes, and that every mistake is one line, ends with its exit code and leaves nothing behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch

from topo_opt.errors import InputError
from topo_opt.model import _asked
from topo_opt.tools import opt, run
from topo_opt.tools.model_arguments import buckets_of, functions_of


class Model(torch.nn.Module):
    def __init__(self, ordered):
        super().__init__()
        self.ordered = ordered
        self.linear = torch.nn.Linear(16, 8)

    def forward(self, x):
        y = torch.nn.functional.silu(self.linear(x))
        return torch.sort(y, -1)[0] if self.ordered else y


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, ordered in (("plain", False), ("ordered", True)):
        torch.manual_seed(0)
        shapes = {"x": {0: torch.export.Dim("batch", max=64)}}
        program = torch.export.export(
            Model(ordered).eval(), (torch.randn(4, 16),), dynamic_shapes=shapes, strict=False
        )
        torch.export.save(program, folder / f"{name}.pt2")
    return folder


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def topo_opt(capfd, *arguments):
    """Exit code, standard output and standard error of one run."""
    try:
        code = opt.main([str(a) for a in arguments])
    except SystemExit as stop:
        code = stop.code
    out, err = capfd.readouterr()
    return code, out, err


def test_a_bundle_and_the_table(capfd, models, tmp_path):
    code, out, err = topo_opt(capfd, models / "plain.pt2", "--topology", "cpu", "--bucket", "batch=1,8")
    assert (code, err) == (0, "")
    assert "-O2 for cpu" in out and "linear silu" in out and "wrote plain.bundle" in out
    assert out.count("nothing left to ATen") == 2
    plan = json.loads((tmp_path / "plain.bundle" / "plan.json").read_text())
    assert [v["bucket"] for v in plan["functions"]["main"]["variants"]] == [{"batch": 1}, {"batch": 8}]
    assert [
        f["bucket"] for f in json.loads((tmp_path / "plain.bundle" / "report.json").read_text())["functions"]
    ] == [
        {"batch": 1},
        {"batch": 8},
    ]
    # The name works on the way back too: the file itself has lost it.
    assert (
        run.main([str(tmp_path / "plain.bundle"), "--bucket", "batch=8", "--device", "cpu", "--check"]) == 0
    )


def two_dims(**names):
    class Sum(torch.nn.Module):
        def forward(self, x, y):
            return x.sum(), y + 1

    shapes = {
        key: {0: torch.export.Dim(name) if name else torch.export.Dim.DYNAMIC} for key, name in names.items()
    }
    return torch.export.export(Sum(), (torch.ones(4), torch.ones(5)), dynamic_shapes=shapes, strict=False)


def test_names_of_dims():
    both = {"main": two_dims(x="rows", y="columns")}
    assert _asked(both, {"columns": (2,), "rows": (3, 4)}).combinations["main"] == [
        {"columns": 2, "rows": 3},
        {"columns": 2, "rows": 4},
    ]
    one = {"main": two_dims(x="rows", y="")}
    assert _asked(one, {"n": (2,), "rows": (3,)}).combinations["main"] == [{"n": 2, "rows": 3}]
    with pytest.raises(InputError, match="'n', which is no dynamic dim") as caught:
        _asked(both, {"n": (2,)})
    assert caught.value.hint == "dynamic dims: rows, columns"
    with pytest.raises(InputError, match="'n', which is no dynamic dim") as caught:
        _asked({"main": two_dims(x="", y="")}, {"n": (2,)})
    assert caught.value.hint.startswith("dynamic dims: x[0], y[0]; a .pt2 does not keep their names")
    with pytest.raises(InputError, match=r"'rows' and 'x.0.' are the same dim of 'main'"):
        _asked(both, {"rows": (2,), "x[0]": (2,)})


def test_two_functions_share_a_bundle(capfd, models, tmp_path):
    inputs = [f"first={models / 'plain.pt2'}", f"second={models / 'ordered.pt2'}"]
    code, out, _ = topo_opt(capfd, *inputs, "--topology", "cpu", "-q", "-o", "two")
    assert (code, out) == (0, "")
    assert list(json.loads((tmp_path / "two" / "plan.json").read_text())["functions"]) == ["first", "second"]


TEXTS = {
    ("--emit=torch",): r'torch.operator "torch.topo.contract"',
    ("--emit=structured",): r"linalg.contract",
    ("--to=ingest",): r"linalg.contract",
    ("--to=schedule",): r'topo.kernel = \{family = "gemm"',
    ("--emit=kernel",): r"tile = \{",
    ("--emit=triton",): r"# ==== kernels/k_gemm_\w+.py\n(.|\n)*@triton.jit",
}


@pytest.mark.parametrize("arguments", TEXTS, ids=" ".join)
def test_text_of_every_level(capfd, models, arguments):
    code, out, err = topo_opt(capfd, models / "plain.pt2", "--topology", "cpu", *arguments)
    assert (code, err) == (0, "")
    assert re.search(TEXTS[arguments], out)


def test_strict_names_the_op_and_the_source_line(capfd, models, tmp_path):
    code, _, err = topo_opt(capfd, models / "ordered.pt2", "--topology", "cpu", "--strict")
    assert code == 1
    assert re.fullmatch(r"\S*test_opt_tool.py:\d+: error: aten.sort.default: .*\(--strict was given\)\n", err)
    assert list(tmp_path.iterdir()) == []


def test_numeric_checks_and_timing_work_on_models(capfd, models):
    code, _, err = topo_opt(
        capfd,
        models / "plain.pt2",
        "--topology",
        "cpu",
        "--emit=kernel",
        "--verify-each=numeric",
        "--mlir-timing",
    )
    assert code == 0
    assert "topo-form-kernels" in err and "topo-choose-tiles" in err


@pytest.mark.parametrize("level", [0, 2])
def test_the_dumped_pipeline_runs_on_the_emitted_ir(capfd, models, level, tmp_path):
    code, direct, err = topo_opt(
        capfd,
        models / "plain.pt2",
        "--topology",
        "cpu",
        f"-O{level}",
        "--emit=kernel",
        "--dump-pass-pipeline",
    )
    assert code == 0
    assert topo_opt(capfd, models / "plain.pt2", "--emit=structured", "-o", "s.mlir")[0] == 0
    after_ingest = err.strip().replace("topo-raise-named-ops,topo-lower-torch,topo-verify-structured,", "")
    code, again, _ = topo_opt(capfd, "s.mlir", f"--pass-pipeline={after_ingest}")
    assert code == 0 and again == direct


def mistakes(models, tmp_path):
    plain, good = models / "plain.pt2", ["--topology", "cpu"]
    (tmp_path / "empty.pt2").write_bytes(b"")
    (tmp_path / "text.pt2").write_text("print('hello')")
    (tmp_path / "cut.pt2").write_bytes(plain.read_bytes()[:2000])
    (tmp_path / "folder.pt2").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    (tmp_path / "t.json").write_text("{}")
    (tmp_path / "weights.pt").write_bytes(b"PK")
    (tmp_path / "model.zip").write_bytes(plain.read_bytes())
    (tmp_path / "t.mlir").write_text("module {}")
    return {
        "no such file": (["absent.pt2", *good], "absent.pt2"),
        "empty file": (["empty.pt2", *good], "empty.pt2"),
        "not an archive": (["text.pt2", *good], "text.pt2"),
        "truncated": (["cut.pt2", *good], "cut.pt2"),
        "a folder": (["folder.pt2", *good], "folder.pt2"),
        "no such topology": ([plain, "--topology", "h999"], "there is no topology 'h999'"),
        "topology with faults": ([plain, "--topology", "./t.json"], "/name: is missing"),
        "no such dim": ([plain, *good, "--bucket", "a=1", "--bucket", "b=1"], "'a', which is no dynamic dim"),
        "size out of range": ([plain, *good, "--bucket", "batch=65"], "65, but it was exported for"),
        "malformed bucket": ([plain, *good, "--bucket", "batch=x"], "'batch=x' is not a bucket"),
        "output is no bundle": ([plain, *good, "-o", "taken"], "is not a bundle"),
        "unwritable output": ([plain, *good, "-o", "/proc/none/b"], "can't be written"),
        "two models of one name": ([f"f={plain}", f"f={plain}"], "two models are called 'f'"),
        "passes on a model": ([plain, "-p", "cse"], "-p is for MLIR input"),
        "text into a folder": ([plain, *good, "--emit=torch", "-o", "taken"], "taken is a folder"),
        "unknown pass": (
            [plain, *good, "--mlir-print-ir-after=topo-form-kernel"],
            "did you mean topo-form-kernels",
        ),
        "a checkpoint": (
            ["weights.pt"],
            "weights.pt is a PyTorch checkpoint; topo-opt takes exported programs",
        ),
        "another zip": (["model.zip"], "is a zip archive that is not called *.pt2"),
        "a folder of files": (["taken"], "taken is a folder, expected a .pt2 or MLIR file"),
        "strict passes": (["t.mlir", "--strict"], "--strict is for models (.pt2), the input is MLIR"),
        "a level for passes": (["t.mlir", "-O1"], "-O is for models"),
    }


NAMES = ["no such file", "empty file", "not an archive", "truncated", "a folder", "no such topology", "topology with faults",
         "no such dim", "size out of range", "malformed bucket", "output is no bundle", "unwritable output",
         "two models of one name", "passes on a model", "text into a folder", "unknown pass", "a checkpoint", "another zip",
         "a folder of files", "strict passes", "a level for passes"]  # fmt: skip
USAGE = {
    "malformed bucket",
    "two models of one name",
    "passes on a model",
    "unknown pass",
    "strict passes",
    "a level for passes",
}
"""Mistakes of the command line itself."""


@pytest.mark.parametrize("mistake", NAMES)
def test_a_mistake_is_one_line(capfd, models, tmp_path, mistake):
    cases = mistakes(models, tmp_path)
    assert list(cases) == NAMES
    arguments, expected = cases[mistake]
    before = sorted(p.name for p in tmp_path.iterdir())
    code, out, err = topo_opt(capfd, *arguments)
    assert (code, out) == (2 if mistake in USAGE else 1, "")
    assert expected in err and "error: " in err
    assert err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "abacus"], "there is no topology 'abacus'"),
        (["-o", "taken"], "is not a bundle"),
        (["-o", "file"], "is not a bundle"),
        (["-o", "/proc/none/b"], "can't be written"),
    ],
    ids=str,
)
def test_a_hopeless_compile_does_not_start(models, tmp_path, arguments, message):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("")
    (tmp_path / "file").write_text("")
    command = [str(models / "plain.pt2"), *arguments]
    code = f"import sys; from topo_opt.tools import opt; code = opt.main({command!r}); sys.exit(code + 10 * ('torch' in sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and message in ended.stderr
    assert (tmp_path / "taken" / "mine").exists() and (tmp_path / "file").exists()


@pytest.mark.parametrize("name", ["plain.pt2", "t.mlir"])
def test_standard_output_that_takes_nothing_is_one_line(models, tmp_path, name):
    (tmp_path / "t.mlir").write_text("module {}")
    path = models / name if name.endswith(".pt2") else name
    options = ["--topology", "cpu", "--emit=structured"] if name.endswith(".pt2") else []
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "topo_opt.tools.opt", path, *options, "-q"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (1, "error: standard output: No space left on device\n")


def test_a_full_disk_leaves_nothing(models, tmp_path):
    # A file size limit fails writes just as a full disk does, from the outside.
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200)); import sys; from topo_opt.tools import opt; sys.exit(opt.main({[str(models / 'plain.pt2'), '--topology', 'cpu', '-q']!r}))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "error: " in ended.stderr and "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_in_mid_compile_is_one_line_and_leaves_nothing(models, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "topo_opt.tools.opt", models / "plain.pt2", "--topology", "cpu"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    time.sleep(2.0)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)  # which are the same to a shell
    assert err == "error: interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_names_of_functions():
    assert list(functions_of(["a/model.pt2"])) == ["main"]
    assert list(functions_of(["a/pre-fill.pt2", "step=b.pt2"])) == ["pre_fill", "step"]
    assert buckets_of(["batch=1,8,8", "seq=128"]) == {"batch": (1, 8), "seq": (128,)}
