"""`topo-run --bench --page`: the bundle's report with measured beside predicted times, and what is refused."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_bundle
import torch
from test_ranks import free_port
from test_report_page import Reader
from torch import nn

from topo_opt import driver
from topo_opt.errors import InputError, TopoError
from topo_opt.report_page import times
from topo_opt.runtime.plan import SCHEMA, Function, Plan
from topo_opt.tools import run, run_bench, run_page


class Two(nn.Module):
    """Two products."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def compiled(folder: Path, **options) -> Path:
    rows = torch.export.Dim("batch", min=1, max=64)
    shapes = ({0: rows},) if "buckets" in options else None
    program = torch.export.export(Two().eval(), (torch.randn(4, 16),), dynamic_shapes=shapes)
    driver.compile({"main": program}, driver.Options(topology="cpu", tune="off", **options), folder)
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A bundle of one device with two buckets."""
    return compiled(tmp_path_factory.mktemp("page") / "one.bundle", buckets={"batch": [1, 8]})


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(run_bench, "BENCH_S", 0.02)


def tables(text: str) -> dict[str, list[list[str]]]:
    """Caption -> rows of cells, that of headings first."""
    found = {}
    for table in re.findall(r"<table>(.*?)</table>", text, re.DOTALL):
        caption = re.search(r"<caption>(.*?)</caption>", table)
        rows = re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
        found[caption[1] if caption else ""] = [
            re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows
        ]
    return found


def predictions(folder: Path) -> list[float]:
    rows = json.loads((folder / "report.json").read_text())["functions"]
    return [row["predicted"]["seconds"] * 1e3 for row in rows]


def test_a_page_has_both_times_of_every_variant(one, tmp_path, capsys):
    before = {p: p.read_bytes() for p in one.rglob("*") if p.is_file()}
    page = tmp_path / "times.html"
    assert run.main([str(one), "--device", "cpu", "--bench", "--compare", "eager", "--page", str(page)]) == 0
    assert f"wrote {page}" in capsys.readouterr().out
    assert before == {p: p.read_bytes() for p in one.rglob("*") if p.is_file()}
    text = page.read_text()
    reader = Reader()
    reader.feed(text)
    assert not reader.open and not reader.fetched and "<script" not in text
    assert not re.search(r"<th(?! scope=)[ >]", text), "every heading says of what"
    found = tables(text)
    head, *rows = found["Predicted beside measured, milliseconds"]
    assert head[2:] == ["predicted", "what was timed", "measured", "10% to 90%", "predicted / measured"]
    assert [row[:2] for row in rows] == [["main", "batch = 1"], ["main", "batch = 8"]]
    for row, predicted in zip(rows, predictions(one), strict=True):
        assert row[3] == "direct call" and float(row[2]) == pytest.approx(predicted, rel=1e-3)
        low, high = map(float, row[5].split(" to "))
        assert 0 < low <= float(row[4]) <= high
        assert float(row[6]) == pytest.approx(predicted / float(row[4]), rel=1e-2)
    assert len(found["Others on the same inputs, milliseconds"]) == 3
    assert f"torch {torch.__version__}" in text and "Triton&#39;s interpreter" in text
    # What is not about time is the bundle's own report.
    mine = (one / "report.html").read_text()
    for around in (text.partition(times.BEGIN)[0], text.partition(times.END)[2]):
        assert around and around in mine


def test_what_was_not_asked_for_is_said(one, tmp_path):
    page = tmp_path / "times.html"
    arguments = ["--device", "cpu", "--bucket", "batch=8", "--bench", "--page", str(page)]
    assert run.main([str(one), *arguments]) == 0
    _, first, second = tables(page.read_text())["Predicted beside measured, milliseconds"]
    assert first[3:] == ["not measured: it was not asked for"] and second[3] == "direct call"


def test_the_page_depends_on_what_was_measured_alone(one):
    page, report = ((one / name).read_text() for name in ("report.html", "report.json"))
    timing = times.Timing("graph replay", 2.0, 1.5, 2.5)
    measured = {times.key("main", {"batch": 1}): [timing]}
    found = times.Measurement("a GPU", {"torch": "9"}, "2031-01-01", (), False, measured, {}, {})
    made = [times.with_measured(page, json.loads(report), found) for _ in range(2)]
    assert made[0] == made[1] and "Measured 2031-01-01 on a GPU, with torch 9." in made[0]
    assert "in Triton&#39;s interpreter" not in times.section(json.loads(report), found)
    # A page that has times can have others in their place.
    assert times.with_measured(made[0], json.loads(report), found) == made[0]


def test_a_missing_prediction_is_said(one):
    report = json.loads((one / "report.json").read_text())
    report["functions"][0] |= {"predicted": None, "unpredicted": "<why>"}
    del report["functions"][1]["predicted"], report["functions"][1]["unpredicted"]
    report["functions"].append({"function": "other", "bucket": {}, "whole": True})
    measured = {times.key("main", {"batch": 1}): [times.Timing("direct call", 2.0, 1.5, 2.5)]}
    found = times.Measurement("a GPU", {}, "2031-01-01", (), False, measured, {}, {"main": "<left>"})
    shown = tables(times.section(report, found))
    _, first, second, other = shown["Predicted beside measured, milliseconds"]
    assert other == ["other", "one size", "no prediction", "not measured: left to ATen as a whole"]
    assert first[2] == first[6] == second[2] == "no prediction" and second[3] == "not measured: &lt;left&gt;"
    assert [row[2] for row in shown["No prediction"][1:]] == ["&lt;why&gt;", times.OLD, times.OLD]


def test_what_the_prediction_does_not_know_is_said(one):
    report = json.loads((one / "report.json").read_text())
    assert "left to ATen" not in times.section(report) and "as -O2 forms them" not in times.section(report)
    report["functions"][0]["aten"] = 3
    said = times.section(report | {"level": 0})
    assert (
        "calls that are left to ATen it knows the bytes" in said
        and "-O2 forms them; these are of -O0" in said
    )


def test_the_slowest_of_two_ranks_counts(tmp_path):
    folder = compiled(tmp_path / "two.bundle", mesh="x=2", planner={"pin": "up.weight=x,_;down.weight=_,x"})
    page = tmp_path / "times.html"
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={free_port()}",
    ]
    ended = subprocess.run(
        [*torchrun, "-m", "topo_opt.tools.run", str(folder), "--device", "cpu", "--bench", "--page", str(page)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("wrote ") == 1, "the first rank alone speaks"
    text = page.read_text()
    _, row = tables(text)["Predicted beside measured, milliseconds"]
    (predicted,) = predictions(folder)
    assert float(row[2]) == pytest.approx(predicted, rel=1e-3) and float(row[4]) > 0
    assert "those of the slowest rank" in text and re.search("Measured .* on 2 ranks on", text)
    (part,) = tables(text)["Parts of the prediction, milliseconds of the device with the most to do"][1:]
    assert int(part[5]) > 0 and float(part[6]) > 0, "collectives"


class SlowRank:
    """The other rank takes three times as long as this one."""

    count, control = 2, None

    def agree(self, error, doing, report=""):
        mine = json.loads(report)
        slower = [3 * t for t in mine] if isinstance(mine, list) else 3 * mine
        return {0: report, 1: json.dumps(slower)}


def test_times_are_those_of_the_rank_that_takes_longest(monkeypatch):
    ticks = iter(range(1000))
    monkeypatch.setattr(run_bench.dist, "barrier", lambda group: None)
    monkeypatch.setattr(run_bench.time, "perf_counter", lambda: next(ticks))
    calls = []
    found = run_bench.measure_together(lambda: calls.append(1), SlowRank(), torch.device("cpu"))
    assert found == (3000.0, 3000.0, 3000.0), "a call takes a second here, three there"
    assert len(calls) == 6, "three to see how long one takes, and at least three more"


def test_a_rank_that_dies_while_calls_are_timed_is_named(monkeypatch):
    def broken(group):
        raise RuntimeError("Connection closed by peer")

    class Alone(SlowRank):
        def agree(self, error, doing, report=""):
            raise TopoError("rank 1 was killed")

    monkeypatch.setattr(run_bench.dist, "barrier", broken)
    with pytest.raises(TopoError, match="rank 1 was killed"):
        run_bench.measure_together(lambda: None, Alone(), torch.device("cpu"))


def test_others_are_timed_on_one_device_only():
    with pytest.raises(InputError, match="'eager' runs on one device, the bundle is for 2 ranks"):
        run_bench.bench_variant(SimpleNamespace(ranks=SlowRank()), "main", None, compare=["eager"])


MISTAKES = [
    ("{folder}/absent/times.html", "can't be written: there is no folder"),
    ("{folder}", "is a folder, the result is one file"),
    ("{bundle}/times.html", "is in the bundle, which holds what its manifest lists and nothing else"),
    ("{bundle}/report.html", "is in the bundle"),
]


@pytest.mark.parametrize(("page", "message"), MISTAKES, ids=[m for _, m in MISTAKES])
def test_what_cannot_be_written_is_refused_before_anything_is_measured(
    one, tmp_path, capsys, monkeypatch, page, message
):
    monkeypatch.setattr(run_bench, "bench_variant", lambda *a, **k: pytest.fail("measured"))
    filled = page.format(folder=tmp_path, bundle=one)
    assert run.main([str(one), "--device", "cpu", "--bench", "--page", filled]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") == 1


def test_a_bundle_without_a_report_is_refused(tmp_path, capsys):
    folder = test_bundle.write(tmp_path / "b")
    assert run.main([str(folder), "--device", "cpu", "--bench", "--page", str(tmp_path / "p.html")]) == 1
    said = capsys.readouterr().err
    assert "has no report.html to show times in (compile the model again)" in said and said.count("\n") == 1


def test_a_report_of_an_older_version_is_refused(one):
    with pytest.raises(InputError, match="no place for measured times"):
        times.with_measured("<html></html>", {}, None)


def test_nothing_measured_is_an_error(tmp_path):
    whole = Function((), None, None, "no lowering")
    program = SimpleNamespace(plan=Plan(SCHEMA, {}, {"main": whole}), ranks=None)
    with pytest.raises(
        TopoError, match=r"nothing was measured .*: main is left to ATen as a whole: no lowering"
    ):
        run_page.write_page(program, [], str(tmp_path / "times.html"))
    assert not list(tmp_path.iterdir())
