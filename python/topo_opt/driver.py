"""The compile itself, one step after the other; `topo-opt`, `topo_opt.compile` and the Dynamo backend all come through here.

    sources --import_model--> structured IR --schedule--> kernel IR --lower--> tiles --generate--> Triton
            --tune--> measured tiles --write--> bundle

An op that a step cannot take is left to ATen, with a remark that says why; `strict` makes that an error. When code generation
refuses a kernel, the compile starts again with the ops of that kernel left out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_mlir import ir

from topo_opt import dialects
from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.errors import (
    InputError,
    Remark,
    StrictError,
    UnsupportedError,
)
from topo_opt.model import FunctionVariant, ImportedModel, Source, import_model
from topo_opt.output_folder import check_bundle_folder
from topo_opt.pipeline import levels, remarks
from topo_opt.pipeline.run import Instrument, run
from topo_opt.sharding.split_passes import split_passes
from topo_opt.topology import Topology, load
from topo_opt.tuning.settings import Settings

if TYPE_CHECKING:
    from topo_opt.report import Report
    from topo_opt.sharding.plan import Plan
    from topo_opt.tuning.tuner import Tuned

Phase = Callable[[str], AbstractContextManager[Any]]
"""Entered around every step with its name; the command line shows progress by it."""


@dataclass(frozen=True)
class Options:
    """How to compile. `topology`: name or file; `buckets`: name of a dynamic dim -> sizes."""

    topology: str = "h200-x1"
    level: int = 2
    strict: bool = False
    buckets: Mapping[str, Sequence[int]] = field(default_factory=dict)
    trust: bool = False
    pack_weights: bool = True
    """Copy weights that are in memory into the bundle; without it the caller binds them when the bundle is loaded."""
    verify_each: bool = True
    tune: str | None = None
    """ "off", "cache", "short" or "full"; None: as the level says, see `tuning.settings`."""
    tuning_cache: str | Path | None = None
    """Folder of measured tiles; None: the user's."""
    tuning_data: Sequence[str | Path] = ()
    """More files of measured tiles, or bundles that have such."""
    tuning_time_s: float | None = None
    mesh: str | None = None
    """`data=2,model=4`: the axes over which the model is split, a process for each place; None: one device."""
    shard: Sequence[str] = ()
    """`layers.*.q.weight=model,_`: tensors by name, and for each dimension the axes that split it; the rest follows from these."""
    planner: Mapping[str, str] = field(default_factory=dict)
    """More options of `topo-plan-shardings`, by which what `shard` does not say is planned: `objective`, `memory-limit`, `pin`."""
    wide_sums: bool = False
    """Form sums over devices in f32 where their results are rounded to f16 or bf16: twice the bytes, the error of one device."""
    instruments: Callable[[], Sequence[Instrument]] = tuple
    phase: Phase = nullcontext

    @cached_property
    def machine(self) -> Topology:
        """The topology, loaded. Raises InputError when there is none of that name, or the file has faults."""
        return load(self.topology)

    @cached_property
    def split(self) -> tuple[str, ...]:
        """The passes that split the model over devices. Raises InputError for a mesh or patterns of another form."""
        return split_passes(
            self.topology, self.machine, self.mesh, self.shard, self.planner, wide_sums=self.wide_sums
        )

    @cached_property
    def tuning(self) -> Settings:
        """What the tuning options say together with the level. Raises InputError for options of another form."""
        return Settings.of(self.level, self.tune, self.tuning_cache, self.tuning_data, self.tuning_time_s)


@dataclass
class Compilation:
    """What is known after the steps so far. `module` is structured IR first, kernel IR after `schedule`."""

    inputs: Mapping[str, Source]
    options: Options
    model: ImportedModel
    module: ir.Module
    variants: tuple[FunctionVariant, ...]
    remarks: list[Remark]
    sources: dict[str, KernelSource] = field(default_factory=dict)
    tuned: "Tuned | None" = None
    plans: "list[Plan]" = field(default_factory=list)
    """How the planner split the functions."""


# Function -> node of its graph -> why it is left to ATen.
Leave = Mapping[str, Mapping[str, str]]

# Each round leaves at least one more kind of op to ATen; after these, functions with refused kernels are left whole.
_MAX_ROUNDS = 8


# Ops with a loop nest of their own, among what a kernel function holds.
_COMPUTES = ("linalg.generic", "linalg.contract", "topo.", "tm_tensor.")


