"""What a compile says about itself: report.json of the bundle, and the table at the end of a compile.

Nothing in it depends on time or machine but what was measured for tuning, so that equal inputs, measured times among them,
give equal bundles.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from torch_mlir import ir

from topo_opt.codegen.triton.kernel import plain
from topo_opt.codegen.triton.pack import is_pack, members_of
from topo_opt.driver import Compilation, callees, kernels, plan_functions
from topo_opt.errors import Remark
from topo_opt.estimate import declared_traffic, work_of
from topo_opt.prediction import Prediction
from topo_opt.tuning.records import Choice

SCHEMA = 1
_GRAPH_NODE = "fxnode:"
_COMPUTE = ("linalg.", "topo.", "tm_tensor.")
_AT_MOST = 30
# What a tile rests on, as the report words it, the best first.
_BASES = {
    "measured": "measurement",
    "cache": "an earlier measurement",
    "data": "shipped data",
    "transfer": "other sizes",
    "model": "the cost model",
}


@dataclass(frozen=True)
class KernelRow:
    """One kernel (or ATen call): how often it is launched over all functions, what is fused in it, its floor per launch.

    `share` is its part of the expected time of one call of every function. `ops`: operation of the model -> how many.
    """

    symbol: str
    family: str
    launches: int
    ops: dict[str, int]
    nbytes: int
    operations: int
    floor_ns: float
    share: float
    grid: tuple[int, ...] | None = None
    num_warps: int | None = None
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    tuning: dict[str, Any] | None = None
    """The tile and the figure that it rests on (`tuning.records.Choice`)."""


@dataclass(frozen=True)
class FunctionRow:
    """One function at one bucket. `kernels`: launches, `aten`: calls left to ATen; `whole`: run as an ATen program.

    `collectives`: those of one rank, where the model is split over several. `unpredicted` says why there is no prediction.
    """

    function: str
    bucket: dict[str, int]
    kernels: int
    distinct_kernels: int
    aten: int
    floor_ns: float
    whole: bool
    collectives: int = 0
    predicted: Prediction | None = None
    unpredicted: str | None = None


@dataclass(frozen=True)
class Report:
    """All of it. `left` has an entry for everything that did not take effect or was left to ATen."""

    topology: str
    level: int
    functions: tuple[FunctionRow, ...]
    kernels: tuple[KernelRow, ...]
    left: tuple[Remark, ...]
    tuning: dict[str, Any]
    """The mode, and notes about what could not be measured or read."""
    recognised: dict[str, int]
    """Pattern of models -> how often it was recognised in one call of every function (`topo-count-recognised`)."""
    missed: tuple[str, ...]
    """What looks like a pattern and was not recognised: the reason, and where it stands in the model."""

    def as_json(self) -> dict[str, Any]:
        """report.json."""
        return {"schema": SCHEMA, **asdict(self)}


def build(
    compilation: Compilation,
    resources: Mapping[str, Any] | None = None,
    predictions: Mapping[str, Prediction | str] | None = None,
) -> Report:
    """The report of a compile whose kernels have been formed.

    Args:
        resources: kernel symbol -> registers, spills and shared memory, where the ahead-of-time compile has run.
        predictions: function symbol -> the time of a call, or why none is predicted; None where nothing was asked for.
    """
    device = compilation.options.machine.primary
    launches: Counter[str] = Counter()
    for _, function in plan_functions(compilation.module):
        launches.update(callees(function, at_load=False))
    rows = [
        *_kernel_rows(compilation, launches, resources or {}),
        *_aten_rows(compilation, launches),
    ]
    total = sum(row.floor_ns * row.launches for row in rows)
    shared = tuple(
        sorted(
            (_with_share(row, total) for row in rows),
            key=lambda row: (-row.share, row.symbol),
        )
    )
    floors = {row.symbol: row.floor_ns for row in rows}
    return Report(
        compilation.options.machine.name,
        compilation.options.level,
        tuple(_function_rows(compilation, floors, device.launch.eager_ns.value, predictions or {})),
        shared,
        tuple(compilation.remarks),
        {"mode": tuned.mode, "notes": tuned.notes}
        if (tuned := compilation.tuned)
        else {"mode": "off", "notes": []},
        _recognised(compilation),
        tuple(dict.fromkeys(_texts(compilation, "topo.missed"))),
    )


def _recognised(compilation: Compilation) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for _, function in plan_functions(compilation.module):
        if "topo.recognised" in function.attributes:
            counts.update(plain(ir.DictAttr(function.attributes["topo.recognised"])))
    return dict(sorted(counts.items()))


def _texts(compilation: Compilation, attribute: str) -> Iterator[str]:
    """The texts of an attribute of the plan functions."""
    for _, function in plan_functions(compilation.module):
        if attribute in function.attributes:
            yield from plain(ir.ArrayAttr(function.attributes[attribute]))


def _with_share(row: KernelRow, total: float) -> KernelRow:
    share = row.floor_ns * row.launches / total if total else 0.0
    return KernelRow(**{**vars(row), "share": round(share, 6), "floor_ns": round(row.floor_ns, 1)})


def _kernel_rows(
    compilation: Compilation, launches: Counter[str], resources: Mapping[str, Any]
) -> Iterator[KernelRow]:
    device = compilation.options.machine.primary
    for symbol, function in kernels(compilation.module):
        if not launches[symbol]:
            continue
        work = work_of(function)
        source, used = compilation.sources.get(symbol), resources.get(symbol)
        family = ir.StringAttr(ir.DictAttr(function.attributes["topo.kernel"])["family"]).value
        yield KernelRow(
            symbol,
            family,
            launches[symbol],
            _fused(function),
            work.nbytes,
            work.ops,
            work.floor_ns(device),
            0.0,
            source.grid if source else None,
            source.num_warps if source else None,
            used.registers if used else None,
            used.spills if used else None,
            used.shared if used else None,
            _tuning(compilation, symbol, function),
        )


def _tuning(compilation: Compilation, symbol: str, function: ir.Operation) -> dict[str, Any] | None:
    """What the choice of a kernel's tile rests on; without tuning the cost model."""
    choice = compilation.tuned.choices.get(symbol) if compilation.tuned else None
    if choice is not None:
        return choice.as_json()
    kernel = plain(ir.DictAttr(function.attributes["topo.kernel"]))
    return (
        Choice(symbol, kernel["tile"], "model", note="tuning is off").as_json() if "tile" in kernel else None
    )


