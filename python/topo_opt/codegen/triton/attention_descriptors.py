"""Keys and values through tensor descriptors: blocks that the hardware copies (TMA), where their place in memory allows.

A descriptor spans three dimensions: the keys and the depth as they lie in memory, and everything else (batch, head, an offset
into a packed projection) as one outer dimension whose stride divides all of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from topo_opt.codegen.kernel_source import Param
from topo_opt.codegen.triton.element_types import signature_type
from topo_opt.codegen.triton.emit import Emitter
from topo_opt.codegen.triton.recorded_loads import ALIGNMENT, single_load
from topo_opt.errors import UnsupportedError
from topo_opt.structured.graph import Graph, element_bytes
from topo_opt.structured.index import Expr, Symbol


@dataclass(frozen=True)
class Descriptor:
    """Where the blocks of an operand are: function argument, outer coordinate, sizes and strides in elements."""

    argument: int
    outer: Expr
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]

    def param(self, graph: Graph, name: str, block: tuple[int, int]) -> Param:
        """The kernel's parameter for blocks of (keys, depth)."""
        kind = signature_type(graph.values[graph.arguments[self.argument]].element)
        made = {"shape": list(self.shape), "strides": list(self.strides), "block": [1, *block]}
        return Param(name, "arg", self.argument, kind, made)


def find(
    emitter: Emitter, operand: int, indices: Sequence[Expr], key: str, depth: str, scalars: frozenset[str]
) -> Descriptor:
    """The descriptor of an operand that is asked for at `indices`, over the axes `key` and `depth`.

    Args:
        scalars: axes with one value a program, which the outer coordinate may use.

    Raises:
        UnsupportedError: the operand is computed, or does not lie in memory as a descriptor can say.
    """
    graph, axes = emitter.graph, emitter.axes
    number, position = single_load(emitter, operand, indices)
    inner = {a.name: c for a, c in position.terms if isinstance(a, Symbol) and a.name in (key, depth)}
    rest = Expr(
        tuple((a, c) for a, c in position.terms if not (isinstance(a, Symbol) and a.name in inner)),
        position.constant,
    )
    size = {name: axes[name].size for name in (key, depth)}
    if not rest.symbols <= scalars or inner.get(depth, 1) != 1 or number not in graph.arguments:
        raise UnsupportedError(f"a tensor descriptor for elements at {position}")
    step = inner.get(key, size[depth])
    stride = gcd(*(c for _, c in rest.terms), rest.constant) or step * size[key]
    outer = Expr(tuple((a, c // stride) for a, c in rest.terms), rest.constant // stride)
    itemsize = element_bytes(graph.values[number].element)
    if stride * itemsize % ALIGNMENT or step * itemsize % ALIGNMENT:
        raise UnsupportedError(
            f"a tensor descriptor with strides of {stride} and {step} elements of {itemsize} bytes"
        )
    shape = (outer.bounds[1] + 1, size[key], size[depth])
    return Descriptor(graph.arguments.index(number), outer, shape, (stride, step, 1))
