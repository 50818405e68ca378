"""The `topo` dialect's own ops."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch_mlir import ir

from topo_opt.errors import InputError
from topo_opt.reference.affine_access import evaluate_at
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
    dtype, form = value_dtype(op.results[0].type), _Form.of(op)

    def step(operands: list[Tensor]) -> list[Tensor]:
        query, key, value = (x.to(wide(x.dtype)) for x in operands[:3])
        batch, heads, rows, depth = query.shape
        groups, columns, width = key.shape[1], key.shape[2], value.shape[3]
        query = query.reshape(batch, groups, heads // groups, rows, depth) * form.scale
        key, value = key.unsqueeze(2), value.unsqueeze(2)
        positions = operands[-1] if form.has_positions else torch.zeros(1, 1, dtype=torch.int64)
        positions = positions.expand(-1, rows)[:, None, None, :, None]
        mask = None
        if form.has_mask:
            mask = operands[3].expand(batch, heads, rows, columns).unflatten(1, (groups, heads // groups))
        block = max(1, SCORE_ELEMENTS // max(1, batch * heads * columns))
        parts = []
        for start in range(0, rows, block):
            place = slice(start, start + block)
            scores = query[..., place, :] @ key.transpose(-1, -2)
            if form.softcap is not None:
                scores = form.softcap * torch.tanh(scores / form.softcap)
            if mask is not None:
                part = mask[..., place, :].to(wide(mask.dtype))
                scores = scores.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else scores + part
            row = torch.arange(rows)[place, None]
            scores = scores.masked_fill(~form.seen(row, positions[..., place, :], columns), -torch.inf)
            parts.append(_safe_softmax(scores) @ value)
        result = torch.cat(parts, -2) if parts else query.new_empty(batch, groups, heads // groups, 0, width)
        return [result.reshape(batch, heads, rows, width).to(dtype)]

    return step


@dataclass(frozen=True)
class _Form:
    """The attributes of an attention."""

    scale: float
    causal: bool
    softcap: float | None
    low: tuple[ir.AffineExpr, ...]
    high: tuple[ir.AffineExpr, ...]
    has_mask: bool
    has_positions: bool

    @staticmethod
    def of(op: ir.Operation) -> "_Form":
        attributes = op.attributes
        low, high = (
            tuple(ir.AffineMapAttr(attributes[name]).value.results) if name in attributes else ()
            for name in ("low", "high")
        )
        segments = list(ir.DenseI32ArrayAttr(attributes["operandSegmentSizes"]))
        cap = float(attributes["softcap"].value) if "softcap" in attributes else None
        scale, causal = float(attributes["scale"].value), bool(attributes["causal"].value)
        return _Form(scale, causal, cap, low, high, bool(segments[3]), bool(segments[4]))

    def seen(self, row: Tensor, position: Tensor, columns: int) -> Tensor:
        """Which columns each row may look at, by the bounds alone."""
        column = torch.arange(columns)
        seen = column <= row if self.causal else torch.ones(1, columns, dtype=torch.bool)
        for expr in self.low:
            seen = seen & (column >= evaluate_at(expr, (row, position)))
        for expr in self.high:
            seen = seen & (column < evaluate_at(expr, (row, position)))
        return seen


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