def _aten_rows(compilation: Compilation, launches: Counter[str]) -> Iterator[KernelRow]:
    device = compilation.options.machine.primary
    for view in compilation.module.body.operations:
        op = view.operation
        if "topo.aten" not in op.attributes:
            continue
        symbol, name = (ir.StringAttr(op.attributes[key]).value for key in ("sym_name", "topo.aten"))
        if launches[symbol]:
            nbytes = declared_traffic(op)
            floor_ns = (
                1e9 * nbytes / device.memory.read_write_bytes_per_s.value + device.launch.eager_ns.value
            )
            yield KernelRow(symbol, "aten", launches[symbol], {name: 1}, nbytes, 0, floor_ns, 0.0)


def _function_rows(
    compilation: Compilation,
    floors: Mapping[str, float],
    eager_ns: float,
    predictions: Mapping[str, Prediction | str],
) -> Iterator[FunctionRow]:
    bodies = dict(plan_functions(compilation.module))
    for variant in compilation.variants:
        if variant.symbol is None:
            whole = "left to ATen as a whole"
            yield FunctionRow(variant.function, variant.bucket, 0, 0, 0, 0.0, True, unpredicted=whole)
            continue
        calls = list(callees(bodies[variant.symbol], at_load=False))
        called = [c for c in calls if c in floors]
        formed = [c for c in called if not c.startswith("aten.")]
        floor_ns = round(sum(floors[c] for c in called), 1)
        aten = len(called) - len(formed)
        found = predictions.get(variant.symbol, "no prediction was asked for")
        yield FunctionRow(
            variant.function, variant.bucket, len(formed), len(set(formed)), aten, floor_ns, False,
            sum(c.startswith("collective.") for c in calls),
            found if isinstance(found, Prediction) else None,
            found if isinstance(found, str) else None,
        )  # fmt: skip


def _fused(function: ir.Operation) -> dict[str, int]:
    """Operation of the model -> how many of them went into a kernel, told from the locations of its ops."""
    nodes: dict[str, None] = {}
    for view in _operations(function):
        if not view.operation.name.startswith(_COMPUTE) or view.operation.name == "linalg.fill":
            continue  # constants and inits are shared, so their locations may be another operation's
        nodes.update(dict.fromkeys(_graph_nodes(view.operation.location)))
    counts = Counter(re.sub(r"(_default|_tensor)?(_\d+)?$", "", node) for node in nodes)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _operations(function: ir.Operation) -> Iterator[ir.OpView]:
    """The ops of a kernel; of a pack those of its members."""
    for body in [m.func for m in members_of(function)] if is_pack(function) else [function]:
        yield from body.regions[0].blocks[0].operations


