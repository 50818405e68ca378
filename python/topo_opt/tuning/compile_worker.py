"""Compiles candidates into Triton's cache on disk, without touching a GPU. One JSON line in, one out.

    python -m topo_opt.tuning.compile_worker BACKEND ARCH WARP_SIZE

The way through Triton is that of a launch, with a driver that only knows the target: the GPU worker then finds every
candidate in the cache.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch

from topo_opt.runtime.compiled_kernels import compile_options
from topo_opt.runtime.dtypes import torch_dtype_of_triton
from topo_opt.runtime.kernel_module import load_function
from topo_opt.tuning.compiled import launch_record, ordered_arguments

_ENOUGH = 256  # elements: nothing is read, only type and alignment count


class TargetOnly:
    """What Triton asks a driver for before it compiles."""

    def __init__(self, target: Any):
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_source(source: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles one kernel for the driver's target; {"shared": bytes of shared memory}, or {"error": why not}."""
    try:
        kernel = launch_record(source)
        tensors = [torch.empty(_ENOUGH, dtype=torch_dtype_of_triton(p.dtype)) for p in kernel.params]
        function = load_function(source["source"], kernel.file, kernel.function)
        arguments = ordered_arguments(function, kernel, tensors)
        compiled = function.warmup(*arguments, grid=kernel.grid, **compile_options(kernel))
        if hasattr(compiled, "result") and not hasattr(compiled, "metadata"):
            compiled = compiled.result()
        return {"shared": int(compiled.metadata.shared)}
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {lines[-1][:300]}"}


def main() -> None:
    """Answers until standard input ends."""
    import triton
    from triton.backends.compiler import GPUTarget

    backend, arch, warp_size = sys.argv[1:]
    triton.runtime.driver.set_active(TargetOnly(GPUTarget(backend, int(arch), int(warp_size))))
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(compile_source(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
