"""Operands of a product through tensor descriptors: blocks that the hardware copies (TMA) straight to where tensor cores read.

A descriptor has the two axes of the operand as its last dimensions, and before them one dimension for everything else that
an address depends on: batch, head, an offset into a packed buffer. What is past the end of an axis reads as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from topo_opt.codegen.kernel_source import Param
from topo_opt.codegen.triton.element_types import signature_type
from topo_opt.codegen.triton.emit import Emitter
from topo_opt.codegen.triton.recorded_loads import ALIGNMENT, single_load
from topo_opt.errors import UnsupportedError
from topo_opt.runtime.plan import IN_ORDER
from topo_opt.structured.graph import Graph, element_bytes
from topo_opt.structured.index import Expr, Mod, Symbol, symbol

MAX_BLOCK = 256
"""Elements of a block along one dimension, from the same source."""


@dataclass(frozen=True)
class BlockAxis:
    """An axis of the operand, cut into blocks: `first` is the source of a block's first element, `number` of its number."""

    name: str
    size: int
    block: int
    first: str
    number: str


@dataclass(frozen=True)
class Dimension:
    """One of the two last dimensions of a descriptor, in elements; `start` is the source of the block's coordinate."""

    size: int
    stride: int
    block: int
    start: str


@dataclass(frozen=True)
class Operand:
    """A described operand: function argument, the outer dimension, and the two axes with the contiguous one last."""

    argument: int
    outer: tuple[int, int, str] | None
    """Size, stride and coordinate of everything else."""
    dimensions: tuple[Dimension, Dimension]
    transposed: bool
    """The axes lie in memory in the other order than they were asked for."""

    def param(self, graph: Graph, name: str) -> Param:
        """The kernel's parameter."""
        outer = [] if self.outer is None else [self.outer]
        made = {
            "shape": [*(o[0] for o in outer), *(d.size for d in self.dimensions)],
            "strides": [*(o[1] for o in outer), *(d.stride for d in self.dimensions)],
            "block": [*(1 for _ in outer), *(d.block for d in self.dimensions)],
        }
        kind = signature_type(graph.values[graph.arguments[self.argument]].element)
        return Param(name, "arg", self.argument, kind, made)

    def load(self, name: str) -> str:
        """Source of the block, its axes in the order they were asked for."""
        first, last = self.dimensions
        start = ", ".join([*([] if self.outer is None else [self.outer[2]]), first.start, last.start])
        shape = "" if self.outer is None else f".reshape({first.block}, {last.block})"
        return f"{name}.load([{start}]){shape}{'.T' if self.transposed else ''}"


@dataclass(frozen=True)
class Pair:
    """Two operands of one form as one, a block of the first above a block of the second.

    They lie `stride` elements apart in one argument, or are two arguments, of which `beside` is the second: the runtime says how far
    apart these are, and which of them comes first (`runtime.plan.Descriptor`).
    """

    first: Operand
    stride: int
    beside: int | None

    def param(self, graph: Graph, name: str, pointer: Callable[[int], str]) -> Param:
        """The kernel's parameter; `pointer` names that of an argument."""
        one = self.first.param(graph, name)
        assert one.descriptor is not None
        sizes = {"shape": IN_ORDER, "strides": self.stride, "block": 2}
        made: dict[str, Any] = {k: [size, *one.descriptor[k]] for k, size in sizes.items()}
        if self.beside is not None:
            made["beside"] = pointer(self.beside)
        return replace(one, descriptor=made)

    def load(self, name: str) -> str:
        """Source of both blocks, (columns of the first and then of the second, k) transposed."""
        rows, depth = self.first.dimensions
        return f"{name}.load([0, {rows.start}, {depth.start}]).reshape({2 * rows.block}, {depth.block}).T"


def paired(graph: Graph, first: Operand, second: Operand, immutable: Collection[int]) -> Pair | None:
    """Two operands that were asked for as (k, columns) as one; None where they don't lie alike.

    Of two arguments only those whose memory is weights: where it is does not change.
    """
    alike = first.dimensions == second.dimensions and first.transposed and second.transposed
    if not alike or 2 * first.dimensions[0].block > MAX_BLOCK or first.outer is not None:
        return None
    if first.argument == second.argument:
        known = second.outer is not None and second.outer[2] == "1"
        return Pair(first, second.outer[1], None) if second.outer is not None and known else None
    arguments = {first.argument, second.argument}
    kinds = {graph.values[graph.arguments[a]].element for a in arguments}
    if second.outer is not None or len(kinds) > 1 or not arguments <= set(immutable):
        return None
    rows, _ = first.dimensions
    return Pair(first, rows.size * rows.stride, second.argument)


