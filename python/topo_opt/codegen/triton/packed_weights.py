"""Weights of which several lie in one element of memory: int4 in bytes, eight of them in a word.

    w[n, k] = (q[n, k // 2] >> 4 * (k % 2)) & 15   -->   q is loaded once; lo, hi = q & 15, q >> 4; w = interleave(lo, hi)

A kernel that asks for weights one step of k after the other would load each element for every weight in it, behind a choice. It
asks instead for the weights at `count * p + j`, for every j: the choices are decided then, and the loads are one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from topo_opt.codegen.triton.contraction import Contraction
from topo_opt.codegen.triton.rehearsal import Load, RehearsingEmitter
from topo_opt.codegen.triton.writer import Writer
from topo_opt.errors import UnsupportedError
from topo_opt.structured.graph import Graph
from topo_opt.structured.index import Expr, Symbol, contiguous_strides, strided, symbol

COUNTS = (2, 4, 8)
"""How many steps of k may share an element; `tl.join` takes two values, so powers of two."""
_STEP = "p"


def steps_in_an_element(
    graph: Graph, pointers: Mapping[int, str], contractions: Sequence[Contraction], columns: Sequence[Expr]
) -> int:
    """How many neighbouring steps of k read the same integers for the right operands of all contractions; 1 for plain weights.

    Args:
        pointers: the values of `graph` that lie in memory.
        columns: columns of the products that are asked for.
    """
    integers = {v for v in pointers if graph.values[v].element.startswith("i")}
    if not integers or any(graph.producer(c.operand("right")[1]) is None for c in contractions):
        return 1
    steps = contractions[0].counts[3]
    for count in (c for c in COUNTS if steps % c == 0):
        if all(_shares(graph, pointers, c, column, count) for c in contractions for column in columns):
            return count
    return 1


def _shares(
    graph: Graph, pointers: Mapping[int, str], contraction: Contraction, column: Expr, count: int
) -> bool:
    """Whether every element that step `p` of `count` weights reads moves with p, and is the same for all of them."""
    emitter = RehearsingEmitter(graph, Writer(), {}, pointers)
    batch, rows, _, k = contraction.counts
    position, value = contraction.operand("right")
    index_map = contraction.node.maps[position]

    def loads(j: int) -> list[Load]:
        at = symbol(_STEP, k // count) * count + j
        loop = contraction.loop(symbol("b", batch), symbol("m", rows), column, at)
        return emitter.rehearse(lambda: emitter.real(value, index_map.apply(loop))).loads

    try:
        first, *others = (loads(j) for j in range(count))
    except UnsupportedError:
        return False
    return any(_moves(graph, load) and all(load in other for other in others) for load in first)


def _moves(graph: Graph, load: Load) -> bool:
    """Whether each step reads another integer."""
    number, indices = load
    info = graph.values[number]
    if not info.element.startswith("i"):
        return False
    position = strided(indices, contiguous_strides(info.shape or ()))
    return any(isinstance(atom, Symbol) and atom.name == _STEP for atom, _ in position.terms)


def interleaved(parts: Sequence[str]) -> str:
    """Source of blocks of one shape with new last dimensions, of which the last changes with the last bit of the part."""
    if len(parts) == 1:
        return parts[0]
    return f"tl.join({interleaved(parts[0::2])}, {interleaved(parts[1::2])})"
