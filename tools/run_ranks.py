"""`topo-run` as one of several processes: torchrun starts them, the first one speaks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from topo_opt.errors import InputError
from topo_opt.tools.reporting import first_line

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
        started = os.environ.get("WORLD_SIZE", "1")
        if started != "1":
            raise InputError(
                f"the bundle is for one device, WORLD_SIZE is {started}",
                hint="run it without torchrun, or compile the model for several devices (topo-opt --mesh)",
            )
        yield
        return
    # What torch.distributed says on its own, with stacks of C++, is in the errors of this tool too.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch
    import torch.distributed as dist

    rank = _checked_rank(plan.ranks)
    on_gpu = device.startswith("cuda") if device else torch.cuda.is_available()
    store = _meet(rank, plan.ranks, timeout_s)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=plan.ranks,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"rank {rank} of {plan.ranks} could not be connected: {first_line(error)}",
            hint="every rank must be started; --timeout waits longer",
        ) from None
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, for the rest of the process
    yield
    dist.destroy_process_group()


def _meet(rank: int, ranks: int, timeout_s: float) -> Any:
    """The store of torchrun, or of rank 0, with all ranks there.

    Raises:
        InputError: says which ranks did not come.
    """
    import torch.distributed as dist

    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise InputError(
            f"MASTER_ADDR is {host!r} and MASTER_PORT is {port!r}, expected a host and a number",
            hint=_start(ranks),
        )
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    until = time.monotonic() + timeout_s
    try:
        store = dist.TCPStore(
            host,
            int(port),
            world_size=ranks,
            is_master=rank == 0 and not by_agent,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
        # Restarts of torchrun share one store.
        store = dist.PrefixStore(f"topo-run/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        store.set(f"here/{rank}", "")
        missing = list(range(ranks))
        while missing and time.monotonic() < until:
            missing = [r for r in missing if not store.check([f"here/{r}"])]
            time.sleep(0.05 if missing else 0)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"rank {rank} of {ranks} did not find the others at {host}:{port} within {timeout_s:g} s: {first_line(error)}",
            hint="rank 0 or torchrun listens there; --timeout waits longer",
        ) from None
    if missing:
        which = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise InputError(
            f"rank {rank} of {ranks} did not find the others within {timeout_s:g} s: rank {which} did not come",
            hint="every rank must be started; --timeout waits longer",
        )
    return store


def end(code: int) -> int:
    """The exit code; of a process that other ranks may have left alone with a collective, it is the end, here and now."""
    distributed = sys.modules.get("torch.distributed")
    if code and distributed is not None and distributed.is_available() and distributed.is_initialized():
        sys.stderr.flush()
        # Leaving in order would wait for what the others no longer do.
        os._exit(code)
    return code


def _start(ranks: int) -> str:
    return f"start it with torchrun --nproc-per-node={ranks} $(which topo-run) BUNDLE"


def _checked_rank(ranks: int) -> int:
    start = _start(ranks)
    world, rank = os.environ.get("WORLD_SIZE"), os.environ.get("RANK")
    if world is None or rank is None:
        raise InputError(f"the bundle is for {ranks} ranks, this is one process", hint=start)
    if not world.isdigit() or not rank.isdigit():
        raise InputError(f"WORLD_SIZE is {world!r} and RANK is {rank!r}, expected numbers")
    if int(world) != ranks:
        raise InputError(f"the bundle is for {ranks} ranks, WORLD_SIZE is {world}", hint=start)
    return int(rank)
