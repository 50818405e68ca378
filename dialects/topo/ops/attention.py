"""`topo.attention`: scaled dot product attention as one op."""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import ext

from topo_opt.dialects.topo.dialect import Topo, static_tensor, verifier


class AttentionOp(Topo.Operation, name="attention", traits=[ext.Pure]):  # type: ignore[call-arg]
    """`topo.attention(q, k, v, mask?, positions?) {scale, causal, low?, high?, softcap?}`:
    `softmax(cap(scale * q k^T) + mask) v` per batch and head.

    `q` BxHxMxD, `k` BxGxNxD, `v` BxGxNxE, H a multiple of G (query head h reads key head `h // (H / G)`). `mask` has rank 4
    and broadcasts to BxHxMxN: boolean (true = attend) or a float that is added. `causal` (BoolAttr): position n is seen by m
    when `n <= m`. `scale` is an f64. The result is BxHxMxE of `q`'s element type; softmax and both products accumulate in f32
    (f64 for f64). Rows that see no position give 0.

    `low` and `high` are affine maps `(m, p) -> (...)` that bound the positions a row sees without a mask: `n >= r` for every
    result r of `low`, `n < r` for every result r of `high`. p is `positions[b, m]`, an i64 tensor that broadcasts to BxM (0
    without one): where a row stands is data when a cache is being filled. `softcap` (f64) is the c of
    `cap(s) = c * tanh(s / c)`.

    Inserted by `topo-raise-named-ops`; `topo-raise-masks` moves what it can from `mask` and `causal` to `low` and `high`.
    Becomes a kernel of family `attention`.
    """

    q: ext.Operand[Any]
    k: ext.Operand[Any]
    v: ext.Operand[Any]
    mask: ext.Operand[Any] | None = None
    positions: ext.Operand[Any] | None = None
    scale: ir.FloatAttr = ext.attribute(kw_only=True)
    causal: Any = ext.attribute(kw_only=True)
    result: ext.Result[Any] = ext.result(kw_only=True)

    @verifier
    def verify_invariants(self) -> str | None:
        values = [static_tensor(v) for v in (*self.operands, *self.results)]
        segments = list(ir.DenseI32ArrayAttr(self.attributes["operandSegmentSizes"]))
        if len(segments) != 5 or sum(segments) != len(self.operands):
            return f"has 'operandSegmentSizes' for q, k, v, mask and positions, got {segments}"
        positions = values.pop(-2) if segments[4] else None
        if None in values or any(t.rank != 4 for t in values):
            return f"works on tensors of rank 4 and static shape, got {[str(v.type) for v in self.operands]}"
        (q, k, v, *masks), result = values[:-1], values[-1]
        if not isinstance(self.attributes["causal"], ir.BoolAttr):
            return f"takes a boolean 'causal', got {self.attributes['causal']}"
        if fault := _operand_fault(q, k, v, result):
            return fault
        sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        for mask in masks:
            if fault := _mask_fault(mask, sizes):
                return fault
        return _bounds_fault(
            self.attributes, self.operands[-1].type if segments[4] else None, positions, sizes
        )


def _operand_fault(q: Any, k: Any, v: Any, result: Any) -> str | None:
    (b, h, m, d), (_, g, n, _), e = q.shape, k.shape, v.shape[3]
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
    return None


def _mask_fault(mask: Any, sizes: tuple[int, ...]) -> str | None:
    if any(have not in (1, full) for have, full in zip(mask.shape, sizes)):
        return f"takes a 'mask' that broadcasts to {'x'.join(map(str, sizes))}, got {mask}"
    boolean = isinstance(mask.element_type, ir.IntegerType) and mask.element_type.width == 1
    if not boolean and not isinstance(mask.element_type, ir.FloatType):
        return f"takes a boolean or float 'mask', got {mask}"
    return None


def _bounds_fault(attributes: Any, given: Any, positions: Any, sizes: tuple[int, ...]) -> str | None:
    for name in ("low", "high"):
        if name not in attributes:
            continue
        attribute = attributes[name]
        if not isinstance(attribute, ir.AffineMapAttr):
            return f"takes an affine map '{name}', got {attribute}"
        bounds = ir.AffineMapAttr(attribute).value
        if (bounds.n_dims, bounds.n_symbols) != (2, 0) or not list(bounds.results):
            return f"takes a map '{name}' from a row and its position, got {bounds}"
    if "softcap" in attributes and not isinstance(attributes["softcap"], ir.FloatAttr):
        return f"takes a float 'softcap', got {attributes['softcap']}"
    if given is None:
        return None
    full = (sizes[0], sizes[2])
    if (
        positions is None
        or positions.rank != 2
        or any(s not in (1, f) for s, f in zip(positions.shape, full))
    ):
        return f"takes 'positions' that broadcast to {full[0]}x{full[1]}, got {given}"
    if str(positions.element_type) != "i64":
        return f"takes 'positions' of i64, got {given}"
    return None
