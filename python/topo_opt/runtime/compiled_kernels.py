"""Kernels compiled for the memory that they are launched on."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from topo_opt.runtime.executor import kernel_arguments
from topo_opt.runtime.launches import prepared
from topo_opt.runtime.plan import Kernel
from topo_opt.runtime.steps import StepFailed


def compile_options(kernel: Kernel) -> dict[str, Any]:
    """What Triton is told: everything that decides the machine code is explicit, since defaults change with versions."""
    options: dict[str, Any] = {
        "num_warps": kernel.num_warps,
        "num_stages": kernel.num_stages,
        "enable_fp_fusion": True,
    }
    return options | ({"launch_pdl": True} if kernel.pdl else {})


class Launch:
    """One kernel launch with all arguments bound."""

    def __init__(self, name: str, function: Any, kernel: Kernel, arguments: list[Any]):
        self.name, self.function, self.kernel, self.arguments = name, function, kernel, arguments
        self.compiled: Any = None
        self.call: Callable[..., None] | None = None

    def compile(self) -> None:
        """Compiles for these arguments (their alignment matters); cheap when Triton has it in its cache."""
        if self.call is not None:
            return
        k = self.kernel
        compiled = self.function.warmup(*self.arguments, grid=k.grid, **compile_options(k))
        if hasattr(compiled, "result") and not hasattr(compiled, "metadata"):
            compiled = compiled.result()
        self.compiled, self.call = compiled, compiled[k.grid]

    def on(
        self, tensors: Sequence[torch.Tensor], stream: int, *, dependent: bool
    ) -> tuple[Callable[[], Any], bool]:
        """The same kernel on other memory, aligned as its own; see `launches.prepared`."""
        self.compile()
        arguments = kernel_arguments(self.kernel, list(tensors))
        ordered = [arguments[n] for n in self.function.arg_names]
        return prepared(self.compiled, self.kernel.grid, ordered, stream, dependent=dependent)

    def __call__(self) -> None:
        if self.call is None:
            self.compile()
        assert self.call is not None
        self.call(*self.arguments)


def compile_all(launches: list[Launch], device: torch.device) -> None:
    """Compiles each kernel once, several at a time: Triton leaves the interpreter lock while LLVM and ptxas work."""
    first = list({launch.name: launch for launch in launches if launch.call is None}.values())
    if len(first) > 1:
        import triton

        triton.runtime.driver.active.get_current_target()  # the driver is set up once, not by every thread

        def compile_one(launch: Launch) -> None:
            torch.cuda.set_device(device)
            launch.compile()

        with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for launch, future in [(launch, pool.submit(compile_one, launch)) for launch in first]:
                _named(launch, future.result)
    for launch in launches:
        _named(launch, launch.compile)


def _named(launch: Launch, compile_it: Callable[[], None]) -> None:
    try:
        compile_it()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise StepFailed(
            f"kernel {launch.name} does not compile: {type(error).__name__}: {lines[-1][:300]}", mutated=False
        ) from error
