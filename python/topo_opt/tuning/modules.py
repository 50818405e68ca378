"""Tuning of all kernels of a module of kernel IR."""

from __future__ import annotations

from pathlib import Path

from torch_mlir import ir

from topo_opt import dialects
from topo_opt.codegen.triton import lower_kernel
from topo_opt.codegen.triton.target import Target
from topo_opt.errors import InputError, UnsupportedError
from topo_opt.pipeline import diagnostics
from topo_opt.pipeline.diagnostics import DiagnosedError
from topo_opt.topology import Device
from topo_opt.tuning import prepared
from topo_opt.tuning.gpu import find_gpu
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


def problems_of(module: ir.Operation, device: Device) -> list[Problem]:
    """What could be measured for every kernel that has code; the candidates hold their code and need the module no more."""
    with module.context, ir.Location.unknown():
        return [
            prepared.problem_of(prepared.problem_data(problem_of(subject, device)))
            for subject in _subjects(module, device)
        ]


def read_module(path: Path) -> ir.Module:
    """The module in a text file.

    Raises:
        TopoError: the file cannot be read, or is not MLIR.
    """
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not MLIR text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    context = dialects.load(ir.Context())
    with diagnostics.collect(context) as collected:
        try:
            return ir.Module.parse(text, context)
        except ir.MLIRError:
            raise DiagnosedError(tuple(d.in_file(str(path)) for d in collected)) from None


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
