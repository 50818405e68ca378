"""`topo.top_k`: the largest elements of every row, with their positions."""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import ext

from topo_opt.dialects.topo.dialect import Topo, static_tensor, verifier


class TopKOp(Topo.Operation, name="top_k", traits=[ext.Pure]):  # type: ignore[call-arg]
    """`topo.top_k(x) {k, largest}`: along the last dimension the `k` largest elements in descending order, and where they stand.

    With `largest = false` the smallest, in ascending order. NaN counts as larger than any number. Of equal elements the one with
    the lowest index comes first: torch promises no order among them, and so leaves this one open. `values` has the element type of
    `x`, `indices` is i64; both have the shape of `x` with `k` as the last dimension.

    Inserted by `topo-raise-named-ops` for `aten.topk`; becomes a kernel of family `top_k`.
    """

    x: ext.Operand[Any]
    k: ir.IntegerAttr
    largest: Any = ext.attribute(kw_only=True)
    values: ext.Result[Any] = ext.result(kw_only=True)
    indices: ext.Result[Any] = ext.result(kw_only=True)

    @verifier
    def verify_invariants(self) -> str | None:
        x, values, indices = (static_tensor(v) for v in (self.operands[0], *self.results))
        if x is None or values is None or indices is None or x.rank == 0:
            return f"works on a tensor of static shape and rank 1 or more, got {self.operands[0].type}"
        k = self.attributes["k"].value
        if not isinstance(self.attributes["largest"], ir.BoolAttr):
            return f"takes a boolean 'largest', got {self.attributes['largest']}"
        if not 1 <= k <= x.shape[-1]:
            return f"has 'k' in [1, {x.shape[-1]}], got {k}"
        shape = [*x.shape[:-1], k]
        if list(values.shape) != shape or values.element_type != x.element_type:
            want = "x".join([*map(str, shape), str(x.element_type)])
            return f"has values of type tensor<{want}>, got {values}"
        if list(indices.shape) != shape or str(indices.element_type) != "i64":
            return f"has indices of type tensor<{'x'.join(map(str, shape))}xi64>, got {indices}"
        return None
