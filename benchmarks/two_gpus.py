"""Models split over two GPUs beside one GPU and PyTorch's tensor parallelism, in one run.

    python benchmarks/two_gpus.py --prepare DIR [case ...]             # compiles; needs no GPU
    torchrun --nproc-per-node=2 benchmarks/two_gpus.py --measure DIR [--out FOLDER] [case ...]

For every case there are the planner's own choice (`planned`), forced splits (`replicated`, `tensor`) and the program for one GPU (`one`). A row has the median of a replay, the slower rank's; what the plan
predicted; the largest difference from the one-GPU program's result; and with `--peers` the time of the same module under
`torch.distributed.tensor.parallel.parallelize_module`, compiled. Rows go to `two_gpus.json`, a table to standard output.
`--device cpu --small` runs the same with gloo, Triton's interpreter and small sizes: a test of this program, not of speed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_models import (
    LLAMA_1B,
    LLAMA_8B,
    Decoder,
    DecoderShape,
    Work,
    bert,
    decode,
    prefill,
    qwen3_moe_block,
)
from gpu_models import tensors
from rich.console import Console
from rich.table import Table

SMALL = DecoderShape(128, 8, 4, 16, 256, 2, 512, positions=64)
AXIS = "x"
REPEATS, REPLAYS = 9, 10
COLUMNS = ("q", "k", "v", "gate", "up")
ROWS = ("o", "down")
AGREE = 6e-2
"""Largest difference from the one-GPU program, relative to the largest magnitude: sums in another order, in bf16, through all layers."""

TENSOR = [
    *(f"layers.*.{name}.weight={AXIS},_" for name in COLUMNS),
    *(f"layers.*.{name}.weight=_,{AXIS}" for name in ROWS),
]
CACHES = [f"layers.*.{name}=_,{AXIS},_,_" for name in ("keys", "values")]
BATCH = [f"ids={AXIS},_", *(f"layers.*.{name}={AXIS},_,_,_" for name in ("keys", "values"))]
WEIGHTS = [*(f"layers.*.{name}.weight=_,_" for name in (*COLUMNS, *ROWS)), "head.weight=_,_"]

Build = Callable[[str], Work]


def cases(small: bool) -> dict[str, tuple[Build, dict[str, list[str] | None]]]:
    """Case -> how to build it, and the forced splits as pins; None: the planner's choice."""
    one, eight = (SMALL, SMALL) if small else (LLAMA_1B, LLAMA_8B)
    cache, lengths = (32, (32, 64)) if small else (1024, (2048, 8192))
    found: dict[str, tuple[Build, dict[str, list[str] | None]]] = {}

    def decoder(name: str, shape: DecoderShape, batch: int, forced: bool) -> None:
        splits: dict[str, list[str] | None] = {"planned": None}
        if forced:
            splits["replicated"] = [*WEIGHTS, *(BATCH if batch > 1 else [])]
            splits["tensor"] = [*TENSOR, *CACHES]
        found[f"{name}-decode-b{batch}"] = (decode(shape, batch, cache), splits)

    for batch in (1, 8, 32):
        decoder("llama8b", eight, batch, forced=True)
    for length in lengths:
        shape = replace(eight, positions=length)
        found[f"llama8b-prefill-{length}"] = (prefill(shape, length), {"planned": None, "tensor": TENSOR})
    decoder("llama1b", one, 1, forced=False)
    if not small:
        found["bert-base-8x512"] = (bert(8, 512), {"planned": None})
        found["qwen3moe-block-t2048"] = (qwen3_moe_block(2048), {"planned": None})
    return found


