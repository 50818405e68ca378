"""Approximations for half-precision results, interpreted, against float64."""

import pytest
import torch

from topo_opt.codegen.triton.fast_functions import definition
from topo_opt.runtime import interpreter
from topo_opt.runtime.kernel_module import load_function

KERNEL = """import triton
import triton.language as tl


{definition}@triton.jit
def kernel(x, y):
    i = tl.arange(0, 16384)
    tl.store(y + i, {name}(tl.load(x + i)))
"""


def evaluate(name: str, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    with interpreter.interpreting():
        source = KERNEL.format(definition=definition(name), name=name)
        function = load_function(source, f"fast{name}.py", "kernel")
        interpreter.launch(function, (1, 1, 1), {"x": x, "y": y}, [x, y])
    return y


@pytest.mark.parametrize("name, exact, bound", [("_erf", torch.erf, 3e-6), ("_tanh", torch.tanh, 3e-7)])
def test_error_is_far_below_half_precision(name, exact, bound):
    x = torch.linspace(-8, 8, 16384)
    y = evaluate(name, x)
    assert (y.double() - exact(x.double())).abs().max() <= bound
    small = torch.logspace(-30, -1, 16384)
    relative = evaluate(name, small).double() / exact(small.double()) - 1
    assert relative.abs().max() <= 2e-5


@pytest.mark.parametrize("name", ["_erf", "_tanh"])
def test_special_values(name):
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    y = evaluate(name, special.repeat(4096))[:4]
    assert y[0].isnan() and y[1] >= 1 - 3e-6 and y[2] <= -1 + 3e-6 and y[3] == 0
    assert y.abs().nan_to_num(0).max() <= 1 + 3e-6
