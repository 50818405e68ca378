"""`topo-run` as one of several processes: torchrun starts them, the first one speaks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from topo_opt.errors import InputError

if TYPE_CHECKING:
    from topo_opt.runtime.plan import Plan


@contextmanager
def connected(plan: Plan, device: str | None, timeout_s: float) -> Iterator[None]:
    """The process group that a bundle for several ranks needs, by the variables that torchrun sets; nothing for one of one device.

    Of all ranks only the first one prints.

    Raises:
        InputError: started without torchrun or with another number of processes, or a process did not come.
    """
    if not plan.mesh:
        yield
        return
    import torch
    import torch.distributed as dist

    if not timeout_s > 0:
        raise InputError(f"--timeout is {timeout_s:g}, expected seconds above 0")
    rank = _checked_rank(plan.ranks)
    on_gpu = device.startswith("cuda") if device else torch.cuda.is_available()
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=timeout_s)
        )
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"rank {rank} of {plan.ranks} did not find the others within {timeout_s:g} s: {reason[:200]}",
            hint="every rank must be started; --timeout waits longer",
        ) from None
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, for the rest of the process
    try:
        yield
    finally:
        # Ranks that are still waiting for this one see the connection close.
        dist.destroy_process_group()


def _checked_rank(ranks: int) -> int:
    start = f"start it with torchrun --nproc-per-node={ranks} -m topo_opt.tools.run BUNDLE"
    world, rank = os.environ.get("WORLD_SIZE"), os.environ.get("RANK")
    if world is None or rank is None:
        raise InputError(f"the bundle is for {ranks} ranks, this is one process", hint=start)
    if not world.isdigit() or not rank.isdigit():
        raise InputError(f"WORLD_SIZE is {world!r} and RANK is {rank!r}, expected numbers")
    if int(world) != ranks:
        raise InputError(f"the bundle is for {ranks} ranks, WORLD_SIZE is {world}", hint=start)
    return int(rank)
