"""Dropping what a rewrite of a structured function has left unused."""

from torch_mlir import ir

_KEPT = ("func.call", "func.return")


def erase_dead(function: ir.Operation) -> None:
    """Erases every op whose results nothing uses. All ops of the structured IR but ATen calls are pure."""
    for view in reversed(list(function.regions[0].blocks[0].operations)):
        op = view.operation
        if op.name not in _KEPT and not any(True for r in op.results for _ in r.uses):
            op.erase()


def plan_functions(module: ir.Operation) -> list[ir.Operation]:
    """The functions of a module that have a body and are no kernels."""
    found = []
    for view in module.regions[0].blocks[0].operations:
        op = view.operation
        if op.name == "func.func" and op.regions[0].blocks and "topo.kernel" not in op.attributes:
            found.append(op)
    return found


def has_op(function: ir.Operation, name: str) -> bool:
    """Whether a function has an op of this name outside of regions: what tells that a rewrite has nothing to do."""
    return any(v.operation.name == name for v in function.regions[0].blocks[0].operations)
