"""From one layout of a tensor to another: which collectives, over which axes, of how many bytes.

The steps take the tensor through ever smaller buffers first: cutting costs nothing, then sums are scattered, what is left
of sums is reduced, dimensions are exchanged, and gathers, which make buffers larger, come last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from topo_opt.sharding.solver import FORBIDDEN, Table
from topo_opt.sharding.strategies import Axes, Layout


class Step(NamedTuple):
    """One collective over `axes`. `share` is the inverse of the part of the whole tensor that its buffer holds.

    The buffer is, as in `CollectiveModel.cost`: of an all-gather the result, of the others the operand of one rank.
    """

    kind: str
    axes: Axes
    share: int


@lru_cache(maxsize=1 << 18)
def conversion(source: Layout, target: Layout, sizes: tuple[int, ...]) -> tuple[Step, ...] | None:
    """The steps from `source` to `target` on a mesh with axes of these sizes; None where there is no way.

    Terms that hold anything at foreign elements can only be read as such. What is whole can be read as such terms too, but
    nothing becomes a sum, or zero at foreign elements, that was not.
    """
    kept = set(target.pending)
    split = {a for axes in source.dims for a in axes}
    if set(source.loose) - set(target.loose) or set(target.partial) - set(source.partial + source.owned):
        return None
    if set(target.owned) - set(source.owned) or set(target.loose) & set((*source.partial, *split)):
        return None
    if target.partial and source.partial and source.combiner != target.combiner:
        return None
    return tuple(_Walk(source, target, sizes, kept).steps)


class _Walk:
    def __init__(self, source: Layout, target: Layout, sizes: tuple[int, ...], kept: set[int]):
        self.dims = [list(axes) for axes in source.dims]
        self.goal = [list(axes) for axes in target.dims]
        self.sizes, self.steps = sizes, list[Step]()
        self.sums = [a for a in source.pending if a not in kept]
        self.busy = set(source.pending)
        self._cut()
        self._scatter()
        if self.sums:
            self.steps.append(Step("all_reduce", tuple(sorted(self.sums)), self._parts()))
            self.busy -= set(self.sums)
        self._cut()
        self._exchange()
        self._gather()
        self._cut()

    def _parts(self) -> int:
        return math.prod(self.sizes[a] for axes in self.dims for a in axes)

    def _used(self) -> set[int]:
        return self.busy | {a for axes in self.dims for a in axes}

    def _cut(self) -> None:
        """Takes a part of what is whole: free."""
        moved = True
        while moved:
            moved = False
            for have, want in zip(self.dims, self.goal):
                if (
                    len(have) < len(want)
                    and want[: len(have)] == have
                    and want[len(have)] not in self._used()
                ):
                    have.append(want[len(have)])
                    moved = True

    def _scatter(self) -> None:
        """Sums of which every device wants a part."""
        moved = True
        while moved:
            moved = False
            for have, want in zip(self.dims, self.goal):
                run = list[int]()
                while (
                    want[: len(have)] == have
                    and len(have) + len(run) < len(want)
                    and want[len(have) + len(run)] in self.sums
                ):
                    run.append(want[len(have) + len(run)])
                if run:
                    self.steps.append(Step("reduce_scatter", tuple(run), self._parts()))
                    have.extend(run)
                    self.sums = [a for a in self.sums if a not in run]
                    self.busy -= set(run)
                    moved = True

    def _exchange(self) -> None:
        """The innermost axes of a dimension become those of another one."""
        moved = True
        while moved:
            moved = False
            for d, have in enumerate(self.dims):
                start = _common(have, self.goal[d])
                for e, other in enumerate(self.dims):
                    if e == d or moved:
                        continue
                    want = self.goal[e]
                    for first in range(start, len(have)):
                        run = have[first:]
                        if [*other, *run] == want[: len(other) + len(run)]:
                            self.steps.append(Step("all_to_all", tuple(run), self._parts()))
                            del have[first:]
                            other.extend(run)
                            moved = True
                            break

    def _gather(self) -> None:
        """What a dimension has and should not have."""
        for have, want in zip(self.dims, self.goal):
            same = _common(have, want)
            if same < len(have):
                gone = tuple(have[same:])
                del have[same:]
                self.steps.append(Step("all_gather", gone, self._parts()))


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


Price = Callable[[str, Axes, int], int]
"""Kind, axes, bytes of the buffer -> picoseconds."""
Cut = Callable[[int], int]
"""Bytes on a device -> picoseconds that a kernel takes longer when a tensor inside of it leaves it for a collective."""


class Conversions:
    """Tables of costs between lists of layouts. Steps are found once for a pair of lists, and priced once for every size of a tensor.

    Args:
        sizes: of the axes.
        price: what a collective costs.
        cut: what it costs besides where it stands inside of a kernel.
    """

    def __init__(self, sizes: Sequence[int], price: Price, cut: Cut = lambda nbytes: 0):
        self.sizes, self.price, self.cut = tuple(sizes), price, cut
        self._plans: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], tuple[list[Step], Table]] = {}
        self._priced: dict[tuple[str, Axes, int], int] = {}
        self._tables: dict[tuple[int, int, int, bool], Table] = {}
        self._lists: dict[tuple[Layout, ...], int] = {}
        self._numbers: dict[int, tuple[int, tuple[Layout, ...]]] = {}

    def step_cost(self, step: Step, nbytes: int) -> int:
        """Picoseconds of one step for a tensor of `nbytes` in all."""
        key = (step.kind, step.axes, -(-nbytes // step.share))
        known = self._priced.get(key)
        if known is None:
            known = self._priced[key] = min(self.price(*key), FORBIDDEN)
        return known

    def cost(self, source: Layout, target: Layout, nbytes: int, inside: bool = False) -> int:
        steps = conversion(source, target, self.sizes)
        if steps is None:
            return FORBIDDEN
        cut = self._cut(source, nbytes) if inside and steps else 0
        return cut + sum(self.step_cost(s, nbytes) for s in steps)

    def _cut(self, source: Layout, nbytes: int) -> int:
        return self.cut(-(-nbytes // source.parts(self.sizes)))

    def table(
        self, sources: tuple[Layout, ...], targets: tuple[Layout, ...], nbytes: int, inside: bool = False
    ) -> Table:
        """Costs from every source to every target. Equal arguments give the same object.

        Args:
            inside: the tensor stays inside of a kernel where nothing is to be done.
        """
        key = (self._number(sources), self._number(targets), nbytes, inside)
        known = self._tables.get(key)
        if known is None:
            steps, places = self._steps(sources, targets)
            prices = np.array([0, FORBIDDEN, *(self.step_cost(s, nbytes) for s in steps)], dtype=np.int64)
            costs = prices[places].sum(axis=-1)
            if inside:
                cuts = np.array([self._cut(x, nbytes) for x in sources], dtype=np.int64)
                costs += np.where(places.any(axis=-1), cuts[:, None], 0)
            known = self._tables[key] = np.minimum(costs, FORBIDDEN)
        return known

    def _number(self, layouts: tuple[Layout, ...]) -> int:
        """A number of the list. Hashing long lists takes time: an object that was seen is known by its address."""
        known = self._numbers.get(id(layouts))
        if known is None:
            number = self._lists.setdefault(layouts, len(self._lists))
            known = self._numbers[id(layouts)] = (number, layouts)
        return known[0]

    def _steps(self, sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> tuple[list[Step], Table]:
        known = self._plans.get((sources, targets))
        if known is not None:
            return known
        numbers: dict[Step, int] = {}
        found: list[list[list[int]]] = []
        longest = 1
        for source in sources:
            row = []
            for target in targets:
                steps = conversion(source, target, self.sizes)
                places = [1] if steps is None else [2 + numbers.setdefault(s, len(numbers)) for s in steps]
                longest = max(longest, len(places))
                row.append(places)
            found.append(row)
        places_table = np.zeros((len(sources), len(targets), longest), dtype=np.int64)
        for i, row in enumerate(found):
            for j, places in enumerate(row):
                places_table[i, j, : len(places)] = places
        known = self._plans[(sources, targets)] = (list(numbers), places_table)
        return known
