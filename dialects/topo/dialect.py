"""The dialect object that the op files attach to, and the one way their verifiers report."""

from collections.abc import Callable
from functools import wraps

from torch_mlir import ir
from torch_mlir.dialects import ext


class Topo(ext.Dialect, name="topo"):  # type: ignore[call-arg]
    """Ops of topo-opt on tensors."""


def verifier(check: Callable[..., str | None]) -> Callable[..., bool]:
    """Makes `check(op) -> sentence or None` a `verify_invariants` method.

    MLIR runs it before the constraints on operands and attributes, so a missing one shows up here as an IndexError or KeyError;
    the sentence for that is MLIR's own, which follows.
    """

    @wraps(check)
    def verify(op: ir.OpView) -> bool:
        try:
            sentence = check(op)
        except (IndexError, KeyError) as error:
            sentence = f"needs all its operands and attributes: {error}"
        if sentence is None:
            return True
        op.operation.location.emit_error(f"'{op.operation.name}' op {sentence}")
        return False

    return verify


def static_tensor(value: ir.Value) -> ir.RankedTensorType | None:
    """The type of `value` when it is a tensor whose dims are all known, else None."""
    kind = value.type
    if isinstance(kind, ir.RankedTensorType) and kind.has_static_shape:
        return kind
    return None
