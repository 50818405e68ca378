"""Problems with the code of every candidate, in a file: to measure where there is a GPU and no compiler.

python -m topo_opt.tuning.kernel_ir kernels.mlir --prepare problems.json     # with the compiler
python -m topo_opt.tuning.prepared problems.json --tuning-cache DIR          # with the GPU: torch and triton only
python -m topo_opt.tuning.ship DIR --device NAME -o tiles.json               # for `topo-opt --tuning-data tiles.json`
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from topo_opt.codegen.kernel_source import KernelSource, Param, Scratch
from topo_opt.errors import InputError, UnsupportedError
from topo_opt.tools.reporting import add_traceback, reported
from topo_opt.topology import load
from topo_opt.tuning.arguments_data import Signature
from topo_opt.tuning.cache import open_store, versions
from topo_opt.tuning.gpu import find_gpu
from topo_opt.tuning.key import Key
from topo_opt.tuning.measure import Case
from topo_opt.tuning.records import Choice, Tile
from topo_opt.tuning.search import Problem
from topo_opt.tuning.settings import MODES, Settings, device_id
from topo_opt.tuning.settle import settle

COMMAND = "python -m topo_opt.tuning.prepared"
SCHEMA = 1


def problem_data(problem: Problem) -> dict[str, Any]:
    """A problem as plain data, without the candidates for which there is no code."""
    candidates = []
    for tile in problem.candidates:
        try:
            candidates.append({"tile": dict(tile), "source": asdict(problem.lower(tile))})
        except UnsupportedError:
            continue
    return {
        "symbol": problem.symbol,
        "key": asdict(problem.key),
        "weight": problem.weight,
        "signature": problem.case.signature.as_json(),
        "candidates": candidates,
    }


def problem_of(data: Mapping[str, Any]) -> Problem:
    """The problem in plain data; the reference is the first candidate."""
    sources = {_text(c["tile"]): source_of(c["source"]) for c in data["candidates"]}
    key = Key(data["key"]["text"], data["key"]["structure"], tuple(data["key"]["sizes"]))
    reference = next(iter(sources.values()))
    case = Case(data["symbol"], Signature.of_json(data["signature"]), reference)

    def lower(tile: Tile) -> KernelSource:
        return sources[_text(tile)]

    return Problem(data["symbol"], key, case, [c["tile"] for c in data["candidates"]], lower, data["weight"])


def source_of(data: Mapping[str, Any]) -> KernelSource:
    """A kernel source in plain data."""
    made = {
        "params": tuple(Param(**p) for p in data["params"]),
        "scratch": tuple(Scratch(**s) for s in data["scratch"]),
        "grid": tuple(data["grid"]),
    }
    return KernelSource(**{**data, **made})


def _text(tile: Tile) -> str:
    return json.dumps(dict(tile), sort_keys=True)


def read_problems(path: Path) -> tuple[list[Problem], str]:
    """The problems of a file, and the digest of the code generators that made it.

    Raises:
        InputError: it has none.
    """
    try:
        data = json.loads(path.read_bytes())
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']}, expected {SCHEMA}")
        return [problem_of(p) for p in data["problems"] if p["candidates"]], data["generators"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} has no tuning problems: {error}") from None


def write_problems(path: Path, problems: Sequence[Problem]) -> None:
    """Writes problems as one file."""
    content = {
        "schema": SCHEMA,
        "generators": versions()["generators"],
        "problems": [problem_data(p) for p in problems],
    }
    path.write_text(json.dumps(content))


def describe(choice: Choice) -> str:
    """A choice as one line."""
    times = "" if choice.us is None else f" {choice.us:.2f} us"
    against = "" if choice.default_us is None else f" (default {choice.default_us:.2f})"
    reasons = Counter(r.reason for r in choice.rejected)
    rejected = "".join(f"; rejected {n}: {reason}" for reason, n in sorted(reasons.items()))
    tile = json.dumps(dict(choice.tile))
    return f"{choice.symbol} {choice.basis}{times}{against}, {choice.tried} tried, {choice.note}: {tile}{rejected}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that this command and `kernel_ir` have in common."""
    parser.add_argument("--topology", default="h200-x1")
    parser.add_argument("--tune", choices=MODES[1:], default="short")
    parser.add_argument("--tuning-cache", metavar="DIR")
    parser.add_argument("--tuning-time", type=float, metavar="S", help="seconds for each file")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("inputs", nargs="+", metavar="PROBLEMS.json", type=Path)
    add_arguments(parser)
    add_traceback(parser)
    arguments = parser.parse_args(argv)
    return reported(lambda: _run(arguments), arguments, COMMAND)


def _run(arguments: argparse.Namespace) -> int:
    for path in arguments.inputs:
        _measure(path, arguments)
    return 0


def _measure(path: Path, arguments: argparse.Namespace) -> None:
    settings = Settings.of(2, arguments.tune, arguments.tuning_cache, (), arguments.tuning_time)
    device = load(arguments.topology).primary
    store = open_store(device_id(device.model), settings.folder)
    problems, generators = read_problems(path)
    store.versions = {**store.versions, "generators": generators}
    known = {p.symbol for p in problems if store.exact(p.key) is not None}
    start = time.perf_counter()
    measurer, reason = find_gpu(device)
    if measurer is None:
        raise InputError(f"nothing can be measured: {reason}")
    try:
        unknown = [p for p in problems if p.symbol not in known]
        guesses = {p.symbol: Choice(p.symbol, p.candidates[0], "model") for p in unknown}
        choices = settle(
            unknown, guesses, measurer, store, depth=settings.mode, limit_s=settings.limit_s, climbs=False
        )
    finally:
        measurer.close()
    print(f"{path}: {len(choices)} kernels in {time.perf_counter() - start:.1f} s, {len(known)} were known")
    for line in [*store.remarks, *map(describe, choices.values())]:
        print(f"  {line}")


if __name__ == "__main__":
    sys.exit(main())
