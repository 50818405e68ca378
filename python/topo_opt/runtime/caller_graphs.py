"""Graphs captured on tensors that a caller passes again and again, as a serving loop with buffers of its own does.

A replay reads whatever is at the captured addresses. That is right, and not freed memory, whenever the tensors of the *present* call
lie there with the captured shapes: the caller holds them now, and what the GPU does later on this stream comes before any other use
that the allocator makes of the memory after they are gone. So a graph keeps no tensor alive, and an address that has been given to
another tensor since is as good as the first one.

Capturing takes as long as many replays and pays only when addresses come back. Fresh tensors often get the addresses of the last
ones too, by chance; so what is waited for is the same tensor objects a second time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from topo_opt.runtime.addresses import readable

KEPT = 4
"""Graphs of one variant."""
MOST_CAPTURES = 16
"""Of one variant over its life: a caller whose tensors change all the time should not pay for graphs."""
_REMEMBERED = 8
"""Sets of tensors that were passed once."""

Replay = Callable[[], None]


class CallerGraphs:
    """The graphs of one variant. Not thread-safe, as the executors."""

    def __init__(
        self, places: Sequence[int], device: torch.device, capture: Callable[[Sequence[Any]], Replay | None]
    ):
        """Prepares for tensors at `places` among the leaves.

        Args:
            capture: a graph on these leaves; None when it can't be done, which is not tried again for this variant.
        """
        self.places, self.capture = list(places), capture
        self.place = device.index if device.type == "cuda" else -1
        self.kept: dict[tuple[int, ...], Replay] = {}
        self.latest: tuple[int, ...] = ()
        self.seen: dict[tuple[int, ...], list[weakref.ref[torch.Tensor]]] = {}
        self.left = MOST_CAPTURES

    def find(self, leaves: Sequence[Any]) -> Replay | None:
        """The graph on the memory of these leaves, captured when they come a second time; None when inputs must be copied."""
        key = tuple([leaves[i].data_ptr() for i in self.places])
        replay = self.kept.get(key)
        if replay is None:
            return self._again(key, leaves) if self.left else None
        for i in self.places:
            if not readable(leaves[i], self.place):
                return None
        if key != self.latest:
            self._use(key, replay)
        return replay

    def _use(self, key: tuple[int, ...], replay: Replay) -> None:
        """Makes a graph the one used last."""
        self.kept.pop(key, None)
        if len(self.kept) >= KEPT:
            del self.kept[next(iter(self.kept))]
        self.kept[key] = replay
        self.latest = key

    def _again(self, key: tuple[int, ...], leaves: Sequence[Any]) -> Replay | None:
        """Remembers tensors that come for the first time, captures on those that have come before."""
        tensors = [leaves[i] for i in self.places]
        if not all(readable(t, self.place) for t in tensors):
            return None
        before = self.seen.pop(key, None)
        if before is None or any(ref() is not t for ref, t in zip(before, tensors)):
            if len(self.seen) >= _REMEMBERED:
                del self.seen[next(iter(self.seen))]
            self.seen[key] = [weakref.ref(t) for t in tensors]
            return None
        replay = self.capture(leaves)
        self.left = self.left - 1 if replay is not None else 0
        if replay is not None:
            self._use(key, replay)
        return replay
