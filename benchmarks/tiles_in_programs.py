"""Tiles judged in whole programs: what a kernel's neighbours do to it, no measurement of the kernel alone can see.

    python benchmarks/tiles_in_programs.py --prepare DIR --entries CACHE ... --cases CASE ...   # needs no GPU
    python benchmarks/tiles_in_programs.py --run DIR [--cases CASE ...] [--out FOLDER]              # on a GPU, without the compiler
    python benchmarks/tiles_in_programs.py --choose FOLDER/tiles_in_programs.jsonl --data FILE -o FILE

`--prepare` writes a bundle of the case (`gpu_models.py`) as it is compiled now, and one for each other promising tile of each of its
kernels: the best of those that `--entries` have times for, then the first candidates of the search. `--run` replays them in turn
with the first one, tests that results agree, and prints the time of a replay beside the first one's. A case `CASE@WAY` is one of
`two_gpus_cases.py` split that way over two devices; one of its ranks runs alone (`lone_rank.py`). `--choose` puts the tiles
that were faster by more than the noise in front in a file of tuning data; prepared anew, the next round starts from them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_models import CASES, Work
from gpu_models import tensors
from lone_rank import load_alone
from two_gpus_cases import cases, options_of

BASE = "base"
CLOSE = 1.15
"""Times of a kernel alone, relative to its best, up to which a tile is tried in the program."""
MOST = 5
"""Other tiles tried for a kernel."""
SMALLEST_SHARE = 0.02
"""Share of the program's floor from which on a kernel is looked at."""
NOISE = 0.004
"""The first variant beside itself is up to 0.3 % off."""
DISTURBED = 0.01
"""A row is no evidence where the first variant took so much longer than usual: the machine was slower for a while."""
ROUNDS, REPLAYS = 9, 20
TURN_MS = 30.0
"""Milliseconds of a turn, from which on there are fewer replays."""
AGREE = 6e-2
"""Largest difference from the first variant's results, relative to their largest magnitude: sums in other orders, in bf16, through
all layers. Eager's own error in these programs is 0.03 to 0.06 (benchmarks/results/kernels-h200.md)."""


def prepare(
    folder: Path, case: str, places: list[Path], kernels: tuple[str, ...], also: Sequence[tuple[str, int]]
) -> None:
    from torch_mlir import ir

    from topo_opt import driver
    from topo_opt.codegen.triton.target import Target
    from topo_opt.errors import UnsupportedError
    from topo_opt.tuning.forms import tunable
    from topo_opt.tuning.ship import entries_of
    from topo_opt.tuning.subjects import subjects_of

    name, _, way = case.partition("@")
    work = work_of(case, "meta")
    with torch.no_grad():
        program = torch.export.export(work.module, work.inputs, strict=False)
    options = driver.Options(topology="h200-x1", pack_weights=False)
    if way:
        options = options_of(cases(small=False)[name], way, program, work, "h200-x2")
    compilation = driver.with_kernels({"main": program}, options)
    known = {e.key.text: e for place in places for e in entries_of(place)}
    device = options.machine.primary
    rows = [{"case": case, "name": BASE}]
    text = str(compilation.module)
    with compilation.module.context, ir.Location.unknown():
        write(compilation, compilation.module, compilation.sources, folder / case / BASE)
        subjects = subjects_of(compilation.module.operation, device, compilation.sources)
        total = sum(s.weight for s in subjects)
        for subject in subjects:
            if subject.weight < SMALLEST_SHARE * total or not subject.symbol.startswith(kernels):
                continue
            form = tunable(subject.func, Target.of(device))
            entry = known.get(form.key.text)
            tiles = form.candidates()
            if entry:
                timed = sorted(entry.timed, key=lambda t: t.us)
                tiles = [t.tile for t in timed if t.us <= CLOSE * timed[0].us]
            tiles = [_with(form.own, key, value) for key, value in also] + list(tiles)
            tried = 0
            for tile in tiles:
                if tried == MOST + len(also):
                    break
                if dict(tile) == dict(form.own):
                    continue
                module = ir.Module.parse(text)
                func = ir.SymbolTable(module.operation)[subject.symbol].operation
                other = tunable(func, Target.of(device))
                try:
                    source = other.lower(tile)
                except UnsupportedError:
                    continue
                if source == compilation.sources[subject.symbol]:
                    continue
                other.apply(tile)
                name = f"{subject.symbol}.{tried}"
                write(
                    compilation, module, {**compilation.sources, subject.symbol: source}, folder / case / name
                )
                rows.append(
                    {
                        "case": case,
                        "name": name,
                        "kernel": subject.symbol,
                        "tile": dict(tile),
                        "text": form.key.text,
                    }
                )
                tried += 1
    (folder / case / "variants.json").write_text(json.dumps(rows))
    print(f"{case}: {len(rows)} programs", flush=True)


def _with(tile: Mapping[str, int], key: str, value: int) -> dict[str, int]:
    """The tile with one more entry; of a pack, for each of its members."""
    members = {name.partition(".")[0] for name in tile if "." in name}
    return {**tile, **({f"{m}.{key}": value for m in sorted(members)} if members else {key: value})}


def work_of(case: str, device: str) -> Work:
    """The model of a case, split or not."""
    name, _, way = case.partition("@")
    return cases(small=False)[name].build(device) if way else CASES[name](device)


