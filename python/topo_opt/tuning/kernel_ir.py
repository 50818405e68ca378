"""Tunes the kernels of kernel IR in text files, such as `topo-opt MODEL --to=lower` writes.

    python -m topo_opt.tuning.kernel_ir kernels.mlir... [--topology NAME] [--tune MODE] [--tuning-cache DIR] [--tuning-time S]

For a machine that has the GPU and not the model: what is measured goes into the cache, and from there into the data that a
compile elsewhere reads (`topo_opt.tuning.ship`).

This file is the command line only; `modules` does the work and needs the compiler. Exit codes are those of `topo-opt`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from topo_opt.tools.reporting import add_traceback, reported
from topo_opt.topology import load
from topo_opt.tuning.prepared import add_arguments, describe, write_problems
from topo_opt.tuning.search import Problem
from topo_opt.tuning.settings import Settings

COMMAND = "python -m topo_opt.tuning.kernel_ir"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("inputs", nargs="+", metavar="FILE.mlir", type=Path)
    add_arguments(parser)
    parser.add_argument(
        "--prepare",
        metavar="PROBLEMS.json",
        type=Path,
        help="measure nothing: write what `prepared` measures",
    )
    add_traceback(parser)
    arguments = parser.parse_args(argv)
    work = _prepare if arguments.prepare else _tune
    return reported(lambda: work(arguments), arguments, COMMAND)


def _prepare(arguments: argparse.Namespace) -> int:
    from topo_opt.tuning import modules

    device = load(arguments.topology).primary
    problems: dict[str, Problem] = {}
    for path in arguments.inputs:
        for problem in modules.problems_of(modules.read_module(path).operation, device):
            # Equal kernels of several files are one problem.
            problems.setdefault(problem.key.text, problem)
    write_problems(arguments.prepare, list(problems.values()))
    print(f"{arguments.prepare}: {len(problems)} kernels")
    return 0


def _tune(arguments: argparse.Namespace) -> int:
    from topo_opt.tuning import modules

    settings = Settings.of(2, arguments.tune, arguments.tuning_cache, (), arguments.tuning_time)
    device = load(arguments.topology).primary
    for path in arguments.inputs:
        module = modules.read_module(path)
        start = time.perf_counter()
        tuned = modules.tune_module(module.operation, device, settings)
        print(f"{path}: {len(tuned.choices)} kernels in {time.perf_counter() - start:.1f} s")
        for line in [*tuned.notes, *map(describe, tuned.choices.values())]:
            print(f"  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
