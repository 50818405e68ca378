"""Which torch dtype stands for which MLIR element type.

A tensor holds exactly its element type. A *scalar* of a half or 8-bit float type is held in float32: the arithmetic inside
one op's body is done wide and rounded once, where the body yields into a tensor (or where `arith.truncf` says so).
Integers are signless in the IR and signed here; unsigned ops reinterpret.
"""

import torch
from torch_mlir import ir

from topo_opt.errors import UnsupportedError
from topo_opt.runtime.dtypes import from_mlir_name, torch_dtype

_WIDE: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}


UNSIGNED: dict[torch.dtype, torch.dtype] = {
    torch.uint8: torch.int8,
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
"""torch's unsigned dtypes and the dtype that holds the same bits in the IR."""


def element_dtype(element: ir.Type) -> torch.dtype:
    """The dtype of a tensor with this element type."""
    return torch_dtype(from_mlir_name(str(element)).torch_name)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a scalar of `dtype` is computed."""
    return _WIDE.get(dtype, dtype)


def value_dtype(type_: ir.Type) -> torch.dtype:
    """The dtype of a value of this type: exact for a tensor, wide for a scalar."""
    if isinstance(type_, ir.RankedTensorType):
        return element_dtype(type_.element_type)
    return wide(element_dtype(type_))


def static_shape(type_: ir.Type) -> list[int]:
    """The shape of a ranked tensor type.

    Raises:
        UnsupportedError: a dynamic size; structured and kernel IR have none.
    """
    shaped = ir.RankedTensorType(type_)
    if not shaped.has_static_shape:
        raise UnsupportedError(
            f"{type_} has a dynamic size", hint="compile for a bucket: structured IR is static"
        )
    return list(shaped.shape)


def as_signless(tensor: torch.Tensor) -> torch.Tensor:
    """The same bits under the dtype used for signless integers."""
    return tensor.view(UNSIGNED[tensor.dtype]) if tensor.dtype in UNSIGNED else tensor


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` as the model's dtype: unsigned and bool are reinterpreted, anything else must already fit."""
    if tensor.dtype == dtype:
        return tensor
    if UNSIGNED.get(dtype) == tensor.dtype:
        return tensor.view(dtype)
    return tensor.to(dtype)
