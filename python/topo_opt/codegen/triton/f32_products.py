"""Products of f32 factors on tensor cores, which multiply bf16: every factor is the sum of three pieces of 8 bits each.

A piece is the upper half of what the pieces before it leave over. Cutting there instead of rounding takes a logical operation and a
subtraction; the second piece is rounded by one addition more, which leaves less for the third. Three pieces hold all 24 bits of a factor of 2^-110 or more; for the last bits of smaller ones bf16, which ends at
2^-133, has no place. Of the nine products of pieces the six largest are added up, the smallest first; what is left out is 2^-22 of a
product at most.

Tensor cores cut off what sums have no room for, so that a long chain of additions drifts: by 5.6e-6 of the largest sum at a depth of
4096, where cuBLAS in f32 is off by 2.6e-6. Sums of blocks of 32, added on general cores, are off by 4.7e-7. Triton's own way
(`input_precision="bf16x6"`) adds like that as well, but rounds pieces with conversions of which a core does 16 in a cycle: 4096 x 4096
x 4096 takes it 2.13 ms on an H200 (triton 3.6), and took this 1.72 before the second piece was rounded.

An infinite factor leaves NaN over, and has NaN as product with a piece that is zero. Its product with the other's first piece is what
the sum becomes anyway, so that sums of smaller products that are NaN count as a finite number. A NaN whose marks are all in the lower
half of its bits, which no arithmetic makes, counts as infinite.
"""

from __future__ import annotations

_PIECES, _PRODUCT = "_f32_pieces", "_f32_product"
_LOWEST = "-3.4028234663852886e38"
FUNCTIONS = {
    _PIECES: """(x):
    bits = x.to(tl.int32, bitcast=True)
    rest = x - (bits & -65536).to(tl.float32, bitcast=True)
    rest_bits = rest.to(tl.int32, bitcast=True) + 32768
    last_bits = (rest - (rest_bits & -65536).to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    first = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    second = (rest_bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return first, second, (last_bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
""",
    _PRODUCT: f"""(a, b):
    a0, a1, a2 = {_PIECES}(a)
    b0, b1, b2 = {_PIECES}(b)
    small = tl.dot(a1, b1)
    small = tl.dot(a2, b0, small)
    small = tl.dot(a0, b2, small)
    small = tl.dot(a1, b0, small)
    small = tl.dot(a0, b1, small)
    return tl.dot(a0, b0, tl.maximum(small, {_LOWEST}))
""",
}
"""Parameters and bodies of functions that a generated file defines where it names them (`reductions.prelude`)."""


def product(left: str, right: str, element: str, before: str = "") -> str:
    """Source of the product of two blocks of an element type, added to `before` if there is such."""
    if element == "f32":
        alone = f"{_PRODUCT}({left}, {right})"
        return f"{before} + {alone}" if before else alone
    return f"tl.dot({left}, {right}, {before})" if before else f"tl.dot({left}, {right})"


def prelude(source: str) -> str:
    """Definitions of the functions that a product in `source` needs."""
    if f"{_PRODUCT}(" not in source:
        return ""
    return "".join(f"@triton.jit\ndef {name}{body}\n\n" for name, body in FUNCTIONS.items())
