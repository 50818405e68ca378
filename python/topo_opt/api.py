"""`topo_opt.compile`: from a module or an exported program to something that can be called."""

import shutil
import tempfile
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram

from topo_opt import driver
from topo_opt.errors import InputError
from topo_opt.output_folder import check_bundle_folder

if TYPE_CHECKING:
    from topo_opt.runtime import Program

DEFAULT_FUNCTION = "main"
DEFAULT_TOPOLOGY = "h200-x1"


def compile(
    model: "torch.nn.Module | ExportedProgram | Mapping[str, Any]",
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    buckets: Mapping[str, Sequence[int]] | None = None,
    topology: str | Path = DEFAULT_TOPOLOGY,
    level: int = 2,
    strict: bool = False,
    tune: str | None = None,
    tuning_cache: str | Path | None = None,
    tuning_data: Sequence[str | Path] = (),
    tuning_time: float | None = None,
    mesh: str | None = None,
    shard: Sequence[str] = (),
    out: str | Path | None = None,
    device: str | torch.device | None = None,
) -> "Program":
    """Compiles for inference and loads the result.

    Args:
        model: a module (exported with `args`, `kwargs` and `dynamic_shapes`), an exported program, or a dictionary of exported
            programs that share weights: function name -> program.
        args: the positional arguments to export a module with, as a tuple.
        buckets: name of a dynamic dim -> sizes to compile kernels for.
        topology: name or file of the machine to compile for.
        level: 0 to 3, as `-O`.
        strict: refuse when anything is left to ATen or did not take effect; calls that the kernels cannot answer raise too.
        tune: "off", "cache" (what was measured earlier), "short" or "full" (measure, when the GPU is here); by default as
            the level says, in this order from 0 to 3.
        tuning_cache: folder of measured tiles; by default the user's.
        tuning_data: more files of measured tiles to read, or bundles that have such.
        tuning_time: seconds that a search may take.
        mesh: axes over which to split the model, such as "data=2,model=4", for as many processes of torch.distributed, which all
            call this; by default one device.
        shard: how tensors are split, by name, one entry a dimension: "layers.*.q.weight=model,_". What they leave open follows
            from them; without any all of it is planned for the topology.
        out: folder for the bundle; by default a temporary one that lives as long as the program.
        device: where to run: by default the first GPU when there is one and the topology is a GPU's, else the CPU.

    Returns:
        The loaded program, bound to the tensors of `model`. `program(...)` calls a single function,
        `program.NAME(...)` one of several.

    Raises:
        InputError: arguments of another form.
        TopoError: the model cannot be exported or compiled, see its message.
    """
    sizes = _sizes(buckets)
    options = driver.Options(
        str(topology),
        level=level,
        strict=strict,
        buckets=sizes,
        pack_weights=out is not None,
        tune=tune,
        tuning_cache=tuning_cache,
        tuning_data=tuning_data,
        tuning_time_s=tuning_time,
        mesh=mesh,
        shard=tuple(shard),
    )
    if isinstance(shard, str):
        raise InputError(
            f"shard is the text {shard!r}, expected a list of patterns", hint=f"write shard=[{shard!r}]"
        )
    _ = options.machine, options.tuning, options.split  # a fault in them shows before the export
    if out is not None:
        check_bundle_folder(out)
    programs = _programs(model, args, kwargs, dynamic_shapes)
    if out is not None:
        return _load(driver.compile(programs, options, Path(out)).path, programs, device, options)
    folder = Path(tempfile.mkdtemp(prefix="topo-opt-"))
    try:
        program = _load(driver.compile(programs, options, folder / "bundle").path, programs, device, options)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(program, shutil.rmtree, folder, ignore_errors=True)
    return program


