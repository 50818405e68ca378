"""What communication and computation cost on a machine: models, and a simulation to judge them by."""

from topo_opt.collectives.model import CollectiveModel
from topo_opt.collectives.result import CollectiveCost
from topo_opt.collectives.schedule import KINDS
from topo_opt.collectives.simulate import Simulated, simulate

__all__ = ["KINDS", "CollectiveCost", "CollectiveModel", "Simulated", "simulate"]
