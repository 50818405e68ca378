"""How long the compiler itself takes: the tool's start, and Llama-3-8B at -O2 from 8 to 32 layers. Needs no GPU.

    python benchmarks/compile_time.py [--layers 8,16,32] [--level 2]

Every compile runs in a process of its own, from a meta-device export, without tuning; `load` is the export and is not
counted. Prints seconds by phase, peak memory of the process and its children, and the growth from the first to the last.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

SMALL = """func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  %e = tensor.empty() : tensor<4xf32>
  %r = linalg.generic {indexing_maps = [affine_map<(i) -> (i)>, affine_map<(i) -> (i)>], iterator_types = ["parallel"]}
      ins(%a : tensor<4xf32>) outs(%e : tensor<4xf32>) {
  ^bb0(%x: f32, %o: f32):
    %n = arith.negf %x : f32
    linalg.yield %n : f32
  } -> tensor<4xf32>
  return %r : tensor<4xf32>
}
"""


def tool_start(repeats: int = 5) -> list[float]:
    """Seconds that `topo-opt small.mlir` takes, one run each."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "small.mlir"
        source.write_text(SMALL)
        command = [str(Path(sys.executable).parent / "topo-opt"), str(source), "-p", "topo-form-kernels"]
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            times.append(time.perf_counter() - start)
        return times


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    usage = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def compile_layers(layers: int, level: int) -> dict[str, object]:
    """Compiles one size in this process; resource measurements are not taken from the cache."""
    from dataclasses import replace

    import torch
    from bench_models import LLAMA_8B, decode

    from topo_opt import driver

    phases: dict[str, float] = {}

    @contextmanager
    def phase(name: str):
        start = time.perf_counter()
        yield
        phases[name] = phases.get(name, 0.0) + time.perf_counter() - start

    start = time.perf_counter()
    work = decode(replace(LLAMA_8B, layers=layers), 1, 1024)("meta")
    with torch.no_grad():
        program = torch.export.export(work.module, work.inputs, strict=False)
    load, before = time.perf_counter() - start, cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        options = driver.Options(topology="h200-x1", level=level, pack_weights=False, phase=phase)
        driver.compile({"main": program}, options, Path(folder) / "bundle")
        total = time.perf_counter() - start
    peaks = [resource.getrusage(w).ru_maxrss for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "layers": layers,
        "load_s": round(load, 1),
        "compile_s": round(total, 1),
        "cpu_s": round(cpu_seconds() - before, 1),
        "peak_gb": round(max(peaks) / 1e6, 2),
        "phases_s": {name: round(seconds, 1) for name, seconds in phases.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", default="8,16,32")
    parser.add_argument("--level", type=int, default=2)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(compile_layers(arguments.one, arguments.level)))
        return 0
    times = sorted(tool_start())
    print(
        json.dumps(
            {
                "topo-opt small.mlir": {
                    "median_s": round(times[len(times) // 2], 2),
                    "best_s": round(times[0], 2),
                }
            }
        ),
        flush=True,
    )
    rows = []
    for layers in map(int, arguments.layers.split(",")):
        command = [sys.executable, __file__, "--one", str(layers), "--level", str(arguments.level)]
        with tempfile.TemporaryDirectory() as cache:
            # An empty cache: what a first compile on a machine pays.

            environment = os.environ | {"XDG_CACHE_HOME": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    first, last = rows[0], rows[-1]
    growth = (last["cpu_s"] / first["cpu_s"]) / (last["layers"] / first["layers"])
    print(json.dumps({"growth of CPU time relative to layers": round(growth, 2)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
