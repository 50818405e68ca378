"""The libdevice functions for Triton's interpreter, which has none: there `libdevice.tanh(x)` gives None.

Each is computed by torch in float64 and rounded once, so results are at least as close as the GPU's. As on the GPU, only
fp32 and fp64 are taken; a function that is not in the tables raises instead of giving None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

Array: TypeAlias = torch.Tensor
T = torch


def _half_away(x: Array) -> Array:
    return T.sign(x) * T.floor(T.abs(x) + 0.5)


def _pi_times(fn: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda x: fn(T.fmod(x, 2) * T.pi)


UNARY: dict[str, Callable[[Array], Array]] = {
    name: getattr(torch, fn)
    for name, fn in {
        "abs": "abs", "floor": "floor", "ceil": "ceil", "trunc": "trunc", "rint": "round", "nearbyint": "round",
        "sqrt": "sqrt", "sqrt_rn": "sqrt", "rsqrt": "rsqrt", "rsqrt_rn": "rsqrt", "rcp_rn": "reciprocal",
        "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log", "log2": "log2", "log10": "log10", "log1p": "log1p",
        "fast_expf": "exp", "fast_logf": "log", "fast_log2f": "log2", "fast_log10f": "log10",
        "sin": "sin", "cos": "cos", "tan": "tan", "asin": "asin", "acos": "acos", "atan": "atan",
        "fast_sinf": "sin", "fast_cosf": "cos", "fast_tanf": "tan", "fast_tanhf": "tanh",
        "sinh": "sinh", "cosh": "cosh", "tanh": "tanh", "asinh": "asinh", "acosh": "acosh", "atanh": "atanh",
        "erf": "erf", "erfc": "erfc", "erfinv": "erfinv", "lgamma": "lgamma",
    }.items()
} | {
    "round": _half_away,
    "exp10": lambda x: T.pow(10.0, x),
    "fast_exp10f": lambda x: T.pow(10.0, x),
    "cbrt": lambda x: T.sign(x) * T.pow(T.abs(x), 1 / 3),
    "rcbrt": lambda x: T.sign(x) * T.pow(T.abs(x), -1 / 3),
    "sinpi": _pi_times(T.sin),
    "cospi": _pi_times(T.cos),
    "tgamma": lambda x: T.where(x > 0, T.exp(T.lgamma(x)), T.pi / (T.sin(T.pi * x) * T.exp(T.lgamma(1 - x)))),
    "logb": lambda x: T.floor(T.log2(T.abs(x))),
    "saturatef": lambda x: T.clamp(T.nan_to_num(x, nan=0.0), 0, 1),
    "normcdf": T.special.ndtr,
    "normcdfinv": T.special.ndtri,
    "erfcx": T.special.erfcx,
    "erfcinv": lambda x: T.erfinv(1 - x),
    "j0": T.special.bessel_j0,
    "j1": T.special.bessel_j1,
    "y0": T.special.bessel_y0,
    "y1": T.special.bessel_y1,
    "cyl_bessel_i0": T.special.i0,
    "cyl_bessel_i1": T.special.i1,
}  # fmt: skip

BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "atan2": T.atan2,
    "copysign": T.copysign,
    "fmod": T.fmod,
    "pow": T.pow,
    "fast_powf": T.pow,
    "hypot": T.hypot,
    "rhypot": lambda x, y: 1 / T.hypot(x, y),
    "fdim": lambda x, y: T.where(x > y, x - y, T.where(T.isnan(x) | T.isnan(y), x + y, 0.0)),
    "remainder": lambda x, y: x - y * T.round(x / y),
    "ldexp": lambda x, n: T.ldexp(x, n),
    "scalbn": lambda x, n: T.ldexp(x, n),
    "div_rn": T.div,
    "fast_dividef": T.div,
    "add_rn": T.add,
    "sub_rn": T.sub,
    "mul_rn": T.mul,
}

PREDICATES: dict[str, tuple[Callable[[Array], Array], str]] = {
    "isnan": (T.isnan, "int1"),
    "isinf": (T.isinf, "int1"),
    "finitef": (T.isfinite, "int1"),
    "isfinited": (T.isfinite, "int1"),
    "signbit": (T.signbit, "int32"),
}

INTEGER: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "popc": lambda x: np.bitwise_count(x.view(f"u{x.itemsize}")),
    "clz": lambda x: np.vectorize(lambda v: x.itemsize * 8 - int(v).bit_length(), otypes=[np.int32])(
        x.view(f"u{x.itemsize}")
    ),
    "ffs": lambda x: np.vectorize(lambda v: (int(v) & -int(v)).bit_length(), otypes=[np.int32])(
        x.view(f"u{x.itemsize}")
    ),
}


def make(name: str, handle_type: Any, tl: Any, semantic: Any) -> Callable[..., Any]:
    """The interpreter's version of `libdevice.<name>` on `tl.tensor` values.

    Args:
        handle_type: the interpreter's `TensorHandle`.
        semantic: its `interpreter_semantic`, which turns numbers into tensors.
    """

    def wrap(data: np.ndarray, dtype: Any, like: Any) -> Any:
        kind = tl.block_type(dtype, list(data.shape)) if like.type.is_block() else dtype
        return tl.tensor(handle_type(data, dtype), kind)

    def call(*args: Any, **_: Any) -> Any:
        tensors = [a if isinstance(a, tl.tensor) else semantic.to_tensor(a) for a in args]
        first = tensors[0]
        like = next((t for t in tensors if t.type.is_block()), first)
        dtype = first.dtype
        if name in INTEGER:
            return wrap(INTEGER[name](first.handle.data).astype(np.int32), tl.int32, like)
        if name == "abs" and dtype.is_int():
            return wrap(np.abs(first.handle.data), dtype, like)
        if dtype not in (tl.float32, tl.float64):
            raise TypeError(f"libdevice.{name} takes fp32 or fp64, not {dtype}")
        if name == "nextafter":
            return wrap(np.nextafter(first.handle.data, tensors[1].handle.data), dtype, like)
        wide = [torch.from_numpy(np.array(t.handle.data, dtype=np.float64)) for t in tensors]
        if name in PREDICATES:
            fn, out = PREDICATES[name]
            made = tl.int1 if out == "int1" else tl.int32
            return wrap(fn(wide[0]).numpy().astype(bool if out == "int1" else np.int32), made, like)
        if name in UNARY:
            result = UNARY[name](wide[0])
        elif name in BINARY:
            result = BINARY[name](*wide)
        elif name in ("fma", "fma_rn"):
            result = wide[0] * wide[1] + wide[2]
        else:
            raise NotImplementedError(f"libdevice.{name} has no implementation for the interpreter")
        return wrap(result.numpy().astype(first.handle.data.dtype), dtype, like)

    call.__name__ = name
    return call
