"""Parts of tensors with padding: what a rank is given has zeros at its end, what it gives back is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from topo_opt.runtime.plan import Variant

if TYPE_CHECKING:
    from topo_opt.runtime.ranks import Ranks


def padded(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The tensor at the beginning of a larger one of zeros; itself where it has this shape."""
    if tuple(tensor.shape) == tuple(shape):
        return tensor
    found = tensor.new_zeros(tuple(shape))
    found[tuple(slice(size) for size in tensor.shape)] = tensor
    return found


def cut(tensor: torch.Tensor, box: Sequence[tuple[int, int]]) -> torch.Tensor:
    """What of a padded part belongs to the whole tensor, of which `box` is (first, count) along every dimension; a view."""
    for dim, (_, count) in enumerate(box):
        tensor = tensor.narrow(dim, 0, count)
    return tensor


def given_parts(ranks: Ranks | None, variant: Variant, leaves: list[Any]) -> list[Any]:
    """What this rank takes of the caller's tensors."""
    if ranks is None:
        return leaves
    return [
        value if leaf.sharding is None else padded(ranks.cut(value, leaf.sharding), leaf.shape or ())
        for leaf, value in zip(variant.inputs, leaves, strict=True)
    ]


def returned_parts(ranks: Ranks | None, variant: Variant, results: list[Any]) -> list[Any]:
    """What this rank returns of results that every rank returns a part of: without padding."""
    if ranks is None:
        return results
    return [
        value
        if leaf.whole is None or leaf.sharding is None
        else cut(value, ranks.part(leaf.sharding, leaf.whole))
        for leaf, value in zip(variant.outputs, results, strict=True)
    ]
