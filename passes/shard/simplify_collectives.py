"""`topo-simplify-collectives`: fewer and smaller collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from topo_opt.passes.base import Pass
from topo_opt.passes.shard.propagate_shardings import shardable
from topo_opt.sharding.annotate import read_mesh
from topo_opt.sharding.collective_rewrites import hoist_gathers, merge_small, simplify
from topo_opt.sharding.partition import partition
from topo_opt.sharding.row_split import is_described, split_rows
from topo_opt.sharding.spec import Mesh
from topo_opt.structured.graph import read


@dataclass(frozen=True)
class SimplifyCollectives(Pass):
    """Rewrites the collectives of programs for one device.

    `all_slice(all_gather(x))`  -->  `x`, or `all_to_all(x)` along another dimension
    `all_slice(all_reduce(x))`  -->  `reduce_scatter(x)`
    `f(all_gather(x))`  -->  `all_gather(f(x))`, f of every element for itself and no larger
    `all_gather(%weight)`  -->  a weight that is loaded whole, of up to `hoist` bytes
    `all_reduce(a), all_reduce(b)`  -->  one of both side by side, each of up to `merge` bytes: what they cost is their latency
    `norm(all_reduce(x))`  -->  `all_gather(norm(reduce_scatter(x)))`, where that is faster on the machine `topology`, whose devices
    the grid must name; without one never
    """

    name = "topo-simplify-collectives"
    hoist: int = 16 << 20
    merge: int = 32 << 10
    topology: str | None = None

    def apply(self, module: Any) -> None:
        mesh = read_mesh(module.operation)
        if mesh is None:
            return
        with module.context:
            hoist_gathers(shardable(module.operation), mesh, self.hoist)
            self._simplify(module.operation, mesh)
            if self.topology is not None and _split_rows(module.operation, mesh, self.topology):
                self._simplify(module.operation, mesh)
            for func in shardable(module.operation):
                merge_small(func, mesh, self.merge)

    def _simplify(self, module: Any, mesh: Mesh) -> None:
        for func in shardable(module):
            simplify(func, mesh)


def _split_rows(module: Any, mesh: Mesh, topology: str) -> bool:
    """Whether any function now does rows in shares."""
    from topo_opt.collectives import CollectiveModel
    from topo_opt.topology import load

    model = CollectiveModel(load(topology))
    if not is_described(mesh, model):
        return False
    changed = False
    for func in shardable(module):
        graph = read(func)
        annotations = split_rows(graph, mesh, model)
        if annotations is not None:
            partition(graph, annotations, mesh)
            changed = True
    return changed
