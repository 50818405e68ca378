"""Functions for kernels that only store half precision: fewer instructions than libdevice's, exact below what is stored.

Those of bf16, behind products alone, take NVIDIA's instruction for tanh. GELU with them is off by 3.0e-5 at most between -8 and 8, as measured on an
H200: as much as half a unit in the last place of bf16 at 0.01, and more than that where GELU is smaller, between -6 and -3.

A generated file defines the ones that it names (`reductions.prelude`).
"""

from __future__ import annotations

# erf(x) = x * p(t) with t = 2 x^2 / c^2 - 1 on |x| <= c, beyond which erf is 1: minimax fit, largest error 2.4e-6 in f32.
_ERF_LIMIT = 3.25
_ERF = (
    0.4346407949924469, -0.2144598662853241, 0.15324343740940094, -0.11417578160762787, 0.08259016275405884,
    -0.056849155575037, 0.034432001411914825, -0.01680685020983219, 0.010106092318892479, -0.008044914342463017,
    0.0030156709253787994,
)  # fmt: skip
# tanh(x) / x in x^2 below |x| = 0.3, where 1 - 2 / (exp(2 x) + 1) loses digits: Taylor series, largest relative error 2e-7.
_TANH_LIMIT = 0.09
_TANH = (1.0, -0.3333333333333333, 0.13333333333333333, -0.05396825396825397, 0.021869488536155203)
_TWO_LOG2_E = 2.8853900817779268
# erf(x) = tanh(x * p(x^2)): minimax fit of GELU over such a polynomial, whose value is off by 2.5e-5 at most. Beyond the limit of x^2, where
# tanh is 1 already, the polynomial stays what it is there: it would change its sign.
_ERF_BF16_LIMIT = 25.0
_ERF_BF16 = (1.1278464, 0.104668, -0.0019884)
_TANH_INSTRUCTION = 'tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [{0}], dtype=tl.float32, is_pure=True, pack=1)'


def _polynomial(coefficients: tuple[float, ...], variable: str) -> list[str]:
    """Statements that leave the value of a polynomial in `p`."""
    lines = [f"p = {coefficients[-1]} * {variable} + ({coefficients[-2]})"]
    return lines + [f"p = p * {variable} + ({c})" for c in coefficients[-3::-1]]


FUNCTIONS = {
    "_erf": [
        f"x = tl.clamp(x, -{_ERF_LIMIT}, {_ERF_LIMIT}, propagate_nan=tl.PropagateNan.ALL)",
        f"t = x * x * {2 / _ERF_LIMIT**2} - 1.0",
        *_polynomial(_ERF, "t"),
        "return p * x",
    ],
    "_tanh": [
        "s = x * x",
        *_polynomial(_TANH, "s"),
        f"return tl.where(s < {_TANH_LIMIT}, p * x, 1.0 - 2.0 / (tl.exp2(x * {_TWO_LOG2_E}) + 1.0))",
    ],
    "_erf_bf16": [
        f"s = tl.minimum(x * x, {_ERF_BF16_LIMIT})",
        *_polynomial(_ERF_BF16, "s"),
        f"return {_TANH_INSTRUCTION.format('p * x')}",
    ],
    "_tanh_bf16": [f"return {_TANH_INSTRUCTION.format('x')}"],
}
"""Bodies of functions of `x`, f32, by name."""


def definition(name: str) -> str:
    """The function's source, with two empty lines after it."""
    return f"@triton.jit\ndef {name}(x):\n" + "".join(f"    {line}\n" for line in FUNCTIONS[name]) + "\n\n"
