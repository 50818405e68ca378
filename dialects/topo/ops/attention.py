"""`topo.attention`: scaled dot product attention as one op."""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import ext

from topo_opt.dialects.topo.dialect import Topo, static_tensor, verifier


class AttentionOp(Topo.Operation, name="attention", traits=[ext.Pure]):  # type: ignore[call-arg]
    """`topo.attention(q, k, v, mask?) {scale, causal}`: `softmax(scale * q k^T + mask) v` per batch and head.

    `q` BxHxMxD, `k` BxGxNxD, `v` BxGxNxE, H a multiple of G (query head h reads key head `h // (H / G)`). `mask` has rank 4
    and broadcasts to BxHxMxN: boolean (true = attend) or a float that is added. `causal` (BoolAttr): position n is seen by m
    when `n <= m`. `scale` is an f64. The result is BxHxMxE of `q`'s element type; softmax and both products accumulate in f32
    (f64 for f64). Rows that see no position give 0.

    Inserted by `topo-raise-named-ops`; becomes a kernel of family `attention`.
    """

    q: ext.Operand[Any]
    k: ext.Operand[Any]
    v: ext.Operand[Any]
    mask: ext.Operand[Any] | None = None
    scale: ir.FloatAttr = ext.attribute(kw_only=True)
    causal: Any = ext.attribute(kw_only=True)
    result: ext.Result[Any] = ext.result(kw_only=True)

    @verifier
    def verify_invariants(self) -> str | None:
        types = [static_tensor(v) for v in (*self.operands, *self.results)]
        if None in types or any(t.rank != 4 for t in types):
            return f"works on tensors of rank 4 and static shape, got {[str(v.type) for v in self.operands]}"
        (q, k, v, *masks), result = types[:-1], types[-1]
        (b, h, m, d), (_, g, n, _), e = q.shape, k.shape, v.shape[3]
        if not isinstance(self.attributes["causal"], ir.BoolAttr):
            return f"takes a boolean 'causal', got {self.attributes['causal']}"
        if list(k.shape) != [b, g, n, d]:
            return f"takes 'k' of shape BxGxNxD with B = {b} and D = {d} of 'q', got {k}"
        if list(v.shape) != [b, g, n, e]:
            return f"takes 'v' of shape BxGxNxE with B, G, N = {b}, {g}, {n} of 'k', got {v}"
        if g == 0 or h % g:
            return f"takes a multiple of the key heads as query heads, got {h} and {g}"
        if not q.element_type == k.element_type == v.element_type == result.element_type:
            return f"has one element type, got {q}, {k}, {v} and {result}"
        if list(result.shape) != [b, h, m, e]:
            return f"has a result of shape {b}x{h}x{m}x{e}, got {result}"
        for mask in masks:
            if any(have not in (1, full) for have, full in zip(mask.shape, (b, h, m, n))):
                return f"takes a 'mask' that broadcasts to {b}x{h}x{m}x{n}, got {mask}"
            boolean = isinstance(mask.element_type, ir.IntegerType) and mask.element_type.width == 1
            if not boolean and not isinstance(mask.element_type, ir.FloatType):
                return f"takes a boolean or float 'mask', got {mask}"
        return None
