"""A variant bound to memory: every step a call without arguments, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from topo_opt.errors import TopoError, UntrustedError
from topo_opt.runtime.aten_program import AtenCall
from topo_opt.runtime.dtypes import torch_dtype, torch_dtype_of_triton
from topo_opt.runtime.load_time import LoadStep, LoadTime
from topo_opt.runtime.plan import (
    AtenStep,
    CollectiveStep,
    CopyStep,
    Kernel,
    KernelStep,
    OutputLeaf,
    Variant,
    ViewStep,
)

if TYPE_CHECKING:
    from topo_opt.runtime.ranks import Ranks


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Tensors made inside are ordinary ones without gradient, also when the caller is in inference mode: later calls, which
    may not be, write into them."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Launcher(Protocol):
    """How an executor launches kernels. `allow_ops`: namespaces of custom operators that ATen steps may call.

    `ranks`: the other processes of a program for several devices; None for a program of one.
    """

    allow_ops: frozenset[str]
    ranks: Ranks | None

    def prepare(self, name: str, kernel: Kernel, tensors: list[torch.Tensor]) -> Callable[[], None]:
        """The launch of one kernel on these tensors (typed as the kernel's parameters), done as often as called."""


@dataclass(frozen=True)
class BoundStep:
    """One thing to run. `name` is for messages."""

    kind: str
    name: str
    run: Callable[[], None]


class StepFailed(TopoError):
    """A step failed. `mutated` tells whether state had already been changed in this call."""

    def __init__(self, message: str, *, mutated: bool):
        super().__init__(message)
        self.mutated = mutated


@dataclass
class BoundVariant:
    """Memory and steps of one variant."""

    variant: Variant
    tensors: list[torch.Tensor]
    steps: list[BoundStep]
    first_mutation: int
    """Number of steps that run before the first change of state."""
    load_steps: list[LoadStep]

    def load(self, load_time: LoadTime) -> bool:
        """Computes what this variant is the first to need of its weights; whether there was any. Raises `StepFailed`."""
        try:
            return load_time.add(self.load_steps)
        except Exception as error:
            text = error.message if isinstance(error, TopoError) else first_line(error)
            raise StepFailed(f"preparing the weights: {text}", mutated=False) from error

    def copy_in(self, leaves: list[Any]) -> None:
        """Copies the caller's tensors into the static inputs; any strides."""
        for leaf, value in zip(self.variant.inputs, leaves):
            if leaf.buffer is not None:
                self.tensors[leaf.buffer].copy_(value)

    def run_steps(self) -> None:
        """Runs every step once. Raises `StepFailed`."""
        for i, step in enumerate(self.steps):
            try:
                step.run()
            except Exception as error:
                text = error.message if isinstance(error, TopoError) else first_line(error)
                raise StepFailed(
                    f"{step.kind} {step.name}: {text}", mutated=i > self.first_mutation
                ) from error

    def copy_out(self, leaves: list[Any]) -> list[Any]:
        """Writes mutated inputs back to the caller's tensors and returns the results as tensors of their own."""
        for leaf, value in zip(self.variant.inputs, leaves):
            if leaf.mutated and leaf.buffer is not None:
                value.copy_(self.tensors[leaf.buffer])
        made: dict[tuple[int, str | None], torch.Tensor] = {}
        return [self._result(out, made) for out in self.variant.outputs]

    def _result(self, out: OutputLeaf, made: dict[tuple[int, str | None], torch.Tensor]) -> Any:
        if out.kind == "literal" or out.buffer is None:
            return out.value
        key = (out.buffer, out.dtype)
        if key not in made:
            # A copy: the static memory is overwritten by the next call, and callers keep results.
            value = self.tensors[out.buffer].clone(memory_format=torch.contiguous_format)
            made[key] = value if out.dtype is None else retyped(value, torch_dtype(out.dtype))
        return made[key]

    def mutated_tensors(self) -> list[torch.Tensor]:
        """The state that one call changes."""
        return [self.tensors[b] for b in self.variant.mutated_state]


def retyped(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same bytes seen as another dtype of the same size (int8 as uint8, ...); flat when the size differs."""
    if tensor.dtype == dtype:
        return tensor
    if tensor.element_size() == dtype.itemsize:
        return tensor.view(dtype)
    return tensor.reshape(-1).view(dtype)


def bind_variant(
    variant: Variant, kernels: Mapping[str, Kernel], tensors: list[torch.Tensor], launcher: Launcher
) -> BoundVariant:
    """Prepares every step: descriptors, compiled kernels and ATen calls are made here, not per call."""
    load_steps = list(_bind_load_steps(variant, kernels, tensors, launcher))
    steps: list[BoundStep] = []
    first, state = None, set(variant.mutated_state)
    base: dict[int, int] = {}
    for step in variant.steps:
        match step:
            case ViewStep():
                tensors[step.out] = view_of(tensors[step.base], step, variant.buffers[step.out].shape)
                base[step.out] = base.get(step.base, step.base)
                continue
            case KernelStep():
                bound = _bind_kernel(step, kernels[step.kernel], tensors, launcher)
                changed = step.writes
            case AtenStep():
                bound, changed = _bind_aten(step, tensors, launcher.allow_ops), step.outputs
            case CopyStep():
                bound = BoundStep("copy", str(step.dst), _copier(tensors[step.dst], tensors[step.src]))
                changed = (step.dst,)
            case CollectiveStep():
                bound, changed = bind_collective(step, tensors, launcher.ranks), (step.dst,)
        if first is None and any(base.get(b, b) in state for b in changed):
            first = len(steps)
        steps.append(bound)
    return BoundVariant(variant, tensors, steps, len(steps) if first is None else first, load_steps)


def _bind_load_steps(
    variant: Variant, kernels: Mapping[str, Kernel], tensors: list[torch.Tensor], launcher: Launcher
) -> Iterator[LoadStep]:
    roots = list(range(len(variant.buffers)))
    for step in variant.load_steps:
        if isinstance(step, ViewStep):
            tensors[step.out] = view_of(tensors[step.base], step, variant.buffers[step.out].shape)
            roots[step.out] = roots[step.base]
        elif isinstance(step, KernelStep):
            bound = _bind_kernel(step, kernels[step.kernel], tensors, launcher)
            named = {roots[b]: variant.buffers[roots[b]] for b in step.buffers}
            reads = tuple(b.name for b in named.values() if b.name and b.kind != "prepared")
            makes = tuple(variant.buffers[roots[b]].name or "" for b in step.writes)
            yield LoadStep(makes, reads, bound.run)


def bind_collective(step: CollectiveStep, tensors: Sequence[torch.Tensor], ranks: Ranks | None) -> BoundStep:
    """A collective on memory."""
    if ranks is None:
        raise TopoError(f"a collective over {', '.join(step.axes)} needs the other ranks")
    run = ranks.bind(step, tensors[step.src], tensors[step.dst])
    return BoundStep("collective", f"{step.kind} over {', '.join(step.axes)}", run)


def view_of(base: torch.Tensor, step: ViewStep, shape: tuple[int, ...]) -> torch.Tensor:
    """The view that a step makes of its base."""
    return base.as_strided(shape, step.strides, base.storage_offset() + step.offset)


def kernel_tensors(step: KernelStep, kernel: Kernel, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The memory of every parameter of a kernel, seen as the type that the parameter points to."""
    return [
        retyped(tensors[b], torch_dtype_of_triton(p.dtype))
        for b, p in zip(step.buffers, kernel.params, strict=True)
    ]


def _bind_kernel(
    step: KernelStep, kernel: Kernel, tensors: list[torch.Tensor], launcher: Launcher
) -> BoundStep:
    typed = kernel_tensors(step, kernel, tensors)
    return BoundStep("kernel", step.kernel, launcher.prepare(step.kernel, kernel, typed))


def _copier(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    source = retyped(source, target.dtype)

    def copy() -> None:
        target.copy_(source)

    return copy


def parse_aten(step: AtenStep, allow_ops: frozenset[str]) -> AtenCall:
    """The call of an ATen step. Raises `UntrustedError` when it asks for operands that the step does not give."""
    call = AtenCall.parse(step.call, step.op, extra_namespaces=allow_ops)
    if call.operand_count > len(step.inputs):
        raise UntrustedError(
            f"{step.op} takes {call.operand_count} operands, its step gives {len(step.inputs)}"
        )
    return call


def aten_results(
    step: AtenStep,
    call: AtenCall,
    given: Sequence[torch.Tensor],
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
) -> list[torch.Tensor]:
    """What the call returns for the memory of the step's inputs, one tensor for each output of the step, of these shapes."""
    operands = [retyped(t, torch_dtype(d)) for t, d in zip(given, step.input_dtypes)]
    results = [r for r in call.run(operands, device) if isinstance(r, torch.Tensor)]
    if len(results) < len(shapes):
        raise TopoError(f"{step.op} gave {len(results)} tensors, the plan expects {len(shapes)}")
    for result, shape in zip(results, shapes):
        if tuple(result.shape) != tuple(shape):
            raise TopoError(f"{step.op} gave the shape {list(result.shape)}, the plan expects {list(shape)}")
    return results[: len(shapes)]


def store(target: torch.Tensor, result: torch.Tensor) -> None:
    """Writes what an ATen call returned into the memory of a buffer, whose dtype may be another of the same size."""
    if result.dtype.itemsize == target.dtype.itemsize and not result.dtype.is_complex:
        target.copy_(retyped(result.contiguous(), target.dtype))
    else:
        target.copy_(result)


def _bind_aten(step: AtenStep, tensors: list[torch.Tensor], allow_ops: frozenset[str]) -> BoundStep:
    call = parse_aten(step, allow_ops)
    given, targets = [tensors[b] for b in step.inputs], [tensors[b] for b in step.outputs]
    shapes = [tuple(t.shape) for t in targets]
    device = tensors[0].device if tensors else torch.device("cpu")

    def run() -> None:
        for target, result in zip(targets, aten_results(step, call, given, shapes, device)):
            store(target, result)

    return BoundStep("aten", step.op, run)


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
