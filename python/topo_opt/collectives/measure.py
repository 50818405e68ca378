"""Measures a machine through torch.distributed: one of the processes that `calibrate` starts, or that torchrun started.

    python -m topo_opt.collectives.measure PLAN.json RESULT.json

RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are those of torchrun. On GPUs calls run in CUDA graphs over NCCL,
on CPUs one behind the other over gloo. Rank 0 writes the result.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

# NVLink multicast stays off: a process that dies while it is used can take the switch out of service for the whole host.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
MANY_BYTES = 8 << 20
SYMMETRIC_BYTES = 8 << 20
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")

Times = list[float]


@dataclass(frozen=True)
class Plan:
    """What to measure. `groups` are numbers of ranks from the first on; sizes are bytes of whole tensors.

    A process that gets nowhere for `quiet_s` ends with an error: another one has failed, or never came.
    """

    devices: int
    sizes: list[int]
    groups: list[int]
    products: list[list[int]]
    copies: list[int]
    repeats: int = 20
    quiet_s: float = 20.0


@dataclass
class Result:
    """Raw times in seconds, and what was left out."""

    versions: dict[str, str] = field(default_factory=dict)
    accelerator: str = "cpu"
    dtype: str = "f32"
    collectives: list[dict[str, Any]] = field(default_factory=list)
    products: list[dict[str, Any]] = field(default_factory=list)
    copies: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


class Watch:
    """Ends the process when nothing moves: a collective that waits for a dead process never returns by itself."""

    def __init__(self, rank: int, quiet_s: float) -> None:
        self._rank, self._quiet_s, self._step, self._since = rank, quiet_s, "start", time.monotonic()
        threading.Thread(target=self._look, daemon=True).start()

    def step(self, name: str) -> None:
        """Something begins."""
        self._step, self._since = name, time.monotonic()

    def beat(self) -> None:
        """The step goes on."""
        self._since = time.monotonic()

    @property
    def step_name(self) -> str:
        """What is under way."""
        return self._step

    def _look(self) -> None:
        while True:
            time.sleep(0.5)
            if time.monotonic() - self._since > self._quiet_s:
                print(
                    f"error: rank {self._rank} got nowhere for {self._quiet_s:g} s at '{self._step}': "
                    "another rank has failed or is missing",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)


class Bench:
    """Times calls on this rank, the slowest rank counting."""

    def __init__(self, plan: Plan, watch: Watch) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.plan, self.watch = torch, dist, plan, watch
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.on_gpu = dist.get_backend() == "nccl"
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if self.on_gpu else torch.device("cpu")
        )
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32

    def tensor(self, nbytes: int) -> Any:
        """Random elements of so many bytes."""
        count = nbytes // self.dtype.itemsize
        return self.torch.randn(count, device=self.device, dtype=self.torch.float32).to(self.dtype)

    def times(self, call: Callable[[], Any], runs: int, group: Any = None, graph: bool = True) -> Times:
        """Sorted seconds of one call, a value for each repeat of `runs` calls.

        With a group its ranks start together and the slowest counts. On a GPU the calls are in a CUDA graph, or not.
        """
        for _ in range(3):
            call()
            self.watch.beat()
        run = self._graph(call, runs) if self.on_gpu and graph else _loop(call, runs)
        run()
        found = []
        for _ in range(self.plan.repeats):
            self._together(group)
            found.append(self._timed(run) / runs)
            self.watch.beat()
        if group is not None:
            slowest = self.torch.tensor(found, device=self.device, dtype=self.torch.float64)
            self.dist.all_reduce(slowest, op=self.dist.ReduceOp.MAX, group=group)
            found = slowest.tolist()
        return sorted(found)

    def gate(self, name: str) -> None:
        """Waits for all ranks without a collective, whose timeout would be too short while others measure."""
        store = self.dist.distributed_c10d._get_default_store()
        store.add(name, 1)
        self._until(name, self.world)

    def leave(self) -> None:
        """The last gate: rank 0 may have the store in its process and goes behind all others."""
        self.gate("end")
        store = self.dist.distributed_c10d._get_default_store()
        store.add("left", 1)
        if self.rank == 0:
            self._until("left", self.world)
        self.dist.destroy_process_group()

    def _until(self, name: str, count: int) -> None:
        store = self.dist.distributed_c10d._get_default_store()
        while store.add(name, 0) < count:
            self.watch.step(f"waiting behind {name}")
            time.sleep(0.05)

    def _together(self, group: Any) -> None:
        if group is not None:
            self.dist.barrier(group=group)
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def _timed(self, run: Callable[[], Any]) -> float:
        if not self.on_gpu:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        self.torch.cuda.synchronize()
        return float(first.elapsed_time(last)) * 1e-3

    def _graph(self, call: Callable[[], Any], runs: int) -> Callable[[], Any]:
        stream = self.torch.cuda.Stream()
        stream.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(stream):
            call()
        self.torch.cuda.synchronize()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            for _ in range(runs):
                call()
        replay: Callable[[], Any] = graph.replay
        return replay


def _loop(call: Callable[[], Any], runs: int) -> Callable[[], Any]:
    def run() -> None:
        for _ in range(runs):
            call()

    return run


def _call(bench: Bench, kind: str, nbytes: int, size: int, group: Any) -> Callable[[], Any]:
    """A call of torch.distributed with `nbytes` as `CollectiveModel.cost` counts them."""
    dist = bench.dist
    whole = bench.tensor(nbytes)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "broadcast":
        return lambda: dist.broadcast(whole, src=0, group=group)
    if kind == "all_to_all":
        other = bench.torch.empty_like(whole)
        return lambda: dist.all_to_all_single(other, whole, group=group)
    part = bench.tensor(nbytes // size)
    # Newer versions of PyTorch have other names for these two.
    if kind == "all_gather":
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return lambda: gather(whole, part, group=group)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return lambda: scatter(part, whole, group=group)


def _collectives(bench: Bench, result: Result) -> None:
    for size in bench.plan.groups:
        group = bench.dist.new_group(list(range(size)))
        if bench.rank < size:
            sizes = [nbytes for nbytes in bench.plan.sizes if nbytes % (size * bench.dtype.itemsize) == 0]
            for kind in COLLECTIVES:
                for nbytes in sizes:
                    bench.watch.step(f"{kind} of {nbytes} bytes among {size}")
                    with _left_out(result, f"{kind} among {size}") as tried:
                        call = _call(bench, kind, nbytes, size, group)
                        found = bench.times(call, _runs(nbytes), group)
                        result.collectives.append(_row(kind, "library", size, nbytes, found))
                    if tried:
                        break
            if bench.on_gpu:
                _symmetric(bench, result, size, group, [n for n in sizes if n <= SYMMETRIC_BYTES])
        bench.gate(f"group of {size}")


def _symmetric(bench: Bench, result: Result, size: int, group: Any, sizes: Sequence[int]) -> None:
    torch = bench.torch
    with _left_out(result, f"symmetric memory among {size}", optional=True):
        import torch.distributed._symmetric_memory as memory

        name = group.group_name
        for nbytes in sizes:
            bench.watch.step(f"symmetric memory, {nbytes} bytes among {size}")
            shared = memory.empty(nbytes // bench.dtype.itemsize, dtype=bench.dtype, device=bench.device)
            memory.rendezvous(shared, group)
            shared.normal_()
            ops = torch.ops.symm_mem
            calls = {
                "one_shot": partial(ops.one_shot_all_reduce, shared, "sum", name),
                "two_shot": partial(ops.two_shot_all_reduce_, shared, "sum", name),
            }
            for algorithm, call in calls.items():
                found = bench.times(call, _runs(nbytes), group)
                result.collectives.append(_row("all_reduce", algorithm, size, nbytes, found))


@contextmanager
def _left_out(result: Result, what: str, optional: bool = False) -> Iterator[list[str]]:
    """Notes what this version of PyTorch cannot do, and why `optional` things fail. Other errors end the measurement."""
    tried: list[str] = []
    try:
        yield tried
    except (NotImplementedError, AttributeError, RuntimeError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if (
            isinstance(error, RuntimeError)
            and not optional
            and not any(w in text.lower() for w in ("not support", "unsupported", "not implement"))
        ):
            raise
        tried.append(text)
        result.left_out.append(f"{what}: {text[:200]}")


def _alone(bench: Bench, result: Result) -> None:
    """What one device does by itself, measured on the first while the others wait."""
    torch = bench.torch
    for m, n, k in bench.plan.products:
        bench.watch.step(f"product {m} x {n} x {k}")
        a = torch.randn(m, k, device=bench.device).to(bench.dtype)
        b = torch.randn(k, n, device=bench.device).to(bench.dtype)
        out = torch.empty(m, n, device=bench.device, dtype=bench.dtype)
        found = bench.times(partial(torch.mm, a, b, out=out), 10)
        result.products.append({"m": m, "n": n, "k": k, "times": found})
    peers = range(bench.world) if bench.on_gpu else (0,)
    for peer in peers:
        if peer and not torch.cuda.can_device_access_peer(bench.device.index, _index(peer)):
            result.left_out.append(f"copies from the first device to number {peer}: no peer access")
            continue
        for nbytes in bench.plan.copies:
            bench.watch.step(f"copy of {nbytes} bytes to device {peer}")
            source = bench.tensor(nbytes)
            target = torch.empty_like(
                source, device=torch.device("cuda", _index(peer)) if peer else bench.device
            )
            # A copy between devices orders streams of both, which a graph of one of them cannot hold.
            found = bench.times(partial(target.copy_, source), _runs(nbytes), graph=not peer)
            result.copies.append({"peer": peer, "bytes": nbytes, "times": found})


def _runs(nbytes: int) -> int:
    return 10 if nbytes <= MANY_BYTES else 3


def _index(rank: int) -> int:
    return rank % int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))


def _row(kind: str, algorithm: str, size: int, nbytes: int, times: Times) -> dict[str, Any]:
    return {"kind": kind, "algorithm": algorithm, "size": size, "bytes": nbytes, "times": times}


def main(arguments: Sequence[str]) -> int:
    """Measures as one rank of those in the environment; returns the exit code."""
    os.environ.update(ENVIRONMENT)
    plan = Plan(**json.loads(Path(arguments[0]).read_text()))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    watch = Watch(rank, plan.quiet_s)
    import torch
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    watch.step(f"waiting for {world} ranks")
    try:
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            timeout=timedelta(seconds=0.8 * plan.quiet_s),
            device_id=torch.device("cuda", torch.cuda.current_device()) if gpu else None,
        )
    except dist.DistError as error:
        reason = str(error).splitlines()[0][:200]
        print(f"error: rank {rank} did not meet the other {world - 1} ranks: {reason}", file=sys.stderr)
        return 1
    result = Result(dtype="bf16" if gpu else "f32")
    result.versions["torch"] = torch.__version__
    if gpu:
        result.accelerator = torch.cuda.get_device_name()
        result.versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        result.versions["cuda"] = str(torch.version.cuda)
    bench = Bench(plan, watch)
    try:
        with torch.no_grad():
            _collectives(bench, result)
            if rank == 0:
                _alone(bench, result)
    except (
        RuntimeError
    ) as error:  # what collectives raise when another rank has gone, and CUDA when memory has
        reason = str(error).splitlines()[0][:300]
        print(f"error: rank {rank} at '{watch.step_name}': {reason}", file=sys.stderr, flush=True)
        # No way back into a process group whose members may be gone: leaving it in order could hang.
        os._exit(1)
    if rank == 0:
        Path(arguments[1]).write_text(json.dumps(asdict(result)))
    bench.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
