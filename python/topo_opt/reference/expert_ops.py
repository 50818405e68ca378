"""The `topo` dialect's ops for mixtures of experts: picking, grouping and products by group."""

import torch
from torch import Tensor
from torch_mlir import ir

from topo_opt.reference.element_types import value_dtype, wide
from topo_opt.reference.program import Program, Step, evaluates


@evaluates("topo.top_k")
def top_k(op: ir.Operation, _program: Program) -> Step:
    """A stable sort of every row, of which the first `k` are taken."""
    k, largest = int(op.attributes["k"].value), bool(op.attributes["largest"].value)

    def step(operands: list[Tensor]) -> list[Tensor]:
        values, indices = torch.sort(operands[0], dim=-1, descending=largest, stable=True)
        return [values[..., :k].contiguous(), indices[..., :k].contiguous()]

    return step


@evaluates("topo.group_rows")
def group_rows(op: ir.Operation, _program: Program) -> Step:
    """A stable sort by group, the rows of no group last."""
    groups = int(op.attributes["groups"].value)

    def step(operands: list[Tensor]) -> list[Tensor]:
        group = operands[0].long()
        group = torch.where((group >= 0) & (group < groups), group, groups)
        counts = torch.bincount(group, minlength=groups + 1)[:groups]
        offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        return [torch.argsort(group, stable=True).int(), offsets.int()]

    return step


@evaluates("topo.grouped_product")
def grouped_product(op: ir.Operation, _program: Program) -> Step:
    """A product a group, in f32 for halves; `order` and `offsets` are not looked at."""
    dtype = value_dtype(op.results[0].type)

    def step(operands: list[Tensor]) -> list[Tensor]:
        x, weights, group = operands[:3]
        result = torch.zeros(x.shape[0], weights.shape[2], dtype=dtype)
        for number in torch.unique(group).tolist():
            if 0 <= number < weights.shape[0]:
                rows = group == number
                product = x[rows].to(wide(x.dtype)) @ weights[number].to(wide(x.dtype))
                result[rows] = product.to(dtype)
        return [result]

    return step
