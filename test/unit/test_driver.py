"""The compile as a whole: variants, what is left to ATen, strictness, determinism, and what a failure leaves behind."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from topo_opt import driver
from topo_opt.errors import InputError, StrictError
from topo_opt.pipeline.numeric import NumericCheck


class Scores(torch.nn.Module):
    """Pointwise, a reduction, and an op that has no kernel."""

    def __init__(self, *, ordered: bool = False):
        super().__init__()
        self.ordered = ordered
        self.scale = torch.nn.Parameter(torch.ones(16))

    def forward(self, x):
        y = torch.softmax(torch.nn.functional.silu(x * self.scale), -1)
        return torch.sort(y, -1)[0] if self.ordered else y


def exported(module, *, dynamic=True):
    shapes = {"x": {0: torch.export.Dim("batch", max=64)}} if dynamic else None
    return torch.export.export(module.eval(), (torch.randn(4, 16),), dynamic_shapes=shapes, strict=False)


def options(**changes):
    return driver.Options("cpu", **{"level": 0, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    check = NumericCheck()
    choices = options(buckets={"batch": (1, 8)}, instruments=lambda: [check])
    result = driver.compile(
        {"scores": exported(Scores())}, choices, tmp_path_factory.mktemp("b") / "scores.bundle"
    )
    return result, check


def test_a_bundle_has_a_variant_for_every_bucket(finished):
    result, _ = finished
    plan = json.loads((result.path / "plan.json").read_text())
    variants = plan["functions"]["scores"]["variants"]
    assert [v["bucket"] for v in variants] == [{"batch": 1}, {"batch": 8}]
    assert all(step["step"] == "kernel" for v in variants for step in v["steps"])


def test_every_pass_after_import_was_checked_on_numbers(finished):
    _, check = finished
    assert check.compared >= 4


def test_the_report_names_kernels_and_what_is_fused_in_them(finished):
    result, _ = finished
    report = json.loads((result.path / "report.json").read_text())
    assert report == json.loads(json.dumps(result.report.as_json()))
    assert [(f["function"], f["bucket"], f["aten"]) for f in report["functions"]] == [
        ("scores", {"batch": 1}, 0),
        ("scores", {"batch": 8}, 0),
    ]
    assert sum(k["share"] for k in report["kernels"]) == pytest.approx(1, abs=1e-4)
    assert {op for k in report["kernels"] for op in k["ops"]} >= {"mul", "silu", "softmax"}
    assert all((result.path / "kernels" / f"{k['symbol']}.py").is_file() for k in report["kernels"])


def test_what_is_left_to_aten_is_named_and_strict_refuses_it(tmp_path):
    program = exported(Scores(ordered=True), dynamic=False)
    result = driver.compile({"main": program}, options(), tmp_path / "b")
    (row,) = [k for k in result.report.kernels if k.family == "aten"]
    assert "sort" in next(iter(row.ops))
    assert result.report.functions[0].aten == 1
    assert [(r.kind, Path(r.where.split(":")[0]).name) for r in result.report.left] == [
        ("left-to-aten", "test_driver.py")
    ]
    with pytest.raises(StrictError, match="sort") as caught:
        driver.compile({"main": program}, options(strict=True), tmp_path / "strict")
    assert caught.value.where and "test_driver.py" in caught.value.where
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b"]


class Products(torch.nn.Module):
    """A scatter that no atomic can do, between pointwise ops, twice with other sizes."""

    def forward(self, x, index):
        y = torch.relu(x).scatter_reduce(0, index, x, "prod") + 1
        return y.scatter_reduce(1, index[:, :2], y[:, :2], "prod").exp()


def test_an_op_without_code_is_left_alone_and_the_rest_stays_compiled(tmp_path):
    args = (torch.rand(4, 6), torch.randint(0, 4, (4, 6)))
    program = torch.export.export(Products(), args, strict=False)
    result = driver.compile({"main": program}, options(level=2), tmp_path / "b")
    plan = json.loads((result.path / "plan.json").read_text())
    steps = [step["step"] for step in plan["functions"]["main"]["variants"][0]["steps"]]
    assert steps.count("aten") == 2 and steps[0] == steps[-1] == "kernel", steps
    assert {r.subject for r in result.report.left} == {"aten.scatter_reduce.two"}
    assert all("no atomic" in r.reason for r in result.report.left)


def test_a_bucket_for_a_dim_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match="'seq', which is no dynamic dim"):
        driver.compile({"main": exported(Scores())}, options(buckets={"seq": (1,)}), tmp_path / "b")
    with pytest.raises(InputError, match="no model was given"):
        driver.compile({}, options(), tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_bundle_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("keep")
    with pytest.raises(InputError, match="is not a bundle"):
        driver.compile({"main": exported(Scores(), dynamic=False)}, options(), tmp_path / "mine")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def digest(folder):
    files = sorted(p for p in Path(folder).rglob("*") if p.is_file())
    return hashlib.sha256(
        b"".join(p.relative_to(folder).as_posix().encode() + p.read_bytes() for p in files)
    ).hexdigest()


@pytest.mark.parametrize("seed", ["1"])
def test_equal_inputs_give_byte_identical_bundles_whatever_the_hash_seed(finished, seed, tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; import test_driver as t\n"
        "t.driver.compile({'scores': t.exported(t.Scores())}, t.options(buckets={'batch': (1, 8)}), Path(sys.argv[2]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    subprocess.run(
        [sys.executable, "-c", code, Path(__file__).parent, tmp_path / "b"], check=True, env=environment
    )
    assert digest(tmp_path / "b") == digest(finished[0].path)
