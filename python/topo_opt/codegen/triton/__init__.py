"""Kernel IR -> readable Triton source. One module a family; `lower_kernel` picks it by the `topo.kernel` attribute."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from torch_mlir import ir

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.target import Target
from topo_opt.codegen.triton.tiles import default_tile
from topo_opt.errors import UnsupportedError

# Family -> module with `lower(kernel) -> KernelSource`.
FAMILIES = {
    "loops": "topo_opt.codegen.triton.loops",
    "gemm": "topo_opt.codegen.triton.gemm",
    "attention": "topo_opt.codegen.triton.attention",
    "update": "topo_opt.codegen.triton.update",
    "scan": "topo_opt.codegen.triton.scan",
    "experts": "topo_opt.codegen.triton.grouped",
    "group_rows": "topo_opt.codegen.triton.group_rows",
    "top_k": "topo_opt.codegen.triton.top_k",
    "move": "topo_opt.codegen.triton.move",
    "pack": "topo_opt.codegen.triton.pack",
}


def lower_kernel(func_op: ir.Operation, target: Target | None = None) -> KernelSource:
    """The Triton kernel of a `func.func` with a `topo.kernel` attribute.

    Args:
        target: the machine the kernel is for; default tiles depend on it. None takes the figures of `Target`.

    Raises:
        UnsupportedError: the kernel has an op or an access that its family can't express.
    """
    kernel = Kernel(func_op.operation, target or Target())
    family = kernel.attributes["family"]
    if family not in FAMILIES:
        raise UnsupportedError(f"kernel family '{family}'", hint=f"known are {', '.join(FAMILIES)}")
    if "tile" not in kernel.attributes:
        kernel.attributes = {**kernel.attributes, "tile": default_tile(kernel)}
    lower: Callable[[Kernel], KernelSource] = import_module(FAMILIES[family]).lower
    return lower(kernel)
