"""`topo-run --page`: the bundle's report with what was measured beside what was predicted."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import topo_opt
from topo_opt.errors import InputError, TopoError
from topo_opt.tools.output import check_destination, write_output

if TYPE_CHECKING:
    from topo_opt.report_page.times import Measurement, Timing
    from topo_opt.runtime.bundle import Bundle
    from topo_opt.runtime.plan import Variant
    from topo_opt.runtime.program import Program
    from topo_opt.tools import run_bench

REPORT = "report.html"
SOFTWARE = ("torch", "triton")
_WHOLE_CALL = "topo-opt"


def check_page(bundle: Bundle, destination: str) -> None:
    """Refuses, before anything is measured, what `write_page` would refuse afterwards.

    Raises:
        InputError: the file can't be written or is in the bundle, or the bundle has no report that could show times.
    """
    if REPORT not in bundle.texts:
        raise InputError(
            f"the bundle {bundle.path} has no {REPORT} to show times in", hint="compile the model again"
        )
    if Path(destination).resolve().is_relative_to(bundle.path.resolve()):
        raise InputError(
            f"{destination} is in the bundle, which holds what its manifest lists and nothing else",
            hint="write the page beside it",
        )
    # Torchrun starts ranks on other hosts too, where nothing is written.
    if os.environ.get("GROUP_RANK", "0") == "0":
        check_destination(destination)
    from topo_opt.report_page.times import with_measured

    with_measured(_text(bundle), bundle.json("report.json"), _nothing())


def write_page(
    program: Program, measured: Sequence[tuple[str, Variant, run_bench.Benchmark]], destination: str
) -> None:
    """Writes the page, from the first rank.

    Raises:
        TopoError: nothing was measured.
        InputError: the file can't be written.
    """
    if not measured:
        whole = _left_to_aten(program)
        told = "; ".join(f"{name} is left to ATen as a whole: {reason}" for name, reason in whole.items())
        raise TopoError(f"nothing was measured that a page could show{': ' if told else ''}{told}")
    if program.ranks is not None and program.ranks.rank:
        return
    from topo_opt.report_page.times import Measurement, key, with_measured

    ours: dict[Any, list[Timing]] = {}
    others: dict[Any, list[Timing]] = {}
    for function, variant, benchmark in measured:
        place = key(function, variant.bucket)
        for timing in benchmark.timings:
            mine = timing.name.startswith(_WHOLE_CALL)
            (ours if mine else others).setdefault(place, []).append(_shown(timing))
    found = Measurement(
        machine=_machine(program),
        versions=_versions(program),
        date=date.today().isoformat(),
        how=list(_how(program, measured)),
        interpreted=program.device.type == "cpu",
        ours=ours,
        others=others,
        unmeasured={
            name: f"left to ATen as a whole: {reason}" for name, reason in _left_to_aten(program).items()
        },
    )
    page = with_measured(_text(program.bundle), program.bundle.json("report.json"), found)
    write_output(page.encode(), destination)
    print(f"wrote {destination}")


def _text(bundle: Bundle) -> str:
    try:
        return bundle.texts[REPORT].decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{REPORT} of the bundle {bundle.path} is not UTF-8 text: {error.reason}") from None


def _nothing() -> Measurement:
    from topo_opt.report_page.times import Measurement

    return Measurement("", {}, "", (), False, {}, {}, {})


def _left_to_aten(program: Program) -> dict[str, str]:
    return {name: str(f.aten_reason) for name, f in program.plan.functions.items() if not f.variants}


def _shown(timing: run_bench.Timing) -> Timing:
    """`topo-opt (graph replay)` is what was timed of ours: a graph replay."""
    from topo_opt.report_page.times import Timing

    what = timing.name
    if what.startswith(_WHOLE_CALL):
        what = what.removeprefix(_WHOLE_CALL).strip(" ()") or "direct call"
    return Timing(what, timing.median_ms, timing.low_ms, timing.high_ms, timing.error)


def _how(program: Program, measured: Sequence[tuple[str, Variant, run_bench.Benchmark]]) -> Iterator[str]:
    from topo_opt.tools.run_bench import IN_A_ROW

    on_gpu = program.device.type == "cuda"
    if program.ranks is None:
        yield "Medians of single calls" + (", the L2 cache cold." if on_gpu else ".")
    elif on_gpu:
        yield f"Medians of {IN_A_ROW} calls in a row, those of the slowest rank."
    else:
        yield "Medians of single calls, those of the slowest rank."
    if on_gpu:
        yield "A direct call takes inputs and gives results as any caller's; the other row is the work on the GPU without that."
        for _, variant, _ in measured:
            status = program.executor.status(variant)
            if not status.graph:
                yield f"{variant.symbol} is not one CUDA graph: {status.reason or status.mode}."
    if program.memory.random_names:
        yield f"{len(program.memory.random_names)} weights are random."


def _machine(program: Program) -> str:
    import torch

    ranks = program.ranks
    if program.device.type == "cuda":
        name = torch.cuda.get_device_name(program.device)
        if ranks is None:
            return name
        return f"{ranks.count} ranks on one {name}" if ranks.shares_gpu else f"{ranks.count} x {name}"
    host = f"{_processor()} ({os.cpu_count()} logical processors)"
    return host if ranks is None else f"{ranks.count} ranks on {host}"


def _processor() -> str:
    """The processor's name as Linux has it, else as Python knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _versions(program: Program) -> dict[str, str]:
    import torch

    found = {"topo-opt": topo_opt.__version__} | {name: version(name) for name in SOFTWARE}
    if program.device.type == "cuda":
        found["CUDA"] = str(torch.version.cuda)
        if program.ranks is not None and not program.ranks.shares_gpu:
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found | {"Python": platform.python_version()}
