"""Operator names of a bundle -> callables, from a list of what may be called."""

import builtins
import math
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from topo_opt.aten_allowlist import PYTHON_FUNCTIONS, refusal
from topo_opt.errors import InputError, UntrustedError

_MODULES: dict[str, ModuleType] = {"operator": operator, "math": math, "torch": torch, "builtins": builtins}


# An export fixes views by the strides that its own device gave; another device's kernels may lay the same result out
# otherwise (scaled_dot_product_attention on CUDA does). Programs are functional, so a copy is as good as a view.
_ANY_LAYOUT = {
    "aten.view.default": "aten.reshape.default",
    "aten._unsafe_view.default": "aten.reshape.default",
}


def resolve(op: str, *, extra_namespaces: frozenset[str] = frozenset()) -> Callable[..., Any]:
    """The callable that the name `op` stands for.

    Args:
        extra_namespaces: `torch.ops` namespaces the caller trusts beyond those on the list (a user's custom operators).

    Raises:
        UntrustedError: the name is not on the list.
        InputError: the operator is allowed but not registered in this process.
    """
    if not isinstance(op, str):
        raise InputError(f"an operator name must be a string, not {op!r:.80}")
    reason = refusal(op, extra_namespaces)
    if reason is not None:
        raise UntrustedError(
            f"the operator {op!r:.120} {reason}", hint="only run bundles of models you trust"
        )
    op = _ANY_LAYOUT.get(op, op)
    parts = op.split(".")
    owner: Any = _MODULES[parts[0]] if op in PYTHON_FUNCTIONS else torch.ops
    try:
        for part in parts[1:] if op in PYTHON_FUNCTIONS else parts:
            owner = getattr(owner, part)
    except (AttributeError, RuntimeError):
        if op in _SUBSTITUTES:
            return _SUBSTITUTES[op]
        hint = f"import the package that registers it, or use another torch than {torch.__version__}"
        raise InputError(f"the operator {op} is not registered in this process", hint=hint) from None
    if op not in PYTHON_FUNCTIONS and not isinstance(
        owner, torch._ops.OpOverload | torch._ops.HigherOrderOperator
    ):
        raise UntrustedError(f"{op!r:.120} is not an operator")
    return owner


def _grouped_mm(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows of `x` (SxK), grouped by end offsets (E), times their group's `weight` (ExKxN): SxN, 0 past the last group."""
    result = x.new_zeros(x.size(0), weight.size(2))
    start = 0
    for group, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[group], out=result[start:end])
            start = end
    return result


# Operators of the exporting library that a serving process need not have installed.
_SUBSTITUTES: dict[str, Callable[..., Any]] = {"transformers.grouped_mm_fallback.default": _grouped_mm}
