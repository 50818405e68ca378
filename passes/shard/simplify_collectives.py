"""`topo-simplify-collectives`: fewer and smaller collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from topo_opt.passes.base import Pass
from topo_opt.passes.shard.propagate_shardings import shardable
from topo_opt.sharding.annotate import read_mesh
from topo_opt.sharding.collective_rewrites import hoist_gathers, merge_small, simplify


@dataclass(frozen=True)
class SimplifyCollectives(Pass):
    """Rewrites the collectives of programs for one device.

    `all_slice(all_gather(x))`  -->  `x`, or `all_to_all(x)` along another dimension
    `all_slice(all_reduce(x))`  -->  `reduce_scatter(x)`
    `f(all_gather(x))`  -->  `all_gather(f(x))`, f of every element for itself and no larger
    `all_gather(%weight)`  -->  a weight that is loaded whole, of up to `hoist` bytes
    `all_reduce(a), all_reduce(b)`  -->  one of both side by side, each of up to `merge` bytes: what they cost is their latency
    """

    name = "topo-simplify-collectives"
    hoist: int = 16 << 20
    merge: int = 32 << 10

    def apply(self, module: Any) -> None:
        mesh = read_mesh(module.operation)
        if mesh is None:
            return
        functions = shardable(module.operation)
        with module.context:
            hoist_gathers(functions, mesh, self.hoist)
            for func in functions:
                simplify(func, mesh)
                merge_small(func, mesh, self.merge)
