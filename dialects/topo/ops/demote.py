"""`topo.demote`: narrows to the storage type of an intermediate."""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import ext

from topo_opt.dialects.topo.dialect import Topo, static_tensor, verifier


class DemoteOp(Topo.Operation, name="demote", traits=[ext.Pure]):  # type: ignore[call-arg]
    """`topo.demote(x)`: `x` (f32) rounded to f16 or bf16, because eager stores this intermediate so.

    A consumer in the same kernel may use `x` itself. A cast the user wrote is `arith.truncf`, which is always kept.

    Inserted by the frontend after every op that eager computes in f32 on half tensors; removed by code generation.
    """

    x: ext.Operand[Any]
    result: ext.Result[Any]

    @verifier
    def verify_invariants(self) -> str | None:
        wide, narrow = static_tensor(self.operands[0]), static_tensor(self.results[0])
        if wide is None or narrow is None:
            return f"works on tensors of static shape, got {self.operands[0].type} and {self.results[0].type}"
        if wide.shape != narrow.shape:
            return f"keeps the shape, got {wide} and {narrow}"
        if not isinstance(wide.element_type, ir.F32Type):
            return f"narrows f32, got {wide.element_type}"
        if not isinstance(narrow.element_type, ir.F16Type | ir.BF16Type):
            return f"narrows to f16 or bf16, got {narrow.element_type}"
        return None
