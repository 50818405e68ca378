"""What an executor is, and the one for the CPU: the same plan and kernels through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from topo_opt.errors import InputError
from topo_opt.runtime import interpreter, kernel_scan
from topo_opt.runtime.bundle import Bundle
from topo_opt.runtime.kernel_module import load_function
from topo_opt.runtime.memory import Memory
from topo_opt.runtime.plan import IN_ORDER, SWAPPED, Descriptor, Kernel, Variant
from topo_opt.runtime.repeated_call import KnownCall
from topo_opt.runtime.steps import BoundVariant, StepFailed, bind_variant, plain_tensors

FARTHEST_APART = 1 << 40
"""Bytes: strides of a tensor map are less (CUDA driver API, cuTensorMapEncodeTiled)."""


@dataclass(frozen=True)
class VariantStatus:
    """How a variant runs: in one graph or step by step, and why not in a graph."""

    symbol: str
    bound: bool
    graph: bool
    reason: str
    mode: str = ""
    """"direct" (launches on the caller's tensors), "graph", "graph on the caller's tensors", "steps" (launches on static
    memory), "" before the first call."""


class Executor(Protocol):
    """Runs variants on one device."""

    def run(self, variant: Variant, leaves: list[Any]) -> list[Any]:
        """Results of one call, as tensors of their own; `leaves` are the caller's, already checked. Raises `StepFailed`."""

    def status(self, variant: Variant) -> VariantStatus:
        """How the variant runs."""

    def refresh(self) -> None:
        """Prepares the weights again, some of which have changed."""

    def repeated(self, variant: Variant, *, own_results: bool) -> KnownCall | None:
        """The short way for more calls of a variant that has run; None where there is none."""

    def close(self) -> None:
        """Frees what was prepared for calls."""


class KernelSources:
    """The kernel files of a bundle, scanned before first use."""

    def __init__(self, bundle: Bundle):
        self.bundle = bundle
        self.checked: dict[str, str] = {}

    def text(self, kernel: Kernel) -> tuple[str, str]:
        """Source and file name (for messages and debuggers) of a kernel. Raises `UntrustedError`."""
        if kernel.file not in self.checked:
            self.checked[kernel.file] = kernel_scan.check(self.bundle.texts[kernel.file], kernel.file)
        return self.checked[kernel.file], str(self.bundle.path / kernel.file)


class InterpretExecutor:
    """Kernels on the CPU by Triton's interpreter: slow, exact about memory, and needs no GPU."""

    def __init__(self, bundle: Bundle, memory: Memory, *, allow_ops: frozenset[str] = frozenset()):
        self.allow_ops, self.ranks = allow_ops, memory.ranks
        self.kernels, self.memory = bundle.plan.kernels, memory
        self.sources = KernelSources(bundle)
        self.functions: dict[str, Any] = {}
        self.variants: dict[int, BoundVariant] = {}

    def run(self, variant: Variant, leaves: list[Any]) -> list[Any]:
        with plain_tensors(), interpreter.interpreting():
            bound = self.variants.get(id(variant))
            if bound is None:
                bound = bind_variant(variant, self.kernels, self.memory.bind(variant), self)
                bound.load(self.memory.load_time)
                self.variants[id(variant)] = bound
            bound.copy_in(leaves)
            try:
                bound.run_steps()
            except StepFailed:
                self.memory.clear_zeroed()
                raise
            return bound.copy_out(leaves)

    def status(self, variant: Variant) -> VariantStatus:
        return VariantStatus(
            variant.symbol, id(variant) in self.variants, False, "the interpreter has no graphs"
        )

    def refresh(self) -> None:
        with plain_tensors(), interpreter.interpreting():
            self.memory.load_time.run_again()

    def repeated(self, variant: Variant, *, own_results: bool) -> KnownCall | None:
        return None  # a call takes seconds, and every one is checked

    def close(self) -> None:
        self.variants.clear()

    def prepare(self, name: str, kernel: Kernel, tensors: list[torch.Tensor]) -> Callable[[], None]:
        if name not in self.functions:
            source, file = self.sources.text(kernel)
            self.functions[name] = load_function(source, file, kernel.function)
        function = self.functions[name]
        arguments = kernel_arguments(kernel, tensors)
        reached = list(tensors)
        if self.ranks is not None:
            reached += self.ranks.reached_by(tensors)

        def launch() -> None:
            interpreter.launch(function, kernel.grid, arguments, reached)

        if self.ranks is not None and kernel.exchange is not None:
            return self.ranks.exchanging(name, kernel.exchange, launch)
        return launch


def kernel_arguments(kernel: Kernel, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Every parameter of a kernel by name: tensors, descriptors made on the host, constants."""
    given = {p.name: t for p, t in zip(kernel.params, tensors, strict=True)}
    arguments: dict[str, Any] = dict(given)
    for p in kernel.params:
        if p.descriptor is not None:
            other = None if p.descriptor.beside is None else given[p.descriptor.beside]
            arguments[p.name] = _described(p.descriptor, given[p.name], other)
    return arguments | dict(kernel.constexprs)


def _described(descriptor: Descriptor, tensor: torch.Tensor, other: torch.Tensor | None) -> Any:
    """A descriptor of a tensor, or of two."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    shape, strides = list(descriptor.shape), list(descriptor.strides)
    if other is not None:
        apart = other.data_ptr() - tensor.data_ptr()
        if abs(apart) >= FARTHEST_APART:
            raise InputError(
                f"two weights of a kernel lie {abs(apart)} bytes apart, and are read as one operand, which spans less than {FARTHEST_APART}",
                hint="allocate all weights of a program in the same way",
            )
        shape[0], strides[0] = (SWAPPED if apart < 0 else IN_ORDER), abs(apart) // tensor.element_size()
        tensor = other if apart < 0 else tensor
    return TensorDescriptor(tensor, shape, strides, list(descriptor.block))
