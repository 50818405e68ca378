"""What a call costs beside the kernels: python benchmarks/call_overhead.py BUNDLE [--device cuda|cpu] [--calls N]

On a GPU: the time of a call as the host sees it, and the time from call to call with the GPU kept busy, against bare replays of the
same graph; the difference is what the runtime adds. On the CPU the kernels run once and repeated calls then skip them, so that
what is left is the runtime's own Python and the copies of inputs and results.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from topo_opt.runtime import load
from topo_opt.runtime.executor import InterpretExecutor
from topo_opt.runtime.plan import Variant
from topo_opt.runtime.program import Program
from topo_opt.runtime.repeated_call import RepeatedCall
from topo_opt.runtime.sample_inputs import sample_leaves
from topo_opt.tools.run_tables import show

ROUNDS = 7
QUEUED = 50
"""Calls that are given to the GPU before it is waited for: few enough that the host never waits for a place in the queue."""


def without_kernels(program: Program) -> None:
    """Lets repeated calls on the CPU skip the kernels."""
    executor = program.executor
    assert isinstance(executor, InterpretExecutor)

    def repeated(variant: Variant, *, own_results: bool) -> RepeatedCall:
        tensors = executor.variants[id(variant)].tensors
        return RepeatedCall(variant, tensors, program.device, _nothing, own_results=own_results)

    executor.repeated = repeated  # type: ignore[method-assign, assignment]


def _nothing() -> None:
    return None


def host_us(call: Callable[[], object], count: int, synchronize: Callable[[], None]) -> float:
    """Microseconds that the host spends in a call, in the round that was disturbed least."""
    times = []
    for _ in range(ROUNDS):
        done = 0
        spent = 0.0
        while done < count:
            batch = min(QUEUED, count - done)
            start = time.perf_counter()
            for _ in range(batch):
                call()
            spent += time.perf_counter() - start
            synchronize()
            done += batch
        times.append(1e6 * spent / count)
    return min(times)


def busy_us(call: Callable[[], object], count: int, synchronize: Callable[[], None]) -> float:
    """Microseconds from call to call when the host runs ahead of the device, in the best round."""
    times = []
    for _ in range(ROUNDS):
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        synchronize()
        times.append(1e6 * (time.perf_counter() - start) / count)
    return min(times)


def measure(program: Program, function: str, variant: Variant, count: int) -> list[object]:
    """One row: variant, host time of a call and of a bare replay, both with the device busy, and the differences."""
    leaves = sample_leaves(variant.inputs, program.device, 1)
    flat = program.plan.functions[function].in_tree is None
    synchronize = torch.cuda.synchronize if program.device.type == "cuda" else _nothing

    def call() -> object:
        return program.call(function, *leaves) if flat else program.call_flat(function, leaves)

    with torch.no_grad():
        for _ in range(3):
            call()
        replay = program.executor.replay_call(variant) if program.device.type == "cuda" else _nothing
        call_host, replay_host = host_us(call, count, synchronize), host_us(replay, count, synchronize)
        call_busy, replay_busy = busy_us(call, count, synchronize), busy_us(replay, count, synchronize)
    return [
        variant.symbol, len(variant.inputs), len(variant.outputs), call_host, replay_host, call_host - replay_host,
        call_busy, replay_busy, call_busy - replay_busy,
    ]  # fmt: skip


def main() -> int:
    """Prints one row a variant; 1 when `--limit` is given and the runtime adds more host time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--static-results", action="store_true", help="results that the next call overwrites")
    parser.add_argument("--limit", type=float, default=None, help="microseconds that a call may add")
    arguments = parser.parse_args()
    program = load(
        arguments.bundle,
        arguments.device,
        random_weights=1,
        strict=True,
        static_results=arguments.static_results,
    )
    if program.device.type == "cpu":
        without_kernels(program)
    rows = [measure(program, f, v, arguments.calls) for f in program.functions for v in program.variants(f)]
    columns = (
        "variant", "inputs", "results", "call, host us", "replay, host us", "added", "call, busy us", "replay, busy us", "added",
    )  # fmt: skip
    show(f"cost of a call on {program.device}, microseconds", columns, rows)
    over = [row for row in rows if arguments.limit is not None and float(str(row[5])) > arguments.limit]
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