def start(sources: Mapping[str, Source], options: Options, leave: Leave | None = None) -> Compilation:
    """Imports the model: structured IR.

    Args:
        leave: nodes to leave to ATen, besides those that the import leaves by itself.

    Raises:
        TopoError: the model cannot be loaded or imported.
    """
    if not sources:
        raise InputError("no model was given")
    _ = options.machine, options.tuning, options.split  # a fault in them shows before any work is done
    with options.phase("import"):
        model = import_model(sources, buckets=options.buckets, trust=options.trust, leave=leave)
        module = ir.Module.parse(model.module, dialects.load(ir.Context()))
    return Compilation(dict(sources), options, model, module, model.variants, list(model.remarks))


def schedule(compilation: Compilation) -> None:
    """Splits the model where that is asked for, and forms kernels: kernel IR."""
    from topo_opt.sharding.plan_watch import watch

    with watch() as plans:
        _run_phase(compilation, "schedule")
    compilation.plans = plans


def choose_tiles(compilation: Compilation) -> None:
    """Annotates every kernel with the tile it will be generated for."""
    _run_phase(compilation, "lower")


def with_kernels(sources: Mapping[str, Source], options: Options) -> Compilation:
    """The model with the source of every kernel.

    Raises:
        TopoError: the model cannot be loaded or imported.
    """
    leave: dict[str, dict[str, str]] = {}
    for _ in range(_MAX_ROUNDS):
        compilation = start(sources, options, leave)
        schedule(compilation)
        choose_tiles(compilation)
        with options.phase("generate"):
            refused = _generate(compilation)
        more = _blamed(compilation, refused)
        if all(nodes.keys() <= leave.get(function, {}).keys() for function, nodes in more.items()):
            break
        leave = {f: leave.get(f, {}) | more.get(f, {}) for f in (*leave, *more)}
    _leave_to_aten(compilation, refused)
    tune(compilation)
    return compilation


def tune(compilation: Compilation) -> None:
    """Chooses tiles by what is measured, now or earlier, and makes the code of the kernels again that get another one."""
    from topo_opt.tuning.subjects import subjects_of
    from topo_opt.tuning.tuner import tune as choose

    options = compilation.options
    if options.tuning.mode == "off":
        return
    device = options.machine.primary
    with options.phase("tune"), compilation.module.context, ir.Location.unknown():
        subjects = subjects_of(compilation.module.operation, device, compilation.sources)
        compilation.tuned = choose(subjects, device, options.tuning)
    compilation.sources |= compilation.tuned.sources


def require_nothing_left(compilation: Compilation) -> None:
    """The check of `strict`.

    Raises:
        StrictError: names the first of what did not take effect, and how many more there are.
    """
    lost = [r for r in compilation.remarks if r.kind != remarks.CHOSEN]
    if compilation.options.strict and lost:
        first, more = lost[0], len(lost) - 1
        tail = f" (and {more} more)" if more else ""
        raise StrictError(
            f"{first.subject}: {first.reason}{tail}", hint="--strict was given", where=first.where
        )


def _run_phase(compilation: Compilation, name: str) -> None:
    options = compilation.options
    with options.phase(name), remarks.collect() as collected:
        run(
            levels.pipeline(options.level, (name,), topology=options.topology, split=options.split),
            compilation.module,
            verify_each=options.verify_each,
            instruments=options.instruments(),
        )
    compilation.remarks += collected


def _generate(compilation: Compilation) -> dict[str, UnsupportedError]:
    """Fills `compilation.sources`; the kernels for which there is no code, each with the reason."""
    from topo_opt.codegen.triton import lower_kernel
    from topo_opt.codegen.triton.target import Target

    device = compilation.options.machine.primary
    if device.target.backend == "none":
        raise InputError(
            f"there is no code generation for {device.model}, on which {compilation.options.machine.name} computes",
            hint="such a topology serves planning; one of a dump names its model with topo-hw import --device",
        )
    target = Target.of(device)
    refused: dict[str, UnsupportedError] = {}
    # A member of a pack is generated with the pack.
    launched = {c for _, function in plan_functions(compilation.module) for c in callees(function)}
    with compilation.module.context, ir.Location.unknown():
        for symbol, function in kernels(compilation.module):
            if symbol not in launched:
                continue
            try:
                compilation.sources[symbol] = lower_kernel(function, target)
            except UnsupportedError as error:
                refused[symbol] = error
    return refused


