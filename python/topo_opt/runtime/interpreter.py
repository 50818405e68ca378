"""Runs Triton kernels on CPU tensors with Triton's interpreter, made right and contained.

What Triton's interpreter lacks, and is added here:
* bf16: it computes on the raw bit patterns. Arithmetic, dot products and casts go through fp32, rounding to nearest even.
* fp8: rounding up a full mantissa does not carry into the exponent. Casts go through torch's.
* libdevice: `libdevice.tanh(x)` gives None. See `libdevice_numpy`.
* reductions and scans with a combine function of the kernel's own go element by element; here they go by halves.
* memory: a store outside a buffer corrupts the process. Each access is checked against the buffers of the launch.
* its changes to `triton.language` stay behind and break later compiles in the process; `interpreting()` undoes them. So
  it needs no environment variable and works whether or not Triton was imported before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import threading
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from topo_opt.errors import TopoError
from topo_opt.runtime import libdevice_numpy

_LOCK = threading.RLock()
_MISSING = object()
_bounds: tuple[np.ndarray, np.ndarray] | None = None
"""Start and end addresses of the buffers of the running launch, sorted."""


class KernelError(TopoError):
    """A kernel failed: out of bounds, or an operation that the interpreter refuses."""


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """While active, `@triton.jit` makes interpreted functions and `triton.language` works on numpy."""
    import triton

    with _LOCK:
        _patch_builder()
        saved = _snapshot()
        knob = triton.knobs.runtime.__dict__.get("interpret", _MISSING)
        try:
            _replace_jit_functions()
            _replace_libdevice()
            triton.knobs.runtime.__dict__["interpret"] = True
            yield
        finally:
            if knob is _MISSING:
                triton.knobs.runtime.__dict__.pop("interpret", None)
            else:
                triton.knobs.runtime.__dict__["interpret"] = knob
            _restore(saved)


def launch(
    function: Any, grid: tuple[int, int, int], arguments: dict[str, Any], buffers: Sequence[torch.Tensor]
) -> None:
    """Runs one kernel; call inside `interpreting()`.

    Args:
        arguments: every parameter by name: tensors, tensor descriptors and constants.
        buffers: the memory that the kernel may touch.

    Raises:
        KernelError: an access outside `buffers`, or anything that the kernel's own code raises.
    """
    global _bounds
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in buffers if t.numel())
    starts = np.array([s for s, _ in spans], dtype=np.uint64)
    _bounds = starts, np.maximum.accumulate(np.array([e for _, e in spans], dtype=np.uint64))
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", RuntimeWarning
            )  # numpy on NaN and overflow, which a GPU passes over
            _direct_executor()(function.rewrite(), function.arg_names, grid)(**arguments)
    except TopoError:
        raise
    except Exception as error:
        cause = error
        while cause.__cause__ is not None and not isinstance(cause, KernelError):
            cause = cause.__cause__  # type: ignore[assignment]
        text = cause.message if isinstance(cause, KernelError) else f"{type(cause).__name__}: {cause}"
        raise KernelError(text) from error
    finally:
        _bounds = None


def _direct_executor() -> Any:
    """Triton's grid loop without its copies of every storage to and from the host: ours are on the host."""
    from triton.runtime.interpreter import GridExecutor

    class Direct(GridExecutor):
        def _init_args_hst(self, args_dev: Any, kwargs: Any) -> Any:
            return list(args_dev), dict(kwargs)

        def _restore_args_dev(self, args_dev: Any, args_hst: Any, kwargs: Any, kwargs_hst: Any) -> None:
            return None

    return Direct


def _places() -> list[Any]:
    """Modules and classes that Triton's interpreter changes."""
    import triton.language as tl
    from triton.language.extra import libdevice

    names = ("core", "standard", "math", "random", "extra")
    modules = [
        tl,
        libdevice,
        *_cuda_modules(),
        *(m for n in names if isinstance(m := getattr(tl, n, None), types.ModuleType)),
    ]
    core = tl.core
    classes = [
        getattr(core, n)
        for n in ("tensor", "dtype", "tensor_descriptor_base", "condition")
        if hasattr(core, n)
    ]
    return modules + classes


