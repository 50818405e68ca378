"""The `topo` dialect: what linalg has no words for. One op a file under `ops`."""

from topo_opt.dialects.topo.dialect import Topo
from topo_opt.dialects.topo.ops.attention import AttentionOp
from topo_opt.dialects.topo.ops.demote import DemoteOp
from topo_opt.dialects.topo.ops.group_rows import GroupRowsOp
from topo_opt.dialects.topo.ops.grouped_product import GroupedProductOp
from topo_opt.dialects.topo.ops.index_update import IndexUpdateOp
from topo_opt.dialects.topo.ops.rotate_half import RotateHalfOp
from topo_opt.dialects.topo.ops.top_k import TopKOp

__all__ = [
    "AttentionOp",
    "DemoteOp",
    "GroupRowsOp",
    "GroupedProductOp",
    "IndexUpdateOp",
    "RotateHalfOp",
    "TopKOp",
    "Topo",
]