def _graph_nodes(location: ir.Location) -> Iterator[str]:
    if isinstance(location, ir.NameLoc):
        if location.name_str.startswith(_GRAPH_NODE):
            yield location.name_str.removeprefix(_GRAPH_NODE)
        yield from _graph_nodes(location.child_loc)
    elif isinstance(location, ir.FusedLoc):
        for part in location.locations:
            yield from _graph_nodes(part)


def render(report: Report, stream: TextIO, *, width: int | None = None) -> None:
    """Prints the table: in colour and boxed on a terminal, plain text otherwise."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(file=stream, width=width or (None if stream.isatty() else 140), highlight=False)
    floor_us = sum(row.floor_ns for row in report.functions) / 1e3
    table = Table(
        box=SIMPLE, title=f"-O{report.level} for {report.topology}, expected at least {floor_us:.1f} us"
    )
    for name, justify in (
        ("kernel", "left"),
        ("launches", "right"),
        ("fused operations", "left"),
        ("MB", "right"),
        ("us", "right"),
        ("share", "right"),
        ("tile", "left"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in report.kernels[:_AT_MOST]:
        fused = " ".join(op if count == 1 else f"{op}x{count}" for op, count in row.ops.items())
        table.add_row(
            row.symbol,
            str(row.launches),
            fused,
            f"{row.nbytes / 1e6:.2f}",
            f"{row.floor_ns / 1e3:.2f}",
            f"{100 * row.share:.1f}%",
            _tile_cell(row.tuning),
        )
    if len(report.kernels) > _AT_MOST:
        table.add_row(f"and {len(report.kernels) - _AT_MOST} more", "", "", "", "", "", "")
    console.print(table)
    for function in report.functions:
        console.print(_function_line(function), markup=False)
    console.print(_tuning_line(report), markup=False)
    for note in report.tuning["notes"]:
        console.print(f"tuning: {note}", markup=False)
    console.print(_recognised_line(report.recognised), markup=False)
    for miss in report.missed:
        console.print(f"not recognised: {miss}", markup=False)
    for line in _left_lines(report.left):
        console.print(line, markup=False)


def _tile_cell(tuning: Mapping[str, Any] | None) -> str:
    """What a tile rests on: the measured time in us, with how many others were tried."""
    if tuning is None:
        return ""
    if tuning["us"] is None:
        return str(tuning["basis"])
    tried = f" of {tuning['tried']}" if tuning["tried"] else ""
    return f"{tuning['basis']} {tuning['us']:.2f} us{tried}"


def _tuning_line(report: Report) -> str:
    """How many kernels have a tile of which basis."""
    bases = Counter(row.tuning["basis"] for row in report.kernels if row.tuning)
    parts = [f"{bases[b]} by {_BASES[b]}" for b in _BASES if bases[b]]
    return f"tiles: {', '.join(parts) or 'none'}"


def _recognised_line(counts: Mapping[str, int]) -> str:
    """All patterns with their counts."""
    return f"recognised: {', '.join(f'{name} {n}' for name, n in counts.items()) or 'nothing'}"


def _function_line(row: FunctionRow) -> str:
    bucket = "".join(f" {name}={size}" for name, size in row.bucket.items())
    if row.whole:
        return f"{row.function}{bucket}: left to ATen as a whole"
    aten = f", {row.aten} left to ATen" if row.aten else ", nothing left to ATen"
    collectives = f", {row.collectives} collectives" if row.collectives else ""
    return (
        f"{row.function}{bucket}: {row.kernels} launches of {row.distinct_kernels} kernels{collectives}{aten}"
    )


def _left_lines(left: Sequence[Remark]) -> Iterator[str]:
    """One line for each reason; many places with the same one are counted."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for remark in left:
        groups.setdefault((remark.kind, remark.subject, remark.reason), []).append(remark.where or "")
    for (kind, subject, reason), places in groups.items():
        more = f" and {len(places) - 1} more places" if len(places) > 1 else ""
        where = f" ({places[0] or 'unknown place'}{more})" if any(places) or more else ""
        yield f"{kind}: {subject}: {reason}{where}"
