"""`topo.group_rows`: rows brought together by the group each belongs to."""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import ext

from topo_opt.dialects.topo.dialect import Topo, static_tensor, verifier


class GroupRowsOp(Topo.Operation, name="group_rows", traits=[ext.Pure]):  # type: ignore[call-arg]
    """`topo.group_rows(group) {groups}`: a stable counting sort of A rows by group.

    `group` is 1-D of an integer type. `order` (A x i32) lists the rows of group 0, then those of group 1 and so on, each in
    ascending order; `offsets` (`groups` + 1, i32) says where each group starts in it and, last, where they end. Rows whose group
    is outside [0, groups) are in none; what `order` holds after the last offset is not defined.

    Inserted by `topo-form-expert-kernels`, for products whose rows share weights by group; becomes a kernel of family `group_rows`.
    """

    group: ext.Operand[Any]
    groups: ir.IntegerAttr
    order: ext.Result[Any] = ext.result(kw_only=True)
    offsets: ext.Result[Any] = ext.result(kw_only=True)

    @verifier
    def verify_invariants(self) -> str | None:
        group, order, offsets = (static_tensor(v) for v in (self.operands[0], *self.results))
        if group is None or group.rank != 1 or not isinstance(group.element_type, ir.IntegerType):
            return f"takes a 1-D integer 'group', got {self.operands[0].type}"
        groups = self.attributes["groups"].value
        if groups < 1:
            return f"has 'groups' of 1 or more, got {groups}"
        rows = group.shape[0]
        if order is None or list(order.shape) != [rows] or str(order.element_type) != "i32":
            return f"has 'order' of type tensor<{rows}xi32>, got {self.results[0].type}"
        if offsets is None or list(offsets.shape) != [groups + 1] or str(offsets.element_type) != "i32":
            return f"has 'offsets' of type tensor<{groups + 1}xi32>, got {self.results[1].type}"
        return None