def _blamed(compilation: Compilation, refused: Mapping[str, UnsupportedError]) -> dict[str, dict[str, str]]:
    """Function -> node -> reason, for the graph nodes that the loops of refused kernels came from."""
    from topo_opt.frontend.import_torch import located_node

    found: dict[str, dict[str, str]] = {}
    if not refused:
        return found
    nodes = {
        symbol: {
            node: f"no code for its kernel: {refused[symbol].message}"
            for view in function.regions[0].blocks[0].operations
            if view.operation.name.startswith(_COMPUTES) and (node := located_node(view.operation.location))
        }
        for symbol, function in kernels(compilation.module)
        if symbol in refused
    }
    for _, function in plan_functions(compilation.module):
        name = ir.StringAttr(function.attributes["topo.function"]).value
        for callee in callees(function):
            if nodes.get(callee):
                found.setdefault(name, {}).update(nodes[callee])
    return found


def _leave_to_aten(compilation: Compilation, refused: Mapping[str, UnsupportedError]) -> None:
    """Functions that still call a kernel for which there is no code are run whole as ATen programs."""
    lost: dict[str, UnsupportedError] = {}
    for symbol, function in plan_functions(compilation.module):
        for callee in callees(function):
            if callee in refused and symbol not in lost:
                lost[symbol] = refused[callee]
    for symbol, error in lost.items():
        compilation.remarks.append(
            Remark("left-to-aten", symbol, f"no code for a kernel: {error.message}", error.where)
        )
    compilation.variants = tuple(
        replace(variant, symbol=None) if variant.symbol in lost else variant
        for variant in compilation.variants
    )


def kernels(module: ir.Module) -> Iterator[tuple[str, ir.Operation]]:
    """Symbol and function of every kernel, in the order of the module."""
    return ((s, f) for s, f in _functions(module) if "topo.kernel" in f.attributes)


def plan_functions(module: ir.Module) -> Iterator[tuple[str, ir.Operation]]:
    """Symbol and function of every function that the user calls, in the order of the module."""
    return ((s, f) for s, f in _functions(module) if "topo.function" in f.attributes)


def callees(function: ir.Operation, *, at_load: bool = True) -> Iterator[str]:
    """The symbols that a plan function calls, in order, repeated as often as they are called.

    Args:
        at_load: with those that are called once, when the program is loaded.
    """
    for view in function.regions[0].blocks[0].operations:
        op = view.operation
        if op.name == "func.call" and (at_load or "topo.at_load" not in op.attributes):
            yield ir.FlatSymbolRefAttr(view.operation.attributes["callee"]).value


def _functions(module: ir.Module) -> Iterator[tuple[str, ir.Operation]]:
    for view in module.body.operations:
        op = view.operation
        if op.name == "func.func":
            yield ir.StringAttr(op.attributes["sym_name"]).value, op


@dataclass(frozen=True)
class Finished:
    """A bundle that was written, and what its report says."""

    path: Path
    report: "Report"
    plans: "list[Plan]" = field(default_factory=list)
    """How the planner split the functions, where it did."""


def compile(sources: Mapping[str, Source], options: Options, out: Path) -> Finished:
    """The whole way from models to a bundle folder.

    Args:
        sources: function name -> path of a `.pt2` file, or an exported program.
        out: the folder to make; an older bundle there is replaced only when everything has gone well.

    Raises:
        StrictError: `options.strict`, and something was left to ATen or did not take effect.
        CompilerCrash: what was made cannot be opened, which is a fault of the compiler.
        TopoError: anything else that keeps the bundle from being made.
    """
    from topo_opt import report
    from topo_opt.bundle_output import write
    from topo_opt.sharding.predict import of_compilation as predict

    check_bundle_folder(out)
    compilation = with_kernels(sources, options)
    require_nothing_left(compilation)
    resources = _measure(compilation)
    with options.phase("predict"):
        predictions = predict(compilation)
    summary = report.build(compilation, resources, predictions)
    return Finished(write(compilation, resources, summary, out), summary, compilation.plans)


def _measure(compilation: Compilation) -> dict[str, Any]:
    """Registers, spills and shared memory of every kernel, where the target has such.

    A kernel whose tile turns out not to fit gets the next one of its space.

    Raises:
        DoesNotFit: a kernel has no tile that fits.
    """
    machine = compilation.options.machine.primary
    if machine.target.capability is None or not compilation.sources:
        return {}
    from topo_opt.codegen.resources import DoesNotFit, measure
    from topo_opt.tuning.refit import Refit

    refit = Refit(compilation.module.operation, machine)
    with compilation.options.phase("compile kernels"):
        while True:
            try:
                return measure(compilation.sources, capability=machine.target.capability)
            except DoesNotFit as error:
                with compilation.module.context, ir.Location.unknown():
                    compilation.sources |= refit.next_tiles(error)
