"""Custom ops that carry what ATen has no op for through the FX importer, which makes each a `torch.operator "torch.topo.*"`.

They are only ever names in a graph: nothing runs them, so they have no implementation. `topo-raise-named-ops` turns them into
ops of the structured IR.
"""

from functools import cache

import torch
from torch._ops import OpOverload

_LIBRARY = torch.library.Library("topo", "FRAGMENT")
_LIBRARY.define("demote(Tensor x, ScalarType dtype) -> Tensor")
_LIBRARY.define("contract(Tensor a, Tensor b, str equation, ScalarType dtype) -> Tensor")
_LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, float softcap) -> Tensor"
)
_LIBRARY.define("index_update(Tensor dest, Tensor source, Tensor index, int dim) -> Tensor")
_LIBRARY.define("top_k(Tensor x, int k, bool largest) -> (Tensor, Tensor)")
_LIBRARY.define("grouped_product(Tensor x, Tensor weights, Tensor group) -> Tensor")

DEMOTE: OpOverload = torch.ops.topo.demote.default
CONTRACT: OpOverload = torch.ops.topo.contract.default
ATTENTION: OpOverload = torch.ops.topo.attention.default
INDEX_UPDATE: OpOverload = torch.ops.topo.index_update.default
TOP_K: OpOverload = torch.ops.topo.top_k.default
GROUPED_PRODUCT: OpOverload = torch.ops.topo.grouped_product.default


@cache
def aten_call(operands: int, results: int) -> OpOverload:
    """The op for a call left to ATen with so many tensors in and out: `(op, template, reason, dtypes, *tensors)`.

    `dtypes` names those of the tensors in and then out, with a space between.

    The FX importer wants a schema of fixed arity, so there is one op per arity.
    """
    name = f"aten_{operands}_{results}"
    tensors = "".join(f", Tensor a{i}" for i in range(operands))
    returns = ", ".join(["Tensor"] * results)
    _LIBRARY.define(f"{name}(str op, str template, str reason, str dtypes{tensors}) -> ({returns})")
    return getattr(torch.ops.topo, name).default
