"""Kernel launches with everything prepared: one call of Triton's C launcher, with pointers as numbers.

`compiled[grid](...)` looks up the device, the stream and the hooks, and asks every tensor for its pointer. How the C launcher is
called differs between versions of Triton, so its arguments are not put together here: Triton's own launcher does that once, with a
recorder in place of the C function.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch

_NO_HOOKS = (None, None, None)
"""Launch metadata, the hook before and the hook after a launch."""


def prepared(
    compiled: Any, grid: Sequence[int], arguments: Sequence[Any], stream: int, *, dependent: bool
) -> tuple[Callable[[], Any], bool]:
    """A launch of a compiled kernel on `stream` with these arguments, and whether it may be kept.

    What may be kept holds addresses only: it keeps no tensor alive, and is right whenever memory of the same use is at the same
    addresses.

    Args:
        compiled: Triton's compiled kernel, loaded.
        arguments: one for each parameter of the kernel: tensors, host-made descriptors, constants.
        stream: the raw stream.
        dependent: the launch may start while the kernel in front of it runs, if it was compiled for that.
    """
    launcher = compiled.run
    if not dependent and getattr(launcher, "launch_pdl", False):
        launcher = copy.copy(launcher)
        launcher.launch_pdl = False
    given = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
    whole = (*grid, stream, compiled.function, compiled.packed_metadata, *_NO_HOOKS, *given)
    if _takes_no_memory(launcher):
        function, recorded = _recorded(launcher, whole)
        return partial(function, *recorded), True
    # Memory of its own is allocated for each launch, or this is no launcher that we know.
    return partial(launcher, *whole), not any(hasattr(a, "base") for a in given)


def _takes_no_memory(launcher: Any) -> bool:
    """Whether a launcher only passes on what it is given."""
    sizes = ("global_scratch_size", "profile_scratch_size", "gsan_enabled")
    return hasattr(launcher, "launch") and not any(getattr(launcher, size, 0) for size in sizes)


def _recorded(launcher: Any, whole: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The C function that the launcher would call, and with what."""
    seen: list[tuple[Any, ...]] = []

    def record(*arguments: Any) -> None:
        seen.append(arguments)

    probe = copy.copy(launcher)
    inner = launcher.launch
    names = inner.__code__.co_freevars if isinstance(inner, FunctionType) else ()
    if "launcher" in names:
        # The wrapper that encodes descriptors; it calls the C function with what it made of them.
        cells = dict(zip(names, inner.__closure__ or ()))
        function = cells["launcher"].cell_contents
        cells["launcher"] = CellType(record)
        probe.launch = FunctionType(
            inner.__code__, inner.__globals__, inner.__name__, inner.__defaults__, tuple(cells.values())
        )
    else:
        function, probe.launch = inner, record
    probe(*whole)
    (arguments,) = seen
    return function, arguments
