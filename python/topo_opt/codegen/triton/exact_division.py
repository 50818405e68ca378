"""Divisions that a product gives exactly."""

from __future__ import annotations

import math

from torch_mlir import ir


def exact_reciprocal(divisor: ir.Value) -> float | None:
    """The reciprocal of a constant power of two, a normal f32: a product with it rounds as the division does. Else None."""
    if isinstance(divisor.owner, ir.Block) or divisor.owner.operation.name != "arith.constant":
        return None
    value = float(divisor.owner.operation.attributes["value"].value)
    mantissa, exponent = math.frexp(value)
    return 1.0 / value if abs(mantissa) == 0.5 and -125 <= exponent <= 126 else None