def _cuda_modules() -> list[Any]:
    """`triton.language.extra.cuda`: Triton executes it twice, and which module an import finds depends on its form."""
    import triton.language.extra as extra

    found = [importlib.import_module("triton.language.extra.cuda"), getattr(extra, "cuda", None)]
    return list({id(m): m for m in found if m is not None}.values())


def _snapshot() -> list[tuple[Any, dict[str, Any]]]:
    return [(place, dict(vars(place))) for place in _places()]


def _restore(saved: list[tuple[Any, dict[str, Any]]]) -> None:
    for place, before in saved:
        for name, value in dict(vars(place)).items():
            old = before.get(name, _MISSING)
            if old is value:
                continue
            # Names that rewritten functions look up in their module must stay; a class gets back exactly what it had.
            if old is not _MISSING:
                setattr(place, name, old)
            elif isinstance(place, type) and name not in ("__annotations__", "__weakref__", "__dict__"):
                delattr(place, name)


_interpreted: dict[int, tuple[Any, Any]] = {}


def _replace_jit_functions() -> None:
    """Triton's own library functions (`tl.sum`, ...) as interpreted functions, when they were imported as compiled ones."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for place in _places():
        for name, value in dict(vars(place)).items():
            if isinstance(value, JITFunction):
                if id(value) not in _interpreted:
                    _interpreted[id(value)] = (value, InterpretedFunction(value.fn))
                replacement = _interpreted[id(value)][1]
                setattr(place, name, _member(replacement) if isinstance(place, type) else replacement)


def _member(function: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return method


def _replace_libdevice() -> None:
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import TensorHandle, interpreter_semantic

    for name, value in dict(vars(libdevice)).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            setattr(libdevice, name, libdevice_numpy.make(name, TensorHandle, tl, interpreter_semantic))
    for cuda in _cuda_modules():
        for name in ("gdc_wait", "gdc_launch_dependents"):
            if hasattr(cuda, name):
                setattr(cuda, name, lambda **_: None)  # programs run one after the other: nothing to wait for


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


def _patch_builder() -> None:
    """Changes the interpreter's own classes, once: nothing but the interpreter uses them."""
    from triton.runtime import interpreter as ti

    if getattr(ti.InterpreterBuilder, "_topo_opt", False):
        return
    ti.InterpreterBuilder._topo_opt = True  # type: ignore[attr-defined]
    # numpy multiplies f32 exactly enough to stand for every way in which a GPU splits such products.
    allowed = ("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6")
    options = dataclasses.replace(ti.interpreter_builder.options, allowed_dot_input_precisions=allowed)
    ti.interpreter_builder.options = options
    _patch_bf16(ti)
    _patch_memory(ti)
    _patch_reductions(ti)


def _patch_bf16(ti: Any) -> None:
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


def _patch_memory(ti: Any) -> None:
    builder = ti.InterpreterBuilder

    def checked(name: str, pointer: int, mask: int) -> None:
        original = getattr(builder, name)

        def method(self: Any, *args: Any, **options: Any) -> Any:
            _check_access(args[pointer], args[mask], name)
            return original(self, *args, **options)

        setattr(builder, name, method)

    def asserted(self: Any, condition: Any, message: str) -> None:
        if not np.all(condition.data):
            raise KernelError(f"assertion failed: {message}")

    # Assertions are on, as in a kernel compiled with debug=True; integer arithmetic still wraps.
    builder.create_assert = asserted
    options = ti.interpreter_builder.options
    object.__setattr__(options, "debug", True)
    object.__setattr__(options, "sanitize_overflow", False)
    checked("create_masked_load", 0, 1)
    checked("create_masked_store", 0, 2)
    checked("create_atomic_rmw", 1, 3)


