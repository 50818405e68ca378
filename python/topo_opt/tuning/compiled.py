"""A kernel source as plain data, back to something that Triton compiles or launches. Needs torch and triton only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from topo_opt.runtime.executor import kernel_arguments
from topo_opt.runtime.plan import Descriptor, Kernel, KernelParam


def launch_record(source: Mapping[str, Any]) -> Kernel:
    """How the runtime launches this kernel: the same code compiles for tuning and for use, so that Triton's cache serves both."""
    params = tuple(
        KernelParam(
            p["name"],
            p["dtype"],
            Descriptor.of(p["descriptor"]) if p["descriptor"] else None,
        )
        for p in source["params"]
    )
    return Kernel(
        file=f"kernels/{source['name']}.py",
        function=source["name"],
        family=source["family"],
        params=params,
        grid=tuple(source["grid"]),
        num_warps=source["num_warps"],
        num_stages=source["num_stages"],
        constexprs=dict(source["constexprs"]),
        pdl=source["pdl"],
    )


def ordered_arguments(function: Any, kernel: Kernel, tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The arguments of a loaded Triton function in its order: tensors, descriptors, constants."""
    arguments = kernel_arguments(kernel, list(tensors))
    return [arguments[n] for n in function.arg_names]
