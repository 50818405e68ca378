"""`topo-lower-slices`: cuts by the place of a device become loads at an offset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir

from topo_opt.passes.base import Pass
from topo_opt.passes.shard.propagate_shardings import shardable
from topo_opt.sharding.annotate import read_mesh
from topo_opt.sharding.collective import read
from topo_opt.sharding.coordinate import coordinate_of
from topo_opt.sharding.loop_bodies import binary, first_of_part, generic, loop_number
from topo_opt.sharding.spec import Mesh


@dataclass(frozen=True)
class LowerSlices(Pass):
    """Turns `shard.all_slice` into a loop nest that reads its operand from where the part of this device begins.

    `%y = shard.all_slice %x on @mesh grid_axes = [1] slice_axis = 0 : tensor<8xf32> -> tensor<2xf32>`
      -->
    `%y = linalg.generic ... { %i = linalg.index 0; %v = tensor.extract %x[2 * %coordinate[1] + %i]; linalg.yield %v }`

    Its readers then take it into their kernels. The function gets the coordinates as an argument where it did not have them.
    """

    name = "topo-lower-slices"

    def apply(self, module: Any) -> None:
        mesh = read_mesh(module.operation)
        if mesh is None:
            return
        for func in shardable(module.operation):
            found = [v.operation for v in func.regions[0].blocks[0].operations]
            for op in found:
                if op.name == "shard.all_slice":
                    _lower(op, coordinate_of(func, mesh), mesh)


def _lower(op: ir.Operation, coordinate: ir.Value, mesh: Mesh) -> None:
    step, kind = read(op, mesh), ir.RankedTensorType(op.results[0].type)
    source = op.operands[0]

    def body(arguments: Sequence[ir.Value]) -> ir.Value:
        places = [loop_number(d) for d in range(kind.rank)]
        first = first_of_part(coordinate, mesh, step.axes, kind.shape[step.dim])
        places[step.dim] = binary("arith.addi", places[step.dim], first)
        return ir.Operation.create("tensor.extract", [kind.element_type], [source, *places]).results[0]

    with ir.InsertionPoint(op), op.location:
        made = generic([], [], ir.AffineMap.get_identity(kind.rank), kind, body)
    op.results[0].replace_all_uses_with(made)
    op.erase()
