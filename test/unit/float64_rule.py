"""The numeric rule as an assertion for tests."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from topo_opt.runtime.numerics import compare_all, float64_outputs


def tensors(value: Any) -> list[Tensor]:
    """The tensors in nested outputs or arguments, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def check(ours: Any, eager: Any, exact: Any, names: Sequence[str] | None = None) -> None:
    """Fails with every verdict that is wrong; see `topo_opt.runtime.numerics`."""
    verdicts = compare_all(tensors(ours), tensors(eager), tensors(exact), names)
    wrong = [str(v) for v in verdicts if not v.passed]
    assert not wrong, f"{len(wrong)} of {len(verdicts)} outputs are wrong:\n" + "\n".join(wrong)


def check_against_module(
    ours: Any, module: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> None:
    """As `check`, with eager and the exact values computed from the module; state the module mutates changes."""
    exact = float64_outputs(module, args, kwargs)
    with torch.no_grad():
        eager = module(*args, **(kwargs or {}))
    check(ours, eager, exact)