def write(compilation: Any, module: Any, sources: Mapping[str, Any], out: Path) -> None:
    """A bundle of a module whose kernels have these sources."""
    from topo_opt.bundle_output import variant_request
    from topo_opt.codegen.bundle import write_bundle
    from topo_opt.codegen.plan import build_plan

    requests = [variant_request(compilation, variant) for variant in compilation.variants]
    built = build_plan(module, sources, requests, resources={}, meta={})
    files = {symbol: source.source for symbol, source in sources.items()}
    write_bundle(out, built, files, aten={}, ir={}, report={}, tuning=None, weights=None, weights_writer=None)


def run(folder: Path, case: str) -> Iterator[dict[str, Any]]:
    """Replays all programs of a case in turn with the first one."""
    torch.manual_seed(0)
    work = work_of(case, "cuda")
    for name, buffer in work.module.named_buffers():
        if name.endswith(("keys", "values")):
            buffer.normal_()
    state = tensors(work.module)
    changing = {n: v.clone() for n, v in state.items() if n.endswith(("keys", "values"))}

    def load(name: str) -> tuple[Any, torch.Tensor]:
        for key, value in changing.items():
            state[key].copy_(value)
        program = load_alone(folder / case / name, "cuda", state)
        result = program(*work.inputs).clone()
        return program, result

    rows = json.loads((folder / case / "variants.json").read_text())
    base, expected = load(BASE)
    for row in rows:
        try:
            program, result = load(row["name"])
        except Exception as error:  # of the kernel compiler: the variant's
            yield row | {"failed": f"{type(error).__name__}: {error}"[:200]}
            continue
        apart = ((result - expected).abs().max() / expected.abs().max()).item()
        if apart > AGREE:
            yield row | {"failed": f"results differ by {apart:.3g}"}
            continue
        ours, first = in_turn([p.executor.replay_call(p.variants("main")[0]) for p in (program, base)])
        yield row | {"ms": round(ours, 5), "base_ms": round(first, 5), "ratio": round(ours / first, 4)}


def in_turn(calls: list[Any]) -> list[float]:
    """Median milliseconds of a call, all of them measured in turn."""
    times: list[list[float]] = [[] for _ in calls]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed(call: Any, replays: int) -> float:
        start.record()
        for _ in range(replays):
            call()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / replays

    timed(calls[0], 1)
    replays = max(2, min(REPLAYS, int(TURN_MS / timed(calls[0], 1))))
    for _ in range(ROUNDS):
        for call, found in zip(calls, times):
            for _ in range(3):
                call()
            found.append(timed(call, replays))
    return [statistics.median(t) for t in times]


def choose(log: Path, data: Path, out: Path) -> None:
    """Puts the tiles that were fastest in their programs in front."""
    from topo_opt.tuning.cache import read_file, write_file
    from topo_opt.tuning.records import Entry, Timed

    rows = [json.loads(line) for line in log.read_text().splitlines()]
    best: dict[str, dict[str, Any]] = {}
    usual = {
        case: statistics.median(r["base_ms"] for r in rows if r["case"] == case and "base_ms" in r)
        for case in {r["case"] for r in rows}
    }
    for row in rows:
        if row.get("base_ms", 0.0) > (1 + DISTURBED) * usual[row["case"]]:
            print(f"{row['name']} is passed over: the first variant took {row['base_ms']} ms beside it")
        elif (
            row["name"] != BASE
            and row.get("ratio", 1) < 1 - NOISE
            and row["ratio"] < best.get(row["text"], {"ratio": 1})["ratio"]
        ):
            best[row["text"]] = row
    entries = []
    for entry in read_file(data):
        row = best.pop(entry.key.text, None)
        if row is not None:
            chosen = Timed(row["tile"], entry.best.us)
            others = tuple(t for t in entry.timed if dict(t.tile) != row["tile"])
            entry = Entry(
                entry.key,
                entry.device,
                entry.versions,
                entry.depth,
                (chosen, *others),
                entry.rejected,
                entry.kernel,
            )
            print(f"{row['case']} {row['kernel']}: {row['ratio']} of the program, {row['tile']}")
        entries.append(entry)
    for row in best.values():
        print(f"{row['kernel']} has no entry in {data}: its tile {row['tile']} is not kept")
    write_file(out, entries, brief=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prepare", type=Path, metavar="DIR")
    parser.add_argument("--entries", type=Path, nargs="*", default=[], metavar="CACHE|FILE")
    parser.add_argument("--kernels", nargs="*", default=["k_"], metavar="PREFIX", help="vary only these")
    parser.add_argument(
        "--also", nargs="*", default=[], metavar="KEY=N", help="try the own tile with this, too"
    )
    parser.add_argument("--run", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--choose", type=Path, metavar="JSONL")
    parser.add_argument("--data", type=Path)
    parser.add_argument("-o", type=Path, metavar="FILE")
    parser.add_argument("--cases", nargs="*", default=[])
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.prepare:
        also = [(key, int(value)) for key, _, value in (a.partition("=") for a in arguments.also)]
        for case in arguments.cases:
            prepare(arguments.prepare, case, arguments.entries, tuple(arguments.kernels), also)
    if arguments.run:
        torch.set_grad_enabled(False)
        for case in arguments.cases or sorted(p.name for p in arguments.run.iterdir() if p.is_dir()):
            start = time.time()
            for row in run(arguments.run, case):
                print(json.dumps({k: v for k, v in row.items() if k != "text"}), flush=True)
                with open(arguments.out / "tiles_in_programs.jsonl", "a") as log:
                    log.write(json.dumps(row) + "\n")
            print(f"{case}: {time.time() - start:.0f} s", flush=True)
            torch.cuda.empty_cache()
    if arguments.choose:
        choose(arguments.choose, arguments.data, arguments.o)
    return 0


if __name__ == "__main__":
    sys.exit(main())
