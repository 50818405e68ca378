"""`topo-verify-structured`: only what docs/architecture.md, section 2, allows may stand in a structured function."""

from dataclasses import dataclass
from typing import Any

from torch_mlir import ir

from topo_opt.passes.base import Pass, fail

_OPS = frozenset(
    [
        "builtin.module",
        "func.func",
        "func.return",
        "func.call",
        "linalg.generic",
        "linalg.contract",
        "linalg.fill",
        "linalg.yield",
        "linalg.index",
        "tensor.empty",
        "tensor.extract",
        "tensor.expand_shape",
        "tensor.collapse_shape",
        "tensor.extract_slice",
        "tensor.insert_slice",
        "tensor.pad",
        "tensor.yield",
        "tensor.concat",
        "tensor.from_elements",
        "topo.attention",
        "topo.grouped_product",
        "topo.index_update",
        "topo.demote",
        "topo.rotate_half",
        "topo.top_k",
        "tm_tensor.scan",
        "tm_tensor.scatter",
        "tm_tensor.yield",
    ]
)
_SCALAR_NAMESPACES = ("arith", "math", "complex")
_ONLY_IN_BODIES = ("cf.assert",)
_BODIES = ("linalg.generic", "tm_tensor.scan", "tm_tensor.scatter", "tensor.pad")


@dataclass(frozen=True)
class VerifyStructured(Pass):
    """Fails at the first op that may not stand in the structured IR, or at a tensor whose shape is not static."""

    name = "topo-verify-structured"

    def apply(self, module: Any) -> None:
        """Checks every op of the module.

        Raises:
            PassFailure: at the op at fault.
        """
        checked: dict[ir.Type, str | None] = {}

        faults: list[tuple[ir.Operation, str]] = []

        def check(op: ir.Operation) -> ir.WalkResult:
            if sentence := _fault(op, checked):
                faults.append((op, sentence))
                return ir.WalkResult.INTERRUPT
            return ir.WalkResult.ADVANCE

        # An exception in the callback would reach us as a RuntimeError with nothing but its text.
        module.operation.walk(check, ir.WalkOrder.PRE_ORDER)
        if faults:
            fail(*faults[0])


def _fault(op: ir.Operation, checked: dict[ir.Type, str | None]) -> str | None:
    name = op.name
    if name not in _OPS and name.partition(".")[0] not in _SCALAR_NAMESPACES:
        if name not in _ONLY_IN_BODIES:
            return f"'{name}' may not stand in the structured IR"
        if op.parent.name not in _BODIES:
            return f"'{name}' may stand only in the body of a linalg.generic"
    for result in op.results:
        kind = result.type
        if kind not in checked:
            checked[kind] = _type_fault(kind)
        if fault := checked[kind]:
            return f"'{name}' has a result of type {kind}: {fault}"
    return None


def _type_fault(kind: ir.Type) -> str | None:
    if isinstance(kind, ir.RankedTensorType):
        return None if kind.has_static_shape else "its shape is not static"
    if isinstance(kind, ir.UnrankedTensorType):
        return "its rank is not known"
    return None
