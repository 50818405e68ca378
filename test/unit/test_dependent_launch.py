"""codegen.triton.dependent_launch: what may stand before the wait, on lines of source and in whole kernels."""

import ast
from pathlib import Path

import pytest
import torch
from kernel_check import check_kernels, kernel_functions, to_kernel_ir
from torch_mlir import ir

from topo_opt import dialects
from topo_opt.codegen.triton import lower_kernel
from topo_opt.codegen.triton.dependent_launch import TRIGGER, WAIT, arrange
from topo_opt.runtime import kernel_scan

INPUTS = Path(__file__).parent.parent / "Inputs" / "kernels"
X = "x = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)"


def early(*lines, immutable=("w", "keys")):
    """The statements before the wait."""
    out = arrange([f"    {line}" for line in lines], immutable, ["XBLOCK"])
    assert out[0].strip() == TRIGGER
    at = next(i for i, line in enumerate(out) if line.strip() == WAIT)
    assert sorted([*out[1:at], *out[at + 1 :]]) == sorted(f"    {line}" for line in lines)
    ast.parse("\n".join(["def f():", *out]))
    return [line.strip() for line in out[1:at]]


def test_a_load_of_a_parameter_takes_what_its_address_needs_along():
    lines = (
        X,
        "a = tl.load(in0 + x)",
        "m = x < 100",
        "b = tl.load(w + x, mask=m, other=0)",
        "tl.store(out + x, a * b)",
    )
    assert early(*lines) == [X, "m = x < 100", "b = tl.load(w + x, mask=m, other=0)"]


def test_descriptors_of_parameters_are_loaded_early():
    lines = (
        "n0 = tl.program_id(1) * XBLOCK",
        "k = keys.load([0, n0]).reshape((XBLOCK, 64))",
        "q = queries.load([0, n0])",
    )
    assert early(*lines) == list(lines[:2])


LATE = {
    "nothing to load": [X, "y = x + 1"],
    "memory that is written": [X, "a = tl.load(in0 + x)"],
    "an address from memory that is written": [X, "i = tl.load(in0 + x)", "a = tl.load(w + i)"],
    "a mask from memory that is written": [X, "m = tl.load(in0 + x) > 0", "a = tl.load(w + x, mask=m)"],
    "a name that is assigned again": [X, "i = x", "a = tl.load(w + i)", "i = x + 1"],
    "a name that a loop assigns again": [X, "a = tl.load(w + x)", "for k in range(0, 4):", "    a = tl.load(w + x + k)"],
    "an atomic": [X, "a = tl.atomic_add(w + x, 1)"],
    "a loop": [X, "for k in range(0, 4):", "    a = tl.load(w + x + k)"],
    "an unknown function": [X, "a = tl.load(w + helper(x))"],
    "both kinds of memory": [X, "a = tl.where(x > 0, tl.load(w + x), tl.load(in0 + x))"],
}  # fmt: skip


@pytest.mark.parametrize("lines", LATE.values(), ids=LATE)
def test_nothing_else_stands_before_the_wait(lines):
    assert early(*lines) == []


def kernels(name):
    context = dialects.load(ir.Context())
    with context, ir.Location.unknown():
        return to_kernel_ir(ir.Module.parse((INPUTS / f"{name}.mlir").read_text()))


FAMILIES = {"rms_norm": "loops", "long_softmax": "loops", "cache_append": "update", "cumsum": "scan"}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_triggers_waits_and_computes_the_same(name):
    module = kernels(name)
    for checked in check_kernels(module):
        source = checked.source
        assert (source.family, source.pdl) == (FAMILIES[name], True) and not source.problems()
        kernel_scan.check(source.source.encode(), f"{source.name}.py")
        lines = [line.strip() for line in source.source.splitlines()]
        assert lines.index(TRIGGER) < lines.index(WAIT)
        for ours, expected in zip(checked.ours, checked.expected):
            torch.testing.assert_close(ours, expected, atol=2e-2, rtol=2e-2)


def test_the_weight_of_a_norm_is_loaded_before_the_wait():
    module = kernels("rms_norm")
    with module.context, ir.Location.unknown():
        (function,) = kernel_functions(module)
        body = lower_kernel(function).source.split("def k_")[1]
    before, after = body.split(WAIT)
    assert "tl.load(in1 + r" in before and "tl.load(in0" not in before and "tl.load(in0" in after


def test_what_is_settled_comes_early_and_a_late_trigger_stands_behind_the_wait():
    lines = ["last = tl.max(tl.load(m + x))", "a = tl.load(k + last)", "b = tl.load(q + x)"]
    body = [f"    {line}" for line in ("x = tl.arange(0, 8)", *lines)]
    early = [line.strip() for line in arrange(body, {"m"}, ())]
    assert early[: early.index(WAIT)] == [TRIGGER, "x = tl.arange(0, 8)", lines[0]]
    late = [line.strip() for line in arrange(body, {"m"}, (), late=True)]
    assert TRIGGER not in late[: late.index(WAIT)] and late[late.index(WAIT) + 1] == TRIGGER
