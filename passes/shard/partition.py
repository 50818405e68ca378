"""`topo-partition`: the program of one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from topo_opt.errors import InputError
from topo_opt.passes.base import Pass, PassFailure
from topo_opt.passes.shard.propagate_shardings import shardable
from topo_opt.sharding.annotate import lift, read_mesh
from topo_opt.sharding.partition import partition


@dataclass(frozen=True)
class Partition(Pass):
    """Rewrites annotated functions to local shapes and explicit collectives of the `shard` dialect.

    What is not annotated is computed whole on every device. Arguments and results that are split say so in `topo.sharding`. What depends
    on which device computes it reads `topo.kind = "coordinate"`, one more argument. The grid stays for the collectives to refer to; a
    module without a grid is left alone.

    `sums = narrow` forms a sum that its readers round to f16 or bf16 in that type, with half the bytes; `wide` in the type of its terms.
    """

    name = "topo-partition"
    sums: Literal["narrow", "wide"] = "narrow"

    def apply(self, module: Any) -> None:
        try:
            mesh = read_mesh(module.operation)
            if mesh is None:
                return
            for func in shardable(module.operation):
                graph, annotations = lift(func, mesh)
                partition(graph, annotations, mesh, narrow_sums=self.sums == "narrow")
            _drop_unused(module.operation)
        except InputError as error:
            location = getattr(error, "location", module.operation.location)
            raise PassFailure(error.message, hint=error.hint, location=location) from error


def _drop_unused(module: Any) -> None:
    """Removes declarations of ATen ops on whole tensors where all calls are on parts."""
    called = {
        view.operation.attributes["callee"].value
        for func in shardable(module)
        for view in func.regions[0].blocks[0].operations
        if view.operation.name == "func.call"
    }
    for view in list(module.regions[0].blocks[0].operations):
        op = view.operation
        if "topo.aten" in op.attributes and op.attributes["sym_name"].value not in called:
            op.erase()
