"""The stretches of a direct variant: kernels launched by their addresses, copies, calls left to ATen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from topo_opt.runtime.addresses import readable
from topo_opt.runtime.aten_program import AtenCall
from topo_opt.runtime.plan import AtenStep, CollectiveStep, CopyStep, Kernel, KernelStep
from topo_opt.runtime.steps import aten_results, kernel_tensors, retyped, store

if TYPE_CHECKING:
    from topo_opt.runtime.direct import DirectVariant
    from topo_opt.runtime.ranks import Ranks

KEPT = 32
"""Sets of addresses whose launches are kept, for each run of kernels."""
Prepared = dict[tuple[int, ...], list[Callable[[], Any]]]
"""Launches by stream and addresses."""


class Relaunch(Protocol):
    """A kernel that is compiled and can be launched on other memory."""

    def on(
        self, tensors: Sequence[torch.Tensor], stream: int, *, dependent: bool
    ) -> tuple[Callable[[], Any], bool]:
        """The launch on these tensors, and whether it may be kept although they may be freed."""


class Part:
    """A stretch of a variant. `frees` are the buffers that nobody needs after it."""

    def __init__(self, direct: DirectVariant, name: str, touched: Sequence[int], changed: Sequence[int]):
        self.direct, self.name = direct, name
        self.roots = sorted({direct.root(b) for b in touched} & direct.varying)
        self.changes = direct.changes(changed)
        self.frees: list[int] = []

    def run(self, tensors: list[torch.Tensor], stream: int) -> None:
        raise NotImplementedError


class Kernels(Part):
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


class Copy(Part):
    """One buffer becomes another."""

    def __init__(self, direct: DirectVariant, step: CopyStep):
        super().__init__(direct, f"copy {step.dst}", (step.src, step.dst), (step.dst,))
        self.step = step

    def run(self, tensors: list[torch.Tensor], stream: int) -> None:
        target = self.direct.tensor(self.step.dst, tensors)
        target.copy_(retyped(self.direct.tensor(self.step.src, tensors), target.dtype))
        for b in self.frees:
            tensors[b] = self.direct.fixed[b]


class Collective(Part):
    """A collective with the other ranks."""

    def __init__(self, direct: DirectVariant, step: CollectiveStep, ranks: Ranks):
        name = f"collective {step.kind} over {', '.join(step.axes)}"
        super().__init__(direct, name, (step.src, step.dst), (step.dst,))
        self.step, self.ranks = step, ranks

    def run(self, tensors: list[torch.Tensor], stream: int) -> None:
        source, target = (self.direct.tensor(b, tensors) for b in (self.step.src, self.step.dst))
        self.ranks.bind(self.step, source, target)()
        for b in self.frees:
            tensors[b] = self.direct.fixed[b]


class Aten(Part):
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
