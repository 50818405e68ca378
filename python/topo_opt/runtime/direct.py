"""A variant launched step by step on the caller's own tensors: nothing is copied in, results are fresh tensors.

What differs from call to call is the memory of the inputs, of the results, and of what ATen calls return; everything else (weights,
state, arena) stays where it is. Prepared launches are kept by the addresses that they use: torch's allocator hands out the same few
again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from topo_opt.errors import TopoError
from topo_opt.runtime.aten_program import AtenCall
from topo_opt.runtime.dtypes import torch_dtype
from topo_opt.runtime.memory import Memory
from topo_opt.runtime.plan import (
    AtenStep,
    CopyStep,
    Kernel,
    KernelStep,
    OutputLeaf,
    Variant,
    ViewStep,
    read,
    written,
)
from topo_opt.runtime.steps import (
    Launcher,
    StepFailed,
    aten_results,
    bind_variant,
    first_line,
    kernel_tensors,
    parse_aten,
    retyped,
    store,
    view_of,
)

KEPT = 32
"""Sets of addresses whose launches are kept, for each run of kernels."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""A subclass may mean anything by its memory."""
POINTER_ALIGNMENT = 16
"""Bytes: what kernels are compiled for, and tensor descriptors need."""


Prepared = dict[tuple[int, ...], list[Callable[[], Any]]]
"""Launches by stream and addresses."""


class Relaunch(Protocol):
    """A kernel that is compiled and can be launched on other memory."""

    def on(
        self, tensors: Sequence[torch.Tensor], stream: int, *, dependent: bool
    ) -> tuple[Callable[[], Any], bool]:
        """The launch on these tensors, and whether it may be kept although they may be freed."""


