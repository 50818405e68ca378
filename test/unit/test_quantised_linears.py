"""Quantised weights end to end: one gemm kernel that reads them as they are stored, against float64."""

import re
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from float64_rule import tensors
from kernel_check import kernel_functions, launch, to_kernel_ir
from lowering import lowered
from quantised_linears import LINEARS
from torch.export import export
from torch_mlir import ir

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton import lower_kernel
from topo_opt.codegen.triton.target import Target
from topo_opt.runtime.numerics import compare_all, float64_outputs

ROWS = {"int4-stack": (1, 8, 32, 512), "int8-zero-point": (1, 32)}


@dataclass(frozen=True)
class Case:
    """A layer, the kernel that computes it with the kernel's arguments, and a batch of rows."""

    layer: torch.nn.Module
    source: KernelSource
    arguments: list[torch.Tensor]
    x: torch.Tensor


@cache
def one_kernel(name: str, m: int) -> Case:
    """A layer, which must be one gemm kernel that reads no weights of the layer's size but the quantised ones."""
    layer = LINEARS[name]()
    torch.manual_seed(m)
    x = torch.randn(m, layer.k).to(layer.dtype)
    module = to_kernel_ir(lowered(export(layer, (x,), strict=False)))
    with module.context, ir.Location.unknown():
        (function,) = kernel_functions(module)
        (plan,) = (f.operation for f in module.body.operations if "topo.kernel" not in f.operation.attributes)
        names = _named(plan)
        family = ir.StringAttr(ir.DictAttr(function.attributes["topo.kernel"])["family"]).value
        assert family == "gemm"
        kind = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
        wide = [t for t in kind.inputs if list(ir.RankedTensorType(t).shape) == [layer.n, layer.k]]
        assert all(str(ir.RankedTensorType(t).element_type) in ("i8", "f8E4M3FN") for t in wide)
        source = lower_kernel(function, Target())
        return Case(layer, source, given(layer, x, names, function), x)


def given(
    layer: torch.nn.Module, x: torch.Tensor, names: list[str], function: ir.Operation
) -> list[torch.Tensor]:
    """Tensors for the kernel's arguments, in their order."""
    tensors = {"x": x, **dict(layer.named_buffers())}
    kind = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    shapes = [list(ir.RankedTensorType(t).shape) for t in kind.inputs]
    return [tensors[name].reshape(shape) for name, shape in zip(names, shapes, strict=True)]


def _named(function: ir.Operation) -> list[str]:
    """The arguments of the one kernel call of a plan function, by name, seen through reshapes."""
    block = function.regions[0].blocks[0]
    attributes = [ir.DictAttr(a) for a in ir.ArrayAttr(function.attributes["arg_attrs"])]
    name_of = {hash(a): ir.StringAttr(d["topo.name"]).value for a, d in zip(block.arguments, attributes)}
    for view in block.operations:
        op = view.operation
        if op.name == "func.call":
            return [name_of[hash(v)] for v in op.operands]
        name_of.update({hash(r): name_of[hash(op.operands[0])] for r in op.results})
    raise AssertionError("no kernel call")


CASES = [(name, m) for name in LINEARS for m in ROWS.get(name, (8,))]


@pytest.mark.parametrize(("name", "m"), CASES)
def test_a_quantised_layer_is_one_kernel(name: str, m: int) -> None:
    case = one_kernel(name, m)
    out = torch.empty(m, case.layer.n, dtype=case.layer.dtype)
    launch(case.source, case.arguments, [out])
    # The op has no kernel in float64; the other layer has the same tensors and formula.
    formula = LINEARS["int8-behind"]() if name == "int8-packed" else case.layer
    exact = float64_outputs(formula, (case.x,), {})
    (verdict,) = compare_all(tensors(out), tensors(case.layer(case.x)), tensors(exact))
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(
    ("name", "m"),
    [("int4-stack", 1), ("int4-stack", 8), ("int4-stack", 512), ("int4-high-first", 8), ("int4-signed", 8)],
)
def test_each_byte_is_loaded_once(name: str, m: int) -> None:
    source = one_kernel(name, m).source
    names = [p.name for p in source.params if p.kind == "arg" and p.index == 0]
    body = source.source.split("@triton.jit")[1]
    assert names == ["in0"] and "where" not in body and "mask" not in body
    addresses = re.findall(r"(\w+) = tl.load\(in0 \+ (\w+)\)", body)
    assert addresses and len({a for _, a in addresses}) == len(addresses)
