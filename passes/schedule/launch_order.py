"""Which kernels of a plan function may run side by side: dependences, and the levels at which a kernel can run.

Besides the values that one kernel makes and another reads, a kernel that rewrites a buffer comes after the readers of the old
content, as the plan will order them (`codegen.plan_inplace`). Kernels on the same level have no path between them, so putting
them together never makes a cycle.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from topo_opt.codegen.plan_graph import PlanGraph


@dataclass(frozen=True)
class LaunchOrder:
    """Dependences between the nodes of a plan graph, all lists by node number."""

    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    late: tuple[int, ...]
    """The last level at which a node may run, when the longest path is not made longer."""
    reads: tuple[frozenset[int], ...]
    """Root values that it is given."""
    writes: tuple[frozenset[int], ...]
    """Root values whose memory gets other content: rewritten arguments, and targets of the new values it makes."""

    def conflict(self, a: int, b: int) -> bool:
        """Whether one writes memory that the other one is given."""
        return bool(self.writes[a] & (self.reads[b] | self.writes[b]) or self.writes[b] & self.reads[a])


def launch_order(graph: PlanGraph) -> LaunchOrder:
    """The dependences of a plan function."""
    count = len(graph.nodes)
    root = [v.root for v in graph.values]
    reads = [frozenset(root[v] for v in n.inputs) for n in graph.nodes]
    maker = {root[v]: i for i, n in enumerate(graph.nodes) for v in n.outputs}
    readers: dict[int, list[int]] = defaultdict(list)
    for i, roots in enumerate(reads):
        for r in roots:
            readers[r].append(i)
    after: list[set[int]] = [set() for _ in range(count)]
    for i, roots in enumerate(reads):
        for r in roots:
            if r in maker:
                after[maker[r]].add(i)
    writes = _writes(graph, maker)
    for i in range(count):
        for r in sorted(writes[i]):
            for reader in readers[r]:
                if reader != i and not _reaches(after, i, reader):
                    after[reader].add(i)
    before: list[list[int]] = [[] for _ in range(count)]
    for i, followers in enumerate(after):
        for f in followers:
            before[f].append(i)
    return LaunchOrder(
        tuple(map(tuple, before)),
        tuple(tuple(sorted(f)) for f in after),
        _latest(before, after),
        tuple(reads),
        tuple(map(frozenset, writes)),
    )


def _writes(graph: PlanGraph, maker: dict[int, int]) -> list[set[int]]:
    root = [v.root for v in graph.values]
    writes = [{root[n.inputs[argument]] for _, argument in n.inout} for n in graph.nodes]
    targets = {a.name: a.value for a in graph.arguments}
    for result in graph.results:
        made = maker.get(root[result.value])
        if result.kind == "mutation" and made is not None and result.name in targets:
            writes[made].add(targets[result.name])
    return writes


def _reaches(after: list[set[int]], start: int, goal: int) -> bool:
    stack, seen = [start], {start}
    while stack:
        for n in after[stack.pop()]:
            if n == goal:
                return True
            if n not in seen:
                seen.add(n)
                stack.append(n)
    return False


def _latest(before: list[list[int]], after: list[set[int]]) -> tuple[int, ...]:
    """For every node the length of the longest path minus the longest path behind it."""
    missing = [len(f) for f in after]
    height = [0] * len(after)
    ready = [i for i, m in enumerate(missing) if m == 0]
    done = 0
    while ready:
        i = ready.pop()
        done += 1
        for p in before[i]:
            height[p] = max(height[p], height[i] + 1)
            missing[p] -= 1
            if missing[p] == 0:
                ready.append(p)
    assert done == len(after), "dependences form a cycle"
    top = max(height, default=0)
    return tuple(top - h for h in height)
