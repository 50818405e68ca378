"""Load steps: what a plan may say of them, when they run, and that changed weights are followed."""

import json
from typing import Any

import pytest
import torch
from torch import nn

import topo_opt
from topo_opt.errors import UntrustedError
from topo_opt.runtime import plan_check
from topo_opt.runtime.load_time import LoadStep, LoadTime


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Any:
    """plan.json of a convolution: its weight is put with channels last when it is loaded."""
    out = tmp_path_factory.mktemp("load") / "bundle"
    module = nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU())
    topo_opt.compile(module.eval(), (torch.randn(1, 32, 5, 5),), topology="cpu", tune="off", out=out)
    return json.loads((out / "plan.json").read_text())


def changed(plan: Any) -> tuple[Any, Any]:
    """A copy of the plan to change, and its variant."""
    copy = json.loads(json.dumps(plan))
    return copy, copy["functions"]["main"]["variants"][0]


def test_the_weight_is_a_parameter_and_what_is_made_of_it(plan) -> None:
    _, variant = changed(plan)
    (step,) = [s for s in variant["load_steps"] if s["step"] == "kernel"]
    kinds = [variant["buffers"][b]["kind"] for b in step["buffers"]]
    assert kinds == ["param", "prepared"]
    assert variant["buffers"][step["buffers"][1]]["shape"] == [64, 3, 3, 32]
    plan_check.from_json(plan)


def test_a_prepared_buffer_needs_a_step_that_makes_it(plan) -> None:
    copy, variant = changed(plan)
    variant["load_steps"] = []
    with pytest.raises(UntrustedError, match="no load step makes the buffers"):
        plan_check.from_json(copy)


def test_a_load_step_may_not_read_an_input(plan) -> None:
    copy, variant = changed(plan)
    (step,) = [s for s in variant["load_steps"] if s["step"] == "kernel"]
    weight = step["buffers"][0]
    variant["buffers"][weight] |= {"kind": "input", "name": "w"}
    with pytest.raises(UntrustedError, match="uses what differs from call to call"):
        plan_check.from_json(copy)


def test_a_load_step_is_a_kernel_or_a_view(plan) -> None:
    copy, variant = changed(plan)
    aten = next(s for s in variant["steps"] if s["step"] == "aten")
    variant["load_steps"] = [aten]
    with pytest.raises(UntrustedError, match="is no kernel and no view"):
        plan_check.from_json(copy)


def test_a_step_may_not_write_a_prepared_buffer(plan) -> None:
    copy, variant = changed(plan)
    (load,) = [s for s in variant["load_steps"] if s["step"] == "kernel"]
    variant["steps"] = [load, *variant["steps"]]
    with pytest.raises(UntrustedError, match="writes prepared"):
        plan_check.from_json(copy)


def test_what_was_made_is_not_made_again_until_a_weight_changes() -> None:
    weight, runs = torch.ones(3), []
    load = LoadTime({"w": weight, "copied": torch.ones(3)}, frozenset(["w"]))
    steps = [
        LoadStep(("a",), ("w",), lambda: runs.append("a")),
        LoadStep(("b",), ("copied",), lambda: runs.append("b")),
    ]
    assert load.add(steps) and not load.add(steps)
    assert runs == ["a", "b"] and not load.is_stale()
    weight.add_(1)
    assert load.is_stale()
    load.run_again()
    assert runs == ["a", "b", "a", "b"] and not load.is_stale()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("results", [[0, 2, 2, 1]], "not an order of dims"),
        ("results", [[0, 1]], "has other results than its call puts in order"),
        ("args", [{"permuted": [{"operand": 0}, [1, 2]]}], "not a valid permuted"),
    ],
)
def test_an_order_of_dims_is_checked(key: str, value: Any, message: str) -> None:
    from topo_opt.errors import InputError
    from topo_opt.runtime.aten_program import call_aten

    template = {"op": "aten.relu.default", "args": [{"operand": 0}], "kwargs": {}} | {key: value}
    with pytest.raises(InputError, match=message):
        call_aten(template, [torch.zeros(2, 3, 4, 5)])


def test_dims_of_operands_and_results_are_put_in_order() -> None:
    from topo_opt.runtime.aten_program import call_aten

    x = torch.randn(2, 5, 3)
    args = [{"permuted": [{"operand": 0}, [0, 2, 1]]}, 1]
    template = {"op": "aten.cumsum.default", "args": args, "kwargs": {}, "results": [[0, 2, 1]]}
    (got,) = call_aten(template, [x])
    torch.testing.assert_close(got, x.permute(0, 2, 1).cumsum(1).permute(0, 2, 1))
