"""The `topo` dialect's own ops."""

import torch
from torch import Tensor
from torch_mlir import ir

from topo_opt.errors import InputError
from topo_opt.reference.element_types import value_dtype, wide
from topo_opt.reference.program import Program, Step, evaluates

SCORE_ELEMENTS = 1 << 24
"""Attention scores held at a time; 64 MiB in f32."""


@evaluates("topo.demote")
def demote(op: ir.Operation, _program: Program) -> Step:
    """Always rounds here: a kernel that keeps the wide value is at least as exact."""
    dtype = value_dtype(op.results[0].type)
    return lambda operands: [operands[0].to(dtype)]


@evaluates("topo.rotate_half")
def rotate_half(op: ir.Operation, _program: Program) -> Step:
    """Pairs along the last dimension, `(a, b) -> (-b, a)`."""
    interleaved = bool(op.attributes["interleaved"].value)

    def step(operands: list[Tensor]) -> list[Tensor]:
        pairs = operands[0].unflatten(-1, (-1, 2) if interleaved else (2, -1))
        axis = -1 if interleaved else -2
        a, b = pairs.unbind(axis)
        return [torch.stack((-b, a), axis).flatten(-2)]

    return step


@evaluates("topo.attention")
def attention(op: ir.Operation, _program: Program) -> Step:
    """Softmax attention in f32 (f64 for doubles), a block of query rows at a time; a row without positions is 0."""
    scale, causal = float(op.attributes["scale"].value), bool(op.attributes["causal"].value)
    dtype = value_dtype(op.results[0].type)

    def step(operands: list[Tensor]) -> list[Tensor]:
        query, key, value, *rest = (x.to(wide(x.dtype)) for x in operands)
        mask = rest[0] if rest else None
        batch, heads, rows, depth = query.shape
        groups, columns, width = key.shape[1], key.shape[2], value.shape[3]
        query = query.reshape(batch, groups, heads // groups, rows, depth) * scale
        key, value = key.unsqueeze(2), value.unsqueeze(2)
        if mask is not None:
            mask = mask.expand(batch, heads, rows, columns).unflatten(1, (groups, heads // groups))
        block = max(1, SCORE_ELEMENTS // max(1, batch * heads * columns))
        parts = []
        for start in range(0, rows, block):
            scores = query[..., start : start + block, :] @ key.transpose(-1, -2)
            scores = _masked(
                scores, None if mask is None else mask[..., start : start + block, :], causal, start
            )
            parts.append(_safe_softmax(scores) @ value)
        result = torch.cat(parts, -2) if parts else query.new_empty(batch, groups, heads // groups, 0, width)
        return [result.reshape(batch, heads, rows, width).to(dtype)]

    return step


def _masked(scores: Tensor, mask: Tensor | None, causal: bool, first_row: int) -> Tensor:
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        rows = torch.arange(first_row, first_row + scores.shape[-2]).unsqueeze(1)
        scores = scores.masked_fill(torch.arange(scores.shape[-1]) > rows, -torch.inf)
    return scores


def _safe_softmax(scores: Tensor) -> Tensor:
    if scores.shape[-1] == 0:
        return scores
    return scores.softmax(-1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)


@evaluates("topo.index_update")
def index_update(op: ir.Operation, _program: Program) -> Step:
    """A copy of the destination with the slices at `index` replaced; of equal indices the last one stays."""
    dim = int(op.attributes["dim"].value)

    def step(operands: list[Tensor]) -> list[Tensor]:
        dest, source, index = operands
        size = dest.shape[dim]
        if index.numel() and (int(index.min()) < 0 or int(index.max()) >= size):
            raise InputError(
                f"topo.index_update: an index of {index.tolist()} is out of range for size {size}"
            )
        result = dest.clone(memory_format=torch.contiguous_format)
        for position, target in enumerate(index.tolist()):
            result.select(dim, target).copy_(source.select(dim, position))
        return [result]

    return step
