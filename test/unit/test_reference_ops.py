"""Every op of `op_cases`: exported, lowered to structured IR, and evaluated, against eager PyTorch.

Cases of one dtype share a program, which makes the suite several times faster.
"""

from typing import Any

import op_cases
import pytest
import torch
from float64_rule import check, tensors
from lowering import lowered
from torch import nn

from topo_opt import reference
from topo_opt.runtime.numerics import float64_outputs

CASES_PER_PROGRAM = 24
THOROUGH = (torch.float16, torch.int32, torch.int8)
"""Dtypes that --quick leaves out: each has a close relative that stays."""


class Together(nn.Module):
    """Several cases in one forward; `spans` tells which inputs are whose."""

    def __init__(self, functions: list[Any], spans: list[tuple[int, int]]):
        super().__init__()
        self.functions, self.spans = functions, spans

    def forward(self, *inputs: Any) -> list[Any]:
        return [f(*inputs[a:b]) for f, (a, b) in zip(self.functions, self.spans, strict=True)]


def _programs() -> list[Any]:
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, case in op_cases.CASES.items():
        for dtype in case.dtypes:
            by_dtype.setdefault(dtype, []).append(name)
    found = []
    for dtype, names in by_dtype.items():
        for start in range(0, len(names), CASES_PER_PROGRAM):
            chunk = tuple(names[start : start + CASES_PER_PROGRAM])
            label = f"{str(dtype).removeprefix('torch.')}-{chunk[0]}-to-{chunk[-1]}"
            marks = [pytest.mark.thorough] if dtype in THOROUGH else []
            found.append(pytest.param(dtype, chunk, id=label, marks=marks))
    return found


@pytest.mark.parametrize(("dtype", "names"), _programs())
def test_ops(dtype: torch.dtype, names: tuple[str, ...]) -> None:
    inputs: list[Any] = []
    spans = []
    for name in names:
        made = op_cases.CASES[name].make(dtype)
        spans.append((len(inputs), len(inputs) + len(made)))
        inputs += made
    module = Together([op_cases.CASES[name].function for name in names], spans)
    program = torch.export.export(module, tuple(inputs), strict=False)
    structured = lowered(program)
    state = {**program.state_dict, **program.constants}
    arguments = reference.bind_inputs(structured, "main", state, tensors(inputs))
    found = reference.run(structured, "main", arguments)
    with torch.no_grad():
        eager = module(*inputs)
    labels = [
        f"{name}[{i}]" for name, out in zip(names, eager, strict=True) for i in range(len(tensors(out)))
    ]
    check(found, eager, float64_outputs(module, inputs), labels)
