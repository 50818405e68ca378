"""The `topo` dialect: what linalg has no words for. One op a file under `ops`."""

from topo_opt.dialects.topo.dialect import Topo
from topo_opt.dialects.topo.ops.attention import AttentionOp
from topo_opt.dialects.topo.ops.demote import DemoteOp
from topo_opt.dialects.topo.ops.index_update import IndexUpdateOp
from topo_opt.dialects.topo.ops.rotate_half import RotateHalfOp

__all__ = ["AttentionOp", "DemoteOp", "IndexUpdateOp", "RotateHalfOp", "Topo"]
