"""How a model is split over the devices of a machine: meshes, shardings, and what every operation allows."""

from topo_opt.sharding.rule import Factor, Rule
from topo_opt.sharding.spec import Mesh, Sharding, ShardingPlan

__all__ = ["Factor", "Mesh", "Rule", "Sharding", "ShardingPlan"]
