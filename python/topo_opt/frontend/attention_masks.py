"""The masks that stand between the scores and the softmax of attention that a model spells out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from topo_opt.frontend.graph_builder import Argument, GraphBuilder

aten = torch.ops.aten
Env = Mapping[fx.Node, Argument]

HIDDEN = -1e30
"""Added to a score in f32 this gives the same number for every score: rows without any key then have equal weights, as they
have where another finite number took the place of all scores."""


@dataclass(frozen=True)
class Mask:
    """A mask of scores of `shape`: added to them (`keeps` None), or boolean, saying where a score stays (True) or goes (False).

    `finite`: what takes the place of scores is a finite number, not minus infinity.
    """

    node: fx.Node
    keeps: bool | None
    shape: tuple[int, ...]
    finite: bool = False


def combined(b: GraphBuilder, env: Env, masks: Sequence[Mask], scores: tuple[int, ...]) -> fx.Node | None:
    """All masks of scores of a shape as one: boolean (true: attend) when all put minus infinity in place of scores, else added."""
    if not masks:
        return None
    added: list[fx.Node] = []
    keeps: dict[bool, fx.Node] = {}
    for mask in masks:
        value = env[mask.node]
        if tuple(mask.shape) != scores:
            value = b.emit(aten.expand.default, value, list(mask.shape))
            value = b.emit(aten.reshape.default, value, list(scores))
        if mask.keeps is None:
            added.append(value if value.meta["val"].dtype == torch.float32 else _cast(b, value))
            continue
        value = value if mask.keeps else b.emit(aten.logical_not.default, value)
        other = keeps.get(mask.finite)
        keeps[mask.finite] = value if other is None else b.emit(aten.logical_and.default, other, value)
    if True in keeps:
        added.append(_chosen_number(b, keeps[True], _number(b, 0.0, keeps[True]), HIDDEN))
    if not added:
        return keeps[False]
    total = added[0]
    for value in added[1:]:
        total = b.emit(aten.add.Tensor, total, value)
    return _chosen_number(b, keeps[False], total, float("-inf")) if False in keeps else total


def _chosen_number(b: GraphBuilder, keep: fx.Node, value: fx.Node, hidden: float) -> fx.Node:
    return b.emit(aten.where.self, keep, value, _number(b, hidden, value))


def _number(b: GraphBuilder, value: float, like: fx.Node) -> fx.Node:
    return b.emit(aten.full.default, [], value, dtype=torch.float32, device=like.meta["val"].device)


def _cast(b: GraphBuilder, value: fx.Node) -> fx.Node:
    return b.emit(aten._to_copy.default, value, dtype=torch.float32)
