"""Arguments to measure a kernel with, described as data: shapes, types, and values that keep it away from special cases.

Floats are random, since a GPU draws less power, and clocks higher, on zeros. Masks are true. Integers that are used as an
index, or compared with one, lie in its range and reach its end: a decode step is measured with its cache full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch_mlir import ir

from topo_opt.codegen.triton.kernel import plain
from topo_opt.runtime.dtypes import from_mlir_name
from topo_opt.structured.graph import Graph, Node, element_bytes, read
from topo_opt.tuning.arguments_data import Argument, Result, Signature

_INDEX_TYPES = ("i64", "i32")


def signature_of(
    func: ir.Operation,
    members: Mapping[str, ir.Operation] | None = None,
    *,
    l2_bytes: int = 50 << 20,
    cold: frozenset[int] | None = None,
) -> Signature:
    """Arguments and results of a kernel function.

    Args:
        members: symbol -> function, for the kernels that a pack calls.
        l2_bytes: what is larger than half of it is cold whatever wrote it.
        cold: positions of the arguments that come from memory; None takes those that the kernel itself says to be immutable
            or rewrites, and all where it says nothing.
    """
    graph = read(func)
    bounds = index_bounds(graph, members or {})
    inout = {r: a for r, a in plain(func.attributes["topo.inout"])} if "topo.inout" in func.attributes else {}
    immutable = plain(ir.DictAttr(func.attributes["topo.kernel"])).get("immutable")
    if cold is None:
        known = range(len(graph.arguments)) if immutable is None else (*immutable, *inout.values())
        cold = frozenset(known)
    # Where the groups of a grouped product end: rows spread evenly over them.
    ends = {
        n.operands[4]: (graph.values[n.operands[3]].shape or (0,))[0] for n in graph.nodes if _is_sorted(n)
    }
    arguments = []
    for position, value in enumerate(graph.arguments):
        info = graph.values[value]
        from_memory = position in cold or 2 * info.nbytes > l2_bytes
        argument = _argument(info.shape or (), info.element, bounds.get(position), from_memory)
        arguments.append(replace(argument, fill="ends", bound=ends[value]) if value in ends else argument)
    results = [
        Result(
            graph.values[v].shape or (),
            from_mlir_name(graph.values[v].element).torch_name,
            inout.get(position),
        )
        for position, v in enumerate(graph.returns)
    ]
    return Signature(tuple(arguments), tuple(results))


def _argument(shape: tuple[int, ...], element: str, bound: int | None, cold: bool) -> Argument:
    dtype = from_mlir_name(element).torch_name
    if element == "i1":
        return Argument(shape, dtype, "true", 0, cold)
    if not element.startswith(("i", "ui", "si")):
        return Argument(shape, dtype, "normal", 0, cold)
    if element_bytes(element) < 4 and bound is None:
        return Argument(shape, dtype, "small", 0, cold)
    return Argument(shape, dtype, "index", bound or 1, cold)


def _is_sorted(node: Node) -> bool:
    """Whether a node is a grouped product that says where its groups end."""
    return node.name == "topo.grouped_product" and len(node.operands) > 4


def index_bounds(graph: Graph, members: Mapping[str, ir.Operation]) -> dict[int, int]:
    """Position of an integer argument -> the least size of what it indexes or is compared with."""
    found: dict[int, int] = {}
    flow = _Flow(graph, members)
    for argument, bound in flow.uses():
        position = graph.arguments.index(argument)
        found[position] = min(bound, found.get(position, bound))
    return found


class _Flow:
    """Follows integers from arguments to where they are an index. A source is an argument, or a range as ("range", size)."""

    def __init__(self, graph: Graph, members: Mapping[str, ir.Operation]):
        self.graph, self.members = graph, members
        self.sources: dict[int, frozenset[Any]] = {
            a: frozenset([a]) for a in graph.arguments if graph.values[a].element in _INDEX_TYPES
        }

    def uses(self) -> Iterator[tuple[int, int]]:
        """(argument, size) for every place where it is used as an index below `size`."""
        for node in self.graph.nodes:
            if node.name == "func.call":
                yield from self._call(node)
            elif node.is_loop_nest:
                yield from self._body(node)
            else:
                yield from self._named(node)
                merged = frozenset().union(*(self._of(o) for o in node.operands))
                self.sources.update((r, merged) for r in node.results)

    def _of(self, value: int) -> frozenset[Any]:
        return self.sources.get(value, frozenset())

    def _arguments(self, sources: frozenset[Any], bound: int) -> Iterator[tuple[int, int]]:
        for source in sorted(s for s in sources if isinstance(s, int)):
            yield source, bound

    def _named(self, node: Node) -> Iterator[tuple[int, int]]:
        shape = self._shape
        match node.name:
            case "topo.index_update":
                dim = ir.IntegerAttr(node.op.attributes["dim"]).value
                yield from self._arguments(self._of(node.operands[2]), shape(node.operands[0])[dim])
            case "tm_tensor.scatter":
                yield from self._arguments(self._of(node.operands[1]), shape(node.operands[2])[0])
            case "topo.grouped_product":
                yield from self._arguments(self._of(node.operands[2]), shape(node.operands[1])[0])
                for operand in node.operands[3:4]:  # the order of the rows: each of them once
                    yield from self._arguments(self._of(operand), shape(operand)[0])
            case "topo.group_rows":
                groups = ir.IntegerAttr(node.op.attributes["groups"]).value
                yield from self._arguments(self._of(node.operands[0]), groups)
            case "topo.attention":
                for operand in node.operands[3:]:
                    yield from self._arguments(self._of(operand), shape(node.operands[1])[2])

    def _shape(self, value: int) -> tuple[int, ...]:
        return self.graph.values[value].shape or (1,)

    def _call(self, node: Node) -> Iterator[tuple[int, int]]:
        callee = self.members.get(ir.FlatSymbolRefAttr(node.op.attributes["callee"]).value)
        if callee is None:
            return
        for position, bound in sorted(index_bounds(read(callee), self.members).items()):
            yield from self._arguments(self._of(node.operands[position]), bound)

    def _body(self, node: Node) -> Iterator[tuple[int, int]]:
        block = node.op.regions[0].blocks[0]
        scalars: dict[int, frozenset[Any]] = {
            hash(a): self._of(o) for a, o in zip(block.arguments, node.operands)
        }

        def of(value: ir.Value) -> frozenset[Any]:
            outer = self.graph.numbers.get(hash(value))
            return scalars.get(hash(value), frozenset()) if outer is None else self._of(outer)

        for view in block.operations:
            op = view.operation
            operands = list(op.operands)
            sources = frozenset().union(*(of(o) for o in operands))
            if op.name == "linalg.index":
                sources = frozenset([("range", node.domain[ir.IntegerAttr(op.attributes["dim"]).value])])
            elif op.name == "tensor.extract":
                for size, index in zip(ir.ShapedType(operands[0].type).shape, operands[1:]):
                    yield from self._arguments(of(index), size)
                sources = of(operands[0])
            elif op.name == "arith.cmpi":
                ranges = [s[1] for s in sources if isinstance(s, tuple)]
                if ranges:
                    yield from self._arguments(sources, min(ranges))
                sources = frozenset()
            elif op.name == "linalg.yield":
                self.sources.update((r, of(o)) for r, o in zip(node.results, operands))
            for result in op.results:
                scalars[hash(result)] = sources
