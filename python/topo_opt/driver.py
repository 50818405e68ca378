"""The compile itself, one step after the other; `topo-opt`, `topo_opt.compile` and the Dynamo backend all come through here.

    sources --import_model--> structured IR --schedule--> kernel IR --lower--> tiles --generate--> Triton --write--> bundle

A step that cannot take a function leaves the whole function to ATen, with a remark that says why; `strict` makes that an error.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch_mlir import ir

from topo_opt import dialects
from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.errors import InputError, Remark, StrictError, UnsupportedError
from topo_opt.model import FunctionVariant, ImportedModel, Source, import_model
from topo_opt.pipeline import levels, remarks
from topo_opt.pipeline.run import Instrument, run
from topo_opt.pipeline.spec import Group
from topo_opt.topology import Topology

Phase = Callable[[str], AbstractContextManager[Any]]
"""Entered around every step with its name; the command line shows progress by it."""


@dataclass(frozen=True)
class Options:
    """How to compile. `buckets`: name of a dynamic dim -> sizes."""

    topology: Topology
    level: int = 2
    strict: bool = False
    buckets: Mapping[str, Sequence[int]] = field(default_factory=dict)
    trust: bool = False
    verify_each: bool = True
    instruments: Callable[[], Sequence[Instrument]] = tuple
    phase: Phase = nullcontext


@dataclass
class Compilation:
    """What is known after the steps so far. `module` is structured IR first, kernel IR after `schedule`."""

    options: Options
    model: ImportedModel
    module: ir.Module
    variants: tuple[FunctionVariant, ...]
    remarks: list[Remark]
    sources: dict[str, KernelSource] = field(default_factory=dict)


def start(sources: Mapping[str, Source], options: Options) -> Compilation:
    """Imports the model: structured IR.

    Raises:
        TopoError: the model cannot be loaded or imported.
    """
    if not sources:
        raise InputError("no model was given")
    with options.phase("import"):
        model = import_model(sources, buckets=options.buckets, trust=options.trust)
        module = ir.Module.parse(model.module, dialects.load(ir.Context()))
    return Compilation(options, model, module, model.variants, list(model.remarks))


def schedule(compilation: Compilation) -> None:
    """Forms kernels: kernel IR."""
    _run_phase(compilation, "schedule")


def lower(compilation: Compilation) -> None:
    """Chooses tiles, then generates the source of every kernel."""
    _run_phase(compilation, "lower")
    with compilation.options.phase("generate"):
        _generate(compilation)


def phases(level: int, names: tuple[str, ...] = levels.PHASES) -> Group:
    """The pipeline that a compile at this level runs."""
    return levels.pipeline(level, names)


def require_nothing_left(compilation: Compilation) -> None:
    """The check of `strict`.

    Raises:
        StrictError: names the first of what did not take effect, and how many more there are.
    """
    if compilation.options.strict and compilation.remarks:
        first, more = compilation.remarks[0], len(compilation.remarks) - 1
        tail = f" (and {more} more)" if more else ""
        raise StrictError(
            f"{first.subject}: {first.reason}{tail}", hint="--strict was given", where=first.where
        )


def _run_phase(compilation: Compilation, name: str) -> None:
    options = compilation.options
    with options.phase(name), remarks.collect() as collected:
        run(
            levels.pipeline(options.level, (name,)),
            compilation.module,
            verify_each=options.verify_each,
            instruments=options.instruments(),
        )
    compilation.remarks += collected


def _generate(compilation: Compilation) -> None:
    from topo_opt.codegen.triton import lower_kernel

    target = compilation.options.topology.primary
    refused: dict[str, UnsupportedError] = {}
    with compilation.module.context, ir.Location.unknown():
        for symbol, function in kernels(compilation.module):
            try:
                compilation.sources[symbol] = lower_kernel(function, target)
            except UnsupportedError as error:
                refused[symbol] = error
        if refused:
            _leave_to_aten(compilation, refused)


def _leave_to_aten(compilation: Compilation, refused: Mapping[str, UnsupportedError]) -> None:
    """Functions that call a kernel for which there is no code are run whole as ATen programs."""
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


def callees(function: ir.Operation) -> Iterator[str]:
    """The symbols that a plan function calls, in order, repeated as often as they are called."""
    for view in function.regions[0].blocks[0].operations:
        if view.operation.name == "func.call":
            yield ir.FlatSymbolRefAttr(view.operation.attributes["callee"]).value


def _functions(module: ir.Module) -> Iterator[tuple[str, ir.Operation]]:
    for view in module.body.operations:
        op = view.operation
        if op.name == "func.func":
            yield ir.StringAttr(op.attributes["sym_name"]).value, op


def write(compilation: Compilation, out: Path) -> Path:
    """Writes the bundle; see `codegen.bundle.write_bundle` for the errors."""
    raise NotImplementedError(out)
