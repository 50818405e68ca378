"""Loading a bundle as one rank of several: all of them load the same, or all fail with the reason of the one that could not."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from topo_opt.errors import InputError, TopoError
from topo_opt.runtime.bundle import Bundle
from topo_opt.runtime.ranks import TIMEOUT_S, Ranks, local_rank

if TYPE_CHECKING:
    from topo_opt.runtime.program import Program


def load_rank(
    bundle: Bundle,
    device: str | torch.device | None,
    make: Callable[..., Program],
    timeout_s: float | None,
) -> Program:
    """The program of this rank.

    Args:
        make: loads on this process, given `ranks` and `device`.

    Raises:
        TopoError: this rank or another one cannot load, or they have different bundles.
    """
    if timeout_s is not None and not timeout_s > 0:
        raise InputError(f"timeout_s is {timeout_s!r}, expected seconds above 0")
    limit = TIMEOUT_S if timeout_s is None else timeout_s
    ranks = Ranks(bundle.plan, torch.device("cpu"), timeout_s=limit)
    doing = "loading the bundle"
    with ranks.watch.stage(doing):
        try:
            where = ranks.device = rank_device(device)
            found = ranks.agree(None, "coming together", json.dumps(_about(bundle, where)))
            about = [json.loads(found[rank]) for rank in range(ranks.count)]
            _require_same(about)
            gpus = [of["gpu"] for of in about if of["gpu"]]
            ranks.shares_gpu = len(set(gpus)) < len(gpus)
            ranks.connect(bundle.plan)
            program = make(device=where, ranks=ranks)
            ranks.agree(None, doing)
        except BaseException as error:
            failure = _as_error(error)
            if not isinstance(failure, TopoError):
                ranks.leave(f"{doing}: {type(error).__name__}: {error}")
                ranks.close()
                raise
            ranks.leave(f"{doing}: {failure.message}", failure.hint)
            ranks.close()
            raise failure from (None if failure is error else error)
    return program


def _as_error(error: BaseException) -> BaseException:
    """Memory that ran out as an error of the user's; others as they are."""
    text = (str(error).strip().splitlines() or [""])[0]
    short = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if short or (isinstance(error, RuntimeError) and "t allocate memory" in text):
        told = text.rpartition("DefaultCPUAllocator: ")[2][:300]
        return InputError(
            f"memory ran out: {told or type(error).__name__}",
            hint="split the model over more devices, or see in report.html what a device needs",
        )
    return error


def _about(bundle: Bundle, device: torch.device) -> dict[str, str]:
    """What must be the same on all ranks: the files that decide what is computed, by digest, and the kind of device."""
    files = bundle.manifest.files
    kernels = sorted((name, entry.sha256) for name, entry in files.items() if name.startswith("kernels/"))
    named = ("plan.json", "constants.safetensors", "weights.safetensors")
    about: dict[str, str] = {name: files[name].sha256 for name in named if name in files}
    about["kernels/"] = hashlib.sha256(json.dumps(kernels).encode()).hexdigest()
    return {**about, "device": device.type, "gpu": _gpu(device), "path": str(bundle.path.absolute())}


def _gpu(device: torch.device) -> str:
    """Which GPU of which host a device is; "" for a CPU."""
    if device.type != "cuda":
        return ""
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"


def _require_same(about: Sequence[Mapping[str, Any]]) -> None:
    """Raises InputError when a rank has another bundle than rank 0, or runs on another kind of device."""
    first = about[0]
    for rank, other in enumerate(about):
        if other["device"] != first["device"]:
            raise InputError(
                f"rank {rank} runs on {other['device']}, rank 0 on {first['device']}",
                hint="give all ranks the same device=",
            )
        names = sorted((first.keys() | other.keys()) - {"path", "device", "gpu"})
        differing = [name for name in names if first.get(name) != other.get(name)]
        if differing:
            raise InputError(
                f"rank {rank} has another bundle than rank 0: {', '.join(differing)} of {other['path']} and {first['path']} differ",
                hint="give all ranks the same bundle, or copies of it",
            )


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
