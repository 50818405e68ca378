"""Element types: MLIR names, Triton's names in signatures, and the type values are computed in."""

from __future__ import annotations

from topo_opt.errors import UnsupportedError

# MLIR element type -> (Triton signature type, tl type of storage, tl type of compute). Halves are computed in f32.
_TABLE = {
    "f64": ("fp64", "tl.float64", "tl.float64"),
    "f32": ("fp32", "tl.float32", "tl.float32"),
    "f16": ("fp16", "tl.float16", "tl.float32"),
    "bf16": ("bf16", "tl.bfloat16", "tl.float32"),
    "f8E4M3FN": ("fp8e4nv", "tl.float8e4nv", "tl.float32"),
    "f8E5M2": ("fp8e5", "tl.float8e5", "tl.float32"),
    "i64": ("i64", "tl.int64", "tl.int64"),
    "i32": ("i32", "tl.int32", "tl.int32"),
    "i16": ("i16", "tl.int16", "tl.int16"),
    "i8": ("i8", "tl.int8", "tl.int8"),
    "i1": ("i1", "tl.int1", "tl.int1"),
    "index": ("i64", "tl.int64", "tl.int64"),
}

NARROW_FLOATS = ("f16", "bf16", "f8E4M3FN", "f8E5M2")


def _row(element: str) -> tuple[str, str, str]:
    row = _TABLE.get(element)
    if row is None:
        raise UnsupportedError(f"element type {element} has no Triton type", hint="the op is left to ATen")
    return row


def signature_type(element: str) -> str:
    """The type of a pointer's element in a Triton signature, e.g. `bf16`."""
    return _row(element)[0]


def storage_type(element: str) -> str:
    """`tl` type of an element in memory."""
    return _row(element)[1]


def compute_type(element: str) -> str:
    """`tl` type a loaded element is computed in."""
    return _row(element)[2]
