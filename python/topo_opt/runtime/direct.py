"""A variant launched step by step on the caller's own tensors: nothing is copied in, results are fresh tensors.

What differs from call to call is the memory of the inputs, of the results, and of what ATen calls return; everything else (weights,
state, arena) stays where it is. Prepared launches are kept by the addresses that they use: torch's allocator hands out the same few
again and again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from topo_opt.errors import TopoError
from topo_opt.runtime.addresses import overlaps, readable, span
from topo_opt.runtime.direct_parts import Aten, Collective, Copy, Kernels, Part, Relaunch
from topo_opt.runtime.dtypes import torch_dtype
from topo_opt.runtime.memory import Memory
from topo_opt.runtime.plan import (
    AtenStep,
    CollectiveStep,
    CopyStep,
    Kernel,
    KernelStep,
    OutputLeaf,
    Variant,
    ViewStep,
    read,
    written,
)
from topo_opt.runtime.short_run import ShortRun
from topo_opt.runtime.steps import (
    Launcher,
    StepFailed,
    bind_variant,
    first_line,
    parse_aten,
    retyped,
    view_of,
)


def rewritten_inputs(variant: Variant) -> frozenset[int]:
    """Input buffers that some step writes."""
    owner = {s.out: s.base for s in variant.steps if isinstance(s, ViewStep)}
    roots = {_root(b, owner) for step in variant.steps for b in written(step)}
    return frozenset(b for b in roots if variant.buffers[b].kind == "input")


def _root(buffer: int, owner: Mapping[int, int]) -> int:
    while buffer in owner:
        buffer = owner[buffer]
    return buffer


class DirectVariant:
    """One variant, with everything prepared that does not depend on the call. Not thread-safe, as the executors."""

    def __init__(
        self,
        variant: Variant,
        kernels: Mapping[str, Kernel],
        memory: Memory,
        launcher: Launcher,
    ):
        self.variant, self.device = variant, memory.device
        self.place = memory.device.index if memory.device.type == "cuda" else -1
        views = [s for s in (*variant.load_steps, *variant.steps) if isinstance(s, ViewStep)]
        self.owner = {s.out: s for s in views}
        self.base = {out: s.base for out, s in self.owner.items()}
        self.made = self._made_by_aten()
        outputs = [i for i, b in enumerate(variant.buffers) if b.kind == "output" and i not in self.made]
        inputs = [leaf.buffer for leaf in variant.inputs if leaf.buffer is not None]
        self.varying = frozenset((*inputs, *outputs, *self.made))
        self.fixed = memory.bind(variant, given=self.varying)
        # Kernels are compiled on addresses that are aligned as those of the calls will be.
        self.bound = bind_variant(variant, kernels, list(self.fixed), launcher)
        for out, step in self.owner.items():
            if self.root(out) not in self.varying:
                self.fixed[out] = view_of(self.fixed[step.base], step, variant.buffers[out].shape)
        self.outputs = [(b, self.like(variant.buffers[b].shape, variant.buffers[b].dtype)) for b in outputs]
        rewritten = rewritten_inputs(variant)
        self.inputs = [
            (i, leaf.buffer, leaf.mutated, leaf.buffer in rewritten and not leaf.mutated)
            for i, leaf in enumerate(variant.inputs)
            if leaf.buffer is not None
        ]
        """Place among the leaves, buffer, the caller wants the new value, it is written although the caller doesn't."""
        self.state = [span(self.fixed[b]) for b in variant.mutated_state]
        """Memory that is written: an input that is a part of it is read as it was before the call."""
        named = ("param", "buffer", "constant")
        self.named = [span(self.fixed[i]) for i, b in enumerate(variant.buffers) if b.kind in named]
        shared = ("temp", "zeroed", "buffer")
        self.uses_shared_memory = any(
            b.kind in shared and b.numel and i not in self.varying for i, b in enumerate(variant.buffers)
        )
        self.parts = self._parts(kernels, launcher)
        self._plan_results()
        self.short = ShortRun.of(self)

    def like(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """What `torch.empty_like` makes such a tensor of, faster than `torch.empty`; one element of memory."""
        return torch.empty((), dtype=torch_dtype(dtype), device=self.device).expand(shape)

    def root(self, buffer: int) -> int:
        """The buffer that owns the memory of `buffer`."""
        return _root(buffer, self.base)

    def _made_by_aten(self) -> frozenset[int]:
        """Buffers that an ATen call is the first to touch: what it returns can take their place."""
        found, touched = set(), set()
        for step in self.variant.steps:
            if isinstance(step, ViewStep):
                continue
            touched |= {self.root(b) for b in read(step)}
            if isinstance(step, AtenStep):
                kinds = {b: self.variant.buffers[b].kind for b in step.outputs}
                found |= {b for b, k in kinds.items() if k in ("temp", "output") and b not in touched}
            touched |= {self.root(b) for b in written(step)}
        return frozenset(found)

    def _parts(self, kernels: Mapping[str, Kernel], launcher: Launcher) -> list[Part]:
        allow_ops, launcher_ranks = launcher.allow_ops, launcher.ranks
        parts: list[Part] = []
        launches: list[tuple[KernelStep, Kernel, Relaunch]] = []
        steps = [s for s in self.variant.steps if not isinstance(s, ViewStep)]

        def close() -> None:
            if launches:
                parts.append(Kernels(self, list(launches), first=not parts))
                launches.clear()

        for step, bound in zip(steps, self.bound.steps, strict=True):
            if isinstance(step, KernelStep):
                launches.append((step, kernels[step.kernel], bound.run))  # type: ignore[arg-type]
                continue
            close()
            if isinstance(step, AtenStep):
                parts.append(Aten(self, step, parse_aten(step, allow_ops)))
            elif isinstance(step, CopyStep):
                parts.append(Copy(self, step))
            elif isinstance(step, CollectiveStep) and launcher_ranks is not None:
                parts.append(Collective(self, step, launcher_ranks))
        close()
        last: dict[int, int] = {}
        for i, part in enumerate(parts):
            for b in part.roots:
                last[b] = i
        kept = {self.root(leaf.buffer) for leaf in self.variant.outputs if leaf.buffer is not None}
        for b, i in last.items():
            if b in self.made and b not in kept:
                parts[i].frees.append(b)
        return parts

    def _plan_results(self) -> None:
        """Which results are a fresh tensor as it is; the others are copied out of memory that lives on, or is given out twice."""
        self.results: list[tuple[OutputLeaf, int, bool]] = []
        """(leaf, place of an equal leaf in front of it or its own, to be copied)."""
        seen: dict[tuple[int, str | None], int] = {}
        given_out: set[int] = set()
        for i, leaf in enumerate(self.variant.outputs):
            if leaf.kind == "literal" or leaf.buffer is None:
                self.results.append((leaf, i, False))
                continue
            key, root = (leaf.buffer, leaf.dtype), self.root(leaf.buffer)
            first = seen.setdefault(key, i)
            fresh = self.variant.buffers[root].kind == "output" or root in self.made
            if first == i:
                copied = not fresh or root in given_out or not self._whole(leaf.buffer)
                given_out.add(root)
                self.results.append((leaf, i, copied))
            else:
                self.results.append((leaf, first, False))

    def _whole(self, buffer: int) -> bool:
        """Whether a buffer is all of its memory, in order."""
        step = self.owner.get(buffer)
        if step is None:
            return True
        shape, count = self.variant.buffers[buffer].shape, 1
        for size, stride in zip(reversed(shape), reversed(step.strides)):
            if size != 1 and stride != count:
                return False
            count *= size
        return step.offset == 0 and count == self.variant.buffers[self.root(buffer)].numel

    def run_accepted(self, leaves: Sequence[Any], stream: int) -> list[Any]:
        """As `run`, for plain tensors on this device."""
        results = None if self.short is None else self.short.run(leaves, stream)
        return self.run(leaves, stream) if results is None else results

    def run(self, leaves: Sequence[Any], stream: int) -> list[Any]:
        """Results of one call on the current stream, whose raw handle is `stream`. Raises `StepFailed`."""
        tensors = list(self.fixed)
        back: list[tuple[torch.Tensor, torch.Tensor]] = []
        for i, buffer, mutated, private in self.inputs:
            given = leaves[i]
            if (
                private
                or not readable(given, self.place)
                or overlaps(given, self.named if mutated else self.state)
            ):
                own = torch.empty_like(self.fixed[buffer], device=self.device).copy_(given)
                if mutated:
                    back.append((given, own))
                given = own
            elif mutated and not given.is_inference():
                torch.autograd.graph.increment_version(given)
            tensors[buffer] = given
        for buffer, template in self.outputs:
            tensors[buffer] = torch.empty_like(template, memory_format=torch.contiguous_format)
        self._run_parts(tensors, stream)
        for given, own in back:
            given.copy_(own)
        return self._results(tensors)

    def run_on(self, memory: Sequence[torch.Tensor], stream: int) -> None:
        """One execution with inputs and results where `memory`, a tensor for each buffer, has them. Raises `StepFailed`.

        What ATen makes in between is taken as it is. A graph that records this keeps that memory in its pool.
        """
        tensors = list(self.fixed)
        for b in self.varying:
            tensors[b] = memory[b]
        self._run_parts(tensors, stream)
        for b in self.made:
            if self.variant.buffers[b].kind == "output":
                memory[b].copy_(tensors[b])

    def _run_parts(self, tensors: list[torch.Tensor], stream: int) -> None:
        changed = False
        for part in self.parts:
            try:
                part.run(tensors, stream)
            except Exception as error:
                text = error.message if isinstance(error, TopoError) else first_line(error)
                # A kernel of this part may have run before the one that failed.
                raise StepFailed(f"{part.name}: {text}", mutated=changed or part.changes) from error
            changed = changed or part.changes

    def _results(self, tensors: list[torch.Tensor]) -> list[Any]:
        results: list[Any] = []
        for i, (leaf, first, copied) in enumerate(self.results):
            if leaf.buffer is None:
                results.append(leaf.value)
            elif first != i:
                results.append(results[first])
            else:
                value = self.tensor(leaf.buffer, tensors)
                if copied:
                    value = value.clone(memory_format=torch.contiguous_format)
                results.append(value if leaf.dtype is None else retyped(value, torch_dtype(leaf.dtype)))
        return results

    def tensor(self, buffer: int, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The memory of a buffer in this call."""
        step = self.owner.get(buffer)
        if step is None or self.root(buffer) not in self.varying:
            return tensors[buffer]
        base = self.tensor(step.base, tensors)
        return view_of(base, step, self.variant.buffers[buffer].shape)

    def changes(self, buffers: Sequence[int]) -> bool:
        """Whether writing these buffers changes what the caller can see: state, or an input."""
        return any(self.variant.buffers[self.root(b)].kind in ("buffer", "input") for b in buffers)
