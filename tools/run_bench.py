"""`topo-run --bench`: milliseconds of one call beside eager and torch.compile on the same inputs, and the machine's floor.

The floor is the larger of two times: reading the weights, state and inputs once and writing the outputs at the measured copy
bandwidth; doing the arithmetic at the measured rate of a large bf16 matrix product.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from topo_opt.errors import InputError, TopoError
from topo_opt.runtime.cuda import CudaExecutor
from topo_opt.runtime.plan import KernelStep, Variant
from topo_opt.runtime.program import Program
from topo_opt.runtime.sample_inputs import sample_leaves

if TYPE_CHECKING:
    from topo_opt.runtime.ranks import Ranks

MODES: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "inductor": {},
    "inductor-max-autotune": {"mode": "max-autotune"},
}
BENCH_S = 0.5
IN_A_ROW = 10
"""Calls between two events where several GPUs work together: they don't begin at the same moment, which counts once."""


@dataclass(frozen=True)
class Timing:
    """One contender: median and the 10th and 90th percentile in milliseconds; `first_s` is compile and first call.

    Of a program for several ranks they are the slowest rank's.
    """

    name: str
    median_ms: float | None
    low_ms: float | None
    high_ms: float | None
    first_s: float
    error: str = ""


@dataclass(frozen=True)
class Benchmark:
    """All contenders for one variant."""

    symbol: str
    timings: list[Timing]
    floor_ms: float | None
    kernels: int
    nbytes: int
    operations: int

    def rows(self) -> list[list[Any]]:
        """Table rows; the ratio is to ours, above 1 means slower than ours."""
        ours = self.timings[0].median_ms
        out = []
        for t in self.timings:
            ratio = None if ours is None or t.median_ms is None else t.median_ms / ours
            share = None if self.floor_ms is None or not t.median_ms else 100 * self.floor_ms / t.median_ms
            spread = None if t.low_ms is None else f"{t.low_ms:.4g}..{t.high_ms:.4g}"
            out.append(
                [
                    t.name if not t.error else f"{t.name}: {t.error}",
                    t.median_ms,
                    spread,
                    ratio,
                    share,
                    t.first_s,
                ]
            )
        return out


COLUMNS = ("contender", "ms", "10%..90%", "ratio", "% of floor", "compile s")


def bench_variant(
    program: Program,
    function: str,
    variant: Variant,
    *,
    compare: list[str],
    seed: int = 0,
    given: Mapping[str, torch.Tensor] | None = None,
) -> Benchmark:
    """Times one variant and its peers, which are of `MODES`. The program's state is left as it was. All ranks must do this together.

    Raises:
        TopoError: the variant fell back to ATen, so there is nothing of ours to time.
        InputError: peers were asked for where there are several ranks.
    """
    if compare and program.ranks is not None:
        raise InputError(
            f"'{compare[0]}' runs on one device, the bundle is for {program.ranks.count} ranks",
            hint="leave out --compare, or compile the model for one device",
        )
    leaves = sample_leaves(program.whole_inputs(variant).inputs, program.device, seed, given)
    before = {name: t.clone() for name, t in program.state.items()}
    try:
        timings = [_ours(program, function, variant, leaves)]
        timings += _replay(program, variant)
        timings += [_peer(program, function, mode, leaves) for mode in compare]
    finally:
        for name, value in before.items():
            program.state[name].copy_(value)
    nbytes, operations = traffic_bytes(variant), _operations(program, variant)
    floor = _floor_ms(program.device, nbytes, operations) if program.device.type == "cuda" else None
    kernels = sum(isinstance(s, KernelStep) for s in variant.steps)
    return Benchmark(variant.symbol, timings, floor, kernels, nbytes, operations)


def traffic_bytes(variant: Variant) -> int:
    """Bytes that any implementation must move: each weight, state buffer and input once, each output once."""
    counted = ("param", "buffer", "constant", "input", "output")
    return sum(b.nbytes for b in variant.buffers if b.kind in counted and b.splat is None)


def _ours(program: Program, function: str, variant: Variant, leaves: list[Any]) -> Timing:
    before = sum(program.fallbacks.values())
    start = time.perf_counter()
    program.call_flat(function, leaves)
    _wait(program.device)
    first = time.perf_counter() - start
    if sum(program.fallbacks.values()) > before:
        raise TopoError(f"{variant.symbol} ran as eager ATen: {next(reversed(program.fallbacks))}")
    return Timing("topo-opt", *_timed(program, lambda: program.call_flat(function, leaves)), first)


def _replay(program: Program, variant: Variant) -> list[Timing]:
    """The plan alone, without copying inputs and results: what a serving loop that writes in place would see."""
    if not isinstance(program.executor, CudaExecutor):
        return []
    graph = "graph replay" if program.executor.status(variant).graph else "launches"
    return [Timing(f"topo-opt ({graph})", *_timed(program, program.executor.replay_call(variant)), 0.0)]


