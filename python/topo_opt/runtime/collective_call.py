"""A collective step as calls of torch.distributed. Parts along another dimension than the first are brought in front and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from topo_opt.runtime.plan import CollectiveStep

_OPS: dict[str, Any] = {
    "add": dist.ReduceOp.SUM,
    "mul": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "or": dist.ReduceOp.MAX,
    "and": dist.ReduceOp.MIN,
}
"""Combiner -> reduction. `or` and `and` are of truth values, which are bytes 0 and 1."""


# PyTorch is about to rename them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CollectiveCall:
    """One collective on its memory, done as often as called.

    Args:
        wait: for what was started on a CPU.
        order: where in the group, whose ranks ascend, the part with a number is.
    """

    def __init__(
        self,
        wait: Callable[[Any], None],
        group: dist.ProcessGroup,
        order: list[int],
        step: CollectiveStep,
        source: torch.Tensor,
        target: torch.Tensor,
    ):
        self.group, self.step = group, step
        self.on_gpu = source.device.type == "cuda"
        self.wait = wait
        # No backend takes truth values, which are bytes.
        self.source, self.target = (
            t.view(torch.uint8) if t.dtype == torch.bool else t for t in (source, target)
        )
        self.n = len(order)
        self.order = None if order == sorted(order) else torch.tensor(order, device=source.device)
        """Where in the group the part with a number is."""
        self.back = None if self.order is None else torch.argsort(self.order)
        self.op = _OPS[step.combiner]

    def __call__(self) -> None:
        # No method of its own is kept: memory and groups are let go at once, not when garbage is collected.
        match self.step.kind:
            case "all_reduce":
                self._all_reduce()
            case "reduce_scatter":
                self._reduce_scatter()
            case "all_gather":
                self._all_gather()
            case "all_to_all":
                self._all_to_all()

    def _all_reduce(self) -> None:
        if self.source.data_ptr() != self.target.data_ptr():
            self.target.copy_(self.source)
        self._reduce(self.target)

    def _done(self, collective: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> None:
        """One collective: in the order of the stream on a GPU, to its end on a CPU."""
        work = collective(*tensors, group=self.group, async_op=not self.on_gpu, **options)
        if work is not None:
            self.wait(work)

    def _reduce(self, tensor: torch.Tensor) -> None:
        self._done(dist.all_reduce, tensor, op=self.op)

    def _reduce_scatter(self) -> None:
        parts = self._split(self.source, self.step.dim)
        if self.on_gpu:
            self._done(_reduce_scatter, self.target, self._grouped(parts), op=self.op)
            return
        # gloo has no such operation for all types.
        total = self.source.clone()
        self._reduce(total)
        place = dist.get_rank(self.group)
        mine = place if self.back is None else int(self.back[place])
        self.target.copy_(self._split(total, self.step.dim)[mine])

    def _all_gather(self) -> None:
        mine = self.source.contiguous()
        received = self._room(mine.shape, self.step.dim)
        self._done(_all_gather, received.flatten(0, 1) if mine.dim() else received, mine)
        self._store(received, self.step.dim)

    def _all_to_all(self) -> None:
        parts = self._grouped(self._split(self.source, self.step.dim))
        received = self._room(parts.shape[1:], self.step.source)
        self._done(dist.all_to_all_single, received, parts)
        self._store(received, self.step.source)

    def _split(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Parts along a dimension, by number: the part comes first."""
        shape = (*tensor.shape[:dim], self.n, tensor.shape[dim] // self.n, *tensor.shape[dim + 1 :])
        return tensor.reshape(shape).movedim(dim, 0)

    def _grouped(self, parts: torch.Tensor) -> torch.Tensor:
        """Parts by their place in the group, dense."""
        return (parts if self.back is None else parts.index_select(0, self.back)).contiguous()

    def _room(self, shape: Sequence[int], dim: int) -> torch.Tensor:
        """Memory for a part of this shape from every place: the target's own, where they lie there as they come."""
        if self.order is None and all(size == 1 for size in self.target.shape[:dim]):
            return self.target.view(self.n, *shape)
        return self.target.new_empty((self.n, *shape))

    def _store(self, received: torch.Tensor, dim: int) -> None:
        """Puts what came from the group, by place, side by side along a dimension of the target."""
        if received.data_ptr() == self.target.data_ptr():
            return
        ordered = received if self.order is None else received.index_select(0, self.order)
        shape = list(self.target.shape)
        inner = (*shape[:dim], self.n, shape[dim] // self.n, *shape[dim + 1 :])
        self.target.view(inner).movedim(dim, 0).copy_(ordered)


class StagedCall:
    """One collective of ranks that share a GPU, on copies in host memory: NCCL takes one rank a GPU."""

    def __init__(
        self,
        wait: Callable[[Any], None],
        group: dist.ProcessGroup,
        order: list[int],
        step: CollectiveStep,
        source: torch.Tensor,
        target: torch.Tensor,
    ):
        self.source, self.target = source, target
        self.given, self.found = (torch.empty(t.shape, dtype=t.dtype) for t in (source, target))
        self.call = CollectiveCall(wait, group, order, step, self.given, self.found)

    def __call__(self) -> None:
        self.given.copy_(self.source)
        self.call()
        self.target.copy_(self.found)
