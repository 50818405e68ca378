"""Whole models on one GPU beside eager and Inductor, side by side in one run.

    python benchmarks/gpu_models.py --prepare DIR [case ...]   # compiles bundles from meta-device exports; needs no GPU
                                    [--tune short --tuning-time 30]   # with one, measures tiles
    python benchmarks/gpu_models.py --run DIR [case ...] [--peers graph,default,default-graph,max-autotune]

Prints one line a case and peer: median milliseconds with the quartiles, the ratio to Inductor max-autotune, the share of the
memory or compute floor (from limits measured in the same run), and the largest error against float64 beside eager's. Rows
are appended to `gpu_models.jsonl` in the current folder, or in `--out`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_models import ALL, CASES, Work

PEERS = ("graph", "default", "default-graph", "max-autotune")


def prepare(folder: Path, cases: list[str], tuning: dict[str, Any]) -> None:
    """Writes a bundle without weights for every case; `tuning` are the tuning options of the driver."""
    from topo_opt import driver

    for case in cases:
        work = ALL[case]("meta")
        with torch.no_grad():
            program = torch.export.export(work.module, work.inputs, strict=False)
        start = time.time()
        options = driver.Options(topology="h200-x1", pack_weights=False, **tuning)
        driver.compile({"main": program}, options, folder / case)
        print(f"{case}: compiled in {time.time() - start:.1f} s after the export", flush=True)


def milliseconds(call: Callable[[], Any]) -> tuple[float, float, float]:
    """Median and quartiles over at least 300 ms of calls."""
    from triton.testing import do_bench

    low, middle, high = do_bench(call, warmup=50, rep=300, quantiles=[0.25, 0.5, 0.75])
    return middle, low, high


def limits() -> tuple[float, float]:
    """Bytes per second of a large copy and operations per second of an 8192-cubed bf16 product."""
    source, target = (torch.empty(1 << 31, dtype=torch.uint8, device="cuda") for _ in range(2))
    copied = 2 * source.numel() / milliseconds(partial(target.copy_, source))[0] * 1e3
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return copied, 2 * 8192**3 / milliseconds(partial(torch.matmul, a, b))[0] * 1e3


def graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as one CUDA graph replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def peer(name: str, call: Callable[[], Any]) -> Callable[[], Any]:
    """The peer's callable, warmed up: eager in a CUDA graph, Inductor in one of its modes, or its default mode in a CUDA graph of ours."""
    torch._dynamo.reset()
    if name == "graph":
        return graphed(call)
    mode = None if name.startswith("default") else name
    compiled = torch.compile(call, mode=mode, fullgraph=True)
    for _ in range(3):
        compiled()
    return graphed(compiled) if name == "default-graph" else compiled


def errors(work: Work, ours: torch.Tensor, state: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Largest error of ours and of eager against the same module in float64, relative to the largest magnitude."""
    eager = work.module(*work.inputs).clone()
    exact_module = work.module.double()
    restore(exact_module, state)
    with grouped_by_loops(exact_module):
        exact = exact_module(*(x.double() if x.is_floating_point() else x for x in work.inputs))
    restore(work.module.to(torch.bfloat16), state)
    scale = exact.abs().max()
    return ((ours - exact).abs().max() / scale).item(), ((eager - exact).abs().max() / scale).item()


@contextmanager
def grouped_by_loops(module: torch.nn.Module) -> Iterator[None]:
    """Experts of transformers one after the other inside: torch's grouped products have no float64."""
    key = "_experts_implementation"
    configs = {id(c): c for m in module.modules() if hasattr(c := getattr(m, "config", None), key)}
    saved = [(c, getattr(c, key)) for c in configs.values()]
    try:
        for config, _ in saved:
            setattr(config, key, "eager")
        yield
    finally:
        for config, value in saved:
            setattr(config, key, value)


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers by every name they have, also buffers that no state dict holds."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: value.detach() for name, value in named}


def restore(module: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Sets every parameter and buffer to its value in `state`, converted to the module's type."""
    for name, value in tensors(module).items():
        value.copy_(state[name])


def run_case(
    folder: Path, case: str, peers: list[str], ceilings: tuple[float, float]
) -> list[dict[str, Any]]:
    """Checks and times one case."""
    from topo_opt import runtime

    torch.manual_seed(0)
    work = ALL[case]("cuda")
    for name, buffer in work.module.named_buffers():
        if name.endswith(("keys", "values")):
            buffer.normal_()
    state = {name: value.clone() for name, value in tensors(work.module).items()}
    floor = max(work.nbytes / ceilings[0], work.flops / ceilings[1]) * 1e3
    start = time.time()
    program = runtime.load(folder / case, "cuda", weights=state, strict=True)
    ours = program(*work.inputs).clone()
    first = time.time() - start
    own_error, eager_error = errors(work, ours, state)
    variant = program.variants("main")[0]
    rows = [row(case, "topo-opt", program.executor.replay_call(variant), floor, first)]
    rows[0] |= {
        "error": own_error,
        "eager_error": eager_error,
        "graph": program.executor.status(variant).graph,
    }
    rows.append(row(case, "topo-opt call", lambda: program(*work.inputs), floor, first))
    for name in peers:
        start = time.time()
        try:
            call = peer(name, lambda: work.module(*work.inputs))
            rows.append(row(case, name, call, floor, time.time() - start))
        except Exception as error:
            rows.append({"case": case, "who": name, "failed": f"{type(error).__name__}: {error}"[:300]})
    return rows


def row(case: str, who: str, call: Callable[[], Any], floor: float, first: float) -> dict[str, Any]:
    middle, low, high = milliseconds(call)
    return {
        "case": case, "who": who, "ms": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)],
        "floor_ms": round(floor, 4), "of_floor": round(floor / middle, 3), "first_call_s": round(first, 1),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prepare", type=Path)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--tune", choices=("off", "cache", "short", "full"), help="while preparing, on a GPU")
    parser.add_argument("--tuning-time", type=float, help="seconds a case")
    parser.add_argument("cases", nargs="*")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    cases = arguments.cases or list(CASES)
    if arguments.prepare:
        prepare(arguments.prepare, cases, {"tune": arguments.tune, "tuning_time_s": arguments.tuning_time})
    if not arguments.run:
        return 0
    torch.set_grad_enabled(False)
    ceilings = limits()
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name()}, copy {ceilings[0] / 1e12:.2f} TB/s, product {ceilings[1] / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    failed = 0
    for case in cases:
        try:
            rows = run_case(arguments.run, case, [p for p in arguments.peers.split(",") if p], ceilings)
        except Exception:
            failed += 1
            traceback.print_exc()
            continue
        finally:
            torch.cuda.empty_cache()
        reference = next((r["ms"] for r in rows if r["who"] == "max-autotune" and "ms" in r), None)
        with open(arguments.out / "gpu_models.jsonl", "a") as log:
            for entry in rows:
                if reference and "ms" in entry:
                    entry["of_max_autotune"] = round(entry["ms"] / reference, 3)
                print(json.dumps(entry), flush=True)
                log.write(json.dumps(entry) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
