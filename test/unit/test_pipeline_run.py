"""Running pipelines: Python and C++ passes in order, failures as diagnostics, and what the instruments see."""

import io
import re
from dataclasses import dataclass
from typing import Any

import pytest
from torch_mlir import ir

from topo_opt import dialects
from topo_opt.errors import CompilerCrash, PipelineError
from topo_opt.passes import PASSES
from topo_opt.passes.base import Pass, fail
from topo_opt.pipeline import remarks
from topo_opt.pipeline.diagnostics import DiagnosedError
from topo_opt.pipeline.instruments import PrintIr, Reproducer, Timing, Watcher
from topo_opt.pipeline.numeric import NumericCheck, NumericMismatch
from topo_opt.pipeline.run import build, run

TEXT = """
func.func @a() -> f32 {
  %0 = arith.constant 1.0 : f32
  %1 = arith.constant 1.0 : f32
  %2 = arith.addf %0, %1 : f32
  return %2 : f32
}
func.func @b(%x: f32) -> f32 {
  return %x : f32
}
"""


@dataclass(frozen=True)
class Tag(Pass):
    """Puts a unit attribute on the op it is anchored on."""

    name = "test-tag"
    key: str = "test.tag"

    def apply(self, module: Any) -> None:
        remarks.emit("tagged", module.operation.name, "was asked for")
        module.operation.attributes[self.key] = ir.UnitAttr.get()


@dataclass(frozen=True)
class Broken(Pass):
    """Fails in the way its option says."""

    name = "test-broken"
    how: str = "diagnosis"

    def apply(self, module: Any) -> None:
        first = module.operation.regions[0].blocks[0].operations[0]
        if self.how == "diagnosis":
            fail(first, "function 'a' is not liked", hint="rename it")
        if self.how == "exception":
            raise ValueError("a slip")
        if self.how == "invalid":
            del first.attributes["function_type"]


@pytest.fixture(autouse=True)
def test_passes(monkeypatch):
    for cls in (Tag, Broken):
        monkeypatch.setitem(PASSES, cls.name, f"{__name__}:{cls.__name__}")


@pytest.fixture
def module():
    return ir.Module.parse(TEXT, dialects.load(ir.Context()))


class Names(Watcher):
    def __init__(self):
        self.seen = []

    def after(self, step, module):
        self.seen.append(step.pipeline)


def test_python_and_cpp_passes_run_in_order(module):
    names = Names()
    run("cse,func.func(test-tag,canonicalize),test-tag{key=test.all}", module, instruments=[names])
    assert names.seen == [
        "builtin.module(cse)",
        "builtin.module(func.func(test-tag))",
        "builtin.module(func.func(canonicalize))",
        "builtin.module(test-tag{key=test.all})",
    ]
    assert "test.all" in module.operation.attributes
    assert all("test.tag" in f.attributes for f in module.body.operations)
    assert "arith.addf" not in str(module)


def test_any_anchors_on_every_op(module):
    run("any(test-tag)", module)
    assert str(module).count("test.tag") == 2


def test_failure_is_a_located_diagnostic_and_stops_the_pipeline(module):
    with pytest.raises(DiagnosedError) as caught:
        run("test-broken,test-tag", module)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.message == "function 'a' is not liked (rename it)"
    assert (diagnostic.line, diagnostic.severity) == (2, "error")
    assert "test.tag" not in module.operation.attributes


def test_ir_left_invalid_is_an_error_only_when_verified(module):
    with pytest.raises(DiagnosedError, match="function_type"):
        run("test-broken{how=invalid}", module)
    again = ir.Module.parse(TEXT, module.context)
    run("test-broken{how=invalid}", again, verify_each=False)


def test_an_exception_in_a_pass_is_a_crash_that_names_the_pass(module):
    with pytest.raises(CompilerCrash, match=r"'test-broken{how=exception}' broke: ValueError: a slip"):
        run("test-broken{how=exception}", module)


UNKNOWN = {
    "canonicalise": r"'canonicalise' is not a known pass .*did you mean 'canonicalize'",
    "topo-form-kernel": r"did you mean 'topo-form-kernels'",
    "xyzzy-plugh": r"'xyzzy-plugh' is not a known pass \(--list-passes",
    "cse{no-such=1}": r"pass 'cse' has no option 'no-such'",
    "convert-torch-to-linalg": r"runs on 'func.func', not on 'builtin.module' \(write func.func\(convert-torch-to-linalg\)",
}


@pytest.mark.parametrize("text", UNKNOWN)
def test_unknown_passes_and_options_are_explained(text, module):
    with pytest.raises(PipelineError) as caught:
        build(f"cse, {text}", module.context)
    first, *_ = caught.value.render().split("\n")
    assert re.search(UNKNOWN[text], first)
    assert first.startswith("pipeline:1:6: ")


