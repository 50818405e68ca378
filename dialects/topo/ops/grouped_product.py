"""`topo.grouped_product`: rows times matrices that each row picks for itself, as mixtures of experts do."""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import ext

from topo_opt.dialects.topo.dialect import Topo, static_tensor, verifier


class GroupedProductOp(Topo.Operation, name="grouped_product", traits=[ext.Pure]):  # type: ignore[call-arg]
    """`topo.grouped_product(x, weights, group, order?, offsets?)`: `y[a, n] = sum over k of x[a, k] * weights[group[a], k, n]`.

    `x` AxK, `weights` GxKxN, `group` A of an integer type; `y` AxN, f32 when `x` is half precision, else of its type. Of rows
    whose group is outside [0, G) no value is promised. `order` and `offsets` are those that `topo.group_rows(group)` gives: they change nothing
    of the result, but let a kernel read each matrix once for all rows of its group.

    Inserted by `topo-raise-named-ops`, without `order` and `offsets`, which `topo-form-expert-kernels` adds where rows are
    expected to share matrices; becomes a kernel of family `experts`.
    """

    x: ext.Operand[Any]
    weights: ext.Operand[Any]
    group: ext.Operand[Any]
    order: ext.Operand[Any] | None = None
    offsets: ext.Operand[Any] | None = None
    result: ext.Result[Any] = ext.result(kw_only=True)

    @verifier
    def verify_invariants(self) -> str | None:
        types = [static_tensor(v) for v in (*self.operands, *self.results)]
        if None in types:
            return f"works on tensors of static shape, got {[str(v.type) for v in self.operands]}"
        (x, weights, group, *sorting), result = types[:-1], types[-1]
        if x.rank != 2 or weights.rank != 3 or group.rank != 1:
            return f"takes tensors of rank 2, 3 and 1, got {x}, {weights} and {group}"
        rows, inner = x.shape
        groups, columns = weights.shape[0], weights.shape[2]
        if weights.shape[1] != inner or weights.element_type != x.element_type:
            return f"takes 'weights' of shape Gx{inner}xN and of the type of 'x', got {weights}"
        if group.shape[0] != rows or not isinstance(group.element_type, ir.IntegerType):
            return f"takes an integer 'group' of {rows} rows, got {group}"
        half = isinstance(x.element_type, ir.F16Type | ir.BF16Type)
        element = "f32" if half else str(x.element_type)
        if list(result.shape) != [rows, columns] or str(result.element_type) != element:
            return f"has a result of type tensor<{rows}x{columns}x{element}>, got {result}"
        if len(sorting) == 1:
            return "takes 'order' and 'offsets' together"
        if sorting and [str(s) for s in sorting] != [f"tensor<{rows}xi32>", f"tensor<{groups + 1}xi32>"]:
            return f"takes 'order' of {rows} and 'offsets' of {groups + 1} i32, got {sorting[0]} and {sorting[1]}"
        return None