class PeerModule(torch.nn.Module):
    """The program as a user would hand it to torch.compile: weights and state are buffers, calls pass the inputs alone.

    With weights as plain arguments Inductor would copy them at every call or give up its CUDA graphs.
    """

    def __init__(self, program: Program, function: str, leaves: list[Any]):
        super().__init__()
        self.graph = program.aten[function].to_graph_module(program.device)
        self.order: list[str | None] = []
        self.constants: list[Any] = []
        given = iter(leaves)
        for i, entry in enumerate(program.aten[function].inputs):
            value = next(given) if entry.kind == "input" else program.memory.tensors[entry.target]
            named = entry.kind != "input"
            if named:
                self.register_buffer(f"tensor{i}", value)
            self.order.append(f"tensor{i}" if named else None)
            self.constants.append(None if named or isinstance(value, torch.Tensor) else (value,))

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Calls the graph; `inputs` are the tensors among the caller's leaves."""
        given, arguments = 0, []
        for name, constant in zip(self.order, self.constants):
            if name is not None:
                arguments.append(getattr(self, name))
            elif constant is not None:
                arguments.append(constant[0])
            else:
                arguments.append(inputs[given])
                given += 1
        return self.graph(*arguments)


def _peer(program: Program, function: str, mode: str, leaves: list[Any]) -> Timing:
    module, options = PeerModule(program, function, leaves), MODES[mode]
    inputs = [v for v in leaves if isinstance(v, torch.Tensor)]
    start = time.perf_counter()
    try:
        with torch.no_grad():
            torch._dynamo.reset()
            run = module if options is None else torch.compile(module, fullgraph=True, **options)
            for _ in range(3):
                run(*inputs)
            _wait(program.device)
            first = time.perf_counter() - start
            return Timing(mode, *measure(lambda: run(*inputs), program.device), first)
    except Exception as error:
        # Whatever a peer's compiler raises is a result of this comparison, not an error of ours.
        text = str(error).strip().splitlines() or [type(error).__name__]
        return Timing(
            mode, None, None, None, time.perf_counter() - start, f"{type(error).__name__}: {text[0][:120]}"
        )


def _timed(program: Program, call: Callable[[], Any]) -> tuple[float, float, float]:
    if program.ranks is None:
        return measure(call, program.device)
    return measure_together(call, program.ranks, program.device)


def measure_together(
    call: Callable[[], Any], ranks: Ranks, device: torch.device
) -> tuple[float, float, float]:
    """As `measure`, by all ranks, which make equally many calls; the times of the rank with the largest median.

    On GPUs the L2 cache is as calls in a row leave it.

    Raises:
        RankFailure: another rank has failed or died.
    """
    in_a_row = IN_A_ROW if device.type == "cuda" else 1
    with torch.no_grad():
        first = statistics.median(_sample(call, ranks, device, in_a_row) for _ in range(3))
        slowest = max(map(float, ranks.agree(None, "agreeing on a number of calls", repr(first)).values()))
        count = max(3, min(1000, int(BENCH_S * 1000 / (slowest * in_a_row))))
        times = sorted(_sample(call, ranks, device, in_a_row) for _ in range(count))
    mine = statistics.median(times), times[len(times) // 10], times[-1 - len(times) // 10]
    every = ranks.agree(None, "comparing times", json.dumps(mine))
    median, low, high = max(json.loads(text) for text in every.values())
    return median, low, high


def _sample(call: Callable[[], Any], ranks: Ranks, device: torch.device, in_a_row: int) -> float:
    """Milliseconds of one call, from when all ranks are there."""
    try:
        dist.barrier(group=ranks.control)
    except RuntimeError:
        # A connection that breaks says less than what the other rank has left behind.
        ranks.agree(None, "starting a timed call")
        raise
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(in_a_row):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / in_a_row


def measure(call: Callable[[], Any], device: torch.device) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile of one call in milliseconds; on a GPU with a cold L2 cache, as Triton measures."""
    with torch.no_grad():
        if device.type == "cuda":
            from triton.testing import do_bench

            median, low, high = do_bench(call, warmup=50, rep=int(BENCH_S * 1000), quantiles=[0.5, 0.1, 0.9])
            return float(median), float(low), float(high)
        times: list[float] = []
        while len(times) < 3 or (sum(times) < BENCH_S * 1000 and len(times) < 1000):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1000)
        times.sort()
        return statistics.median(times), times[len(times) // 10], times[-1 - len(times) // 10]


def _operations(program: Program, variant: Variant) -> int:
    """Arithmetic of one call, from the report's figures for each kernel; 0 when the bundle has none."""
    report = program.bundle.json("report.json")
    rows = report.get("kernels", []) if isinstance(report, dict) else []
    known = {r["symbol"]: r.get("operations", 0) for r in rows if isinstance(r, dict) and "symbol" in r}
    return sum(known.get(s.kernel, 0) for s in variant.steps if isinstance(s, KernelStep))


_rates: dict[str, tuple[float, float]] = {}


def _floor_ms(device: torch.device, nbytes: int, operations: int) -> float:
    bytes_per_ms, operations_per_ms = _machine_rates(device)
    return max(nbytes / bytes_per_ms, operations / operations_per_ms)


def _machine_rates(device: torch.device) -> tuple[float, float]:
    """Bytes and arithmetic operations a millisecond, measured once: a 2 GB copy and an 8192^3 bf16 product."""
    key = str(device)
    if key not in _rates:
        a = torch.empty(1 << 30, dtype=torch.uint8, device=device)
        b = torch.empty_like(a)
        copy_ms, _, _ = measure(lambda: b.copy_(a), device)
        x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
        product_ms, _, _ = measure(lambda: x @ x, device)
        _rates[key] = 2 * a.numel() / copy_ms, 2 * 8192**3 / product_ms
    return _rates[key]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
