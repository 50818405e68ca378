"""When a result counts as right: no further from the exact value than twice eager PyTorch's own error.

The exact value is the same computation in float64. Judging against eager's error, instead of a fixed tolerance, is strict
where the model is well conditioned and fair where it is not. Integers, booleans, shapes and dtypes must be equal, and NaN
and infinity must stand at the same places. Needs torch alone.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from topo_opt.errors import InputError

ERROR_RATIO = 2.0
"""Our error may be this many times eager's."""

FLOOR_ULP = 4.0
"""Error always allowed, in units in the last place of the output's largest magnitude (its root mean square, for the rms
error): eager may hit the exact value by luck."""


@dataclass(frozen=True)
class Verdict:
    """The comparison of one tensor. Errors are absolute, in the tensor's own unit."""

    name: str
    passed: bool
    reason: str
    max_error: float
    eager_max_error: float
    rms_error: float
    eager_rms_error: float
    allowed_max: float
    allowed_rms: float

    def __str__(self) -> str:
        state = "ok" if self.passed else f"WRONG ({self.reason})"
        return (
            f"{self.name}: {state}, max error {self.max_error:.3g} (eager {self.eager_max_error:.3g}, allowed "
            f"{self.allowed_max:.3g}), rms {self.rms_error:.3g} (eager {self.eager_rms_error:.3g}, allowed {self.allowed_rms:.3g})"
        )


def _refused(name: str, reason: str) -> Verdict:
    return Verdict(name, False, reason, *[float("nan")] * 6)


def _exact_verdict(name: str, ours: Tensor, eager: Tensor) -> Verdict:
    wrong = int((ours != eager).sum())
    return Verdict(
        name,
        wrong == 0,
        f"{wrong} of {ours.numel()} elements differ" if wrong else "",
        *[float(wrong > 0), 0.0] * 3,
    )


def _as_reals(tensor: Tensor) -> Tensor:
    """Doubles on the CPU; a complex number is two reals."""
    tensor = tensor.detach().cpu()
    return (
        torch.view_as_real(tensor.to(torch.complex128).resolve_conj())
        if tensor.is_complex()
        else tensor.double()
    )


def _special_mismatch(ours: Tensor, eager: Tensor) -> str:
    for what, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = int((test(ours) != test(eager)).sum())
        if wrong:
            return f"{what} at other places than eager: {wrong} of {ours.numel()} elements"
    return ""


def compare(ours: Tensor, eager: Tensor, exact: Tensor, name: str = "output") -> Verdict:
    """Judges one tensor.

    Args:
        ours: our result.
        eager: eager PyTorch's result, in the same dtype.
        exact: the result of the float64 computation; for integers only its shape matters.
    """
    if ours.shape != eager.shape or exact.shape != eager.shape:
        return _refused(
            name, f"shape {tuple(ours.shape)}, eager has {tuple(eager.shape)}, float64 {tuple(exact.shape)}"
        )
    if ours.dtype != eager.dtype:
        return _refused(name, f"dtype {ours.dtype}, eager has {eager.dtype}")
    if not (eager.is_floating_point() or eager.is_complex()):
        return _exact_verdict(name, ours.cpu(), eager.cpu())
    epsilon = torch.finfo(eager.dtype).eps
    ours, eager, exact = (_as_reals(t) for t in (ours, eager, exact))
    reason = _special_mismatch(ours, eager)
    if reason:
        return _refused(name, reason)
    finite = torch.isfinite(eager) & torch.isfinite(exact)
    if not bool(finite.any()):
        return Verdict(name, True, "", *[0.0] * 6)
    exact = exact[finite]
    our_error, eager_error = (ours[finite] - exact).abs(), (eager[finite] - exact).abs()
    max_error, eager_max = our_error.max().item(), eager_error.max().item()
    rms, eager_rms = our_error.square().mean().sqrt().item(), eager_error.square().mean().sqrt().item()
    floor = FLOOR_ULP * epsilon
    allowed_max = max(ERROR_RATIO * eager_max, floor * exact.abs().max().item())
    allowed_rms = max(ERROR_RATIO * eager_rms, floor * exact.square().mean().sqrt().item())
    passed = max_error <= allowed_max and rms <= allowed_rms
    reason = (
        ""
        if passed
        else f"{max(max_error / max(eager_max, 1e-300), rms / max(eager_rms, 1e-300)):.3g} times eager's error"
    )
    return Verdict(name, passed, reason, max_error, eager_max, rms, eager_rms, allowed_max, allowed_rms)


def compare_all(
    ours: Sequence[Tensor],
    eager: Sequence[Tensor],
    exact: Sequence[Tensor],
    names: Sequence[str] | None = None,
) -> list[Verdict]:
    """One verdict per tensor; a differing number of tensors is a failed verdict of its own."""
    if not len(ours) == len(eager) == len(exact):
        return [_refused("outputs", f"{len(ours)} tensors, eager has {len(eager)}, float64 {len(exact)}")]
    labels = names or [f"output {i}" for i in range(len(ours))]
    return [compare(o, e, x, n) for o, e, x, n in zip(ours, eager, exact, labels, strict=True)]


def widened(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every floating-point tensor in float64 (complex in complex128); others as they are."""
    return {name: to_float64(tensor) for name, tensor in tensors.items()}


def to_float64(tensor: Tensor) -> Tensor:
    """float64 or complex128 for a floating-point tensor, the tensor itself otherwise."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """Rows of `a` up to each offset times the matrix of their group; rows past the last offset are zero."""
    if offs is None or a.dim() != 2 or b.dim() != 3 or bias is not None:
        raise InputError("a grouped matmul other than rows times one matrix per group has no float64 form")
    result = a.new_zeros(a.shape[0], b.shape[2])
    start = 0
    for group, end in enumerate(offs.tolist()):
        result[start:end] = a[start:end] @ b[group]
        start = max(start, end)
    return result


_WITHOUT_FLOAT64 = {torch.ops.aten._grouped_mm.default: _grouped_mm}
"""Ops whose kernels refuse float64."""


class Float64Arithmetic(TorchDispatchMode):
    """Makes every op that asks for a narrower float compute in float64 instead, so that a model that casts inside
    (a norm in float32, a table in bfloat16) still has an exact value to be judged against.

    Inputs and weights must be widened too (`to_float64`).
    """

    _WIDE = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}
    _WIDE |= {torch.complex32: torch.complex128, torch.complex64: torch.complex128}

    def __enter__(self) -> "Float64Arithmetic":
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.set_default_dtype(self._default)
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(self._widen, (args, kwargs or {}))
        return _WITHOUT_FLOAT64.get(func, func)(*args, **kwargs)

    def _widen(self, value: Any) -> Any:
        return self._WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def float64_outputs(
    module: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """The module's outputs computed in float64 on widened copies of its weights and of the arguments."""
    wide_args, wide_kwargs = tree_map(
        lambda v: to_float64(v) if isinstance(v, Tensor) else v, (tuple(args), dict(kwargs or {}))
    )
    with torch.no_grad(), Float64Arithmetic():
        return copy.deepcopy(module).double()(*wide_args, **wide_kwargs)