def prepare(folder: Path, names: list[str], topology: str, small: bool) -> int:
    """Writes the bundles of every case, and what the plans predict."""
    from topo_opt import driver
    from topo_opt.errors import TopoError

    known, failed = cases(small), 0
    for name in names or list(known):
        build, splits = known[name]
        work = build("meta")
        with torch.no_grad():
            program = torch.export.export(work.module, work.inputs, strict=False)
        single = "cpu" if topology == "cpu" else "h200-x1"
        compilations = {"one": driver.Options(topology=single, pack_weights=False)}
        for split, pins in splits.items():
            mesh = f"{AXIS}=2" if pins is not None or topology == "cpu" else "auto"
            planner = {"pin": ";".join(pins)} if pins else {}
            compilations[split] = driver.Options(
                topology=topology, mesh=mesh, planner=planner, pack_weights=False
            )
        for split, options in compilations.items():
            start = time.time()
            try:
                done = driver.compile({"main": program}, options, folder / name / split)
            except TopoError as error:
                failed += 1
                print(f"{name} {split}: {error.render()}", flush=True)
                continue
            (row,) = done.report.functions
            plan = done.plans[0] if done.plans else None
            about = {
                "predicted_ms": plan.seconds * 1e3 if plan else None,
                "mesh": dict(plan.mesh.axes) if plan else {},
                "launches": row.kernels,
                "collectives": row.collectives,
            }
            (folder / name / f"{split}.json").write_text(json.dumps(about))
            print(
                f"{name} {split}: {row.kernels} launches, {row.collectives} collectives, {time.time() - start:.1f} s",
                flush=True,
            )
    return failed


class Machine:
    """This process among two, and how things are timed on it."""

    def __init__(self, device: str):
        self.rank = int(os.environ["RANK"])
        self.device = torch.device(device, self.rank) if device == "cuda" else torch.device("cpu")
        if device == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        self.control = dist.new_group(backend="gloo")

    def slower(self, value: float) -> float:
        """The larger of what the ranks measured."""
        both = torch.tensor(value)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.control)
        return both.item()

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
                dist.barrier(group=self.control)
            start.record()
            for _ in range(REPLAYS):
                call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / REPLAYS)
        middle = statistics.median(times)
        return middle if alone else self.slower(middle)


def built(build: Build, machine: Machine) -> tuple[Work, dict[str, torch.Tensor]]:
    """The module with the same weights on every rank, and its tensors by name."""
    torch.manual_seed(0)
    work = build(str(machine.device))
    state = tensors(work.module)
    generator = torch.Generator(device=machine.device).manual_seed(1)
    for name, value in state.items():
        if name.endswith(("keys", "values")):
            value.normal_(generator=generator)
    return work, state


def run_case(
    folder: Path, name: str, build: Build, splits: list[str], machine: Machine, peers: bool
) -> Iterator[dict[str, Any]]:
    """Rows of one case: one GPU first, then every split, then PyTorch."""
    from topo_opt import runtime

    work, state = built(build, machine)
    held = {n: v.clone() for n, v in state.items() if n.endswith(("keys", "values"))}
    about = {
        s: json.loads((folder / name / f"{s}.json").read_text())
        for s in ("one", *splits)
        if (folder / name / f"{s}.json").exists()
    }
    expected, single = None, 0.0
    if machine.rank == 0:
        program = runtime.load(folder / name / "one", machine.device, weights=state)
        expected = first_output(program(*work.inputs)).clone()
        single = machine.milliseconds(replay(program, work), alone=True)
        del program
    dist.barrier(group=machine.control)
    yield {"case": name, "who": "one", "ms": single, **about["one"]}
    for split in splits:
        if split not in about:
            continue
        for key, value in held.items():
            state[key].copy_(value)
        row: dict[str, Any] = {"case": name, "who": split, **about[split]}
        distributed = about[split]["mesh"] != {} and any(n > 1 for n in about[split]["mesh"].values())
        if not distributed:
            yield row | {"ms": single, "note": "the plan takes one device"}
            continue
        program = runtime.load(folder / name / split, machine.device, weights=state)
        result = first_output(program(*work.inputs))
        if expected is not None:
            row["differs"] = ((result - expected).abs().max() / expected.abs().max()).item()
        row["status"] = program.status() if machine.rank == 0 else None
        yield row | {"ms": machine.milliseconds(replay(program, work))}
        del program, result
    del work, state, held
    if peers and name.startswith("llama"):
        torch.cuda.empty_cache()
        yield {
            "case": name,
            "who": "torch tensor parallel",
            "ms": machine.milliseconds(parallelized(build, machine)),
        }


def first_output(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, (tuple, list)) else result


def replay(program: Any, work: Work) -> Callable[[], Any]:
    """What is timed: the replay of the graph where there is one, the call elsewhere."""
    if program.device.type == "cpu":
        return lambda: program(*work.inputs)
    return program.executor.replay_call(program.variants("main")[0])


