"""Table: casts between element types and multiplications that give the high half; importing it adds the rows."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch_mlir import ir

from topo_opt.reference.element_types import element_dtype
from topo_opt.reference.scalar_ops import UNSIGNED_OF_SIZE, ScalarFn, row


def element_of(type_: ir.Type) -> torch.dtype:
    """The element dtype of a scalar or tensor type."""
    return element_dtype(type_.element_type if isinstance(type_, ir.RankedTensorType) else type_)


@row("arith.truncf", "arith.extf", "arith.convertf")
def change_float(op: ir.Operation) -> ScalarFn:
    """Rounds to the exact type first: the value may be held in a wider one."""
    dtype = element_of(op.results[0].type)
    return lambda x: x.to(dtype)


@row("arith.trunci")
def truncate_integer(op: ir.Operation) -> ScalarFn:
    """Keeps the low bits; torch's cast to bool would test for zero instead."""
    dtype = element_of(op.results[0].type)
    return (lambda x: (x & 1).bool()) if dtype == torch.bool else (lambda x: x.to(dtype))


@row("arith.extsi", "arith.index_cast")
def extend_signed(op: ir.Operation) -> ScalarFn:
    """Signed, so that a true i1 becomes -1; also narrows an index."""
    dtype = element_of(op.results[0].type)
    if dtype == torch.bool:
        return lambda x: (x & 1).bool()
    return lambda x: -x.to(dtype) if x.dtype == torch.bool else x.to(dtype)


def _zero_extend(x: Tensor) -> Tensor:
    """i64 with the value of the unsigned reading; i64 itself keeps its bits."""
    if x.dtype == torch.bool or x.dtype.itemsize == 8:
        return x.to(torch.int64)
    return x.to(torch.int64) & ((1 << 8 * x.dtype.itemsize) - 1)


@row("arith.extui", "arith.index_castui")
def extend_unsigned(op: ir.Operation) -> ScalarFn:
    """Zero-extends, then takes the low bits."""
    dtype = element_of(op.results[0].type)
    if dtype == torch.bool:
        return lambda x: (x & 1).bool()
    return lambda x: _zero_extend(x).to(dtype)


@row("arith.sitofp")
def signed_to_float(op: ir.Operation) -> ScalarFn:
    """A true i1 is -1."""
    dtype = element_of(op.results[0].type)
    return lambda x: (-x.to(torch.int8) if x.dtype == torch.bool else x).to(dtype)


@row("arith.uitofp")
def unsigned_to_float(op: ir.Operation) -> ScalarFn:
    """i64 above 2^63 goes through numpy, which has the unsigned conversion."""
    dtype = element_of(op.results[0].type)
    target = np.float64 if dtype == torch.float64 else np.float32

    def convert(x: Tensor) -> Tensor:
        if x.dtype == torch.int64:
            return torch.as_tensor(x.numpy().view(np.uint64).astype(target)).to(dtype)
        return _zero_extend(x).to(dtype)

    return convert


@row("arith.fptosi", "arith.fptoui")
def float_to_integer(op: ir.Operation) -> ScalarFn:
    """Towards zero. Out of range has no defined value, in MLIR or in torch."""
    dtype = element_of(op.results[0].type)
    if dtype == torch.bool:
        return lambda x: (x.to(torch.int64) & 1).bool()
    return lambda x: x.to(torch.int64).to(dtype)


@row("arith.bitcast", "tensor.bitcast")
def reinterpret(op: ir.Operation) -> ScalarFn:
    """Narrows to the exact source type first, since the value may be held wide."""
    source, target = element_of(op.operands[0].type), element_of(op.results[0].type)
    return lambda x: x.to(source).view(target)


def _extended_multiply(signed: bool) -> Callable[[ir.Operation], ScalarFn]:
    def prepare(op: ir.Operation) -> ScalarFn:
        dtype = element_of(op.results[0].type)
        bits = 8 * dtype.itemsize
        read = (lambda x: x.numpy().astype(object)) if signed else _as_python_unsigned

        def multiply(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            product = read(a) * read(b)
            return _low_bits(product, dtype), _low_bits(np.right_shift(product, bits), dtype)

        return multiply  # type: ignore[return-value]

    return prepare


def _as_python_unsigned(x: Tensor) -> np.ndarray:
    return x.numpy().view(UNSIGNED_OF_SIZE[x.dtype.itemsize]).astype(object)


def _low_bits(values: object, dtype: torch.dtype) -> Tensor:
    array = np.asarray(values, dtype=object)
    unsigned = np.asarray(np.bitwise_and(array, (1 << 8 * dtype.itemsize) - 1), dtype=object)
    exact = unsigned.astype(UNSIGNED_OF_SIZE[dtype.itemsize])
    return torch.from_numpy(exact.view(exact.dtype.str.replace("u", "i")).copy())


row("arith.mulsi_extended")(_extended_multiply(signed=True))
row("arith.mului_extended")(_extended_multiply(signed=False))
