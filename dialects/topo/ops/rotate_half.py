"""`topo.rotate_half`: the quarter turn of rotary position embeddings."""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import ext

from topo_opt.dialects.topo.dialect import Topo, static_tensor, verifier


class RotateHalfOp(Topo.Operation, name="rotate_half", traits=[ext.Pure]):  # type: ignore[call-arg]
    """`topo.rotate_half(x) {interleaved}`: pairs along the last dimension, of even size D, turned by a quarter.

    `out[d] = -x[d + D/2]` for `d < D/2`, else `x[d - D/2]`. With `interleaved` (BoolAttr) neighbours are the pairs:
    `out[2i] = -x[2i + 1]`, `out[2i + 1] = x[2i]`. The result has the type of `x`.

    Inserted by `topo-raise-rotary`; becomes part of whatever kernel reads it.
    """

    x: ext.Operand[Any]
    interleaved: Any = ext.attribute(kw_only=True)
    result: ext.Result[Any] = ext.result(kw_only=True)

    @verifier
    def verify_invariants(self) -> str | None:
        source, result = self.operands[0].type, self.results[0].type
        if static_tensor(self.operands[0]) is None:
            return f"works on a tensor of static shape, got {source}"
        if source != result:
            return f"keeps the type, got {source} and {result}"
        if not isinstance(source.element_type, ir.FloatType):
            return f"turns floats, got {source.element_type}"
        if source.rank == 0 or source.shape[-1] % 2:
            return f"takes a last dimension of even size, got {source}"
        if not isinstance(self.attributes["interleaved"], ir.BoolAttr):
            return f"takes a boolean 'interleaved', got {self.attributes['interleaved']}"
        return None
