"""Products whose factors have rows off the boundaries that hardware copies from: whole programs against float64, and machine code."""

from __future__ import annotations

import pytest
import torch
from kernel_check import check_kernels, kernel_functions, to_kernel_ir

import topo_opt
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.frontend.ingest import structured_module


def launched(program: topo_opt.runtime.program.Program) -> list[str]:
    return [s.kernel for s in program.variants("main")[0].steps if hasattr(s, "kernel")]


class Linear(torch.nn.Module):
    """A product with a weight of `shape`, transposed or not, and what is behind it."""

    def __init__(self, *shape: int, transposed: bool, dtype: torch.dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.nn.Parameter(
            torch.randn(shape, generator=generator).to(dtype), requires_grad=False
        )
        self.transposed = transposed

    def forward(self, x):
        weight = self.weight.t() if self.transposed else self.weight
        return torch.relu(x @ weight + 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_is_copied_once_and_the_product_reads_what_is_no_padding(dtype, transposed):
    rows, k, columns = 130, 67, 77
    shape = (columns, k) if transposed else (k, columns)
    model = Linear(*shape, transposed=transposed, dtype=dtype).eval()
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(4)).to(dtype)
    module = structured_module(model, (x,))
    to_kernel_ir(module)
    (gemm,) = [f for f in kernel_functions(module) if Kernel(f).attributes["family"] == "gemm"]
    lengths = {Kernel(gemm).graph.values[a].shape[-1] for a in Kernel(gemm).graph.arguments}
    assert (80 if not transposed else 72 if dtype == torch.bfloat16 else 68) in lengths
    for checked in check_kernels(module):
        for ours, expected in zip(checked.ours, checked.expected, strict=True):
            torch.testing.assert_close(
                ours, expected, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-3
            )
    program = topo_opt.compile(model, (x,), device="cpu", strict=True)
    exact, eager = model.double()(x.double()), model.to(dtype)(x)
    allowed = 2 * (eager.double() - exact).abs().max() + 1e-6 * exact.abs().max()
    assert (program(x).double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("left,right", [((515, 513), (513, 517)), ((4, 300, 259), (4, 259, 515))])
def test_both_factors_of_a_large_product_are_copied(left, right):
    class Product(torch.nn.Module):
        def forward(self, a, b):
            return a @ b

    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(shape, generator=generator) for shape in (left, right))
    program = topo_opt.compile(Product(), (a, b), device="cpu", strict=True)
    assert sum(name.startswith("k_gemm") for name in launched(program)) == 1 and len(launched(program)) >= 2
    exact, eager = a.double() @ b.double(), a @ b
    assert (program(a, b) - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-6 * exact.abs().max()
