"""Kernels of family `loops` from functions of tensors, and their code for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch_mlir import ir

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.frontend.ingest import structured_module
from topo_opt.pipeline import levels
from topo_opt.pipeline.run import run as run_pipeline
from topo_opt.runtime.kernel_module import load_function


def kernels_of(function: Callable, *inputs: torch.Tensor) -> tuple[ir.Module, list[ir.Operation]]:
    """Kernel IR of a function of tensors, without tiles; the module keeps the operations alive."""
    module = structured_module(function, inputs)
    with module.context, ir.Location.unknown():
        run_pipeline(levels.pipeline(2, ("schedule",)), module)
    return module, [o.operation for o in module.body.operations if "topo.kernel" in o.operation.attributes]


def compiled(source: KernelSource) -> Any:
    """What Triton makes of a kernel for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = load_function(source.source, f"{source.name}.py", source.name)
    signature = {p.name: f"*{p.dtype}" for p in source.params} | {c: "constexpr" for c in source.constexprs}
    aligned = {(n,): [["tt.divisibility", 16]] for n in range(len(source.params))}
    return triton.compile(
        ASTSource(function, signature, dict(source.constexprs), aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": source.num_warps, "num_stages": source.num_stages},
    )
