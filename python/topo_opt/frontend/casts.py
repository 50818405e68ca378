"""Conversions between types as eager makes them.

torch-mlir has none from or to complex types, so these go by real and imaginary parts. Floats become small integers by way
of int32, as eager's conversion does; straight, values out of range have no meaning.
"""

import torch
from torch import fx

from topo_opt.frontend.graph_builder import GraphBuilder

aten = torch.ops.aten
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_SMALL = (torch.int8, torch.uint8, torch.int16)


def cast(b: GraphBuilder, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """`x` in another type, as `x.to(dtype)`."""
    source = x.meta["val"].dtype
    if source == dtype:
        return x
    if dtype in _PARTS:
        return _to_complex(b, x, _PARTS[dtype])
    if source in _PARTS:
        x = b.emit(aten.real.default, x)
        return cast(b, x, dtype)
    if source.is_floating_point and dtype in _SMALL:
        x = b.emit(aten._to_copy.default, x, dtype=torch.int32)
    return b.emit(aten._to_copy.default, x, dtype=dtype)


def _to_complex(b: GraphBuilder, x: fx.Node, part: torch.dtype) -> fx.Node:
    if x.meta["val"].dtype.is_complex:
        real, imaginary = (cast(b, b.emit(op, x), part) for op in (aten.real.default, aten.imag.default))
    else:
        real = cast(b, x, part)
        imaginary = b.emit(aten.full_like.default, real, 0.0)
    return b.emit(aten.complex.default, real, imaginary)
