"""Tunes the kernels of kernel IR in text files, such as `topo-opt MODEL --to=lower` writes.

    python -m topo_opt.tuning.kernel_ir kernels.mlir... [--topology NAME] [--tune MODE] [--tuning-cache DIR] [--tuning-time S]

For a machine that has the GPU and not the model: what is measured goes into the cache, and from there into the data that a
compile elsewhere reads (`topo_opt.tuning.ship`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torch_mlir import ir

from topo_opt.codegen.triton import lower_kernel
from topo_opt.codegen.triton.target import Target
from topo_opt.errors import InputError, TopoError, UnsupportedError
from topo_opt.topology import Device, load
from topo_opt.tuning import prepared
from topo_opt.tuning.gpu import find_gpu
from topo_opt.tuning.prepared import add_arguments, describe, write_problems
from topo_opt.tuning.search import Problem
from topo_opt.tuning.settings import Settings
from topo_opt.tuning.subjects import Subject, subjects_of
from topo_opt.tuning.tuner import FindMeasurer, Tuned, problem_of, tune


def tune_module(
    module: ir.Operation, device: Device, settings: Settings, *, find: FindMeasurer = find_gpu
) -> Tuned:
    """Chooses the tile of every kernel and writes it into the IR; kernels have a tile before.

    Raises:
        InputError: as `tuner.tune`.
    """
    with module.context, ir.Location.unknown():
        return tune(_subjects(module, device), device, settings, find=find)


def _subjects(module: ir.Operation, device: Device) -> list[Subject]:
    target = Target.of(device)
    kernels = [
        v.operation for v in module.regions[0].blocks[0].operations if "topo.kernel" in v.operation.attributes
    ]
    with_code = [ir.StringAttr(f.attributes["sym_name"]).value for f in kernels if _has_code(f, target)]
    return subjects_of(module, device, with_code)


def _has_code(func: ir.Operation, target: Target) -> bool:
    try:
        lower_kernel(func, target)
    except UnsupportedError:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m topo_opt.tuning.kernel_ir", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("inputs", nargs="+", metavar="FILE.mlir")
    add_arguments(parser)
    parser.add_argument(
        "--prepare",
        metavar="PROBLEMS.json",
        type=Path,
        help="measure nothing: write what `prepared` measures",
    )
    arguments = parser.parse_args(argv)
    try:
        if arguments.prepare:
            _prepare(arguments)
            return 0
        for name in arguments.inputs:
            _tune_file(name, arguments)
    except TopoError as error:
        print(error.render(), file=sys.stderr)
        return 1
    return 0


def _prepare(arguments: argparse.Namespace) -> None:
    device = load(arguments.topology).primary
    problems: dict[str, Problem] = {}
    for name in arguments.inputs:
        module = _module(name)
        with module.context, ir.Location.unknown():
            for subject in _subjects(module.operation, device):
                problem = problem_of(subject, device)
                # Equal kernels of several files are one problem; its candidates need the module.
                problems.setdefault(problem.key.text, _with_code(problem))
    write_problems(arguments.prepare, list(problems.values()))
    print(f"{arguments.prepare}: {len(problems)} kernels")


def _with_code(problem: Problem) -> Problem:
    return prepared.problem_of(prepared.problem_data(problem))


def _module(name: str) -> ir.Module:
    from topo_opt import dialects

    try:
        return ir.Module.parse(Path(name).read_text(), dialects.load(ir.Context()))
    except OSError as error:
        raise InputError(f"{name}: {error.strerror}") from None


def _tune_file(name: str, arguments: argparse.Namespace) -> None:
    settings = Settings.of(2, arguments.tune, arguments.tuning_cache, (), arguments.tuning_time)
    module = _module(name)
    start = time.perf_counter()
    tuned = tune_module(module.operation, load(arguments.topology).primary, settings)
    print(f"{name}: {len(tuned.choices)} kernels in {time.perf_counter() - start:.1f} s")
    for line in [*tuned.notes, *map(describe, tuned.choices.values())]:
        print(f"  {line}")


if __name__ == "__main__":
    sys.exit(main())
