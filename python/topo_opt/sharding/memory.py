"""How much memory a plan takes on a device: what stays (parameters, state, inputs) and the most that intermediate results take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from topo_opt.sharding.plan_graph import PlanGraph
from topo_opt.sharding.strategies import Layout, Strategy


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one device. `peak_op` is the operation at which `activations`, the most at one time, are alive."""

    parameters: int
    state: int
    inputs: int
    activations: int
    peak_op: int

    @property
    def total(self) -> int:
        return self.parameters + self.state + self.inputs + self.activations

    def __str__(self) -> str:
        return (
            f"{size_text(self.total)}: parameters {size_text(self.parameters)}, state {size_text(self.state)}, "
            f"inputs {size_text(self.inputs)}, intermediate results {size_text(self.activations)}"
        )


def size_text(nbytes: float) -> str:
    """Decimal gigabytes, megabytes or kilobytes, whichever is the largest of which there is one."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} bytes"


_KINDS = {"param": "parameters", "constant": "parameters", "buffer": "state"}


def lifetimes(graph: PlanGraph) -> list[tuple[int, int, int]]:
    """(value, first operation, last operation) of every stored intermediate result. The new value of an argument lies in the argument."""
    found = []
    for number, value in enumerate(graph.values):
        if value.kind is None and value.in_memory and value.rewrites < 0 and value.producer >= 0:
            last = max((op for op, _ in value.uses), default=value.producer)
            found.append((number, value.producer, len(graph.ops) - 1 if value.returned else last))
    return found


def memory_use(
    graph: PlanGraph, layouts: Sequence[Layout], chosen: Sequence[Strategy], sizes: Sequence[int]
) -> MemoryUse:
    """The memory of a plan: `layouts` of all values, `chosen` strategies of all operations.

    Beside what lies in memory an operation needs a copy of every operand that it takes in a larger part than it lies in.
    """
    held = {"parameters": 0, "state": 0, "inputs": 0}
    for value, layout in zip(graph.values, layouts):
        if value.kind is not None:
            held[_KINDS.get(value.kind, "inputs")] += -(-value.nbytes // layout.parts(sizes))
    change = np.zeros(len(graph.ops) + 1, dtype=np.int64)
    for number, first, last in lifetimes(graph):
        size = -(-graph.values[number].nbytes // layouts[number].parts(sizes))
        change[first] += size
        change[last + 1] -= size
    alive = np.cumsum(change[:-1]) if graph.ops else np.zeros(1, dtype=np.int64)
    for index, (op, strategy) in enumerate(zip(graph.ops, chosen)):
        for position, operand in enumerate(op.operands):
            if operand >= 0 and strategy.operands[position].dims != layouts[operand].dims:
                taken = strategy.operands[position].parts(sizes)
                if taken < layouts[operand].parts(sizes):
                    alive[index] += graph.values[operand].nbytes // taken
    peak = int(alive.argmax())
    return MemoryUse(**held, activations=int(alive[peak]), peak_op=peak)
