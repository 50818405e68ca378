"""Rows that belong to a device by the number of their group: those of others are zero."""

from __future__ import annotations

from collections.abc import Sequence

from torch_mlir import ir

from topo_opt.sharding.loop_bodies import (
    binary,
    compare,
    constant,
    generic,
    index_cast,
    index_constant,
    select,
)

OWNED = "topo.owned"
"""Attribute of the op that `rows_of_ours` makes: the number of groups of a device."""


def rows_of_ours(value: ir.Value, group: ir.Value, count: int, dim: int = 0) -> ir.Value:
    """`value` where the row's group is in [0, count), else zero; rows lie along dimension `dim`. At the insertion point."""
    kind = ir.RankedTensorType(value.type)

    def body(arguments: Sequence[ir.Value]) -> ir.Value:
        number = index_cast(arguments[1])
        inside = binary(
            "arith.andi",
            compare("sge", number, index_constant(0)),
            compare("slt", number, index_constant(count)),
        )
        return select(inside, arguments[0], constant(kind.element_type, 0))

    whole = ir.AffineMap.get_identity(kind.rank)
    row = ir.AffineMap.get(kind.rank, 0, [ir.AffineDimExpr.get(dim)])
    made = generic([value, group], [whole, row], whole, kind, body)
    i64 = ir.IntegerType.get_signless(64)
    made.owner.operation.attributes[OWNED] = ir.IntegerAttr.get(i64, count)
    return made