def parallelized(build: Build, machine: Machine) -> Callable[[], Any]:
    """The module under PyTorch's tensor parallelism, compiled with max-autotune."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    work, _ = built(build, machine)
    module, count = work.module, dist.get_world_size()
    assert isinstance(module, Decoder)
    styles: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS} | {
        n: RowwiseParallel() for n in ROWS
    }
    mesh = init_device_mesh(machine.device.type, (count,))
    for layer in module.layers:
        parallelize_module(layer, mesh, styles)
        # The module's own views speak of heads, of which each rank has its share.
        layer.shape = replace(
            layer.shape, heads=layer.shape.heads // count, kv_heads=layer.shape.kv_heads // count
        )
        if layer.shape.cache:
            for name in ("keys", "values"):
                setattr(layer, name, getattr(layer, name).chunk(count, 1)[machine.rank].contiguous())
    mode = "max-autotune" if machine.device.type == "cuda" else None
    compiled = torch.compile(module, mode=mode, fullgraph=True)
    for _ in range(3):
        compiled(*work.inputs)
    return partial(compiled, *work.inputs)


def with_ratios(rows: list[dict[str, Any]]) -> None:
    """Adds times relative to one GPU, and predicted times relative to measured ones."""
    single = {row["case"]: row["ms"] for row in rows if row["who"] == "one"}
    for row in rows:
        if row["who"] != "one" and single.get(row["case"]):
            row["of_one"] = row["ms"] / single[row["case"]]
        if row.get("predicted_ms"):
            row["predicted_of_measured"] = row["predicted_ms"] / row["ms"]


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table("case", "who", "ms", "of one GPU", "predicted ms", "of measured", "collectives", "differs")

    def cell(row: dict[str, Any], key: str, text: str) -> str:
        return text.format(row[key]) if row.get(key) is not None else ""

    for row in rows:
        table.add_row(
            row["case"],
            row["who"] + (f" {row['failed']}" if "failed" in row else ""),
            cell(row, "ms", "{:.4f}"),
            cell(row, "of_one", "{:.3f}"),
            cell(row, "predicted_ms", "{:.4f}"),
            cell(row, "predicted_of_measured", "{:.2f}"),
            cell(row, "collectives", "{}"),
            cell(row, "differs", "{:.4f}"),
        )
    Console(width=140).print(table)


def run(arguments: argparse.Namespace) -> int:
    torch.set_grad_enabled(False)
    machine = Machine(arguments.device)
    known = cases(arguments.small)
    rows: list[dict[str, Any]] = []
    start, wrong = time.time(), 0
    for name in arguments.cases or list(known):
        if machine.slower(time.time() - start) > arguments.seconds:
            rows.append({"case": name, "who": "-", "ms": None, "failed": "not run, the time was over"})
            continue
        build, splits = known[name]
        for row in run_case(arguments.measure, name, build, list(splits), machine, arguments.peers):
            if row.get("differs", 0.0) > AGREE:
                wrong += 1
                row["failed"] = "differs"
            rows.append(row)
            if machine.rank == 0:
                print(json.dumps({k: v for k, v in row.items() if k != "status"}, default=str), flush=True)
        if machine.device.type == "cuda":
            torch.cuda.empty_cache()
    if machine.rank == 0:
        with_ratios([row for row in rows if row["ms"] is not None])
        about = {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if machine.device.type == "cuda" else "cpu",
            "date": time.strftime("%Y-%m-%d"),
        }
        (arguments.out / "two_gpus.json").write_text(
            json.dumps({**about, "rows": rows}, indent=1, default=str)
        )
        print_table(rows)
    dist.barrier(group=machine.control)
    dist.destroy_process_group()
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prepare", type=Path, metavar="DIR")
    parser.add_argument("--measure", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--topology", default="h200-x2", help="of two devices, for --prepare")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--peers", action="store_true", help="PyTorch's tensor parallelism too")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after so long")
    parser.add_argument("--small", action="store_true", help="small sizes, for a try without GPUs")
    parser.add_argument("cases", nargs="*")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    failed = 0
    if arguments.prepare:
        failed = prepare(arguments.prepare, arguments.cases, arguments.topology, arguments.small)
    if arguments.measure:
        failed += run(arguments)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