def _check_access(pointers: Any, mask: Any, operation: str) -> None:
    if _bounds is None:
        return
    addresses = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.data.shape))
    touched = addresses[np.broadcast_to(mask.data, addresses.shape).astype(bool)]
    if touched.size == 0:
        return
    starts, ends = _bounds
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    at = np.searchsorted(starts, touched, side="right") - 1
    inside = (
        (at >= 0) & (touched + np.uint64(size) <= ends[np.maximum(at, 0)])
        if starts.size
        else np.zeros(1, bool)
    )
    if not inside.all():
        count = int((~inside).sum())
        verb = "loads" if "load" in operation else "stores"
        raise KernelError(f"it {verb} {count} of {touched.size} elements outside its buffers")


def _patch_reductions(ti: Any) -> None:
    """Reductions and scans with the kernel's own combine function: by halves, on whole slices at a time.

    The combine function is associative by contract, as on the GPU, where the order is also not defined.
    """
    import triton.language as tl

    def tensor(data: np.ndarray, like: Any) -> Any:
        kind = tl.block_type(like.dtype, list(data.shape)) if data.ndim else like.dtype
        return tl.core.tensor(
            ti.TensorHandle(data if data.ndim else data.reshape(1), like.dtype.scalar), kind
        )

    def combine(self: Any, inputs: Any, left: list[np.ndarray], right: list[np.ndarray]) -> list[np.ndarray]:
        both = [*map(tensor, left, inputs), *map(tensor, right, inputs)]
        result = self.combine_fn(*both)
        parts = result if isinstance(result, tuple) else (result,)
        return [
            np.broadcast_to(np.asarray(p.handle.data), left[0].shape).astype(x.dtype)
            for p, x in zip(parts, left)
        ]

    def generic_reduce(self: Any, input: Any) -> Any:
        whole = self.axis is None
        arrays = [
            np.asarray(t.handle.data).reshape(-1) if whole else np.asarray(t.handle.data) for t in input
        ]
        arrays = [np.moveaxis(a, 0 if whole else self.axis, 0) for a in arrays]
        while (length := arrays[0].shape[0]) > 1:
            half = length // 2
            odd = [a[2 * half :] for a in arrays]
            arrays = combine(self, input, [a[:half] for a in arrays], [a[half : 2 * half] for a in arrays])
            if length % 2:
                arrays = [np.concatenate([a, o]) for a, o in zip(arrays, odd)]
        out = []
        for a, t in zip(arrays, input):
            data = a[0]
            if self.keep_dims:
                data = data.reshape((1,) * len(t.shape)) if whole else np.expand_dims(data, self.axis)
            out.append(self.to_tensor(data, t.dtype))
        return out

    def generic_scan(self: Any, input: Any) -> Any:
        arrays = [np.moveaxis(np.asarray(t.handle.data), self.axis, 0).copy() for t in input]
        step, length = 1, arrays[0].shape[0]
        while step < length:
            # Blocks keep their power-of-two length: the first `step` results are combined and thrown away.
            shifted = [np.concatenate([a[:step], a[:-step]]) for a in arrays]
            later = combine(self, input, shifted, arrays)
            arrays = [np.concatenate([a[:step], b[step:]]) for a, b in zip(arrays, later)]
            step *= 2
        return [self.to_tensor(np.moveaxis(a, 0, self.axis), t.dtype) for a, t in zip(arrays, input)]

    def total(self: Any, input: Any) -> Any:
        data = input.handle.data
        if input.dtype.scalar == tl.bfloat16:
            wide = np.sum(bf16_to_f32(data), axis=self.axis, keepdims=self.keep_dims)
            return self.to_tensor(f32_to_bf16(wide), input.dtype)
        return self.to_tensor(
            np.sum(data, axis=self.axis, keepdims=self.keep_dims, dtype=data.dtype), input.dtype
        )

    ti.ReduceOps.generic_reduce, ti.ReduceOps.sum, ti.ScanOps.generic_scan = (
        generic_reduce,
        total,
        generic_scan,
    )
