"""Divisions by constant powers of two are products, with the same bits; others stay divisions."""

from __future__ import annotations

import pytest
import torch
from kernel_check import launch
from loops_samples import kernels_of
from torch_mlir import ir

from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.loops import lower
from topo_opt.codegen.triton.target import Target


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "divisor,is_product",
    [(8.0, True), (-0.25, True), (2.0**-125, True), (2.0**-127, False), (3.0, False), (0.0, False)],
)
def test_division_by_a_power_of_two_is_a_product(divisor, is_product, dtype):
    x = torch.tensor([1.0, -3.7, 1e-38, -1.5e-45, 3e38, 0.0, -0.0, torch.inf, torch.nan], dtype=dtype)
    module, functions = kernels_of(lambda x: x / divisor, x)
    with module.context, ir.Location.unknown():
        kernel = Kernel(functions[0], Target())
        kernel.attributes = {**kernel.attributes, "tile": {"x": 16, "r": 1, "warps": 1}}
        source = lower(kernel)
    result = torch.full_like(x, 7.5)
    launch(source, [x], [result])
    code = source.source[source.source.index("@triton.jit") :]
    assert " * " + repr(1 / divisor) in code if is_product else "/" in code or "div_rn" in code
    assert torch.equal(result.nan_to_num(5.0), (x / divisor).nan_to_num(5.0))
    assert torch.equal(result.signbit(), (x / divisor).signbit())
