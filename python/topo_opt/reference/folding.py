"""Evaluating the reductions that `reductions` recognises, on space views.

Every function gives a space view whose reduced loops have size 1.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from topo_opt.reference.reductions import Extremum


def fold(
    combine: Callable[[Tensor, Tensor], Tensor], value: Tensor, dims: Sequence[int], counts: Sequence[int]
) -> Tensor:
    """Folds a space view over `dims`, each of which has `counts[d]` >= 1 iterations; the dims keep size 1."""
    if combine is torch.add:
        repeats = 1
        varying = []
        for d in dims:
            if value.shape[d] == 1:
                repeats *= counts[d]
            else:
                varying.append(d)
        total = value.sum(varying, keepdim=True, dtype=value.dtype) if varying else value
        return total * repeats if repeats != 1 else total
    if combine in (torch.maximum, torch.minimum, torch.fmax, torch.fmin, torch.bitwise_and, torch.bitwise_or):
        dims = [d for d in dims if value.shape[d] != 1]  # idempotent: a repeated value changes nothing
        if combine is torch.maximum and dims:
            return value.amax(dims, keepdim=True)
        if combine is torch.minimum and dims:
            return value.amin(dims, keepdim=True)
    for d in dims:
        value = _halve(
            combine, value.expand([counts[d] if i == d else n for i, n in enumerate(value.shape)]), d
        )
    return value


def _halve(combine: Callable[[Tensor, Tensor], Tensor], value: Tensor, dim: int) -> Tensor:
    while value.shape[dim] > 1:
        half, odd = divmod(value.shape[dim], 2)
        folded = combine(value.narrow(dim, 0, half), value.narrow(dim, half, half))
        value = torch.cat([folded, value.narrow(dim, 2 * half, 1)], dim) if odd else folded
    return value


def contract(lhs: Tensor, rhs: Tensor, dims: Sequence[int], counts: Sequence[int]) -> Tensor:
    """`sum over dims of lhs * rhs` of two space views, the product never formed; the dims keep size 1."""
    rank = len(counts)
    reduced = set(dims)
    letters = [[d for d in range(rank) if x.shape[d] != 1] for x in (lhs, rhs)]
    kept = [d for d in range(rank) if d not in reduced and (d in letters[0] or d in letters[1])]
    repeats = 1
    for d in reduced:
        if d not in letters[0] and d not in letters[1]:
            repeats *= counts[d]
    squeezed = [
        x.squeeze([d for d in range(rank) if d not in present]) if len(present) < rank else x
        for x, present in zip((lhs, rhs), letters, strict=True)
    ]
    total = torch.einsum(squeezed[0], letters[0], squeezed[1], letters[1], kept)
    shaped = total.reshape([max(lhs.shape[d], rhs.shape[d]) if d in kept else 1 for d in range(rank)])
    return shaped * repeats if repeats != 1 else shaped


def extremum(
    rule: Extremum,
    value: Tensor,
    payload: Tensor | None,
    best: Tensor,
    chosen: Tensor,
    dims: Sequence[int],
    counts: Sequence[int],
) -> Tensor:
    """The final accumulator of one result of a running extremum; `chosen` is its initial value, `best` the extremum's."""
    full = [counts[d] if d in dims else max(1, value.shape[d]) for d in range(len(counts))]
    flat = _reduction_last(value.expand(full), dims)
    sign = 1 if rule.largest else -1
    ordered = flat if rule.largest or not flat.dtype.is_floating_point else flat * sign
    peak = ordered.amax(-1) if rule.largest or flat.dtype.is_floating_point else flat.amin(-1)
    reached = ordered == peak.unsqueeze(-1)
    if rule.strict:
        position = reached.to(torch.uint8).argmax(-1)
    else:
        position = flat.shape[-1] - 1 - reached.to(torch.uint8).flip(-1).argmax(-1)
    top = flat.gather(-1, position.unsqueeze(-1)).squeeze(-1)
    top = _spread(top, dims, len(counts))
    position = _spread(position, dims, len(counts))
    if rule.strict:
        wins = top > best if rule.largest else top < best
    else:
        wins = top >= best if rule.largest else top <= best
    if payload is None:
        return torch.where(wins, top, best)
    shape = [counts[d] if d in dims else max(value.shape[d], payload.shape[d]) for d in range(len(counts))]
    flat_payload = _reduction_last(payload.expand(shape), dims)
    index = _reduction_last(position.expand([1 if d in dims else shape[d] for d in range(len(counts))]), dims)
    picked = _spread(flat_payload.gather(-1, index).squeeze(-1), dims, len(counts))
    return torch.where(wins, picked, chosen)


def _reduction_last(view: Tensor, dims: Sequence[int]) -> Tensor:
    kept = [d for d in range(view.dim()) if d not in dims]
    return view.permute([*kept, *dims]).flatten(len(kept))


def _spread(packed: Tensor, dims: Sequence[int], rank: int) -> Tensor:
    for d in sorted(dims):
        packed = packed.unsqueeze(d)
    assert packed.dim() == rank
    return packed
