"""Types of the torch dialect as builtin types; the bindings have no class for `!torch.vtensor`."""

import re

from torch_mlir import ir

_VTENSOR = re.compile(r"!torch\.vtensor<\[([\d,]*)\],(.+)>")
_SIGNED = re.compile(r"^[su]i(?=\d)")


def builtin_tensor(kind: ir.Type) -> ir.RankedTensorType:
    """`!torch.vtensor<[2,3],si64>` -> `tensor<2x3xi64>`; builtin integers have no sign.

    Raises:
        ValueError: not a tensor of static shape.
    """
    match = _VTENSOR.fullmatch(str(kind))
    if match is None:
        raise ValueError(f"{kind} is not a tensor of static shape")
    shape = [int(size) for size in match[1].split(",") if size]
    return ir.RankedTensorType.get(shape, ir.Type.parse(_SIGNED.sub("i", match[2]), kind.context))
