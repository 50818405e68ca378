"""report.html: its figures against those of the plan that it is made of, and what the page may hold."""

import json
import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from topo_opt import driver, topology
from topo_opt.report_page import links, memory
from topo_opt.report_page.memory import size_text
from topo_opt.sharding.plan_result import collectives
from topo_opt.topology.graph import link_graph


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4096, 16384, bias=False)
        self.down = nn.Linear(16384, 4096, bias=False)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A planned bundle for two devices, and what its compile gave."""
    folder = tmp_path_factory.mktemp("page") / "mlp.bundle"
    with torch.device("meta"):
        module = Mlp().eval().bfloat16()
        example = (torch.empty(8, 4096, dtype=torch.bfloat16),)
    program = torch.export.export(module, example)
    options = driver.Options(topology="h200-x2", mesh="auto", pack_weights=False, tune="off")
    return folder, driver.compile({"main": program}, options, folder)


class Reader(HTMLParser):
    """Texts of cells, tags that are open, and attributes that would fetch something."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.fetched = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.fetched += [(k, v) for k, v in attrs if k in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data.strip())


def test_the_page_is_whole_and_fetches_nothing(bundle):
    folder, _ = bundle
    reader = Reader()
    text = (folder / "report.html").read_text()
    reader.feed(text)
    assert not reader.open and not reader.fetched and "<script" not in text
    assert "report.html" in json.loads((folder / "manifest.json").read_text())["files"]


def test_it_shows_the_plan(bundle):
    folder, done = bundle
    (plan,) = done.plans
    text = (folder / "report.html").read_text()
    assert f"{plan.seconds * 1e3:.3f} ms a call" in text
    assert text.count("<svg") == 1
    for one in collectives(plan):
        assert f"<td>{one.step.kind}</td>" in text
    for name in ("up.weight", "down.weight"):
        assert f"<td>{name}</td>" in text


def test_links_carry_what_the_collectives_move(bundle):
    _, done = bundle
    (plan,) = done.plans
    machine = topology.load("h200-x2")
    moved = links.traffic(plan)
    assert moved
    # Every byte that leaves a device on NVLink arrives at the other one.
    out = {d: sum(n for (a, _), n in moved.items() if a == d) for d in ("gpu0", "gpu1")}
    came = {d: sum(n for (_, b), n in moved.items() if b == d) for d in ("gpu0", "gpu1")}
    assert out["gpu0"] == came["gpu1"] and out["gpu1"] == came["gpu0"]
    graph = link_graph(machine)
    edge = max(moved, key=lambda e: moved[e])
    share = links.busy(machine, moved, plan.seconds)[edge]
    assert share == pytest.approx(moved[edge] / graph.edges[edge]["bytes_per_s"] / plan.seconds)
    assert 0 < share <= 1


def test_the_bar_holds_what_the_program_keeps(bundle):
    folder, _ = bundle
    plan = json.loads((folder / "plan.json").read_text())
    variant = plan["functions"]["main"]["variants"][0]
    from topo_opt.runtime.plan_check import from_json

    found = {p.kind: p for p in memory.parts(from_json(plan), 10**9)}
    weights = sum(2 * b["shape"][0] * b["shape"][1] for b in variant["buffers"] if b["kind"] == "param")
    assert found["param"].nbytes == weights and found["param"].share == weights / 1e9
    assert found["arena"].nbytes == variant["arena_bytes"]
    text = (folder / "report.html").read_text()
    assert re.search(rf"weights {re.escape(size_text(weights))}\b", text)


@pytest.mark.parametrize(
    "nbytes, text", [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_999, "1 MB"), (1.234e9, "1.23 GB"), (141e9, "141 GB")]
)  # fmt: skip
def test_sizes(nbytes, text):
    assert size_text(nbytes) == text


def test_text_of_a_model_cannot_become_markup():
    from topo_opt.errors import Remark
    from topo_opt.report import Report
    from topo_opt.report_page.page import page
    from topo_opt.runtime.plan import SCHEMA, Plan

    remark = Remark("left-to-aten", "aten.<script>alert(1)</script>", "a & b", None)
    report = Report("h200-x1", 2, (), (), (remark,), {"mode": "off", "notes": []}, {}, ())
    text = page(report, Plan(SCHEMA, {}, {}), topology.load("h200-x1"))
    assert "<script" not in text and "&lt;script&gt;" in text and "a &amp; b" in text


def test_processes_on_a_cpu_are_no_devices_of_the_topology(tmp_path):
    program = torch.export.export(nn.Linear(16, 16).eval(), (torch.randn(4, 16),))
    options = driver.Options(topology="cpu", mesh="x=2", planner={"pin": "weight=_,x"}, tune="off")
    driver.compile({"main": program}, options, tmp_path / "out")
    text = (tmp_path / "out" / "report.html").read_text()
    assert "Memory of each of 2 devices" in text and re.search(
        "<td>(all_reduce|reduce_scatter|all_gather)</td>", text
    )


def test_the_prediction_is_that_of_the_plan_in_parts(bundle):
    folder, done = bundle
    (plan,) = done.plans
    (row,) = json.loads((folder / "report.json").read_text())["functions"]
    found = row["predicted"]
    parts = ("kernel_seconds", "launch_seconds", "collective_seconds", "call_seconds")
    assert found["seconds"] == pytest.approx(plan.seconds, rel=1e-9)
    assert found["seconds"] == pytest.approx(sum(found[p] for p in parts), rel=1e-9)
    assert found["collectives"] == len(list(collectives(plan))) > 0
    assert found["collective_seconds"] == pytest.approx(sum(c.seconds for c in collectives(plan)), rel=1e-9)
    assert (found["devices"], found["model"]) == (2, "NVIDIA H200 SXM")


def test_functions_that_are_planned_together_have_times_of_their_own(tmp_path):
    module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval()
    few, many = (torch.export.export(module, (torch.randn(n, 64),)) for n in (8, 512))
    pins = {"pin": "0.weight=x,_;2.weight=_,x"}
    options = driver.Options(topology="h200-x2", mesh="x=2", planner=pins, pack_weights=False, tune="off")
    done = driver.compile({"few": few, "many": many}, options, tmp_path / "out")
    (plan,) = done.plans
    one, other = (row.predicted for row in done.report.functions)
    assert one.seconds < other.seconds and one.collectives == other.collectives > 0
    # Both start a call, of which the plan has one.
    assert one.seconds + other.seconds - other.call_seconds == pytest.approx(plan.seconds, rel=1e-9)


def test_a_program_of_one_device_has_a_prediction(tmp_path):
    program = torch.export.export(nn.Linear(64, 64).eval(), (torch.randn(4, 64),))
    options = driver.Options(topology="h200-x2", tune="off")
    (row,) = driver.compile({"main": program}, options, tmp_path / "out").report.functions
    assert (row.predicted.devices, row.predicted.collectives, row.predicted.launches) == (1, 0, 1)
    text = (tmp_path / "out" / "report.html").read_text()
    assert "Parts of the prediction" in text and "no prediction" not in text.lower()


def test_why_there_is_no_prediction(tmp_path):
    program = torch.export.export(nn.Linear(16, 16).eval(), (torch.randn(4, 16),))
    options = driver.Options(topology="cpu", mesh="x=2", shard=("weight=_,x",), tune="off")
    (row,) = driver.compile({"main": program}, options, tmp_path / "out").report.functions
    assert (
        row.predicted is None
        and row.unpredicted == "how tensors are split was given, and nothing was planned"
    )
    assert f"<td>{row.unpredicted}</td>" in (tmp_path / "out" / "report.html").read_text()
