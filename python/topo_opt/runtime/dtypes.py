"""The one table between torch dtypes, MLIR element types and Triton element types."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from topo_opt.errors import InputError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ElementType:
    """One row: the same element under its three names. `itemsize` is in bytes, as stored by torch."""

    torch_name: str
    mlir_name: str
    triton_name: str | None
    itemsize: int
    category: str
    """"float", "int", "bool" or "complex"."""


_ROWS = (
    # torch             MLIR            Triton     bytes category
    ("float64",         "f64",          "fp64",    8, "float"),
    ("float32",         "f32",          "fp32",    4, "float"),
    ("float16",         "f16",          "fp16",    2, "float"),
    ("bfloat16",        "bf16",         "bf16",    2, "float"),
    ("float8_e4m3fn",   "f8E4M3FN",     "fp8e4nv", 1, "float"),
    ("float8_e5m2",     "f8E5M2",       "fp8e5",   1, "float"),
    ("float8_e4m3fnuz", "f8E4M3FNUZ",   "fp8e4b8", 1, "float"),
    ("float8_e5m2fnuz", "f8E5M2FNUZ",   "fp8e5b16", 1, "float"),
    ("int64",           "i64",          "i64",     8, "int"),
    ("int32",           "i32",          "i32",     4, "int"),
    ("int16",           "i16",          "i16",     2, "int"),
    ("int8",            "i8",           "i8",      1, "int"),
    ("uint64",          "ui64",         "u64",     8, "int"),
    ("uint32",          "ui32",         "u32",     4, "int"),
    ("uint16",          "ui16",         "u16",     2, "int"),
    ("uint8",           "ui8",          "u8",      1, "int"),
    ("bool",            "i1",           "i1",      1, "bool"),
    ("complex64",       "complex<f32>", None,      8, "complex"),
    ("complex128",      "complex<f64>", None,      16, "complex"),
)  # fmt: skip

ELEMENT_TYPES = tuple(ElementType(*row) for row in _ROWS)
BY_TORCH = {e.torch_name: e for e in ELEMENT_TYPES}
BY_TRITON = {e.triton_name: e for e in ELEMENT_TYPES if e.triton_name}
# MLIR integers carry no sign in our IR, so iN stands for the signed type; topo.dtype tells the unsigned one.
BY_MLIR = {e.mlir_name: e for e in ELEMENT_TYPES} | {"si64": BY_TORCH["int64"], "index": BY_TORCH["int64"]}


def from_torch_name(name: str) -> ElementType:
    """The row of "bfloat16" or "torch.bfloat16"; raises `InputError` for anything not in the table."""
    row = BY_TORCH.get(name.removeprefix("torch."))
    if row is None:
        raise InputError(f"dtype {name!r} is not supported", hint="supported: " + ", ".join(BY_TORCH))
    return row


def from_mlir_name(name: str) -> ElementType:
    """The row of an MLIR element type as printed; raises `InputError` for anything not in the table."""
    row = BY_MLIR.get(name)
    if row is None:
        raise InputError(f"element type {name} has no torch dtype", hint="supported: " + ", ".join(BY_MLIR))
    return row


def from_triton_name(name: str) -> ElementType:
    """The row of a Triton element type; raises `InputError` for anything not in the table."""
    row = BY_TRITON.get(name)
    if row is None:
        raise InputError(f"Triton type {name!r} is not supported", hint="supported: " + ", ".join(BY_TRITON))
    return row


@cache
def torch_dtype(torch_name: str) -> torch.dtype:
    """The `torch.dtype` of a torch name of the table."""
    import torch

    return getattr(torch, from_torch_name(torch_name).torch_name)


@cache
def torch_dtype_of_triton(triton_name: str) -> torch.dtype:
    """The `torch.dtype` whose pointer Triton types as `*triton_name`."""
    return torch_dtype(from_triton_name(triton_name).torch_name)


def name_of(dtype: torch.dtype) -> str:
    """The torch name of a `torch.dtype`, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
