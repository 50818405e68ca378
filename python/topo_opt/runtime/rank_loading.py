"""Loading a bundle as one rank of several: all of them load, or all fail with the reason of the one that could not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from topo_opt.errors import InputError, TopoError
from topo_opt.runtime.plan import Plan
from topo_opt.runtime.ranks import TIMEOUT_S, Ranks, local_rank

if TYPE_CHECKING:
    from topo_opt.runtime.program import Program


def load_rank(
    plan: Plan, device: str | torch.device | None, make: Callable[..., Program], timeout_s: float | None
) -> Program:
    """The program of this rank.

    Args:
        make: loads on this process, given `ranks` and `device`.

    Raises:
        TopoError: this rank or another one cannot load.
    """
    if timeout_s is not None and not timeout_s > 0:
        raise InputError(f"timeout_s is {timeout_s!r}, expected seconds above 0")
    where = rank_device(device)
    ranks = Ranks(plan, where, timeout_s=TIMEOUT_S if timeout_s is None else timeout_s)
    program, error = None, None
    try:
        program = make(device=where, ranks=ranks)
    except TopoError as failure:
        error = failure
    ranks.agree(error, "loading the bundle")
    assert program is not None
    return program


def rank_device(device: str | torch.device | None) -> torch.device:
    """The device of this rank: of the GPUs of a host the one with the rank's number on it, where none is named."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    if where.type != "cuda" or where.index is not None:
        return where
    count, number = torch.cuda.device_count(), local_rank()
    if number >= count:
        raise InputError(
            f"rank {number} of this host has no GPU: there are {count}",
            hint="start as many processes a host as it has GPUs",
        )
    return torch.device("cuda", number)
