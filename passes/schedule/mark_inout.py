"""`topo-mark-inout`: says which kernel results are rewritten arguments."""

from __future__ import annotations

from dataclasses import dataclass

from torch_mlir import ir

from topo_opt.passes.base import Pass
from topo_opt.passes.schedule.roles import memory_operands
from topo_opt.structured.graph import read


@dataclass(frozen=True)
class MarkInout(Pass):
    """Sets `topo.inout` on kernels that end in an update, whose result is their destination argument: those of family
    `update`, and products that store into a cache.

    `@k_update_01(%cache, %new, %at) {topo.kernel = {family = "update"}}`  -->  `{..., topo.inout = [[0, 0]]}`

    The plan then passes one buffer for both and copies the destination first where its old value is still needed.
    """

    name = "topo-mark-inout"

    def apply(self, module) -> None:
        for view in module.operation.regions[0].blocks[0].operations:
            op = view.operation
            if "topo.kernel" in op.attributes and (pairs := _rewritten(op)):
                op.attributes["topo.inout"] = ir.ArrayAttr.get([ir.DenseI64ArrayAttr.get(p) for p in pairs])


def _rewritten(function: ir.Operation) -> list[list[int]]:
    """Pairs (result, argument) of one buffer."""
    graph = read(function)
    pairs: list[list[int]] = []
    for position, value in enumerate(graph.returns):
        producer = graph.producer(value)
        destinations = (
            memory_operands(producer) if producer is not None and producer.name != "func.call" else []
        )
        pairs.extend([position, graph.arguments.index(d)] for d in destinations)
    return pairs
