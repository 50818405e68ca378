"""Approximations for half-precision results, interpreted, against float64."""

import math
import re

import pytest
import torch
from torch_mlir import ir

from topo_opt import dialects
from topo_opt.codegen.triton import lower_kernel
from topo_opt.codegen.triton.fast_functions import definition
from topo_opt.codegen.triton.target import Target
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


def test_gelu_of_bf16_is_off_by_less_than_its_last_digits():
    x = torch.linspace(-9, 9, 16384)
    gelu = 0.5 * x.double() * (1 + evaluate("_erf_bf16", x / math.sqrt(2)).double())
    error = (gelu - torch.nn.functional.gelu(x.double())).abs()
    assert error.max() <= 2.6e-5 and error[x.abs() > 6].max() <= 1e-7


LINEAR = """func.func @f(%a: tensor<64x32xKIND>, %w: tensor<32x32xKIND>) -> tensor<64x32xKIND> attributes {topo.kernel = {family = "gemm",
    tile = {m = 64 : i64, n = 32 : i64, k = 32 : i64, group = 1 : i64, warps = 4 : i64, stages = 2 : i64}}} {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<64x32xf32>
  %c = linalg.fill ins(%zero : f32) outs(%e : tensor<64x32xf32>) -> tensor<64x32xf32>
  %x = linalg.contract indexing_maps = [affine_map<(m, n, k) -> (m, k)>, affine_map<(m, n, k) -> (n, k)>, affine_map<(m, n, k) -> (m, n)>]
    ins(%a, %w : tensor<64x32xKIND>, tensor<32x32xKIND>) outs(%c : tensor<64x32xf32>) -> tensor<64x32xf32>
  %y = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, j)>], iterator_types = ["parallel", "parallel"]}
    ins(%x : tensor<64x32xf32>) outs(%e : tensor<64x32xf32>) {
  ^bb0(%in: f32, %out: f32):
    %s = math.erf %in : f32
    %t = math.tanh %s : f32
    linalg.yield %t : f32
  } -> tensor<64x32xf32>
  %r = "topo.demote"(%y) : (tensor<64x32xf32>) -> tensor<64x32xKIND>
  return %r : tensor<64x32xKIND>
}"""
WITHOUT_TANH = Target(has_tanh=False)


@pytest.mark.parametrize(
    "kind, target, suffix", [("bf16", None, "_bf16"), ("bf16", WITHOUT_TANH, ""), ("f16", None, "")]
)
def test_what_products_give_is_as_coarse_as_the_stored_type_and_the_machine_allow(kind, target, suffix):
    with ir.Context() as context, ir.Location.unknown():
        dialects.load(context)
        module = ir.Module.parse(LINEAR.replace("KIND", kind))
        source = lower_kernel(module.body.operations[0].operation, target).source
    assert re.findall(r"= (_\w+)\(", source) == [f"_erf{suffix}", f"_tanh{suffix}"]


@pytest.mark.parametrize(
    "machine, has", [("h200-x1", True), ("dgx-a100-x8", True), ("dgx2-v100-x16", False), ("mi300x-x8", False)]
)
def test_machines_that_have_the_instruction(machine, has):
    assert Target.named(machine).has_tanh == has


@pytest.mark.parametrize("name", ["_erf", "_tanh", "_erf_bf16", "_tanh_bf16"])
def test_special_values(name):
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    y = evaluate(name, special.repeat(4096))[:4]
    assert y[0].isnan() and y[1] >= 1 - 3e-6 and y[2] <= -1 + 3e-6 and y[3] == 0
    assert y.abs().nan_to_num(0).max() <= 1 + 3e-6
