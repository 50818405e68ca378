"""ATen ops written with other ATen ops, where torch-mlir's own lowering is missing or gives another value than eager.

A rule takes a builder and the arguments of the op, promoted and widened already (`precision`), and gives the result as a node
(a list of nodes for several results), or None where the op is right as it is.
"""

from collections.abc import Callable
from typing import Any

import torch

from topo_opt.frontend.index_updates import index_add, scatter
from topo_opt.frontend.rewrites_complex import COMPLEX
from topo_opt.frontend.rewrites_division import DIVISION
from topo_opt.frontend.rewrites_extrema import EXTREMA
from topo_opt.frontend.rewrites_normalization import NORMALIZATION
from topo_opt.frontend.rewrites_pointwise import POINTWISE
from topo_opt.frontend.rewrites_pooling import POOLING
from topo_opt.frontend.rewrites_search import SEARCH
from topo_opt.frontend.strided_views import as_strided

# Op -> rule.
REWRITES: dict[Any, Callable[..., Any]] = {
    **POINTWISE,
    **COMPLEX,
    **DIVISION,
    **EXTREMA,
    **NORMALIZATION,
    **POOLING,
    **SEARCH,
    torch.ops.aten.as_strided.default: as_strided,
    torch.ops.aten.index_add.default: index_add,
    torch.ops.aten.index_put.default: scatter,
    torch.ops.aten._unsafe_index_put.default: scatter,
}
