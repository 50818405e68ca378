"""Loading a bundle: opened and checked, its weights found, on one device or as one of several ranks."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from topo_opt.errors import InputError, TopoError
from topo_opt.runtime.bundle import Bundle, open_bundle, verify_weight_files
from topo_opt.runtime.cuda import GraphMode
from topo_opt.runtime.launch_choice import LaunchMode
from topo_opt.runtime.memory import Fetch
from topo_opt.runtime.program import Program
from topo_opt.runtime.weight_files import WeightFileMissing
from topo_opt.runtime.weights import Part, Weights

if TYPE_CHECKING:
    from topo_opt.runtime.ranks import Ranks


def load(
    path: str | Path,
    device: str | torch.device | None = None,
    *,
    weights: Mapping[str, torch.Tensor] | str | Path | None = None,
    random_weights: int | None = None,
    strict: bool = False,
    graphs: GraphMode = "auto",
    launch: LaunchMode = "auto",
    verify_weights: bool = True,
    allow_ops: Collection[str] = (),
    static_results: bool = False,
    timeout_s: float | None = None,
) -> Program:
    """Loads a bundle. One for several ranks is loaded by every process of an initialised process group, rank by rank of its mesh;
    each reads its part of the weights only, is called with the same whole inputs, and returns whole results, but for those
    that were asked to stay split. `Program.close` comes before `torch.distributed.destroy_process_group`.

    Args:
        path: bundle folder.
        device: "cuda", "cuda:1", ..., or "cpu" (kernels through Triton's interpreter). Default: a GPU where there is one.
        weights: tensors by name (a state dict); or a path: where the model archive is now, a safetensors file, or a folder
            of either. Default: what the bundle has or refers to.
        random_weights: seed; tensors that are nowhere to be found get random values instead of raising.
        strict: calls that compiled kernels can't answer raise `StrictError` instead of running as ATen.
        graphs: "auto" captures CUDA graphs where possible, "off" never, "require" raises where it is impossible.
        launch: "graph" replays one CUDA graph a call, on memory of its own or, when the same tensors come again, on the caller's;
            "direct" launches kernel by kernel on the caller's tensors, without any copy; "auto" takes what is faster for each
            variant. `Program.status()` tells what was taken.
        verify_weights: hash weight files too.
        allow_ops: namespaces of custom operators (`torch.ops.<namespace>`) that the bundle may call.
        static_results: repeated calls of a graph return the program's own memory, which the next call overwrites, instead of
            copies; direct launches have fresh results anyway.

        timeout_s: how long a rank is waited for that is silent, does not come, or gets nowhere; 25 by default. On a GPU, where
            nothing can wake a call that waits for a rank that is gone, the process ends then, with one line that says why.

    Raises:
        InputError: no bundle there, no such device, weights missing or of another type, no process group or one of another
            size, or another rank failed to load.
        UntrustedError: the bundle is damaged or holds something that it may not.
    """
    if launch not in get_args(LaunchMode):
        raise InputError(f"launch is {launch!r}, expected one of {', '.join(get_args(LaunchMode))}")
    if launch == "graph" and graphs == "off":
        raise InputError("launch is 'graph' and graphs is 'off'", hint="give launch='direct'")
    try:
        bundle = open_bundle(path, verify_weights=False)
    except TopoError as error:
        if "torch.distributed" in sys.modules:
            from topo_opt.runtime.ranks import tell_others

            tell_others(error)
        raise
    make = partial(
        _load, bundle, weights=weights, random_weights=random_weights, strict=strict, graphs=graphs,
        launch=launch, verify_weights=verify_weights, allow_ops=allow_ops, static_results=static_results,
    )  # fmt: skip
    if not bundle.plan.mesh:
        return make(device=device)
    from topo_opt.runtime.rank_loading import load_rank

    return load_rank(bundle, device, make, timeout_s)


def _load(
    bundle: Bundle,
    *,
    device: str | torch.device | None,
    weights: Mapping[str, torch.Tensor] | str | Path | None,
    random_weights: int | None,
    strict: bool,
    graphs: GraphMode,
    launch: LaunchMode,
    verify_weights: bool,
    allow_ops: Collection[str],
    static_results: bool,
    ranks: Ranks | None = None,
) -> Program:
    """The program of a bundle on one device, which may be one of several ranks."""
    if verify_weights and (ranks is None or ranks.is_first_of_host):
        if ranks is not None:
            ranks.progress("hashing the weights")
        verify_weight_files(bundle)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise InputError(f"device {str(where)!r} is not supported", hint="use 'cuda' or 'cpu'")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise InputError("device 'cuda' was asked for, but torch sees no GPU", hint="use device='cpu'")
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    return Program(
        bundle,
        device=where,
        fetch=_fetcher(bundle, weights, made_up=random_weights is not None),
        random_seed=random_weights,
        strict=strict,
        graphs=graphs,
        launch=launch,
        allow_ops=allow_ops,
        static_results=static_results,
        ranks=ranks,
    )


def _fetcher(
    bundle: Bundle, weights: Mapping[str, torch.Tensor] | str | Path | None, *, made_up: bool
) -> Fetch:
    """Where tensors come from: a mapping of the caller comes first, then the bundle's own file or reference.

    Args:
        made_up: what is in a file that is gone counts as not there, instead of being an error.
    """
    given = weights if isinstance(weights, Mapping) else {}

    @cache
    def stored() -> Any:
        # Opened at the first name that is not given: a bundle may refer to an archive that is not there any more.
        return Weights.open(bundle.path, source=None if isinstance(weights, Mapping) else weights)

    def fetch(name: str, part: Part | None) -> torch.Tensor | None:
        value = given.get(name)
        if value is not None:
            return value.detach() if part is None else part.of(value.detach())
        try:
            return stored().fetch(name, part)
        except WeightFileMissing:
            if made_up:
                return None
            raise

    return fetch
