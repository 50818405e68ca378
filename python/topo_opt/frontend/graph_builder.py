"""Builds FX graphs whose nodes carry fake tensors of static shape, one op at a time."""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

# An argument of an op: a node, a number, a dtype ..., or a list of such.
Argument = Any

# Where a node came from: the node of the normalized graph it stands for.
SOURCE = "topo_source"


class GraphBuilder:
    """Emits ops into `graph`; each new node gets `meta["val"]` by running the op on fake tensors.

    Args:
        mode: the fake mode that every value of this program belongs to. It has no symbols, so that an op whose result size
            depends on data raises torch's DynamicOutputShapeException or DataDependentOutputException.
    """

    def __init__(self, mode: FakeTensorMode):
        self.graph = fx.Graph()
        self.mode = mode
        self._meta: dict[str, Any] = {}

    @contextmanager
    def at(self, node: fx.Node) -> Iterator[None]:
        """While open, emitted nodes are attributed to `node` and its source line."""
        before = self._meta
        self._meta = {SOURCE: node.meta.get(SOURCE, node.name), "stack_trace": node.meta.get("stack_trace")}
        try:
            yield
        finally:
            self._meta = before

    def placeholder(self, name: str, value: torch.Tensor) -> fx.Node:
        """A graph input whose fake value is `value`."""
        node = self.graph.placeholder(name)
        node.meta.update(val=value)
        return node

    def emit(self, target: Callable[..., Any], *args: Argument, **kwargs: Argument) -> Argument:
        """The result of `target`: a node, a number when it computes one, or a list of both when it has several results."""
        with self.mode:
            value = target(*map(value_of, args), **{k: value_of(v) for k, v in kwargs.items()})
        return self.call(target, args, kwargs, value)

    def call(self, target: Any, args: Any, kwargs: Any, value: Any, name: str | None = None) -> Argument:
        """As `emit`, for a result whose fake value is already known."""
        if not _has_tensor(value):
            return value
        node = self.graph.create_node("call_function", target, tuple(args), dict(kwargs), name)
        node.meta.update(self._meta, val=value)
        if isinstance(value, torch.Tensor):
            return node
        return [self._item(node, i, v) for i, v in enumerate(value)]

    def _item(self, node: fx.Node, index: int, value: Any) -> Argument:
        if not isinstance(value, torch.Tensor):
            return value
        item = self.graph.call_function(operator.getitem, (node, index))
        item.meta.update(self._meta, val=value)
        return item


def value_of(argument: Argument) -> Any:
    """An argument with its nodes replaced by their fake values."""
    return fx.map_arg(argument, lambda node: node.meta["val"])


def _has_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)
