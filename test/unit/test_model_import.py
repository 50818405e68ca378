"""Importing in a child process: what kills the lowering is found, left to ATen and named."""

import os
import signal

import pytest
import torch

from topo_opt.errors import CompilerCrash, InputError
from topo_opt.frontend import lower_program
from topo_opt.model import import_model


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(torch.sin(x) + torch.sin(x + 1)).exp()


@pytest.fixture
def program():
    return torch.export.export(Model(), (torch.randn(4),), strict=False)


@pytest.fixture
def dies(monkeypatch, tmp_path):
    """Makes the lowering die of a graph of which `predicate(ops)` holds."""
    monkeypatch.setenv("TOPO_OPT_CRASH_DIR", str(tmp_path))

    def install(predicate):
        original = lower_program.import_graph

        def import_graph(context, graph, *rest):
            if predicate([str(n.target) for n in graph.nodes if n.op == "call_function"]):
                os.kill(os.getpid(), signal.SIGSEGV)
            return original(context, graph, *rest)

        monkeypatch.setattr(lower_program, "import_graph", import_graph)

    return install


def test_a_node_that_kills_the_lowering_is_left_to_aten_with_the_reason(program, dies, tmp_path):
    dies(lambda ops: "aten.sin.default" in ops)
    model = import_model({"main": program})
    (variant,) = model.variants
    assert variant.symbol == "main"
    assert {r.subject for r in model.remarks} == {"aten.sin.default"}
    assert all("SIGSEGV" in r.reason and r.where and "test_model_import.py" in r.where for r in model.remarks)
    crashes = [p for p in tmp_path.iterdir() if (p / "main.pt2").is_file()]
    assert crashes and "SIGSEGV" in (crashes[0] / "report.txt").read_text()


def test_a_crash_that_no_node_has_alone_leaves_every_node_to_aten(program, dies):
    dies(lambda ops: {"aten.sin.default", "aten.exp.default"} <= set(ops))
    model = import_model({"main": program})
    assert {r.subject for r in model.remarks} >= {"aten.sin.default", "aten.exp.default", "aten.tanh.default"}
    assert all("lowering the function crashes" in r.reason for r in model.remarks)


def test_a_crash_that_stays_is_one_error(program, dies):
    dies(lambda ops: True)
    with pytest.raises(CompilerCrash, match="the import stage died with SIGSEGV"):
        import_model({"main": program})


def test_buckets_combine_and_name_their_dims():
    class Two(torch.nn.Module):
        def forward(self, x):
            return x * 2

    dims = {"x": {0: torch.export.Dim("rows", max=9), 1: torch.export.Dim("cols", max=9)}}
    program = torch.export.export(Two(), (torch.randn(2, 3),), dynamic_shapes=dims, strict=False)
    model = import_model({"main": program}, buckets={"rows": [1, 2], "x[1]": [5, 7]})
    found = [(v.symbol, v.bucket) for v in model.variants]
    assert found == [(f"main__rows_{r}__cols_{c}", {"rows": r, "cols": c}) for r in (1, 2) for c in (5, 7)]
    with pytest.raises(InputError, match="'depth', which is no dynamic dim") as caught:
        import_model({"main": program}, buckets={"depth": [1]})
    assert caught.value.hint == "dynamic dims: rows, cols"