def readable(tensor: torch.Tensor, place: int) -> bool:
    """Whether kernels on the device with index `place` (-1: the CPU) can use the memory of a tensor as it lies."""
    return (
        type(tensor) in _PLAIN
        and tensor.get_device() == place
        and tensor.is_contiguous()
        and not tensor.data_ptr() % POINTER_ALIGNMENT
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one past the last byte of a contiguous tensor."""
    start = tensor.data_ptr()
    return start, start + tensor.nbytes


def overlaps(tensor: torch.Tensor, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether a contiguous tensor shares memory with one of the spans."""
    start, end = span(tensor)
    return any(start < last and first < end for first, last in spans)


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
        self.owner = {s.out: s for s in variant.steps if isinstance(s, ViewStep)}
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
        self.parts = self._parts(kernels, launcher.allow_ops)
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

    def _parts(self, kernels: Mapping[str, Kernel], allow_ops: frozenset[str]) -> list[_Part]:
        parts: list[_Part] = []
        launches: list[tuple[KernelStep, Kernel, Relaunch]] = []
        steps = [s for s in self.variant.steps if not isinstance(s, ViewStep)]

        def close() -> None:
            if launches:
                parts.append(_Kernels(self, list(launches), first=not parts))
                launches.clear()

        for step, bound in zip(steps, self.bound.steps, strict=True):
            if isinstance(step, KernelStep):
                launches.append((step, kernels[step.kernel], bound.run))  # type: ignore[arg-type]
                continue
            close()
            if isinstance(step, AtenStep):
                parts.append(_Aten(self, step, parse_aten(step, allow_ops)))
            elif isinstance(step, CopyStep):
                parts.append(_Copy(self, step))
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
        changed = False
        for part in self.parts:
            try:
                part.run(tensors, stream)
            except Exception as error:
                text = error.message if isinstance(error, TopoError) else first_line(error)
                # A kernel of this part may have run before the one that failed.
                raise StepFailed(f"{part.name}: {text}", mutated=changed or part.changes) from error
            changed = changed or part.changes
        for given, own in back:
            given.copy_(own)
        return self._results(tensors)

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


class _Part:
    """A stretch of a variant. `frees` are the buffers that nobody needs after it."""

    def __init__(self, direct: DirectVariant, name: str, touched: Sequence[int], changed: Sequence[int]):
        self.direct, self.name = direct, name
        self.roots = sorted({direct.root(b) for b in touched} & direct.varying)
        self.changes = direct.changes(changed)
        self.frees: list[int] = []

    def run(self, tensors: list[torch.Tensor], stream: int) -> None:
        raise NotImplementedError


class _Kernels(_Part):
    """Kernels one after the other, launched by their addresses."""

    def __init__(
        self, direct: DirectVariant, launches: list[tuple[KernelStep, Kernel, Relaunch]], *, first: bool
    ):
        names = [step.kernel for step, _, _ in launches]
        name = f"kernel {names[0]}" if len(names) == 1 else f"kernels {names[0]} to {names[-1]}"
        super().__init__(
            direct, name, [b for s, _, _ in launches for b in s.buffers], [b for s, _, _ in launches for b in s.writes]
        )  # fmt: skip
        self.launches, self.first = launches, first
        self.kept: Prepared = {}
        self.own = [sorted({direct.root(b) for b in s.buffers} & direct.varying) for s, _, _ in launches]
        self.single: list[dict[tuple[int, ...], Callable[[], Any]]] = [{} for _ in launches]

    def run(self, tensors: list[torch.Tensor], stream: int) -> None:
        key = (stream, *[tensors[b].data_ptr() for b in self.roots])
        runs = self.kept.get(key)
        if runs is None:
            runs = self.prepare(tensors, stream, key, self.kept)
        for run in runs:
            run()
        for b in self.frees:
            tensors[b] = self.direct.fixed[b]

    def prepare(
        self, tensors: list[torch.Tensor], stream: int, key: tuple[int, ...], kept: Prepared
    ) -> list[Callable[[], Any]]:
        """The launches on these tensors, put into `kept` when they may be kept."""
        runs, keep = [], True
        for number, roots in enumerate(self.own):
            # Most kernels of a long variant use memory that stays: they are the same for all addresses.
            own = (stream, *[tensors[b].data_ptr() for b in roots])
            run = self.single[number].get(own)
            if run is None:
                run, lasting = self.launch(number, tensors, stream)
                keep = keep and lasting
                if lasting:
                    _keep(self.single[number], own, run)
            runs.append(run)
        if keep:
            _keep(kept, key, runs)
        return runs

    def launch(self, number: int, tensors: list[torch.Tensor], stream: int) -> tuple[Callable[[], Any], bool]:
        """One kernel on these tensors, and whether the launch may be kept."""
        step, kernel, relaunch = self.launches[number]
        now = list(tensors)
        for b in step.buffers:
            now[b] = self.direct.tensor(b, tensors)
        # What stands in front of the first kernel is the caller's, and may be writing what kernels take for constant.
        dependent = not (self.first and number == 0)
        return relaunch.on(kernel_tensors(step, kernel, now), stream, dependent=dependent)


def _keep(kept: dict[tuple[int, ...], Any], key: tuple[int, ...], value: Any) -> None:
    """Puts an entry into a table of at most `KEPT`, in place of the oldest."""
    if len(kept) >= KEPT:
        del kept[next(iter(kept))]
    kept[key] = value


class _Copy(_Part):
    """One buffer becomes another."""

    def __init__(self, direct: DirectVariant, step: CopyStep):
        super().__init__(direct, f"copy {step.dst}", (step.src, step.dst), (step.dst,))
        self.step = step

    def run(self, tensors: list[torch.Tensor], stream: int) -> None:
        target = self.direct.tensor(self.step.dst, tensors)
        target.copy_(retyped(self.direct.tensor(self.step.src, tensors), target.dtype))
        for b in self.frees:
            tensors[b] = self.direct.fixed[b]


class _Aten(_Part):
    """A call left to ATen. What it returns becomes the buffer where it can, without a copy."""

    def __init__(self, direct: DirectVariant, step: AtenStep, call: AtenCall):
        super().__init__(direct, f"aten {step.op}", (*step.inputs, *step.outputs), step.outputs)
        self.step, self.call = step, call
        self.shapes = [direct.variant.buffers[b].shape for b in step.outputs]

    def run(self, tensors: list[torch.Tensor], stream: int) -> None:
        direct = self.direct
        given = [direct.tensor(b, tensors) for b in self.step.inputs]
        results = aten_results(self.step, self.call, given, self.shapes, direct.device)
        taken = {t.untyped_storage().data_ptr() for t in given}
        for b, result in zip(self.step.outputs, results):
            if b in direct.made:
                kind = direct.fixed[b]
                storage = result.untyped_storage()
                if (
                    result.dtype is kind.dtype
                    and readable(result, direct.place)
                    and storage.nbytes() == kind.nbytes
                    and storage.data_ptr() not in taken
                ):
                    taken.add(storage.data_ptr())
                    tensors[b] = result
                    continue
                tensors[b] = torch.empty(kind.shape, dtype=kind.dtype, device=direct.device)
            store(direct.tensor(b, tensors), result)
        for b in self.frees:
            tensors[b] = direct.fixed[b]


class ShortRun:
    """The shortest way through a variant that is one run of kernels from inputs that nobody writes to results of their own."""

    def __init__(self, direct: DirectVariant, kernels: _Kernels, results: list[tuple[int, int]]):
        self.direct, self.kernels = direct, kernels
        self.places = [i for i, *_ in direct.inputs]
        self.literals = [leaf.value for leaf in direct.variant.outputs]
        buffers, leaves = direct.variant.buffers, direct.variant.outputs
        self.results = results
        """(place among the results, buffer whose memory it is)."""
        self.templates = [
            direct.like(buffers[leaf.buffer or 0].shape, leaf.dtype or buffers[leaf.buffer or 0].dtype)
            for leaf in (leaves[i] for i, _ in results)
        ]
        self.only_tensors = len(results) == len(leaves)
        self.kept: Prepared = {}

    @classmethod
    def of(cls, direct: DirectVariant) -> ShortRun | None:
        """For a variant that is as simple as that; None for others."""
        if len(direct.parts) != 1 or direct.state or any(m or p for *_, m, p in direct.inputs):
            return None
        (part,) = direct.parts
        results = []
        for i, (leaf, first, copied) in enumerate(direct.results):
            if leaf.buffer is None:
                continue
            buffer = direct.variant.buffers[leaf.buffer]
            same_size = (
                leaf.dtype is None or torch_dtype(leaf.dtype).itemsize == torch_dtype(buffer.dtype).itemsize
            )
            if copied or first != i or not same_size:
                return None
            results.append((i, direct.root(leaf.buffer)))
        if not isinstance(part, _Kernels) or {b for b, _ in direct.outputs} != {b for _, b in results}:
            return None
        return cls(direct, part, results)

    def run(self, leaves: Sequence[Any], stream: int) -> list[Any] | None:
        """Results of one call; None when an input has to be copied."""
        key = [stream]
        for i in self.places:
            tensor = leaves[i]
            at = tensor.data_ptr()
            if at % POINTER_ALIGNMENT or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
                return None
            key.append(at)
        like, order = torch.empty_like, torch.contiguous_format
        made = [like(template, memory_format=order) for template in self.templates]
        key += [t.data_ptr() for t in made]
        try:
            runs = self.kept.get(tuple(key))
            if runs is None:
                runs = self._prepare(leaves, made, stream, tuple(key))
            for run in runs:
                run()
        except Exception as error:
            text = error.message if isinstance(error, TopoError) else first_line(error)
            raise StepFailed(f"{self.kernels.name}: {text}", mutated=False) from error
        if self.only_tensors:
            return made
        results = list(self.literals)
        for (i, _), tensor in zip(self.results, made):
            results[i] = tensor
        return results

    def _prepare(
        self, leaves: Sequence[Any], made: Sequence[torch.Tensor], stream: int, key: tuple[int, ...]
    ) -> list[Callable[[], Any]]:
        tensors = list(self.direct.fixed)
        for i, buffer, *_ in self.direct.inputs:
            tensors[buffer] = leaves[i]
        for (_, buffer), tensor in zip(self.results, made):
            kind = self.direct.fixed[buffer]
            tensors[buffer] = retyped(tensor, kind.dtype).view(kind.shape)
        return self.kernels.prepare(tensors, stream, key, self.kept)
