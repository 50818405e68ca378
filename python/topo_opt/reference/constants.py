"""Constant attributes as tensors, including the element types that MLIR's buffer protocol refuses."""

import re
import struct

import numpy as np
import torch
from torch_mlir import ir

from topo_opt.errors import UnsupportedError
from topo_opt.reference.element_types import element_dtype, static_shape, wide

_TOKEN = re.compile(r"\[|\]|\(|\)|,|[^\[\](),\s]+")
_RAW_HEX = re.compile(r'^"0x([0-9A-Fa-f]*)"$')
_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def constant_tensor(op: ir.Operation) -> torch.Tensor:
    """The value of an `arith.constant` or `complex.constant`: a 0-d wide tensor for a scalar, else a tensor.

    Raises:
        UnsupportedError: a resource blob, which the compiler never puts in the IR.
    """
    type_ = op.results[0].type
    if isinstance(type_, ir.RankedTensorType):
        return _dense(op, type_)
    dtype = element_dtype(type_)
    attribute = op.attributes["value"]
    if isinstance(attribute, ir.ArrayAttr):
        real, imaginary = (_float(str(part).split(":")[0], torch.float64) for part in attribute)
        return torch.tensor(complex(real, imaginary), dtype=wide(dtype))
    text = str(attribute).rsplit(":", 1)[0].strip()
    return _elements([text], dtype)[0].to(wide(dtype))


def _dense(op: ir.Operation, type_: ir.RankedTensorType) -> torch.Tensor:
    shape, dtype = static_shape(type_), element_dtype(type_.element_type)
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    if (dtype.is_floating_point and dtype.itemsize < 4) or dtype.is_complex:
        return _from_text(op, shape, dtype)
    attribute = op.attributes["value"]
    if not isinstance(attribute, ir.DenseElementsAttr):
        raise UnsupportedError(f"constant {str(attribute)[:60]} is not a dense attribute")
    splat = attribute.is_splat
    array = np.array(attribute.get_splat_value().value if splat else attribute)
    tensor = torch.tensor(array).to(dtype)
    return tensor.expand(shape) if splat else tensor.reshape(shape)


def _from_text(op: ir.Operation, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """bf16, f8 and complex constants have no buffer in the bindings; their printed form is exact."""
    text = op.get_asm(print_generic_op_form=True, large_elements_limit=None)
    start = text.index("dense<") + len("dense<")
    body = text[start : text.index("> : tensor<", start)]
    raw = _RAW_HEX.match(body)
    if raw:
        return torch.frombuffer(bytearray.fromhex(raw[1]), dtype=dtype).reshape(shape)
    tokens = [t for t in _TOKEN.findall(body) if t not in "[],()"]
    if dtype.is_complex:
        parts = _elements(tokens, dtype.to_real())
        tensor = torch.view_as_complex(parts.reshape(-1, 2))
    else:
        tensor = _elements(tokens, dtype)
    return tensor.reshape(()).expand(shape) if tensor.numel() == 1 else tensor.reshape(shape)


def _elements(tokens: list[str], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.tensor([t in ("true", "1", "-1") for t in tokens])
    if not dtype.is_floating_point:
        return torch.tensor([int(t, 0) for t in tokens], dtype=dtype)
    return torch.stack([torch.tensor(_float(t, dtype), dtype=torch.float64).to(dtype) for t in tokens])


def _float(token: str, dtype: torch.dtype) -> float:
    """A printed float; NaN, infinity and exact values are printed as the hexadecimal bits of the type."""
    token = token.strip()
    if not token.startswith("0x"):
        return float(token)
    width = (len(token) - 2) // 2
    if dtype.itemsize != width:  # a part of a complex constant is printed in its own width
        return struct.unpack({2: ">e", 4: ">f", 8: ">d"}[width], bytes.fromhex(token[2:]))[0]
    bits = int(token, 16)
    signed = bits - (1 << 8 * width) if bits >> (8 * width - 1) else bits
    return torch.tensor(signed, dtype=_INT_OF_SIZE[width]).view(dtype).to(torch.float64).item()
