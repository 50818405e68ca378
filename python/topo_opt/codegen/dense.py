"""Constants of the IR as numpy arrays."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from topo_opt.errors import UnsupportedError

_NUMPY = {"bool": np.bool_, "bfloat16": np.uint16, "complex64": np.complex64, "complex128": np.complex128}
_DIRECT = {"float64", "float32", "float16", "int64", "int32", "int16", "int8", "bool"}
_UNSIGNED = {"uint8", "uint16", "uint32", "uint64"}
_TOKEN = re.compile(r"0x[0-9A-Fa-f]+|[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|inf|nan)")


def numpy_dtype(torch_name: str) -> np.dtype:
    """The numpy type used to store a torch type: itself, or an unsigned integer of the same size."""
    if torch_name in _DIRECT or torch_name in _UNSIGNED or torch_name in _NUMPY:
        return np.dtype(_NUMPY.get(torch_name, torch_name))
    return np.dtype(np.uint8)


def dense_values(attribute: Any, torch_name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The elements of a `dense` attribute, or of its text. A splat is an array with zero strides, so it takes no memory.

    Raises:
        UnsupportedError: an element type that constants can't have (float8), or a resource blob.
    """
    if torch_name in _DIRECT | _UNSIGNED:
        values = np.array(attribute)
        if values.shape != shape:
            values = np.broadcast_to(values.reshape(-1)[:1].reshape((1,) * len(shape)), shape)
        if torch_name in _UNSIGNED:
            values = (
                values.view(np.dtype(torch_name)) if values.flags.c_contiguous else values.astype(torch_name)
            )
        return values
    if torch_name not in ("bfloat16", "complex64", "complex128"):
        raise UnsupportedError(f"a constant of type {torch_name} can't be stored")
    flat = _from_text(str(attribute), torch_name)
    if flat.size == 1:
        return np.broadcast_to(flat.reshape((1,) * len(shape)), shape)
    return flat.reshape(shape)


def splat_scalar(values: np.ndarray, torch_name: str) -> bool | int | float | None:
    """The repeated element of a splat as a JSON number that gives it back exactly; None when there is no such number."""
    if values.size < 2 or any(s != 0 and n != 1 for s, n in zip(values.strides, values.shape)):
        return None
    first = values.reshape(-1)[:1]
    if torch_name == "bfloat16":
        first = (first.astype(np.uint32) << 16).view(np.float32)
    if (
        np.iscomplexobj(first)
        or not np.isfinite(first[0])
        or (first[0] == 0 and np.signbit(first[0].astype(float)))
    ):
        return None
    return first[0].item()


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """float32 values to bfloat16 bit patterns, rounding to nearest even, NaN kept a quiet NaN."""
    wide = np.ascontiguousarray(values, dtype=np.float32)
    bits = wide.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
        np.uint16
    )
    return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded)


def _from_text(text: str, torch_name: str) -> np.ndarray:
    """For the types MLIR's buffer protocol lacks: the printed form, exact because MLIR prints round-trip digits."""
    body = text[text.index("dense<") + 6 : text.rindex("> : tensor<")]
    raw = {"bfloat16": np.uint16, "complex64": np.complex64, "complex128": np.complex128}[torch_name]
    if body.startswith('"0x'):
        return np.frombuffer(bytes.fromhex(body.strip('"')[2:]), dtype=raw)
    tokens = _TOKEN.findall(body)
    if torch_name == "bfloat16":
        # A hexadecimal token is the bit pattern itself: how MLIR prints NaN and infinities.
        return np.array(
            [int(t, 16) if t.startswith("0x") else bf16_bits(np.array([float(t)]))[0] for t in tokens],
            dtype=np.uint16,
        )
    part = np.float32 if torch_name == "complex64" else np.float64
    width = np.dtype(part).itemsize
    numbers = [
        np.frombuffer(int(t, 16).to_bytes(width, "little"), dtype=part)[0] if t.startswith("0x") else part(t)
        for t in tokens
    ]
    return np.array(numbers, dtype=part).view(raw)
