"""Several functions of one model as one graph, so that what they share lies alike in all of them.

Parameters, constants and state of one name are one value. The cost of a plan is then that of one call of each function, and
its minimum the best for all of them together: a prompt and a step of decoding do not each get the weights as they like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from topo_opt.errors import InputError
from topo_opt.sharding.plan_graph import PlanGraph, PlanOp, PlanValue

SHARED = ("param", "constant", "buffer")


@dataclass(frozen=True)
class Joined:
    """`graph` has the operations of all functions, one function behind the other.

    `operations[f]` are those of function f as a range, `values[f][i]` is the value of `graph` that value i of function f is.
    """

    graph: PlanGraph
    functions: tuple[PlanGraph, ...]
    operations: tuple[range, ...]
    values: tuple[tuple[int, ...], ...]


def join(functions: Sequence[PlanGraph]) -> Joined:
    """All functions as one graph.

    Raises:
        InputError: a name stands for tensors of different shapes.
    """
    values: list[PlanValue] = []
    ops: list[PlanOp] = []
    shared: dict[str, int] = {}
    places: list[tuple[int, ...]] = []
    ranges: list[range] = []
    for function in functions:
        place: list[int] = []
        for value in function.values:
            known = shared.get(value.name) if value.kind in SHARED else None
            if known is None:
                known = len(values)
                values.append(replace(value, number=known, uses=[], producer=-1))
                if value.kind in SHARED:
                    shared[value.name] = known
            elif values[known].shape != value.shape:
                raise InputError(
                    f"'{value.name}' is {list(value.shape)} in '{function.name}' and {list(values[known].shape)} "
                    "in another function",
                    hint="plan them one by one",
                )
            place.append(known)
        for number, value in enumerate(function.values):
            if value.rewrites >= 0:
                values[place[number]].rewrites = place[value.rewrites]
        first = len(ops)
        ops += [
            replace(
                op,
                operands=tuple(place[o] if o >= 0 else -1 for o in op.operands),
                results=tuple(place[r] if r >= 0 else -1 for r in op.results),
            )
            for op in function.ops
        ]
        places.append(tuple(place))
        ranges.append(range(first, len(ops)))
    parts = tuple((f.name, r) for f, r in zip(functions, ranges, strict=True))
    graph = PlanGraph(ops, values, " and ".join(f.name for f in functions), parts=parts)
    return Joined(graph, tuple(functions), tuple(ranges), tuple(places))
