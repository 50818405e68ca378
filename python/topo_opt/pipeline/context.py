"""The one kind of MLIR context that this project uses."""

from torch_mlir import ir
from torch_mlir.dialects import torch as torch_dialect
from torch_mlir.passmanager import PassManager

from topo_opt import dialects

# `torch_c` and `tm_tensor` are in no registry: they load as dependents of these passes, when such a pass is initialised.
_LOADS_DEPENDENTS = (
    "builtin.module(func.func(convert-torch-to-arith,convert-torch-to-linalg,convert-torch-to-tmtensor),"
    "torch-func-backend-type-conversion)"
)


def make_context() -> ir.Context:
    """A context with upstream's, torch-mlir's and our dialects loaded and registered.

    It stays single-threaded: worker threads deadlock on the interpreter lock as soon as a dialect has Python verifiers.
    """
    context = ir.Context()
    torch_dialect.register_dialect(context)
    dialects.load(context)
    with context, ir.Location.unknown():
        empty = ir.Module.parse("func.func private @empty()")
        PassManager.parse(_LOADS_DEPENDENTS).run(empty.operation)
    return context
