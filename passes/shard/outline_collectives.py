"""`topo-outline-collectives`: collectives become calls, which nothing is fused with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_mlir import ir

from topo_opt.passes.base import Pass
from topo_opt.passes.shard.propagate_shardings import shardable
from topo_opt.sharding.annotate import read_mesh
from topo_opt.sharding.collective import COLLECTIVES, Step, read


@dataclass(frozen=True)
class OutlineCollectives(Pass):
    """Turns the collectives of a program for one device into calls of private declarations.

    `%y = shard.all_reduce %x on @mesh grid_axes = [1] : tensor<8xf32> -> tensor<8xf32>`
      -->
    `%y = call @collective.all_reduce.0(%x)` of
    `func.func private @collective.all_reduce.0(tensor<8xf32>) -> tensor<8xf32> attributes {topo.collective = {kind = "all_reduce", axes = ["model"], ...}}`

    Like calls that are left to ATen they stand between kernels: what they read is in memory, and so is their result. The plan makes
    each a step of its own.
    """

    name = "topo-outline-collectives"

    def apply(self, module: Any) -> None:
        top = module.operation
        mesh = read_mesh(top)
        if mesh is None:
            return
        declared: dict[tuple[Step, ir.Type, ir.Type], str] = {}
        for func in shardable(top):
            for view in list(func.regions[0].blocks[0].operations):
                op = view.operation
                if op.name not in COLLECTIVES:
                    continue
                key = (read(op, mesh), op.operands[0].type, op.results[0].type)
                if key not in declared:
                    declared[key] = f"collective.{key[0].kind}.{len(declared)}"
                    _declare(top, declared[key], *key)
                with ir.InsertionPoint(op), op.location:
                    call = ir.Operation.create(
                        "func.call",
                        [key[2]],
                        [op.operands[0]],
                        {"callee": ir.FlatSymbolRefAttr.get(declared[key])},
                    )
                op.results[0].replace_all_uses_with(call.results[0])
                op.erase()


def _declare(module: ir.Operation, symbol: str, step: Step, operand: ir.Type, result: ir.Type) -> None:
    i64 = ir.IntegerType.get_signless(64)
    described = {
        "kind": ir.StringAttr.get(step.kind),
        "axes": ir.ArrayAttr.get([ir.StringAttr.get(axis) for axis in step.axes]),
        "dim": ir.IntegerAttr.get(i64, step.dim),
        "source": ir.IntegerAttr.get(i64, step.source),
        "combiner": ir.StringAttr.get(step.combiner),
    }
    ir.Operation.create(
        "func.func",
        attributes={
            "sym_name": ir.StringAttr.get(symbol),
            "sym_visibility": ir.StringAttr.get("private"),
            "function_type": ir.TypeAttr.get(ir.FunctionType.get([operand], [result])),
            "topo.collective": ir.DictAttr.get(described),
        },
        regions=1,
        ip=ir.InsertionPoint(module.regions[0].blocks[0]),
        loc=ir.Location.unknown(module.context),
    )
