"""The compiler half of `topo-opt`: exported models in, a bundle (or the IR of a phase) out."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from topo_opt import driver, report
from topo_opt.model import torch_dialect
from topo_opt.pipeline import levels
from topo_opt.tools.model_arguments import (
    buckets_of,
    functions_of,
    output_of,
    planner_options,
    writes_bundle,
)
from topo_opt.tools.opt_mlir import check_pass_names, instruments_of
from topo_opt.tools.output import write_output
from topo_opt.tools.progress import Progress

# What --to stops after, by the text that --emit writes then.
_TEXT_AFTER = {"import": "torch", "ingest": "structured", "schedule": "scheduled", "lower": "kernel"}


def run(arguments: argparse.Namespace) -> int:
    """Compiles what the command line names, after `model_arguments.check`; returns the exit code.

    Raises:
        TopoError: anything that keeps the result from being made.
    """
    check_pass_names(arguments)
    sources = functions_of(arguments.inputs)
    options = driver.Options(
        topology=arguments.topology,
        level=arguments.level,
        strict=arguments.strict,
        buckets=buckets_of(arguments.bucket),
        trust=arguments.trust_model,
        verify_each=arguments.verify_each != "false",
        tune=arguments.tune,
        tuning_cache=arguments.tuning_cache,
        tuning_data=arguments.tuning_data,
        tuning_time_s=arguments.tuning_time,
        mesh=arguments.mesh,
        shard=tuple(arguments.shard),
        planner=planner_options(arguments),
        wide_sums=arguments.wide_sums,
        instruments=lambda: instruments_of(arguments),
        phase=Progress(quiet=arguments.quiet).phase,
    )
    if arguments.dump_pass_pipeline:
        text = levels.pipeline(options.level, topology=options.topology, split=options.split)
        print(text, file=sys.stderr)
    if arguments.explain:
        from topo_opt.tools import explain_plans

        return explain_plans.of_model(arguments, sources, options)
    if writes_bundle(arguments):
        return _bundle(arguments, sources, options)
    what = _TEXT_AFTER[arguments.to] if arguments.to else arguments.emit
    write_output(_TEXTS[what](sources, options).encode(), arguments.output)
    return 0


def _torch(sources: dict[str, Path], options: driver.Options) -> str:
    with options.phase("import"):
        return torch_dialect(sources, buckets=options.buckets, trust=options.trust)


def _structured(sources: dict[str, Path], options: driver.Options) -> str:
    return _text(driver.start(sources, options))


def _scheduled(sources: dict[str, Path], options: driver.Options) -> str:
    compilation = driver.start(sources, options)
    driver.schedule(compilation)
    return _text(compilation)


def _kernel(sources: dict[str, Path], options: driver.Options) -> str:
    compilation = driver.with_kernels(sources, options)
    return _text(compilation)


def _triton(sources: dict[str, Path], options: driver.Options) -> str:
    compilation = driver.with_kernels(sources, options)
    driver.require_nothing_left(compilation)
    files = (f"# ==== kernels/{symbol}.py\n{source.source}" for symbol, source in compilation.sources.items())
    return "\n".join(files)


_TEXTS: dict[str, Callable[[dict[str, Path], driver.Options], str]] = {
    "torch": _torch,
    "structured": _structured,
    "scheduled": _scheduled,
    "kernel": _kernel,
    "triton": _triton,
}


def _text(compilation: Any) -> str:
    driver.require_nothing_left(compilation)
    return str(compilation.module)


def _bundle(arguments: argparse.Namespace, sources: dict[str, Path], options: driver.Options) -> int:
    out = output_of(arguments, sources)
    finished = driver.compile(sources, options, out)
    if not arguments.quiet:
        report.render(finished.report, sys.stdout)
        print(f"wrote {out}")
    return 0