def describe(
    emitter: Emitter, value: int, indices: Sequence[Expr], axes: tuple[BlockAxis, BlockAxis]
) -> Operand:
    """The descriptor of an operand that is asked for at `indices` over two block axes.

    Raises:
        UnsupportedError: the operand is computed, or does not lie in memory as a descriptor can say.
    """
    graph = emitter.graph
    number, position = single_load(emitter, value, indices)
    if number not in graph.arguments:
        raise UnsupportedError("a tensor descriptor for a value that is no argument")
    blocks = {a.name: a for a in axes}
    number_of = {a.name: symbol(f"{a.name}#", -(-a.size // a.block)) for a in axes}
    inner_of = {a.name: symbol(f"{a.name}%", a.block) for a in axes}
    position = position.substitute({a.name: number_of[a.name] * a.block + inner_of[a.name] for a in axes})
    dimensions, rest = {}, position
    for axis in axes:
        dimensions[axis.name], rest = _dimension(axis, rest)
    unit = element_bytes(graph.values[number].element)
    ordered = sorted(axes, key=lambda a: dimensions[a.name].stride, reverse=True)
    first, last = (dimensions[a.name] for a in ordered)
    if last.stride != 1:
        raise UnsupportedError("a tensor descriptor for an operand without contiguous axis")
    outer = None
    if not rest.is_constant or rest.constant:
        stride = gcd(*(c for _, c in rest.terms), rest.constant)
        coordinate = Expr(tuple((a, c // stride) for a, c in rest.terms), rest.constant // stride)
        outer = (coordinate.bounds[1] + 1, stride, _source(coordinate, blocks, emitter))
    for stride in (first.stride, *([] if outer is None else [outer[1]])):
        if stride * unit % ALIGNMENT:
            raise UnsupportedError(f"a tensor descriptor with a stride of {stride * unit} bytes")
    if last.block * unit < ALIGNMENT or max(first.block, last.block) > MAX_BLOCK:
        raise UnsupportedError(f"a tensor descriptor with blocks of {first.block} by {last.block} elements")
    return Operand(graph.arguments.index(number), outer, (first, last), ordered[0] is not axes[0])


def _dimension(axis: BlockAxis, position: Expr) -> tuple[Dimension, Expr]:
    """The dimension of a block axis, and the position without it."""
    inner = [(a, c) for a, c in position.terms if f"{axis.name}%" in a.symbols()]
    if not inner and axis.block > 1:
        raise UnsupportedError(f"a tensor descriptor for an operand that does not vary over {axis.name}")
    stride = inner[0][1] if inner else 1
    if len(inner) > 1 or (inner and not isinstance(inner[0][0], Symbol)) or stride < 1:
        raise UnsupportedError(f"a tensor descriptor for an axis in several pieces: {position}")
    rest = Expr(tuple(t for t in position.terms if t not in inner), position.constant)
    for atom, coefficient in rest.terms:
        if coefficient != stride * axis.block:
            continue
        number = f"{axis.name}#"
        whole = isinstance(atom, Symbol) and atom.name == number
        part = isinstance(atom, Mod) and atom.operand == symbol(number, -(-axis.size // axis.block))
        if whole or part:
            assert isinstance(atom, (Symbol, Mod))
            size = axis.size if whole else atom.divisor * axis.block  # type: ignore[union-attr]
            start = axis.first if whole else f"{axis.number} % {atom.divisor} * {axis.block}"  # type: ignore[union-attr]
            left = Expr(tuple(t for t in rest.terms if t != (atom, coefficient)), rest.constant)
            _check_tail(axis, whole)
            return Dimension(size, stride, axis.block, start), left
    _check_tail(axis, axis.size <= axis.block)
    return Dimension(min(axis.size, axis.block), stride, axis.block, "0"), rest


def _check_tail(axis: BlockAxis, whole: bool) -> None:
    """Only at the end of a dimension does what is past an axis read as zero."""
    if not whole and axis.size % axis.block:
        raise UnsupportedError(f"a tensor descriptor for blocks that are no part of axis {axis.name}")


def _source(coordinate: Expr, blocks: Mapping[str, BlockAxis], emitter: Emitter) -> str:
    def render(name: str) -> str:
        if name.endswith("#"):
            return f"({blocks[name[:-1]].number})"
        if name not in emitter.axes or not emitter.axes[name].scalar:
            raise UnsupportedError(f"a tensor descriptor for elements that depend on {name}")
        return emitter.axes[name].source

    return coordinate.source(render)
