"""Runs Triton kernels on CPU tensors with Triton's interpreter, made right and contained.

What Triton's interpreter lacks, and is added here:
* bf16 and fp8: see `interpreter_floats`.
* libdevice: `libdevice.tanh(x)` gives None. See `libdevice_numpy`.
* reductions and scans with a combine function of the kernel's own: see `interpreter_reductions`.
* memory: a store outside a buffer corrupts the process. Each access is checked against the buffers of the launch.
* its changes to `triton.language` stay behind and break later compiles in the process; `interpreting()` undoes them. So
  it needs no environment variable and works whether or not Triton was imported before.
"""

from __future__ import annotations

import contextlib
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
from topo_opt.runtime.interpreter_floats import patch_narrow_floats
from topo_opt.runtime.interpreter_reductions import patch_reductions

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


def _patch_builder() -> None:
    """Changes the interpreter's own classes, once: nothing but the interpreter uses them."""
    from triton.runtime import interpreter as ti

    if getattr(ti.InterpreterBuilder, "_topo_opt", False):
        return
    ti.InterpreterBuilder._topo_opt = True  # type: ignore[attr-defined]
    patch_narrow_floats(ti)
    _patch_memory(ti)
    patch_reductions(ti)


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

    def assembly(self: Any, text: str, constraints: str, values: Any, *_: Any) -> Any:
        if text.startswith("tanh.approx.f32 "):
            result = ti.TensorHandle(np.tanh(values[0].data), ti.tl.float32)
        elif text.startswith("griddepcontrol.wait;"):
            # Programs run one after the other: nothing to wait for.
            result = ti.TensorHandle(np.zeros(1, np.int32), ti.tl.int32)
        else:
            raise KernelError(f"the interpreter runs no assembly: {text[:80]}")
        return types.SimpleNamespace(get_result=lambda _: result)

    builder.create_inline_asm = assembly
    # Assertions are on, as in a kernel compiled with debug=True; integer arithmetic still wraps.
    builder.create_assert = asserted
    options = ti.interpreter_builder.options
    object.__setattr__(options, "debug", True)
    object.__setattr__(options, "sanitize_overflow", False)
    checked("create_masked_load", 0, 1)
    checked("create_masked_store", 0, 2)
    checked("create_atomic_rmw", 1, 3)
    atomic = builder.create_atomic_rmw

    def whole(self: Any, kind: Any, pointer: Any, value: Any, mask: Any, *args: Any) -> Any:
        # The native code takes its operands for arrays without strides, which broadcast ones are not in every version.
        for operand in (pointer, value, mask):
            operand.data = np.ascontiguousarray(operand.data)
        return atomic(self, kind, pointer, value, mask, *args)

    builder.create_atomic_rmw = whole


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
