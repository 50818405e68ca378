"""The short way of a call whose kind of arguments is known: check, copy in, replay, results.

Everything that depends on the variant alone is prepared once. Inputs are copied into the static memory with one call for all
of a dtype; what is left per call is a comparison for each argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from topo_opt.runtime.caller_graphs import CallerGraphs
from topo_opt.runtime.dtypes import torch_dtype
from topo_opt.runtime.plan import Variant
from topo_opt.runtime.pytree import argument_names
from topo_opt.runtime.steps import retyped

_CONTIGUOUS = torch.contiguous_format


class ArgumentOrder:
    """Where the leaves of a function are among its arguments, when every argument is one leaf."""

    def __init__(self, names: Sequence[str]):
        self.count = len(names)
        self.position = {name: i for i, name in enumerate(names)}
        self.simple = len(self.position) == self.count

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any] | None:
        """The leaves of a call; None when they have to be looked for, or are not what the function takes."""
        if not kwargs:
            return args if len(args) == self.count else None
        if len(args) + len(kwargs) != self.count or not self.simple:
            return None
        found = [*args, *([None] * len(kwargs))]
        for name, value in kwargs.items():
            at = self.position.get(name, -1)
            if at < len(args):
                return None
            found[at] = value
        return found

    @classmethod
    def of(cls, tree: Any, names: Sequence[str]) -> ArgumentOrder | None:
        """For a function with the argument tree `tree` and one name a leaf; None when an argument is not a leaf."""
        if tree is None:
            return cls(names)
        positional, named = tree["children"]
        children = (*positional["children"], *named["children"])
        return cls(argument_names(tree, names)) if all(c["type"] == "leaf" for c in children) else None


class KnownCall:
    """A function whose arguments are of a known kind. Call `accepts` first; not thread-safe, as the executors."""

    def __init__(self, variant: Variant, device: torch.device):
        self.variant, self.device = variant, device
        self.literals = [(i, s.value) for i, s in enumerate(variant.inputs) if s.kind == "literal"]
        self.specs = [
            (i, torch_dtype(str(s.dtype)), torch.Size(s.shape or ()))
            for i, s in enumerate(variant.inputs)
            if s.kind == "tensor"
        ]
        self.count = len(variant.inputs)
        # A number is compared faster than a device; tensors on the CPU have -1, those on "meta" have it too.
        self.place = device.index if device.type == "cuda" else -1

    def accepts(self, leaves: Sequence[Any]) -> bool:
        """Whether these leaves are of exactly the types and sizes that the variant is for, and where it runs."""
        if len(leaves) != self.count:
            return False
        place, tensor = self.place, torch.Tensor
        for i, dtype, shape in self.specs:
            leaf = leaves[i]
            # A subclass may mean anything by a copy.
            if type(leaf) is not tensor or leaf.dtype is not dtype or leaf.shape != shape:
                return False
            if leaf.get_device() != place or leaf.is_meta:
                return False
        for i, value in self.literals:
            if type(leaves[i]) is not type(value) or leaves[i] != value:
                return False
        return True

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Results of one call."""
        if not torch.is_grad_enabled():
            return self._run(leaves)
        # What torch.no_grad() does, without making an object.
        torch._C._set_grad_enabled(False)
        try:
            return self._run(leaves)
        finally:
            torch._C._set_grad_enabled(True)

    def _run(self, leaves: Sequence[Any]) -> list[Any]:
        raise NotImplementedError


class DirectCall(KnownCall):
    """Launches on the caller's tensors."""

    def __init__(self, variant: Variant, device: torch.device, run: Callable[[Sequence[Any]], list[Any]]):
        """Prepares the call. `run` gives the results of one."""
        super().__init__(variant, device)
        self.run = run

    def _run(self, leaves: Sequence[Any]) -> list[Any]:
        return self.run(leaves)


class RepeatedCall(KnownCall):
    """One variant that has run before, on static memory."""

    def __init__(
        self,
        variant: Variant,
        tensors: Sequence[torch.Tensor],
        device: torch.device,
        replay: Callable[[], None],
        *,
        enter: Callable[[], None] | None = None,
        leave: Callable[[], None] | None = None,
        own_results: bool = True,
        callers: CallerGraphs | None = None,
    ):
        """Prepares the call.

        Args:
            tensors: the memory of every buffer of the variant.
            replay: runs the variant on it.
            enter: what comes before the first copy; `leave`: what comes after the last one.
            own_results: results are copies; else they are the static memory, which the next call overwrites.
            callers: graphs on tensors that the caller passes again and again: they spare the copies of inputs.
        """
        super().__init__(variant, device)
        self.replay, self.callers = replay, callers
        self.enter, self.leave, self.own_results = enter, leave, own_results
        inputs = [(i, tensors[s.buffer]) for i, s in enumerate(variant.inputs) if s.buffer is not None]
        groups: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
        for i, tensor in inputs:
            groups.setdefault(tensor.dtype, []).append((i, tensor))
        self.single = [g[0] for g in groups.values() if len(g) == 1]
        self.batched = [([i for i, _ in g], [t for _, t in g]) for g in groups.values() if len(g) > 1]
        self._prepare_results(tensors)

    def _prepare_results(self, tensors: Sequence[torch.Tensor]) -> None:
        made: dict[tuple[int, str | None], int] = {}
        self.sources: list[torch.Tensor] = []
        self.outputs: list[tuple[int, Any]] = []
        """(place in `sources`, None), or (-1, literal)."""
        for out in self.variant.outputs:
            if out.kind == "literal" or out.buffer is None:
                self.outputs.append((-1, out.value))
                continue
            key = (out.buffer, out.dtype)
            if key not in made:
                made[key] = len(self.sources)
                value = tensors[out.buffer]
                self.sources.append(value if out.dtype is None else retyped(value, torch_dtype(out.dtype)))
            self.outputs.append((made[key], None))
        self.in_order = [at for at, _ in self.outputs] == list(range(len(self.outputs)))

    def _run(self, leaves: Sequence[Any]) -> list[Any]:
        if self.enter is not None:
            self.enter()
        replay = None if self.callers is None else self.callers.find(leaves)
        if replay is None:
            for i, target in self.single:
                target.copy_(leaves[i])
            for places, targets in self.batched:
                torch._foreach_copy_(targets, [leaves[i] for i in places])
            replay = self.replay
        replay()
        results = self.sources
        if self.own_results:
            # Contiguous as the static memory is, which a view need not be.
            results = [s.clone(memory_format=_CONTIGUOUS) for s in results]
        if self.leave is not None:
            self.leave()
        if self.in_order:
            return list(results)
        return [value if at < 0 else results[at] for at, value in self.outputs]
