"""The check that every candidate passes before its time counts: the same bits at every run, and the right values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# Largest error relative to the largest value of a result; another order of summation is allowed, another result is not.
_TOLERANCE = {
    torch.bfloat16: 2**-6,
    torch.float16: 2**-8,
    torch.float32: 2e-4,
    torch.complex64: 2e-4,
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
}
_FLOAT8 = 2**-2
RUNS = 2

Run = Callable[[], Sequence[torch.Tensor]]
"""Puts the inputs back as they were, launches, and gives the results as tensors of their own."""


def outputs(run: Run, *, runs: int = RUNS) -> tuple[list[torch.Tensor], str]:
    """Results of a candidate, and "" or why it is rejected.

    Args:
        runs: how often it runs; a race that shows once is enough to reject.
    """
    first = list(run())
    for _ in range(runs - 1):
        for position, (a, b) in enumerate(zip(first, run(), strict=True)):
            if not same_bits(a, b):
                return first, f"result {position} differs between two runs on equal inputs: a race"
    return first, ""


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal as bytes, NaN and the sign of zero included."""
    return torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


def mismatch(ours: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str:
    """ "" when the results agree but for rounding, else what is wrong."""
    for position, (a, b) in enumerate(zip(ours, expected, strict=True)):
        if not (a.is_floating_point() or a.is_complex()):
            if not torch.equal(a, b):
                return f"result {position} is wrong: {int((a != b).sum())} of {a.numel()} integers differ"
            continue
        wide = (
            torch.complex128
            if a.is_complex()
            else torch.float64
            if a.dtype == torch.float64
            else torch.float32
        )
        x, y = a.to(wide), b.to(wide)
        finite = y.isfinite()
        if not torch.equal(finite, x.isfinite()):
            return f"result {position} is wrong: other elements are infinite or NaN"
        if not bool(finite.any()):
            continue
        x, y = x[finite], y[finite]
        error, largest = float((x - y).abs().max()), float(y.abs().max())
        allowed = _TOLERANCE.get(a.dtype, _FLOAT8) * max(largest, 1e-30)
        if error > allowed:
            return f"result {position} is wrong: off by {error:.3g} where values reach {largest:.3g}"
    return ""
