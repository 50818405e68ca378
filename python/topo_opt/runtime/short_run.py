"""The shortest way through a direct variant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from topo_opt.errors import TopoError
from topo_opt.runtime.addresses import POINTER_ALIGNMENT
from topo_opt.runtime.direct_parts import Kernels, Prepared
from topo_opt.runtime.dtypes import torch_dtype
from topo_opt.runtime.steps import StepFailed, first_line, retyped

if TYPE_CHECKING:
    from topo_opt.runtime.direct import DirectVariant


class ShortRun:
    """The shortest way through a variant that is one run of kernels from inputs that nobody writes to results of their own."""

    def __init__(self, direct: DirectVariant, kernels: Kernels, results: list[tuple[int, int]]):
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
        if not isinstance(part, Kernels) or {b for b, _ in direct.outputs} != {b for _, b in results}:
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