def test_remarks_reach_every_open_collector_once(module):
    with remarks.collect() as outer, remarks.collect() as inner:
        run("func.func(test-tag,test-tag)", module)
    assert outer == inner
    assert [(r.kind, r.subject) for r in outer] == [("tagged", "func.func")]


def printed(pipeline, module, **options):
    stream = io.StringIO()
    wanted = options.pop("wanted", lambda name: True)
    run(pipeline, module, instruments=[PrintIr(wanted, stream=stream, **options)])
    return re.findall(r"IR Dump After (\S+)", stream.getvalue())


def test_printing_after_all_one_or_changes(module):
    text = "func.func(test-tag),cse,test-tag,cse"
    assert printed(text, ir.Module.parse(TEXT, module.context)) == ["test-tag", "cse", "test-tag", "cse"]
    assert printed(text, ir.Module.parse(TEXT, module.context), wanted=lambda n: n == "cse") == ["cse", "cse"]
    only = printed(text, ir.Module.parse(TEXT, module.context), only_changes=True)
    assert only == ["test-tag", "cse", "test-tag"]


def test_printing_as_a_tree_of_files(module, tmp_path):
    run("test-tag,cse", module, instruments=[PrintIr(lambda name: True, tree_dir=tmp_path)])
    folder = tmp_path / "builtin_module_no-symbol-name"
    assert sorted(p.name for p in folder.iterdir()) == ["1_test-tag.mlir", "2_cse.mlir"]
    assert ir.Module.parse((folder / "2_cse.mlir").read_text(), module.context)


@dataclass(frozen=True)
class Double(Pass):
    """Makes every constant twice as large: a pass with a fault."""

    name = "test-double"

    def apply(self, module: Any) -> None:
        for op in module.regions[0].blocks[0].operations:
            for inner in op.regions[0].blocks[0].operations:
                if inner.operation.name == "arith.constant":
                    value = ir.FloatAttr(inner.operation.attributes["value"])
                    inner.operation.attributes["value"] = ir.FloatAttr.get(value.type, 2 * value.value)


SCALED = """
func.func @scaled(%x: tensor<4xf32>, %i: tensor<4xi64>) -> tensor<4xf32> {
  %c = arith.constant 3.0 : f32
  %e = tensor.empty() : tensor<4xf32>
  %0 = linalg.generic {indexing_maps = [affine_map<(d0) -> (d0)>, affine_map<(d0) -> (d0)>, affine_map<(d0) -> (d0)>],
                       iterator_types = ["parallel"]}
      ins(%x, %i : tensor<4xf32>, tensor<4xi64>) outs(%e : tensor<4xf32>) {
  ^bb0(%a: f32, %b: i64, %o: f32):
    %f = arith.sitofp %b : i64 to f32
    %m = arith.mulf %a, %c : f32
    %s = arith.addf %m, %f : f32
    linalg.yield %s : f32
  } -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
"""


def test_numeric_check_compares_after_every_pass_and_names_the_one_that_is_wrong(module, monkeypatch):
    monkeypatch.setitem(PASSES, "test-double", f"{__name__}:Double")
    good = NumericCheck()
    run("cse,canonicalize", ir.Module.parse(SCALED, module.context), instruments=[good])
    assert good.compared == 2
    with pytest.raises(NumericMismatch, match=r"'test-double' changed result 0 of @scaled: .*not close"):
        run("cse,test-double,cse", ir.Module.parse(SCALED, module.context), instruments=[NumericCheck()])


def test_timing_names_every_pass(module):
    stream = io.StringIO()
    run("cse,test-tag", module, instruments=[Timing(stream)])
    lines = stream.getvalue().splitlines()
    assert [line.split()[-1] for line in lines[-3:]] == ["cse", "test-tag", "Total"]
    assert "Execution time report" in stream.getvalue()


def test_reproducer_holds_the_failing_pass_and_its_input(module, tmp_path):
    path = tmp_path / "crash.mlir"
    with pytest.raises(DiagnosedError):
        run("test-tag,test-broken,cse", module, instruments=[Reproducer(path)])
    text = path.read_text()
    assert 'pipeline: "builtin.module(test-broken)"' in text
    again = ir.Module.parse(text, module.context)
    assert "test.tag" in again.operation.attributes
    with pytest.raises(DiagnosedError, match="not liked"):
        run("test-broken", again)


def test_reproducer_is_removed_after_success(module, tmp_path):
    run("cse", module, instruments=[Reproducer(tmp_path / "crash.mlir")])
    assert list(tmp_path.iterdir()) == []
