"""How `two_gpus.py` measures one row, as one rank of two."""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from bench_models import Decoder, Work
from gpu_models import tensors
from two_gpus_cases import COLUMNS, ROWS, Case

REPEATS, REPLAYS = 9, 10
AGREE = 6e-2
"""Largest difference from the one-GPU program, relative to the largest magnitude: sums in another order, in bf16, through all layers."""
AGAIN = 3


class Rows(Protocol):
    """What is recorded."""

    def row(self, case: str, who: str) -> dict[str, Any] | None: ...

    def fail(self, reason: str) -> None: ...


class Limit:
    """Ends the process when a row takes too long."""

    def __init__(self, seconds: float, log: Rows):
        self.seconds, self.log = seconds, log
        self._reason, self._until = "", 0.0
        threading.Thread(target=self._look, daemon=True).start()

    def begin(self, reason: str) -> None:
        """A row begins; `reason` is recorded when it takes too long."""
        self._until, self._reason = time.monotonic() + self.seconds, reason

    def end(self) -> None:
        """The row has ended."""
        self._reason = ""

    def _look(self) -> None:
        while True:
            time.sleep(0.5)
            reason = self._reason
            if reason and time.monotonic() > self._until:
                self.log.fail(reason)
                sys.stdout.flush()
                os._exit(AGAIN)


