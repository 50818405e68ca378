"""`--explain=sharding`: prints why tensors are split as they are."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from topo_opt.errors import InputError

if TYPE_CHECKING:
    from topo_opt.driver import Options
    from topo_opt.sharding.plan import Plan

WIDTH = 200
"""Columns of the tables where standard output is no terminal: names and reasons stay on one line."""


def with_passes(arguments: argparse.Namespace, work: Callable[[], int]) -> int:
    """Runs passes over MLIR and explains what `topo-plan-shardings` among them chose, instead of printing the IR.

    Raises:
        InputError: no pass planned anything.
    """
    from topo_opt.sharding.plan_watch import watch

    # The IR goes into the file of -o, or nowhere.
    with watch() as plans, Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        code = work()
    if code == 0 and not plans:
        raise InputError(
            "nothing was planned that could be explained", hint="put topo-plan-shardings into the pipeline"
        )
    for plan in plans:
        _print(plan, as_json=arguments.explain == "sharding-json")
    return code


def of_model(arguments: argparse.Namespace, sources: dict[str, Path], options: Options) -> int:
    """Plans an exported model for the topology, pipelines included, and explains the plan. Nothing is compiled.

    Raises:
        TopoError: the model cannot be imported, or nothing fits.
    """
    from topo_opt import driver
    from topo_opt.passes.shard.propagate_shardings import shardable
    from topo_opt.pipeline.run import run
    from topo_opt.sharding.named import parse_mesh
    from topo_opt.sharding.pins import ShardingPin
    from topo_opt.sharding.plan import PlanOptions, plan_topology
    from topo_opt.sharding.plan_functions import join
    from topo_opt.sharding.plan_reading import read_plan_graph

    compilation = driver.start(sources, options)
    with options.phase("plan"):
        run(
            "builtin.module(topo-raise-rotary,topo-raise-masks,topo-bubble-up-slices)",
            compilation.module,
            verify_each=options.verify_each,
        )
        machine = options.machine
        devices = () if machine.primary.kind == "cpu" else machine.compute
        named = arguments.mesh not in (None, "auto")
        joined = join(
            [
                read_plan_graph(f, narrow_sums=not arguments.wide_sums)
                for f in shardable(compilation.module.operation)
            ]
        )
        plan = plan_topology(
            joined.graph,
            machine,
            PlanOptions(
                objective=arguments.objective,
                memory_limit=arguments.memory_limit,
                mesh=parse_mesh(arguments.mesh, devices) if named else None,
                pins=tuple(ShardingPin.parse(text) for text in arguments.pin),
                # As a program that is split has them, so that the plan is that of a compile.
                whole_results=True,
            ),
        )
    _print(plan, as_json=arguments.explain == "sharding-json")
    return 0


def _print(plan: Plan, *, as_json: bool) -> None:
    from rich.console import Console

    from topo_opt.sharding.explain import explain, render

    found = explain(plan)
    if as_json:
        print(json.dumps(found.as_dict(), indent=1))
        return
    width = None if sys.stdout.isatty() else WIDTH
    render(found, plan, Console(file=sys.stdout, width=width))
