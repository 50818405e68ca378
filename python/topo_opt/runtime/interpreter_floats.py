"""bf16 and fp8 in Triton's interpreter.

* bf16: it computes on the raw bit patterns. Arithmetic, dot products and casts go through fp32, rounding to nearest even.
* fp8: rounding up a full mantissa does not carry into the exponent. Casts go through torch's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns (uint16) to float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: np.ndarray) -> np.ndarray:
    """Any float values to bfloat16 bit patterns, by way of float32, to nearest even."""
    wide = np.ascontiguousarray(values, dtype=np.float32).reshape(np.shape(values))
    bits = wide.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded.astype(np.uint16))


_FP8 = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}


def fp8_to_f32(bits: np.ndarray, name: str) -> np.ndarray:
    """Bit patterns (uint8) of Triton's fp8 type `name` to float32, exactly."""
    return torch.from_numpy(np.array(bits)).view(_FP8[name]).float().numpy()


def f32_to_fp8(values: np.ndarray, name: str) -> np.ndarray:
    """Any float values to fp8 bit patterns, by way of float32, as torch rounds them."""
    return torch.from_numpy(np.array(values, dtype=np.float32)).to(_FP8[name]).view(torch.uint8).numpy()


def patch_narrow_floats(ti: Any) -> None:
    """Changes the classes of `triton.runtime.interpreter` (`ti`) so that both types compute as a GPU does."""
    import triton.language as tl

    builder, handle = ti.InterpreterBuilder, ti.TensorHandle

    def is_bf16(h: Any) -> bool:
        return isinstance(h, handle) and h.dtype.scalar == tl.bfloat16

    def widen(h: Any) -> Any:
        return handle(bf16_to_f32(h.data), tl.float32) if is_bf16(h) else h

    def narrow(result: Any) -> Any:
        if result.data.dtype == np.bool_:
            return handle(result.data, tl.int1)
        return handle(f32_to_bf16(result.data), tl.bfloat16)

    def through_f32(name: str) -> None:
        original = getattr(builder, name)

        def method(self: Any, *args: Any) -> Any:
            if any(map(is_bf16, args)):
                return narrow(original(self, *map(widen, args)))
            result = original(self, *args)
            # A comparison keeps its operands' type, and a scalar one then splats to integers, which no mask may be.
            return handle(result.data, tl.int1) if result.data.dtype == np.bool_ else result

        setattr(builder, name, method)

    for name in ("binary_op", "unary_op", "create_erf", "create_rsqrt", "create_fma"):
        through_f32(name)

    ternary = builder.ternary_op

    def ternary_op(self: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        if op is np.where or not is_bf16(other):
            return ternary(self, lhs, rhs, other, op)
        return narrow(ternary(self, widen(lhs), widen(rhs), widen(other), op))

    dot = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return dot(self, widen(a), widen(b), d, *rest)

    cast = builder.cast_impl

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        if is_bf16(source) and kind.scalar != tl.bfloat16:
            wide = widen(source)
            return wide if kind.scalar == tl.float32 else cast(self, wide, kind)
        if kind.scalar == tl.bfloat16 and not is_bf16(source):
            return handle(f32_to_bf16(source.data), tl.bfloat16)
        return cast(self, source, kind)

    convert = builder.create_fp_to_fp

    def create_fp_to_fp(self: Any, source: Any, kind: Any, rounding: Any) -> Any:
        nearest = rounding is None or rounding == ti._ir.ROUNDING_MODE.RTNE
        if source.dtype.scalar.name in _FP8:
            exact = handle(fp8_to_f32(source.data, source.dtype.scalar.name), tl.float32)
            return exact if kind.scalar == tl.float32 else self.create_fp_to_fp(exact, kind, rounding)
        if nearest and kind.scalar.name in _FP8:
            return handle(f32_to_fp8(widen(source).data, kind.scalar.name), kind.scalar)
        if nearest and tl.bfloat16 in (source.dtype.scalar, kind.scalar) and _is_wide(source, kind):
            return cast_impl(self, source, kind)
        return convert(self, source, kind, rounding)

    def _is_wide(source: Any, kind: Any) -> bool:
        return source.dtype.scalar.primitive_bitwidth >= 16 and kind.scalar.primitive_bitwidth >= 16

    def get_bf16(self: Any, value: float) -> Any:
        return handle(f32_to_bf16(np.array([value], dtype=np.float32)), tl.bfloat16)

    builder.ternary_op, builder.create_dot, builder.get_bf16 = ternary_op, create_dot, get_bf16
    builder.cast_impl, builder.create_fp_to_fp = cast_impl, create_fp_to_fp