class Machine:
    """This process among two, and how things are timed on it."""

    def __init__(self, device: str):
        # NVLink multicast stays off: a process that dies while it is used can take the switch out of service for the whole host.
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        self.rank = int(os.environ["RANK"])
        on_gpu = device.startswith("cuda")
        self.shares_gpu = device.startswith("cuda:")
        local = int(os.environ.get("LOCAL_RANK", self.rank))
        self.device = torch.device(device if self.shares_gpu or not on_gpu else f"cuda:{local}")
        if on_gpu:
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if on_gpu and not self.shares_gpu else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=120))
        self.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=120))

    def slower(self, value: float) -> float:
        """The larger of what the ranks measured."""
        both = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.control)
        return both.item()

    def together(self) -> None:
        """Waits for the other rank."""
        dist.barrier(group=self.control)

    def milliseconds(self, call: Callable[[], Any], *, alone: bool = False) -> float:
        """Median of a call, the slower rank's; `alone`: the other rank is idle."""
        if self.device.type == "cpu":
            start = time.perf_counter()
            call()
            mine = (time.perf_counter() - start) * 1e3
            return mine if alone else self.slower(mine)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(3):
            call()
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            if not alone:
                self.together()
            start.record()
            for _ in range(REPLAYS):
                call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / REPLAYS)
        middle = statistics.median(times)
        return middle if alone else self.slower(middle)

    def end(self, code: int) -> int:
        """Leaves in order, together; the exit code."""
        self.together()
        sys.stdout.flush()
        os._exit(code)

    def leave(self, code: int) -> int:
        """Leaves at once: the other rank may not come any more."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def built(case: Case, machine: Machine) -> tuple[Work, dict[str, torch.Tensor]]:
    """The module with the same weights and caches on every rank, and its tensors by name."""
    torch.manual_seed(0)
    work = case.build(str(machine.device))
    state = tensors(work.module)
    generator = torch.Generator(device=machine.device).manual_seed(1)
    for name, value in state.items():
        if name.endswith(("keys", "values")):
            value.normal_(generator=generator)
    return work, state


def measured_row(
    folder: Path, name: str, case: Case, who: str, machine: Machine, log: Rows
) -> dict[str, Any]:
    """What is known of one way to run a case. `one` leaves its result in the folder, for the others to compare with."""
    if "torch" in who:
        return {"ms": parallelized(case, machine)}
    about = json.loads((folder / f"{who}.json").read_text())
    if "failed" in about:
        return {"failed": f"not compiled: {about['failed']}"}
    if who == "one":
        return about | _one(folder, case, machine)
    one = log.row(name, "one") or {}
    if not any(size > 1 for size in about["mesh"].values()):
        return about | {"ms": one.get("ms"), "note": "the plan takes one device"}
    for other in case.ways:
        row = log.row(name, other)
        if row and row.get("ms") and row.get("digest") == about["digest"]:
            return about | {"ms": row["ms"], "differs": row.get("differs"), "note": f"the same program as {other}"}  # fmt: skip
    return about | _split(folder, who, case, machine)


def _one(folder: Path, case: Case, machine: Machine) -> dict[str, Any]:
    """The program of one GPU, on the first rank."""
    from topo_opt import runtime

    found: dict[str, Any] = {}
    if machine.rank == 0:
        work, state = built(case, machine)
        program = runtime.load(folder / "one", machine.device, weights=state)
        result = first_output(program(*work.inputs))
        torch.save(result.cpu(), folder / "one.pt")
        found = {"ms": machine.milliseconds(replay(program, work), alone=True), "how": _how(program)}
    machine.together()
    return found


def _split(folder: Path, who: str, case: Case, machine: Machine) -> dict[str, Any]:
    """The program of two GPUs."""
    from topo_opt import runtime

    work, state = built(case, machine)
    program = runtime.load(folder / who, machine.device, weights=state)
    result = first_output(program(*work.inputs))
    found: dict[str, Any] = {}
    if (folder / "one.pt").exists():
        expected = torch.load(folder / "one.pt").to(result.device)
        found["differs"] = ((result - expected).abs().max() / expected.abs().max()).item()
        if machine.slower(found["differs"]) > AGREE:
            found["failed"] = "differs from the program of one GPU"
    # From the second call on it is the replay of a graph, or what took its place.
    program(*work.inputs)
    found |= {"ms": machine.milliseconds(replay(program, work)), "how": _how(program)}
    del result
    program.close()
    return found


def _how(program: Any) -> str:
    """How the only variant ran, and why not as a graph."""
    (status,) = program.status()
    return f"{status.mode}: {status.reason}" if status.reason else status.mode


def first_output(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, (tuple, list)) else result


def replay(program: Any, work: Work) -> Callable[[], Any]:
    """What is timed: the replay of the graph where there is one, the call elsewhere."""
    if program.device.type == "cpu":
        return lambda: program(*work.inputs)
    return program.executor.replay_call(program.variants("main")[0])


def parallelized(case: Case, machine: Machine) -> float:
    """Milliseconds of the module under PyTorch's tensor parallelism: layers compiled with max-autotune, all of it one CUDA graph.

    Layers are compiled one by one, and all share the code of the first: of a whole model, compilation would take minutes.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    work, _ = built(case, machine)
    module, count = work.module, dist.get_world_size()
    assert isinstance(module, Decoder)
    styles: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS}
    styles |= {name: RowwiseParallel() for name in ROWS}
    mesh = init_device_mesh(machine.device.type, (count,))
    for layer in module.layers:
        parallelize_module(layer, mesh, styles)
        # The module's own views speak of heads, of which each rank has its share.
        heads, kv_heads = layer.shape.heads // count, layer.shape.kv_heads // count
        layer.shape = replace(layer.shape, heads=heads, kv_heads=kv_heads)
        if layer.shape.cache:
            for name in ("keys", "values"):
                setattr(layer, name, getattr(layer, name).chunk(count, 1)[machine.rank].contiguous())
    on_gpu = machine.device.type == "cuda"
    for part in (*module.layers, module.norm, module.head) if on_gpu else ():
        part.compile(mode="max-autotune-no-cudagraphs", fullgraph=True)

    def call() -> Any:
        return module(*work.inputs)

    for _ in range(3):
        call()
    return machine.milliseconds(graphed(call) if on_gpu else call)


def graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as one CUDA graph replay, its collectives included."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The watchdog of the process group asks for events in a thread of its own.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay
