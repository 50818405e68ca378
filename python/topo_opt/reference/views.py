"""`tensor` ops that move elements without computing, and the ops that start a tensor (`empty`, `fill`, `splat`)."""

import math

import torch
from torch import Tensor
from torch_mlir import ir

from topo_opt.reference.affine_access import loop_index
from topo_opt.reference.body import Body, Space, gather
from topo_opt.reference.element_types import static_shape, value_dtype
from topo_opt.reference.program import Program, Step, evaluates

_DYNAMIC = -(2**63)


@evaluates("tensor.empty")
def empty(op: ir.Operation, _program: Program) -> Step:
    """NaN (or the smallest integer), so that a read of what nothing wrote shows; takes no memory."""
    shape, dtype = static_shape(op.results[0].type), value_dtype(op.results[0].type)
    if dtype.is_floating_point or dtype.is_complex:
        poison = torch.full((), math.nan, dtype=torch.float32).to(dtype)
    else:
        poison = torch.tensor(True if dtype == torch.bool else torch.iinfo(dtype).min, dtype=dtype)
    return lambda _: [poison.expand(shape)]


@evaluates("linalg.fill", "tensor.splat")
def fill(op: ir.Operation, _program: Program) -> Step:
    """The scalar, everywhere; takes no memory."""
    shape, dtype = static_shape(op.results[0].type), value_dtype(op.results[0].type)
    return lambda operands: [operands[0].reshape(()).to(dtype).expand(shape)]


@evaluates("tensor.from_elements")
def from_elements(op: ir.Operation, _program: Program) -> Step:
    """Row-major scalars."""
    shape, dtype = static_shape(op.results[0].type), value_dtype(op.results[0].type)
    return lambda operands: [
        torch.stack(operands).to(dtype).reshape(shape) if operands else torch.empty(shape, dtype=dtype)
    ]


@evaluates("tensor.expand_shape", "tensor.collapse_shape", "tensor.reshape", "tensor.cast")
def reshape(op: ir.Operation, _program: Program) -> Step:
    """Row-major; the result type has the sizes."""
    shape = static_shape(op.results[0].type)
    return lambda operands: [operands[0].reshape(shape)]


@evaluates("tensor.dim")
def dim(op: ir.Operation, _program: Program) -> Step:
    """A size, as an index."""
    shape = static_shape(op.operands[0].type)
    return lambda operands: [torch.tensor(shape[int(operands[1])])]


class _Slice:
    """Offsets, sizes and strides of a slice op: static attributes with the dynamic ones from operands in order."""

    def __init__(self, op: ir.Operation, fixed_operands: int):
        self.static = [list(op.attributes[f"static_{part}"]) for part in ("offsets", "sizes", "strides")]
        self.fixed = fixed_operands

    def index(self, operands: list[Tensor]) -> tuple[slice, ...]:
        dynamic = iter(operands[self.fixed :])
        offsets, sizes, strides = (
            [int(next(dynamic)) if n == _DYNAMIC else n for n in part] for part in self.static
        )
        spans = zip(offsets, sizes, strides, strict=True)
        return tuple(slice(o, o + (n - 1) * s + 1 if n else o, s) for o, n, s in spans)


@evaluates("tensor.extract_slice")
def extract_slice(op: ir.Operation, _program: Program) -> Step:
    """A strided box; unit dimensions may be dropped."""
    where, shape = _Slice(op, 1), static_shape(op.results[0].type)
    return lambda operands: [operands[0][where.index(operands)].reshape(shape)]


@evaluates("tensor.insert_slice", "tensor.parallel_insert_slice")
def insert_slice(op: ir.Operation, _program: Program) -> Step:
    """A copy of the destination with a strided box replaced."""
    where = _Slice(op, 2)

    def step(operands: list[Tensor]) -> list[Tensor]:
        result = operands[1].clone(memory_format=torch.contiguous_format)
        box = result[where.index(operands)]
        box.copy_(operands[0].reshape(box.shape))
        return [result]

    return step


@evaluates("tensor.insert")
def insert(_op: ir.Operation, _program: Program) -> Step:
    """A copy of the tensor with one element replaced."""

    def step(operands: list[Tensor]) -> list[Tensor]:
        result = operands[1].clone(memory_format=torch.contiguous_format)
        gather(result, operands[2:])
        result[tuple(operands[2:])] = operands[0].reshape(()).to(result.dtype)
        return [result]

    return step


@evaluates("tensor.concat")
def concat(op: ir.Operation, _program: Program) -> Step:
    """Along one dimension."""
    along = op.attributes["dim"].value
    return lambda operands: [torch.cat(operands, along)]


@evaluates("tensor.pad")
def pad(op: ir.Operation, _program: Program) -> Step:
    """The region gives the padding at each index; negative padding does not occur in MLIR."""
    low, high = (list(op.attributes[f"static_{side}"]) for side in ("low", "high"))
    dynamic = sum(n == _DYNAMIC for n in low + high)
    shape, dtype = static_shape(op.results[0].type), value_dtype(op.results[0].type)
    body, rank = Body(op), len(shape)

    def step(operands: list[Tensor]) -> list[Tensor]:
        source, sizes, outer = operands[0], iter(operands[1 : 1 + dynamic]), operands[1 + dynamic :]
        starts = [int(next(sizes)) if n == _DYNAMIC else n for n in low]
        indices = [loop_index(d, rank, 0, n) for d, n in enumerate(shape)]
        space = Space((0,) * rank, tuple(shape))
        (around,) = body.evaluate(body.yields, indices, outer, space)
        result = around.to(dtype).expand(shape).clone(memory_format=torch.contiguous_format)
        result[tuple(slice(s, s + n) for s, n in zip(starts, source.shape, strict=True))] = source
        return [result]

    return step


@evaluates("tensor.generate")
def generate(op: ir.Operation, _program: Program) -> Step:
    """The region gives the element at each index."""
    shape, dtype = static_shape(op.results[0].type), value_dtype(op.results[0].type)
    body, rank = Body(op), len(shape)

    def step(operands: list[Tensor]) -> list[Tensor]:
        indices = [loop_index(d, rank, 0, n) for d, n in enumerate(shape)]
        (value,) = body.evaluate(body.yields, indices, operands, Space((0,) * rank, tuple(shape)))
        return [value.to(dtype).expand(shape)]

    return step
