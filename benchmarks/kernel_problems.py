"""Single-kernel problems on one GPU beside Inductor, side by side in one run.

    python benchmarks/kernel_problems.py --prepare DIR [problem ...]   # compiles bundles without weights; needs no GPU
    python benchmarks/kernel_problems.py --run DIR [problem ...] [--peers default,max-autotune] [--seconds 280]

Prints one line a problem: milliseconds of ours as kernels and as a call, the peers', the ratios, and our largest error
against float64 beside eager's. Rows go to `kernel_problems.jsonl` in the current folder, or in `--out`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from problem_set import PROBLEMS

PEERS = ("eager", "default", "max-autotune")
EXACT_BYTES = 8 << 30
"""Inputs up to so many bytes in float64 are computed in float64 as well."""


def prepare(folder: Path, names: list[str]) -> int:
    """Writes a bundle for every problem; returns how many could not be compiled."""
    from topo_opt import driver

    failed = 0
    for name in names:
        start = time.time()
        try:
            module, inputs = PROBLEMS[name]("meta")
            with torch.no_grad():
                program = torch.export.export(module, inputs, strict=False)
            done = driver.compile({"main": program}, driver.Options(pack_weights=False), folder / name)
        except Exception as error:
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            continue
        rows = ", ".join(f"{f.kernels} launches, {f.aten} left to ATen" for f in done.report.functions)
        print(f"{name}: {rows}, {time.time() - start:.1f} s", flush=True)
    return failed


def milliseconds(call: Callable[[], Any]) -> float:
    """Median over at least 60 ms of calls, caches cleared between them."""
    from triton.testing import do_bench

    return do_bench(call, warmup=10, rep=60, quantiles=[0.5])


def peer(name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    """A peer's call, warmed up."""
    if name == "eager":
        return lambda: module(*inputs)
    torch._dynamo.reset()
    # Without its own graphs: they copy the inputs, which here are most of the work.
    mode = None if name == "default" else "max-autotune-no-cudagraphs"
    compiled = torch.compile(module, mode=mode, fullgraph=True)
    for _ in range(3):
        compiled(*inputs)
    return lambda: compiled(*inputs)


def errors(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], ours: torch.Tensor) -> dict[str, Any]:
    """Largest errors of ours and of eager against float64, relative to the largest magnitude."""
    eager = module(*inputs)
    if not eager.is_floating_point():
        return {"differs": int((eager != ours).sum())}
    if 2 * sum(i.nbytes for i in (*inputs, eager)) > EXACT_BYTES:
        return {"from_eager": ((ours - eager).abs().max() / eager.abs().max()).item()}
    exact = copy.deepcopy(module).double()(*(i.double() if i.is_floating_point() else i for i in inputs))
    scale = exact.abs().max()
    return {
        "error": ((ours - exact).abs().max() / scale).item(),
        "eager_error": ((eager - exact).abs().max() / scale).item(),
    }


def run(folder: Path, name: str, peers: list[str]) -> dict[str, Any]:
    """Checks and times one problem."""
    from topo_opt import runtime

    torch.manual_seed(0)
    module, inputs = PROBLEMS[name]("cuda")
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    program = runtime.load(folder / name, "cuda", weights=state, strict=True)
    row: dict[str, Any] = {"problem": name} | errors(module, inputs, program(*inputs).clone())
    for who in peers:
        try:
            row[who] = milliseconds(peer(who, module, inputs))
        except Exception as error:
            row[f"{who}_failed"] = f"{type(error).__name__}: {error}"[:200]
    row["ours"] = milliseconds(program.executor.replay_call(program.variants("main")[0]))
    row["ours_call"] = milliseconds(lambda: program(*inputs))
    for who in peers:
        if who in row:
            row[f"of_{who}"] = row["ours"] / row[who]
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prepare", type=Path)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no problem after so long")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("problems", nargs="*")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    names = arguments.problems or list(PROBLEMS)
    failed = prepare(arguments.prepare, names) if arguments.prepare else 0
    if not arguments.run:
        return 1 if failed else 0
    torch.set_grad_enabled(False)
    start, ratios = time.time(), []
    peers = [p for p in arguments.peers.split(",") if p]
    for name in names:
        if time.time() - start > arguments.seconds:
            print(f"not run: {', '.join(names[names.index(name) :])}")
            break
        try:
            row = run(arguments.run, name, peers)
        except Exception:
            failed += 1
            traceback.print_exc()
            continue
        finally:
            torch.cuda.empty_cache()
        ratios += [row["of_default"]] if "of_default" in row else []
        print(json.dumps(row), flush=True)
        with open(arguments.out / "kernel_problems.jsonl", "a") as log:
            log.write(json.dumps(row) + "\n")
    if ratios:
        middle = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"{len(ratios)} problems, geometric mean {middle:.3f} of Inductor's default, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
