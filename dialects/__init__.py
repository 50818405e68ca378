"""Dialects of topo-opt and what a context needs before any of our IR is built or parsed in it."""

from torch_mlir import ir
from torch_mlir._mlir_libs import _mlir
from torch_mlir._mlir_libs._torchMlir import register_dialect
from torch_mlir.passmanager import PassManager

from topo_opt.dialects.topo import Topo

# MLIR looks for the module `<prefix>.<namespace>` when it makes a view of an op. Without one it searches the import path again
# for every view (30 us instead of 0.6), so each namespace we use has a module here, even an empty one.
_mlir.globals.append_dialect_search_prefix(__name__)

# torch_c and tm_tensor are in no registry; they come in as dependents of these passes.
_LOADS_DEPENDENTS = (
    "builtin.module(func.func(convert-torch-to-arith,convert-torch-to-linalg,convert-torch-to-tmtensor,"
    "convert-torch-to-tensor),torch-func-backend-type-conversion)"
)


def load(context: ir.Context) -> ir.Context:
    """Registers every dialect that topo-opt reads or writes in `context`, and returns it. Calling it again does nothing."""
    if is_loaded(context):
        return context
    register_dialect(context)
    with context, ir.Location.unknown():
        Topo.load()
        empty = ir.Module.parse("func.func private @empty()")
        PassManager.parse(_LOADS_DEPENDENTS).run(empty.operation)
    return context


def is_loaded(context: ir.Context) -> bool:
    """Whether `load` has been called on `context`."""
    return context.is_registered_operation("topo.demote")
