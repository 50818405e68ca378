"""One rank of a program for several devices, alone on one device: what its kernels take when nobody is waited for.

    python benchmarks/lone_rank.py BUNDLE ... [--rank R] [--device cuda] [--kernels] [--repeats N]

Weights and inputs are random. What other ranks would give comes from this one: sums inside of kernels add up its own part as often as there are
ranks, collectives of the library copy its own part. So results are meaningless and times lack the links; what is left is what tiles,
launches and splits decide. Prints the milliseconds of a call, and with `--kernels` those of every kernel in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from topo_opt.runtime import loading
from topo_opt.runtime.boxes import KernelBoxes, exchanges_of, kernel_boxes, offsets
from topo_opt.runtime.bundle import open_bundle
from topo_opt.runtime.dtypes import torch_dtype
from topo_opt.runtime.plan import CollectiveStep, Exchange, Plan, Variant
from topo_opt.runtime.ranks import Ranks, mesh_of

ALONE = 2
"""Ranks that exchange of which this one can stand for all: its own part is then where that of the other one would be."""


class _Quiet:
    """A watch over nobody."""

    def look_at(self, event: Any) -> None: ...

    def waiting(self) -> Any:
        return nullcontext()


class LoneRank(Ranks):
    """A rank whose others do not exist."""

    def __init__(self, plan: Plan, rank: int, device: torch.device):
        self.mesh, self.device, self.rank = mesh_of(plan), device, rank
        self.count = len(self.mesh.devices)
        self.watch: Any = _Quiet()
        self.shares_gpu = False
        self.boxes: dict[str, KernelBoxes] = {}
        for axes in sorted({exchange.axes for exchange, _ in exchanges_of(plan).values()}):
            self.boxes |= self._boxes({n: f for n, f in exchanges_of(plan).items() if f[0].axes == axes})

    def _boxes(self, kernels: Any) -> dict[str, KernelBoxes]:
        exchanges = [exchange for exchange, _ in kernels.values()]
        memory = torch.full((offsets(exchanges)[1],), 255, dtype=torch.uint8, device=self.device)
        ranks = exchanges[0].ranks
        made = kernel_boxes(
            kernels,
            self.rank % ranks,
            [memory.data_ptr()] * ranks,
            self.device,
            spans=[memory],
            held=[memory],
        )
        for boxes in made.values() if ranks > ALONE else ():
            boxes.stop()
        return made

    def agree(self, error: Any, doing: str, report: str = "") -> dict[int, str]:
        if error is not None:
            raise error
        return dict.fromkeys(range(self.count), report)

    def progress(self, doing: str) -> None: ...

    @contextmanager
    def calling(self, function: str) -> Iterator[None]:
        yield

    def close(self) -> None: ...

    def exchanging(self, name: str, exchange: Exchange, launch: Callable[[], None]) -> Callable[[], None]:
        return launch

    def bind(self, step: CollectiveStep, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        count = min(source.numel(), target.numel())
        given, taken = source.reshape(-1)[:count], target.view(-1)[:count]
        return lambda: taken.copy_(given)


def load_alone(
    path: Path, device: str, weights: Mapping[str, torch.Tensor] | None = None, *, rank: int = 0
) -> Any:
    """The program of one rank of a bundle, which may be for one device too; without `weights` they are random."""
    bundle = open_bundle(path, verify_weights=False)
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    return loading._load(
        bundle, device=where, weights=weights, random_weights=0, strict=True, graphs="auto",
        launch="graph" if where.type == "cuda" else "auto", verify_weights=False, allow_ops=(), static_results=True,
        ranks=LoneRank(bundle.plan, rank, where) if bundle.plan.mesh else None,
    )  # fmt: skip


def inputs_of(program: Any, variant: Variant) -> list[Any]:
    """Whole inputs: zeros and ones, and normal numbers."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for leaf in program.whole_inputs(variant).inputs:
        shape, dtype = leaf.shape or (), torch_dtype(str(leaf.dtype))
        if dtype.is_floating_point:
            value = torch.randn(shape, generator=generator).to(dtype)
        else:
            value = torch.randint(0, 2, shape, generator=generator).to(dtype)
        found.append(value.to(program.memory.device))
    return found


def milliseconds(call: Callable[[], object], repeats: int, device: str) -> float:
    """Median of `repeats` times ten calls, one on a CPU."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    call()
    calls = 10 if device == "cuda" else 1
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize()
        times.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(times)


def kernel_times(call: Callable[[], object]) -> dict[str, tuple[int, float]]:
    """Kernel -> (launches of a call, their median microseconds)."""
    from torch.profiler import ProfilerActivity, profile

    calls = 5
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in profiled.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name].append(event.time_range.elapsed_us())
    return {name: (len(t) // calls, statistics.median(t)) for name, t in times.items()}


def measure(path: Path, device: str, rank: int, repeats: int) -> tuple[dict[str, Any], Callable[[], object]]:
    """A row about a bundle, and its call."""
    program = load_alone(path, device, rank=rank)
    function = program.functions[0]
    variant = program.variants(function)[0]
    given = inputs_of(program, variant)
    program.call_flat(function, given)
    call = (
        program.executor.replay_call(variant)
        if device == "cuda"
        else partial(program.call_flat, function, given)
    )
    row = {"bundle": str(path), "rank": rank, "ms": round(milliseconds(call, repeats, device), 4)}
    return row, call


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kernels", action="store_true", help="times of every kernel too, on a GPU")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    torch.set_grad_enabled(False)
    for path in options.bundles:
        row, call = measure(path, options.device, options.rank, options.repeats)
        print(json.dumps(row), flush=True)
        if options.kernels and options.device == "cuda":
            for name, (count, us) in sorted(kernel_times(call).items(), key=lambda kv: -kv[1][0] * kv[1][1]):
                print(f"{count:5} x {us:8.2f} us  {name[:100]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
