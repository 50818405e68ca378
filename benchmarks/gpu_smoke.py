"""Exercises the GPU executor on a bundle: python benchmarks/gpu_smoke.py BUNDLE [--seed N] [--replays N]

Loads with random weights where the bundle has none, checks every variant against eager ATen and float64 on the GPU, replays
with fresh inputs comparing each result with eager and watching the memory, calls from two threads, times, and prints a table. Ends with exit code 0
only when everything is right; a failure prints its traceback and the other variants still run.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

from topo_opt.runtime import load
from topo_opt.runtime.program import Program
from topo_opt.runtime.sample_inputs import sample_leaves
from topo_opt.tools.run_bench import COLUMNS, bench_variant
from topo_opt.tools.run_check import check_variant
from topo_opt.tools.run_tables import show

SETTLED = 20
"""Calls after which all caches are filled."""
# Bytes: nothing may stay allocated on the GPU, the host's allocator keeps some.
ALLOWED_GROWTH = {"allocated": 0, "reserved": 64 << 20, "resident": 64 << 20}


@dataclass(frozen=True)
class Footprint:
    """Bytes: GPU memory that tensors have and that the allocator has, and host memory of the process."""

    allocated: int
    reserved: int
    resident: int


def replay(program: Program, function: str, variant, count: int, seed: int, half_limit: float) -> float:
    """Largest deviation from eager over `count` calls with fresh inputs, relative to the largest magnitude of eager.

    Raises an AssertionError when a result is off, or when memory grew after the first calls.
    """
    worst, limits = 0.0, {torch.float32: 5e-3, torch.float64: 1e-6}
    before: Footprint | None = None
    for i in range(count):
        if i == SETTLED:
            before = footprint()
        leaves = sample_leaves(variant.inputs, program.device, seed + i)
        copies = [v.clone() if isinstance(v, torch.Tensor) else v for v in leaves]
        eager = program.run_aten(function, copies, commit=False)
        ours = program.call_flat(function, leaves)
        for a, b in zip(ours, eager, strict=True):
            if isinstance(b, torch.Tensor) and b.numel() and not b.is_complex():
                scale = b.double().abs().max().clamp_min(1e-6)
                deviation = ((a.double() - b.double()).abs().max() / scale).item()
                limit = limits.get(b.dtype, half_limit) if b.is_floating_point() else 0.0
                if not deviation <= limit:
                    raise AssertionError(f"replay {i}: deviation {deviation:.3g} from eager, allowed {limit}")
                worst = max(worst, deviation)
    if before is not None:
        ours = eager = leaves = copies = a = b = None
        require_no_growth(before, footprint(), count - SETTLED)
    return worst


def footprint() -> Footprint:
    """What is in use now, after everything that was given to the GPU has ended."""
    torch.cuda.synchronize()
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return Footprint(torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), resident)


def require_no_growth(before: Footprint, after: Footprint, calls: int) -> None:
    """Raises when a call leaves memory behind. Fresh inputs and eager's temporaries come and go, so reserved memory may settle."""
    grown = {name: getattr(after, name) - getattr(before, name) for name in ALLOWED_GROWTH}
    print(f"  {calls} calls: " + ", ".join(f"{name} {n:+,} bytes" for name, n in grown.items()))
    if over := [f"{name} grew by {n} bytes" for name, n in grown.items() if n > ALLOWED_GROWTH[name]]:
        raise AssertionError(f"after {calls} calls " + " and ".join(over))


def kept_results(program: Program, function: str, variant, seed: int) -> None:
    """A result must not change when the function is called again."""
    leaves = [sample_leaves(variant.inputs, program.device, seed + i) for i in range(2)]
    first = program.call_flat(function, leaves[0])
    saved = [v.clone() if isinstance(v, torch.Tensor) else v for v in first]
    program.call_flat(function, leaves[1])
    torch.cuda.synchronize()
    for a, b in zip(first, saved, strict=True):
        if isinstance(a, torch.Tensor) and not torch.equal(a.nan_to_num(), b.nan_to_num()):
            raise AssertionError("a result changed after the next call")


def two_threads(program: Program, function: str, variant, seed: int) -> None:
    """Concurrent calls must give what single calls give; only said of functions without state."""
    if variant.mutated_state:
        return
    leaves = sample_leaves(variant.inputs, program.device, seed)
    expected = program.call_flat(function, leaves)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                got = program.call_flat(function, leaves)
                torch.cuda.synchronize()
                for a, b in zip(got, expected, strict=True):
                    if isinstance(a, torch.Tensor) and a.is_floating_point():
                        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2, equal_nan=True)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failures:
        raise failures[0]


def smoke(program: Program, function: str, variant, arguments: argparse.Namespace) -> list:
    """One row of the table. Raises when something is wrong."""
    result = check_variant(program, function, variant, seed=arguments.seed)
    for v in result.verdicts:
        print(f"  {variant.symbol}: {v}")
    if result.fallback:
        raise AssertionError(f"the variant fell back to ATen: {result.fallback}")
    if not result.passed:
        raise AssertionError("wrong results: " + "; ".join(str(v) for v in result.verdicts if not v.passed))
    kept_results(program, function, variant, arguments.seed)
    program.state.reset()
    worst = replay(program, function, variant, arguments.replays, arguments.seed, arguments.limit)
    two_threads(program, function, variant, arguments.seed)
    bench = bench_variant(program, function, variant, compare=["eager"], seed=arguments.seed)
    status = program.executor.status(variant)
    show(variant.symbol, COLUMNS, bench.rows())
    times = {
        t.name.split(" ")[0] + ("" if "(" not in t.name else " replay"): t.median_ms for t in bench.timings
    }
    return [
        variant.symbol, bench.kernels, "one graph" if status.graph else f"no graph: {status.reason}", worst,
        times.get("topo-opt"), times.get("topo-opt replay"), times.get("eager"), bench.floor_ms,
    ]  # fmt: skip


def main() -> int:
    """Runs everything; 0 when all is right."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument(
        "--limit", type=float, default=0.05, help="of half-precision replays; routing by top-k needs more"
    )
    parser.add_argument("--weights", default=None)
    arguments = parser.parse_args()
    import triton

    print(f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}")
    start = time.time()
    program = load(arguments.bundle, "cuda", weights=arguments.weights, random_weights=arguments.seed)
    print(f"loaded in {time.time() - start:.1f} s, {len(program.memory.random_names)} weights are random")
    rows, failed = [], 0
    for function in program.functions:
        for variant in program.variants(function):
            start = time.time()
            try:
                rows.append(smoke(program, function, variant, arguments))
            except Exception:
                failed += 1
                traceback.print_exc()
                rows.append([variant.symbol, None, "FAILED", None, None, None, None, None])
            print(f"{variant.symbol}: {time.time() - start:.1f} s", flush=True)
    for reason, count in program.fallbacks.items():
        print(f"{count} calls ran as eager ATen: {reason}")
    columns = ("variant", "kernels", "graph", "worst deviation", "ms", "replay ms", "eager ms", "floor ms")
    show("GPU smoke test", columns, rows)
    print("all right" if not failed else f"{failed} FAILED")
    return 1 if failed or program.fallbacks else 0


if __name__ == "__main__":
    sys.exit(main())