def _programs(model: Any, args: Any, kwargs: Any, dynamic_shapes: Any) -> dict[str, ExportedProgram]:
    if isinstance(model, torch.nn.Module):
        from topo_opt.frontend.load import export_module

        _check_arguments(args, kwargs)
        _warn_of_training(model)
        return {DEFAULT_FUNCTION: export_module(model, args or (), kwargs, dynamic_shapes)}
    programs = {DEFAULT_FUNCTION: model} if isinstance(model, ExportedProgram) else model
    if not isinstance(programs, Mapping):
        wrap = " (a function: make it the forward of a module)" if callable(model) else ""
        raise InputError(
            f"a {type(model).__name__} cannot be compiled{wrap}",
            hint="give a module, an ExportedProgram or a dictionary of such programs",
        )
    if not programs:
        raise InputError("the dictionary of programs is empty", hint="function name -> ExportedProgram")
    arguments = {"args": args, "kwargs": kwargs, "dynamic_shapes": dynamic_shapes}
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise InputError(f"{given[0]} was given with a program that is exported already", hint="leave it out")
    for name, program in programs.items():
        if not isinstance(program, ExportedProgram):
            raise InputError(
                f"'{name}' is a {type(program).__name__}", hint="torch.export.export makes an ExportedProgram"
            )
        if not str(name).isidentifier():
            raise InputError(
                f"'{name}' cannot be the name of a function", hint="letters, digits and _, not a digit first"
            )
    return dict(programs)


def _warn_of_training(model: torch.nn.Module) -> None:
    """Says that modules behave as in training, which what is compiled for inference hardly ever should."""
    kinds = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._NormBase)
    found = [name for name, m in model.named_modules() if m.training and isinstance(m, kinds)]
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        warnings.warn(
            f"'{found[0]}'{more} of the model is in training mode and compiled so: call model.eval() for inference",
            stacklevel=4,
        )


def _check_arguments(args: Any, kwargs: Any) -> None:
    if not isinstance(args, tuple | list | type(None)):
        raise InputError(
            f"args is a {type(args).__name__}, expected a tuple of the model's arguments",
            hint="give kwargs" if isinstance(args, Mapping) else "write args=(x,)",
        )
    for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
            raise InputError(f"an argument has layout {leaf.layout}", hint="give x.to_dense()")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(k, str) for k in kwargs)):
        raise InputError(
            f"kwargs is a {type(kwargs).__name__}, expected a dictionary: argument name -> value"
        )


def _sizes(buckets: Any) -> dict[str, tuple[int, ...]]:
    """`{"batch": [1, 8]}` with every size once; raises InputError for anything of another form."""
    hint = 'write buckets={"batch": (1, 8)}'
    if not isinstance(buckets, Mapping | type(None)):
        raise InputError(f"buckets is a {type(buckets).__name__}, expected a dictionary", hint=hint)
    sizes = {}
    for name, values in (buckets or {}).items():
        if not isinstance(name, str):
            raise InputError(f"buckets has the key {name!r}, expected the name of a dynamic dim", hint=hint)
        if not isinstance(values, Sequence) or isinstance(values, str | bytes):
            raise InputError(f"bucket '{name}' is {values!r}, expected a list of sizes", hint=hint)
        wrong = [v for v in values if not isinstance(v, int) or isinstance(v, bool) or v < 0]
        if wrong or not values:
            what = f"has the size {wrong[0]!r}" if wrong else "has no sizes"
            raise InputError(f"bucket '{name}' {what}, expected whole numbers", hint=hint)
        sizes[name] = tuple(dict.fromkeys(values))
    return sizes


def _load(
    path: Path,
    programs: Mapping[str, ExportedProgram],
    device: str | torch.device | None,
    options: driver.Options,
) -> "Program":
    from topo_opt import runtime
    from topo_opt.frontend.weights import program_tensors

    if device is None:
        device = "cuda" if options.machine.primary.kind == "gpu" and torch.cuda.is_available() else "cpu"
    return runtime.load(
        path,
        device,
        weights=program_tensors(programs),
        strict=options.strict,
        allow_ops=_namespaces(programs),
    )


def _namespaces(programs: Mapping[str, ExportedProgram]) -> frozenset[str]:
    """Namespaces of the operators that the caller's own programs use: they are registered in this process."""
    return frozenset(
        node.target.namespace
        for program in programs.values()
        for node in program.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    )
