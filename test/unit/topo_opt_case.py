"""The Python API as tests use it: compiled for the CPU, in this process."""

from typing import Any

import torch

import topo_opt


def compiled(module: torch.nn.Module, args: tuple[Any, ...], **options: Any) -> Any:
    """The program of a module for the `cpu` topology."""
    return topo_opt.compile(module.eval(), args, topology="cpu", device="cpu", **options)
