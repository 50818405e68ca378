"""Which values share memory, and the order of the nodes that makes the sharing right.

A root value is one *version* of a storage: the argument it came with, or a fresh temporary. A kernel that rewrites its
argument (`topo.inout`) makes a new version. The new version may take the old one's storage when nobody reads the old one
afterwards; "afterwards" is not the order of the text: every reader of the old version that doesn't depend on the rewrite is
moved before it by an ordering edge. What can't be done in place gets a copy first.

A storage may be written when it is a temporary, or a state buffer or input that the program mutates. Parameters, constants
and other inputs are never written.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass

from topo_opt.codegen.plan_graph import Node, PlanGraph


@dataclass(frozen=True)
class AvoidedRewrite:
    """A rewrite that could not be done in place, so a tensor of `dtype` and `shape` is copied first."""

    kernel: str
    dtype: str
    shape: tuple[int, ...]
    reason: str


@dataclass
class Sharing:
    """The outcome: root value -> root value whose memory it uses, nodes in running order, copies with their reasons."""

    storage: dict[int, int]
    order: list[Node]
    copies: list[AvoidedRewrite]


def share_storage(graph: PlanGraph) -> Sharing:
    """Decides sharing, adds copy nodes to `graph`, and orders the nodes."""
    return _Sharer(graph).run()


class _Sharer:
    def __init__(self, graph: PlanGraph):
        self.graph = graph
        self.storage: dict[int, int] = {}
        self.overwritten: set[int] = set()
        self.copies: list[AvoidedRewrite] = []
        self.successors: dict[int, set[int]] = defaultdict(set)
        self.nodes: list[Node] = []
        self.producer: dict[int, int] = {}
        self.readers: dict[int, list[int]] = defaultdict(list)
        self.kept: set[int] = set()
        """Versions that must still be there when the last node has run."""
        mutated = {r.name for r in graph.results if r.kind == "mutation"}
        self.target = {
            a.name: a.value for a in graph.arguments if a.kind in ("buffer", "input") and a.name in mutated
        }
        fixed = {a.value for a in graph.arguments} | set(graph.constants)
        self.read_only = fixed - set(self.target.values())

    def root(self, value: int) -> int:
        return self.graph.values[value].root

    def memory(self, value: int) -> int:
        root = self.root(value)
        return self.storage.get(root, root)

    def run(self) -> Sharing:
        self.kept = {self.root(r.value) for r in self.graph.results}
        for node in self.graph.nodes:
            self.add(node)
        for number, node in enumerate(list(self.nodes)):
            for result, argument in node.inout:
                self.rewrite(node, number, result, argument)
        self.finish_mutations()
        return Sharing(self.storage, self.ordered(), self.copies)

    def add(self, node: Node) -> int:
        number = len(self.nodes)
        self.nodes.append(node)
        for value in dict.fromkeys(node.inputs):
            root = self.root(value)
            self.readers[root].append(number)
            if root in self.producer:
                self.successors[self.producer[root]].add(number)
        for value in node.outputs:
            self.producer[self.root(value)] = number
        return number

    def rewrite(self, node: Node, number: int, result: int, argument: int) -> None:
        """Gives the result the memory of the argument, or of a copy of it."""
        new, old_value = node.outputs[result], node.inputs[argument]
        if self.graph.values[new].numel == 0:
            return
        old = self.root(old_value)
        reason = self.obstacle(node, number, old_value, argument)
        if reason is None:
            for reader in self.readers[old]:
                if reader != number:
                    self.successors[reader].add(number)
            self.overwritten.add(old)
            self.storage[self.root(new)] = self.memory(old)
            return
        value = self.graph.values[old_value]
        self.copies.append(AvoidedRewrite(node.kernel, value.dtype, value.shape, reason))
        fresh = self.graph.new_value(value.dtype, value.shape)
        copy = Node("copy", [old_value], [fresh.index])
        node.inputs[argument] = fresh.index
        self.successors[self.add(copy)].add(number)
        if old not in {self.root(v) for v in node.inputs}:
            self.readers[old].remove(number)
        self.readers[fresh.index].append(number)
        self.overwritten.add(fresh.index)
        self.storage[self.root(new)] = fresh.index

    def obstacle(self, node: Node, number: int, value: int, argument: int) -> str | None:
        """Why the memory of `value` can't be rewritten by `node`; None when it can."""
        old = self.root(value)
        if not self.graph.covers_root(value):
            return "it is a part of a larger tensor"
        if self.memory(old) in self.read_only:
            return "it may not be written"
        if old in self.overwritten:
            return "another kernel rewrites it"
        if old in self.kept:
            return "the old value is a result"
        if any(self.root(v) == old for i, v in enumerate(node.inputs) if i != argument):
            return "the kernel reads it a second time"
        if any(r != number and self.reaches(number, r) for r in self.readers[old]):
            return "the old value is read after the new one"
        return None

    def reaches(self, start: int, goal: int) -> bool:
        """Whether `goal` must run after `start`."""
        stack, seen = [start], {start}
        while stack:
            for after in self.successors[stack.pop()]:
                if after == goal:
                    return True
                if after not in seen:
                    seen.add(after)
                    stack.append(after)
        return False

    def finish_mutations(self) -> None:
        """Brings every new value into the memory of its target: for free, by producing it there, or by a copy at the end."""
        pending = []
        for r in self.graph.results:
            if r.kind != "mutation" or self.graph.values[r.value].numel == 0:
                continue
            target = self.target[r.name]
            if self.memory(r.value) == target and self.graph.covers_root(r.value):
                continue
            if not self.produce_in(target, r.value):
                pending.append((target, r.value))
        targets = {t for t, _ in pending}
        self.stage_results(targets)
        sources = [self.staged(v) if self.memory(v) in targets else v for _, v in pending]
        before = range(len(self.nodes))
        for (target, _), source in zip(pending, sources):
            shape = self.graph.values[target].shape
            if self.graph.values[source].shape != shape:
                v = self.graph.values[source]
                source = self.graph.new_view(v, shape, v.offset, self.graph.values[target].strides).index
            number = self.add(Node("copy", [source], [target]))
            for earlier in before:
                self.successors[earlier].add(number)

    def produce_in(self, target: int, value: int) -> bool:
        """Lets the producer of `value` write straight into `target`, when every reader of `target` can run before it."""
        root = self.root(value)
        number = self.producer.get(root)
        if number is None or root in self.storage or target in self.overwritten or target in self.kept:
            return False
        node = self.nodes[number]
        # An ATen call makes its result elsewhere before it is stored, a kernel may interleave reads and writes.
        reads_target = node.kind != "aten" and any(self.root(v) == target for v in node.inputs)
        if reads_target or not self.graph.covers_root(value) or len(self.versions(target)) > 1:
            return False
        if self.graph.values[root].numel != self.graph.values[target].numel or self.users_of_storage(root):
            return False
        if any(r != number and self.reaches(number, r) for r in self.readers[target]):
            return False
        for reader in self.readers[target]:
            if reader != number:
                self.successors[reader].add(number)
        self.overwritten.add(target)
        self.storage[root] = target
        return True

    def versions(self, storage: int) -> list[int]:
        return [storage, *(r for r, s in self.storage.items() if s == storage)]

    def users_of_storage(self, root: int) -> bool:
        """Whether another version was already placed in the memory of `root`."""
        return any(s == root for s in self.storage.values())

    def staged(self, value: int) -> int:
        """A copy of `value`, for when its memory is overwritten by the final copies."""
        v = self.graph.values[value]
        fresh = self.graph.new_value(v.dtype, v.shape)
        self.add(Node("copy", [value], [fresh.index]))
        return fresh.index

    def stage_results(self, targets: set[int]) -> None:
        """Outputs that lie in memory which the final copies overwrite are copied out before."""
        for i, r in enumerate(self.graph.results):
            if r.kind == "output" and self.memory(r.value) in targets:
                self.graph.results[i] = type(r)(r.kind, r.name, r.dtype, self.staged(r.value))

    def ordered(self) -> list[Node]:
        """Topological order, as close to the text's order as the edges allow."""
        waiting = [0] * len(self.nodes)
        for after in self.successors.values():
            for n in after:
                waiting[n] += 1
        rank = self.ranks()
        ready = [(rank[n], n) for n, count in enumerate(waiting) if count == 0]
        heapq.heapify(ready)
        out = []
        while ready:
            _, number = heapq.heappop(ready)
            out.append(self.nodes[number])
            for n in sorted(self.successors[number]):
                waiting[n] -= 1
                if waiting[n] == 0:
                    heapq.heappush(ready, (rank[n], n))
        assert len(out) == len(self.nodes), "ordering edges form a cycle"
        return out

    def ranks(self) -> list[float]:
        """Text position; a copy added for a rewrite stands right before the first node that needs it."""
        rank = [float(n) for n in range(len(self.nodes))]
        for n in range(len(self.graph.nodes), len(self.nodes)):
            needed = [s for s in self.successors[n] if s < len(self.graph.nodes)]
            if needed:
                rank[n] = min(needed) - 0.5
        return rank
