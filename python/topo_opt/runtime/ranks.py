"""The ranks of a program for several devices: its process groups, the place of this process on the mesh, and collectives.

Rank r is place r of the mesh in row-major order. Every set of axes that a collective runs over has its own groups, with a time
limit, so that a rank that does not come ends the others with an error. A control group on the CPU lets all ranks agree that each of them
is ready, or fail together with the reason of the one that is not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from topo_opt.errors import InputError, TopoError
from topo_opt.runtime.plan import CollectiveStep, Plan
from topo_opt.sharding.parts import Dims, groups, part
from topo_opt.sharding.spec import Mesh

TIMEOUT_S = 25.0
"""How long a collective waits for the other ranks: all of them have ended half a minute after one is missing."""
AGREE_TIMEOUT_S = 1800.0
"""How long ranks wait for each other while weights are read or kernels compiled. A rank that dies is noticed at once."""

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


class RankFailure(TopoError):
    """A collective did not come to its end: another rank failed, is missing or was too slow."""


def mesh_of(plan: Plan) -> Mesh:
    """The mesh of a plan for several ranks."""
    devices = plan.devices if len(plan.devices) == plan.ranks else tuple(str(r) for r in range(plan.ranks))
    return Mesh(tuple((axis.name, axis.size) for axis in plan.mesh), devices)


class Ranks:
    """This process among those that run one program.

    Args:
        device: where tensors of collectives lie; NCCL serves "cuda", gloo "cpu".

    Raises:
        InputError: no process group was initialised, or one of another size.
        RankFailure: the ranks did not come together.
    """

    def __init__(self, plan: Plan, device: torch.device, *, timeout_s: float = TIMEOUT_S):
        self.mesh, self.device, self.timeout_s = mesh_of(plan), device, timeout_s
        self.count = len(self.mesh.devices)
        _require_group(self.count)
        self.rank = dist.get_rank()
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._order: dict[tuple[str, ...], list[int]] = {}
        self._broken = ""
        wanted = sorted({axes for axes in _axes_of(plan)})
        try:
            limit = timedelta(seconds=AGREE_TIMEOUT_S)
            self.control = dist.new_group(backend="gloo", timeout=limit)
            for axes in wanted:
                self._make_groups(axes)
        except (RuntimeError, ValueError) as error:
            raise RankFailure(f"the ranks could not be connected: {_first_line(error)}") from None

    def _make_groups(self, axes: tuple[str, ...]) -> None:
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        for members in groups(self.mesh, axes):
            limit = timedelta(seconds=self.timeout_s)
            made = dist.new_group(sorted(members), backend=backend, timeout=limit)
            if self.rank in members:
                self._groups[axes] = made
                # Groups list their ranks in ascending order; parts are in that of the axes.
                self._order[axes] = [sorted(members).index(rank) for rank in members]

    @property
    def place(self) -> tuple[int, ...]:
        """The coordinates of this rank on the mesh."""
        return self.mesh.coordinates(self.rank)

    @property
    def is_first_of_host(self) -> bool:
        """Whether this rank does what one process a host does for all of them."""
        return local_rank() == 0

    def part(self, dims: Dims, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """(first, count) of what this rank holds along every dimension of a whole tensor."""
        return part(dims, shape, self.mesh, self.rank)

    def cut(self, tensor: torch.Tensor, dims: Dims) -> torch.Tensor:
        """The part of this rank, a view.

        Raises:
            InputError: a dimension does not divide.
        """
        try:
            box = self.part(dims, tensor.shape)
        except ValueError as error:
            raise InputError(f"a tensor of shape {list(tensor.shape)} cannot be split: {error}") from None
        for dim, (first, count) in enumerate(box):
            tensor = tensor.narrow(dim, first, count)
        return tensor

    def whole(self, tensor: torch.Tensor, dims: Dims | None) -> torch.Tensor:
        """A tensor of which every rank holds a part, put together on every rank, through the control group."""
        if dims is None or not any(dims):
            return tensor
        parts: list[Any] = [None] * self.count
        self._guarded(lambda: dist.all_gather_object(parts, tensor.cpu(), group=self.control))
        shape = [size * self.mesh.size(axes) for size, axes in zip(tensor.shape, dims, strict=True)]
        found = torch.empty(shape, dtype=tensor.dtype)
        for rank, held in enumerate(parts):
            target = found
            for dim, (first, count) in enumerate(part(dims, shape, self.mesh, rank)):
                target = target.narrow(dim, first, count)
            target.copy_(held)
        return found.to(tensor.device)

    def agree(self, error: TopoError | None, doing: str) -> None:
        """Comes back when all ranks are here without an error.

        Raises:
            TopoError: `error`, or what another rank reports.
        """
        reports: list[Any] = [None] * self.count
        mine = None if error is None else (error.message, error.hint)
        try:
            self._guarded(lambda: dist.all_gather_object(reports, mine, group=self.control))
        except RankFailure:
            if error is not None:
                raise error from None
            raise
        if error is not None:
            raise error
        failed = [(rank, report) for rank, report in enumerate(reports) if report is not None]
        if failed:
            rank, (message, hint) = failed[0]
            raise InputError(f"rank {rank} failed {doing}: {message}", hint=hint)

    def _guarded(self, work: Callable[[], Any]) -> None:
        if self._broken:
            raise RankFailure(f"rank {self.rank}: {self._broken}")
        try:
            work()
        except (RuntimeError, ValueError) as error:
            self._broken = f"another rank failed, is missing or came too late (limit {self.timeout_s:g} s): {_first_line(error)}"
            raise RankFailure(
                f"rank {self.rank} of {self.count}: {self._broken}",
                hint="the first rank that failed says why",
            ) from None

    def leave(self, reason: str) -> None:
        """Closes the connections of this rank, so that the others, which may be waiting for it, fail at once."""
        if self._broken:
            return
        self._broken = reason
        for group in (*self._groups.values(), self.control):
            try:
                dist.destroy_process_group(group)
            except (RuntimeError, ValueError, AssertionError):
                # A group that the failure has already closed.
                continue
        self._groups.clear()

    def bind(self, step: CollectiveStep, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        """The collective on this memory, done as often as called.

        Raises (when called):
            RankFailure: it did not come to its end.
        """
        collective = _Bound(self._groups[step.axes], self._order[step.axes], step, source, target)

        def run() -> None:
            self._guarded(collective)

        return run


def _axes_of(plan: Plan) -> Sequence[tuple[str, ...]]:
    return [
        step.axes
        for function in plan.functions.values()
        for variant in function.variants
        for step in (*variant.load_steps, *variant.steps)
        if isinstance(step, CollectiveStep)
    ]


def _require_group(count: int) -> None:
    start = f"start {count} processes, such as torchrun --nproc-per-node={count} -m topo_opt.tools.run BUNDLE"
    if not dist.is_available():
        raise InputError("this build of PyTorch has no torch.distributed, the bundle needs it")
    if not dist.is_initialized():
        raise InputError(
            f"the bundle is for {count} ranks, and no process group was initialised",
            hint=f"{start}; in Python call torch.distributed.init_process_group first",
        )
    if dist.get_world_size() != count:
        raise InputError(
            f"the bundle is for {count} ranks, the process group has {dist.get_world_size()}", hint=start
        )


class _Bound:
    """One collective on its memory. Parts along another dimension than the first are brought in front and back."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        order: list[int],
        step: CollectiveStep,
        source: torch.Tensor,
        target: torch.Tensor,
    ):
        self.group, self.step = group, step
        # No backend takes truth values, which are bytes.
        self.source, self.target = (
            t.view(torch.uint8) if t.dtype == torch.bool else t for t in (source, target)
        )
        self.n = len(order)
        self.order = None if order == sorted(order) else torch.tensor(order, device=source.device)
        """Where in the group the part with a number is."""
        self.back = None if self.order is None else torch.argsort(self.order)
        self.op = _OPS[step.combiner]
        self.run = {
            "all_reduce": self._all_reduce,
            "reduce_scatter": self._reduce_scatter,
            "all_gather": self._all_gather,
            "all_to_all": self._all_to_all,
        }[step.kind]

    def __call__(self) -> None:
        self.run()

    def _all_reduce(self) -> None:
        if self.source.data_ptr() != self.target.data_ptr():
            self.target.copy_(self.source)
        self._reduce(self.target)

    def _reduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, op=self.op, group=self.group)

    def _reduce_scatter(self) -> None:
        parts = self._split(self.source, self.step.dim)
        if self.source.device.type == "cuda":
            received = torch.empty_like(parts[0])
            _reduce_scatter(received, self._grouped(parts), op=self.op, group=self.group)
            self.target.copy_(received)
            return
        # gloo has no such operation for all types.
        total = self.source.clone()
        self._reduce(total)
        place = dist.get_rank(self.group)
        mine = place if self.back is None else int(self.back[place])
        self.target.copy_(self._split(total, self.step.dim)[mine])

    def _all_gather(self) -> None:
        mine = self.source.contiguous()
        received = mine.new_empty((self.n, *mine.shape))
        _all_gather(received.flatten(0, 1) if mine.dim() else received, mine, group=self.group)
        self._store(received, self.step.dim)

    def _all_to_all(self) -> None:
        parts = self._grouped(self._split(self.source, self.step.dim))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.group)
        self._store(received, self.step.source)

    def _split(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Parts along a dimension, by number: the part comes first."""
        shape = (*tensor.shape[:dim], self.n, tensor.shape[dim] // self.n, *tensor.shape[dim + 1 :])
        return tensor.reshape(shape).movedim(dim, 0)

    def _grouped(self, parts: torch.Tensor) -> torch.Tensor:
        """Parts by their place in the group, dense."""
        return (parts if self.back is None else parts.index_select(0, self.back)).contiguous()

    def _store(self, received: torch.Tensor, dim: int) -> None:
        """Puts what came from the group, by place, side by side along a dimension."""
        ordered = received if self.order is None else received.index_select(0, self.order)
        shape = list(self.target.shape)
        inner = (*shape[:dim], self.n, shape[dim] // self.n, *shape[dim + 1 :])
        self.target.view(inner).movedim(dim, 0).copy_(ordered)


def local_rank() -> int:
    """The number of this process on its host, as torchrun says."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
