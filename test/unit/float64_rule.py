"""The numeric rule as an assertion for tests."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from topo_opt.runtime.numerics import compare_all


def tensors(value: Any) -> list[Tensor]:
    """The tensors in nested outputs or arguments, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def check(ours: Any, eager: Any, exact: Any, names: Sequence[str] | None = None) -> None:
    """Fails with every verdict that is wrong; see `topo_opt.runtime.numerics`."""
    verdicts = compare_all(tensors(ours), tensors(eager), tensors(exact), names)
    wrong = [str(v) for v in verdicts if not v.passed]
    assert not wrong, f"{len(wrong)} of {len(verdicts)} outputs are wrong:\n" + "\n".join(wrong)
