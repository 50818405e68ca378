"""What a program computes once, from its weights, when it is loaded: weights in the order that a kernel wants.

Variants share what has the same name. The memory of a prepared buffer stays where it is, so that graphs and prepared launches
hold when its content is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LoadStep:
    """A kernel on its memory: the prepared buffers that it makes, and the weights among what it reads, by name."""

    makes: tuple[str, ...]
    reads: tuple[str, ...]
    run: Callable[[], None]


class LoadTime:
    """The load steps of all variants that have been bound. Weights that lie in the caller's memory are watched."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], shared: frozenset[str]):
        self._tensors, self._shared = tensors, shared
        """Weights by name, and the names of those that the caller may write into."""
        self._steps: list[LoadStep] = []
        self._made: set[str] = set()
        self._watched: dict[str, int] = {}

    def add(self, steps: Sequence[LoadStep]) -> bool:
        """Runs the steps whose results are not there yet, in order; whether there was any."""
        fresh = False
        for step in steps:
            if self._made.issuperset(step.makes):
                continue
            step.run()
            fresh = True
            self._steps.append(step)
            self._made.update(step.makes)
            for name in step.reads:
                # Torch does not count the changes of a tensor that was made in inference mode.
                if name in self._shared and not self._tensors[name].is_inference():
                    self._watched[name] = self._tensors[name]._version
        return fresh

    def is_stale(self) -> bool:
        """Whether a weight was changed in place, as torch counts it, since it was read."""
        tensors = self._tensors
        return any(tensors[name]._version != version for name, version in self._watched.items())

    def run_again(self) -> None:
        """Computes everything again."""
        for step in self._steps:
            step.run()
        self._watched = {name: self._tensors[name]._version for name in self._watched}
