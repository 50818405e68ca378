"""The ranks of a program for several devices: its process groups, the place of this process on the mesh, and collectives.

Rank r is place r of the mesh in row-major order. Every set of axes that a collective runs over has its own groups. A watch (`rank_watch`) ends the
waiting for a rank that fails, dies, stops or never comes, and lets all ranks agree that each of them is ready, or fail together
with the reason of the one that is not.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from topo_opt.errors import InputError, TopoError
from topo_opt.runtime.boxes import KernelBoxes, boxes_of_host, boxes_on_peers, exchanges_of
from topo_opt.runtime.collective_call import CollectiveCall, StagedCall
from topo_opt.runtime.plan import CollectiveStep, Exchange, Plan
from topo_opt.runtime.rank_parts import cut
from topo_opt.runtime.rank_signs import Fault
from topo_opt.runtime.rank_store import write_note
from topo_opt.runtime.rank_watch import LONGEST_S, RankWatch
from topo_opt.sharding.parts import Dims, groups, part
from topo_opt.sharding.spec import Mesh

log = logging.getLogger("topo_opt.runtime")

TIMEOUT_S = 25.0
"""How long a rank waits for one that is silent, does not come, or gets nowhere: all of them have ended half a minute after one is missing."""
AGAIN = "load the bundle again on all ranks"
POLL_S = 0.25
"""Between two looks at the other ranks while a collective waits on a CPU."""


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
        self.boxes: dict[str, KernelBoxes] = {}
        """What the kernels that exchange are given, by name."""
        self._broken: Fault | None = None
        self._kept = False
        self._calls = self._agreements = 0
        self.shares_gpu = False
        """Whether ranks have been put on the same GPU: collectives go through host memory, and no graph can hold them."""
        self.watch = _new_watch(timeout_s)
        # Garbage is collected in the middle of other work, also of calls.
        weakref.finalize(self, self.watch.dismiss).atexit = False

    def connect(self, plan: Plan) -> None:
        """Makes the process groups, which all ranks do together.

        Raises:
            RankFailure: one of them did not.
        """
        backend = "nccl" if self.device.type == "cuda" and not self.shares_gpu else "gloo"
        # The watch comes first; without it, a collective of NCCL ends its process after this time.
        limit = timedelta(seconds=self.timeout_s + 30 if backend == "nccl" else LONGEST_S)

        def make() -> None:
            self.control = dist.new_group(backend="gloo", timeout=limit)
            for axes in sorted(set(_axes_of(plan))):
                for members in groups(self.mesh, axes):
                    made = dist.new_group(sorted(members), backend=backend, timeout=limit)
                    if self.rank in members:
                        self._groups[axes] = made
                        # Groups list their ranks in ascending order; parts are in that of the axes.
                        self._order[axes] = [sorted(members).index(rank) for rank in members]
            self._make_boxes(plan)

        self._guarded(make)

    def _make_boxes(self, plan: Plan) -> None:
        """The memory of all kernels that exchange, group by group; empty on every rank when this comes back."""
        wanted = exchanges_of(plan)
        for axes in sorted({exchange.axes for exchange, _ in wanted.values()}):
            kernels = {name: found for name, found in wanted.items() if found[0].axes == axes}
            members = next(found for found in groups(self.mesh, axes) if self.rank in found)
            peers = self.device.type == "cuda" and not self.shares_gpu
            if peers and all(exchange.memory == "peers" for exchange, _ in kernels.values()):
                made = boxes_on_peers(kernels, self._groups[axes], self.device)
            else:
                made = boxes_of_host(kernels, sorted(members), self.rank, self.control, self.device)
            self.boxes |= made
        if wanted:
            dist.barrier(group=self.control)
        # A GPU goes on at once with wrong numbers, which nobody would tell from right ones: there the process ends.
        if self.device.type == "cpu" and wanted:
            self.watch.wake_by(self._stop_waiting)

    def _stop_waiting(self, fault: Fault) -> None:
        self._broken = self._broken or fault
        for boxes in self.boxes.values():
            boxes.stop()

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

    def room(self, dims: Dims, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what every rank holds of a whole tensor, padding included."""
        return tuple(-(-size // self.mesh.size(axes)) for size, axes in zip(shape, dims, strict=True))

    def cut(self, tensor: torch.Tensor, dims: Dims) -> torch.Tensor:
        """The part of this rank, a view."""
        for dim, (first, count) in enumerate(self.part(dims, tensor.shape)):
            tensor = tensor.narrow(dim, first, count)
        return tensor

    def whole(self, tensor: torch.Tensor, dims: Dims | None, shape: Sequence[int]) -> torch.Tensor:
        """A tensor of this shape of which every rank holds a part, put together on every rank, through the control group."""
        if dims is None or not any(dims):
            return tensor
        parts: list[Any] = [None] * self.count
        self.agree(None, "putting a tensor together")
        self._guarded(lambda: dist.all_gather_object(parts, tensor.cpu(), group=self.control))
        found = torch.empty(tuple(shape), dtype=tensor.dtype)
        for rank, held in enumerate(parts):
            box = part(dims, shape, self.mesh, rank)
            target = found
            for dim, (first, count) in enumerate(box):
                target = target.narrow(dim, first, count)
            target.copy_(cut(held, box))
        return found.to(tensor.device)

    def agree(self, error: TopoError | None, doing: str, report: str = "") -> dict[int, str]:
        """Comes back when all ranks are here without an error; with what each of them reports.

        Raises:
            TopoError: `error`, or what another rank reports.
            RankFailure: another rank will not come.
        """
        if error is not None:
            self.leave(f"{doing}: {error.message}", error.hint)
            raise error
        self._require_whole()
        self._agreements += 1
        found = self.watch.exchange(self._agreements, report, doing)
        if isinstance(found, Fault):
            self._broken = found
            raise self._failure()
        return found

    def progress(self, doing: str) -> None:
        """Tells the other ranks what this one is doing.

        Raises:
            RankFailure: another rank has failed or died in the meantime.
        """
        self.watch.progress(doing)
        if self._broken is None:
            self._broken = self.watch.fault()
        self._require_whole()

    @contextmanager
    def calling(self, function: str) -> Iterator[None]:
        """Around a call: all ranks make the same calls, and one that fails ends the program of all.

        Raises:
            RankFailure: another rank has failed or left.
        """
        self._calls += 1
        doing = f"in call {self._calls} of {function}"
        with self.watch.stage(doing):
            if self._broken is None:
                self._broken = self.watch.fault()
            self._require_whole()
            try:
                yield
            except BaseException as error:
                hint = error.hint if isinstance(error, TopoError) else None
                self.leave(f"{doing}: {_first_line(error)}", hint)
                raise

    def call_failure(self, function: str, message: str) -> TopoError:
        """The error of a call in which a step failed: of this rank itself, or because of another one."""
        if self._broken is None:
            return TopoError(f"{function} failed on rank {self.rank}: {message}")
        return RankFailure(
            f"{function} ended on rank {self.rank}: {self._broken.message}", hint=self._broken.hint
        )

    def _failure(self) -> RankFailure:
        assert self._broken is not None
        if not self._kept:
            self._kept = True
            for group in self._all_groups():
                _never_free(group)
        return RankFailure(self._broken.message, hint=self._broken.hint)

    def _require_whole(self) -> None:
        if self._broken is not None:
            raise self._failure()

    def _guarded(self, work: Callable[[], Any]) -> None:
        """Runs what fails, or never comes back, when another rank fails."""
        self._require_whole()
        try:
            with self.watch.waiting():
                work()
        except (RuntimeError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            # The connection to a rank breaks before anything else is known of it.
            self._broken = self.watch.ended_rank() or Fault(
                f"a collective failed: {_first_line(error)}", "the first rank that failed says why"
            )
            raise self._failure() from None

    def wait(self, work: Any) -> None:
        """Waits for a collective on the CPU, as long as the other ranks are on their way to it.

        Raises:
            RankFailure: one of them is not.
        """
        while True:
            try:
                work.wait(timedelta(seconds=POLL_S))
                return
            except RuntimeError:
                # Over by now, well or not; or only the time of this look is.
                if work.is_completed():
                    work.wait()
                    return
            fault = self.watch.fault()
            if fault is not None:
                self._broken = fault
                raise self._failure()

    def leave(self, reason: str, hint: str | None = None) -> None:
        """Says why this rank cannot go on and closes its connections, so that the others, which may be waiting for it, fail at once."""
        was_broken = self._broken is not None
        if not was_broken:
            self._broken = Fault(f"this rank has failed {reason}", hint or AGAIN)
        self.watch.fail(reason, hint, first=not was_broken)
        if was_broken:
            # Groups in which others are missing cannot be closed in order.
            return
        for group in self._all_groups():
            _never_free(group)
            try:
                _end_group(group)
            except (RuntimeError, ValueError, AssertionError):
                # A group that the failure has already closed.
                continue
        self._groups.clear()

    def _all_groups(self) -> tuple[dist.ProcessGroup, ...]:
        control = (self.control,) if hasattr(self, "control") else ()
        return (*self._groups.values(), *control)

    def close(self) -> None:
        """Tells the other ranks that this one needs them no more."""
        self._broken = self._broken or Fault("the program was closed", AGAIN)
        self.watch.close()

    def reached_by(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The memory of all ranks that a kernel reaches which is given these tensors."""
        given = {t.data_ptr() for t in tensors}
        return [s for boxes in self.boxes.values() if boxes.words.data_ptr() in given for s in boxes.spans]

    def exchanging(self, name: str, exchange: Exchange, launch: Callable[[], None]) -> Callable[[], None]:
        """The launch, on a CPU, of a kernel that waits for what the other ranks give.

        Raises (when called):
            RankFailure: they do not.
        """
        doing = f"waiting in {name} over {', '.join(exchange.axes)}"

        def run() -> None:
            self._require_whole()
            self.watch.tell(doing)
            with self.watch.waiting():
                launch()
            self._require_whole()

        return run

    def bind(self, step: CollectiveStep, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        """The collective on this memory, done as often as called.

        Raises (when called):
            RankFailure: it did not come to its end.
        """
        kind = StagedCall if self.shares_gpu else CollectiveCall
        collective = kind(self.wait, self._groups[step.axes], self._order[step.axes], step, source, target)
        doing = f"waiting at {step.kind} over {', '.join(step.axes)}"

        def run() -> None:
            self._guarded(collective)

        def run_named() -> None:
            self.watch.tell(doing)
            self._guarded(collective)

        # What a graph captures is told of by the call.
        return run if self.device.type == "cuda" and not self.shares_gpu else run_named


def _new_watch(timeout_s: float) -> RankWatch:
    store = dist.distributed_c10d._get_default_store()
    write_note(store, dist.get_rank(), "")
    return RankWatch(store, dist.get_rank(), dist.get_world_size(), timeout_s)


def tell_others(error: TopoError) -> None:
    """Leaves word for ranks that load a program with this one, if any do, that this process could not open it."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    try:
        write_note(store, dist.get_rank(), error.message)
    except RuntimeError as lost:
        log.warning("the other ranks could not be told: %s", _first_line(lost))


def _axes_of(plan: Plan) -> Sequence[tuple[str, ...]]:
    return [exchange.axes for exchange, _ in exchanges_of(plan).values()] + [
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


def _end_group(group: dist.ProcessGroup) -> None:
    """Closes a group without the other ranks. Those of NCCL are aborted: closing them in order waits for what runs on the device."""
    if dist.get_backend(group) == "nccl":
        dist.distributed_c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)


def _never_free(group: dist.ProcessGroup) -> None:
    """Keeps a group for as long as the process lives, also past the interpreter's last collection.

    Freeing one of gloo waits for its threads, in which operations may wait for a rank that has stopped: the process would not end.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def local_rank() -> int:
    """The number of this process on its host, as torchrun says."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _first_line(error: BaseException) -> str:
    lines = (error.message if isinstance(error, TopoError) else str(error)).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
