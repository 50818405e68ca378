"""`topo.index_update`: rows of a tensor replaced at given positions, as a KV cache is written."""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import ext

from topo_opt.dialects.topo.dialect import Topo, static_tensor, verifier


class IndexUpdateOp(Topo.Operation, name="index_update", traits=[ext.Pure]):  # type: ignore[call-arg]
    """`topo.index_update(dest, source, index) {dim}`: `dest` with `dest[..., index[i], ...] = source[..., i, ...]`.

    `index` is 1-D and of an integer type, its values are in `[0, dest.shape[dim])` and distinct; `source` has the shape of
    `dest` except at `dim`, where it has the length of `index`.

    Inserted by `topo-raise-named-ops` for `index_copy` and for `index_put` with one index; lowered to an `update` kernel, in
    place when `dest` dies there.
    """

    dest: ext.Operand[Any]
    source: ext.Operand[Any]
    index: ext.Operand[Any]
    dim: ir.IntegerAttr
    result: ext.Result[Any]

    @verifier
    def verify_invariants(self) -> str | None:
        types = [static_tensor(v) for v in (*self.operands, *self.results)]
        if None in types:
            return "works on tensors of static shape"
        dest, source, index, result = types
        if result != dest:
            return f"has the type of 'dest' as its result, expected {dest}, got {result}"
        if index.rank != 1 or not isinstance(index.element_type, ir.IntegerType):
            return f"takes a 1-D integer 'index', got {index}"
        dim = self.attributes["dim"].value
        if not 0 <= dim < dest.rank:
            return f"has 'dim' in [0, {dest.rank}), got {dim}"
        expected = [*dest.shape[:dim], index.shape[0], *dest.shape[dim + 1 :]]
        if list(source.shape) != expected or source.element_type != dest.element_type:
            want = "x".join([*map(str, expected), str(dest.element_type)])
            return f"takes tensor<{want}> as 'source' for this 'dest' and 'index', got {source}"
        return None
