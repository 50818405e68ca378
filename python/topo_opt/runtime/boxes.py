"""Memory that the ranks of a program write for one another, for kernels that exchange (`codegen.triton.exchange`).

Every rank has a box for each such kernel. On GPUs whose memory the others can reach, boxes lie there (symmetric memory); else in
memory of the host that all ranks map, and that the driver maps for the GPU. It is a file without a name, so that nothing is left behind by
ranks that die, and how much of it there may be is no matter of /dev/shm.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from topo_opt.errors import InputError
from topo_opt.runtime.plan import ALIGNMENT, Exchange, Kernel, Plan

ABSENT = 255
"""Every byte of a box before the first launch."""
_PORTABLE_AND_MAPPED = 3
"""Flags of `cudaHostRegister`: for all contexts of the process, and with an address for the GPU."""


@dataclass
class KernelBoxes:
    """What one kernel is given: `words` (place of this rank, 0 as long as it is to wait, addresses of the boxes; int64) and `turns` (int32,
    one a program). `spans` are the tensors behind the addresses, where the host can read them."""

    words: torch.Tensor
    turns: torch.Tensor
    spans: tuple[torch.Tensor, ...] = ()
    held: list[Any] = field(default_factory=list)
    """What keeps the memory alive."""

    def stop(self) -> None:
        """Lets the kernel wait no longer: what it adds up from now on is wrong."""
        self.words[1] = 1


def exchanges_of(plan: Plan) -> dict[str, tuple[Exchange, Kernel]]:
    """The kernels of a plan that exchange, by name in order."""
    return {
        name: (kernel.exchange, kernel)
        for name, kernel in sorted(plan.kernels.items())
        if kernel.exchange is not None
    }


def offsets(exchanges: Sequence[Exchange]) -> tuple[list[int], int]:
    """Where in the memory of a rank the box of every kernel starts, and the bytes of all."""
    found, end = [], 0
    for exchange in exchanges:
        found.append(end)
        end += -(-exchange.nbytes // ALIGNMENT) * ALIGNMENT
    return found, end


Exchanging = Mapping[str, tuple[Exchange, Kernel]]
"""Kernels that exchange, by name."""


def kernel_boxes(
    kernels: Exchanging,
    place: int,
    addresses: Sequence[int],
    device: torch.device,
    *,
    spans: Sequence[torch.Tensor] = (),
    held: Sequence[Any] = (),
) -> dict[str, KernelBoxes]:
    """What every kernel of one group is given.

    Args:
        place: of this rank in the group.
        addresses: of the memory of every rank in the group, as this rank sees it.
    """
    starts, _ = offsets([exchange for exchange, _ in kernels.values()])
    found = {}
    for start, (name, (_, kernel)) in zip(starts, kernels.items(), strict=True):
        words = torch.tensor([place, 0, *(a + start for a in addresses)], dtype=torch.int64, device=device)
        turns = torch.zeros(kernel.grid[0], dtype=torch.int32, device=device)
        found[name] = KernelBoxes(words, turns, tuple(spans), list(held))
    return found


def boxes_on_peers(
    kernels: Exchanging, group: dist.ProcessGroup, device: torch.device
) -> dict[str, KernelBoxes]:
    """Boxes in symmetric memory on every GPU of a group, whose ranks call this together.

    Raises:
        InputError: a GPU cannot reach another one.
    """
    # The switch's multicast stays off: a process that dies while it is used can take the switch out of service for the whole host.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch.distributed import _symmetric_memory as symmetric

    _, nbytes = offsets([exchange for exchange, _ in kernels.values()])
    memory = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    memory.fill_(ABSENT)
    torch.cuda.synchronize(device)
    try:
        handle = symmetric.rendezvous(memory, group)
    except RuntimeError as error:
        raise InputError(
            f"GPUs cannot reach each other's memory: {str(error).splitlines()[0][:200]}",
            hint="compile for a topology that says so: its links between these GPUs are no NVLink",
        ) from error
    return kernel_boxes(
        kernels, dist.get_rank(group), list(handle.buffer_ptrs), device, held=[memory, handle]
    )


def boxes_of_host(
    kernels: Exchanging, members: Sequence[int], rank: int, control: dist.ProcessGroup, device: torch.device
) -> dict[str, KernelBoxes]:
    """Boxes in memory of the host for a group of ranks `members`; all ranks of the program call this together.

    Args:
        control: the group of all ranks.

    Raises:
        InputError: the memory cannot be had.
    """
    _, nbytes = offsets([exchange for exchange, _ in kernels.values()])
    made = SharedFile(nbytes, len(members)) if rank == members[0] else None
    paths: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(paths, None if made is None else made.path, group=control)
    file = made or SharedFile(nbytes, len(members), paths[members[0]])
    addresses, memory, held = file.map(device)
    dist.barrier(group=control)
    file.close()
    return kernel_boxes(kernels, members.index(rank), addresses, device, spans=(memory,), held=held)


class SharedFile:
    """Memory of the host for the ranks of one group, `nbytes` for each: a file without a name, which ends with the last process that maps it.

    One rank makes it and tells the others `path`; when all have called `map`, it calls `close`.
    """

    def __init__(self, nbytes: int, ranks: int, path: str | None = None):
        self.nbytes, self.ranks = max(nbytes, mmap.PAGESIZE), ranks
        self._made: int | None = None
        if path is None:
            self._made = os.memfd_create("topo-opt")
            path = f"/proc/{os.getpid()}/fd/{self._made}"
            try:
                os.posix_fallocate(self._made, 0, self.nbytes * ranks)
            except OSError as error:
                self.close()
                raise InputError(
                    f"{self.nbytes * ranks} bytes that ranks share can't be reserved: {error.strerror}",
                    hint="give the processes more memory, or split the model over another mesh",
                ) from None
        self.path = path

    def map(self, device: torch.device) -> tuple[list[int], torch.Tensor, list[Any]]:
        """Addresses of the part of every rank, all of the memory as a tensor, and what holds it.

        Raises:
            InputError: it cannot be mapped.
        """
        try:
            with open(self.path, "r+b") as file:
                view = mmap.mmap(file.fileno(), self.nbytes * self.ranks)
        except OSError as error:
            raise InputError(
                f"the memory that ranks share can't be opened: {error.strerror} ({self.path})",
                hint="ranks that exchange through the host's memory run on one host, as one user, and see each other's processes",
            ) from None
        memory = torch.frombuffer(view, dtype=torch.uint8)
        if self._made is not None:
            memory.fill_(ABSENT)
        held: list[Any] = [view, memory]
        if device.type == "cuda":
            held.append(_Registered(memory))
        start = memory.data_ptr()
        return [start + rank * self.nbytes for rank in range(self.ranks)], memory, held

    def close(self) -> None:
        """Lets nobody open it any more; the memory stays for those who have it."""
        if self._made is not None:
            os.close(self._made)
            self._made = None


class _Registered:
    """Host memory that the GPU can address, for as long as this lives."""

    def __init__(self, memory: torch.Tensor):
        self.memory, runtime = memory, torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE_AND_MAPPED))
        if code:
            raise InputError(
                f"the driver does not map the memory that ranks share for the GPU (CUDA error {code})"
            )

    def __del__(self) -> None:
        torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
