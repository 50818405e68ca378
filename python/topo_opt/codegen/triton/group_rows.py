"""Rows brought together by group (`topo.group_rows`): a stable counting sort, a program a group.

Every program reads the groups of all rows, which are few and stay in the caches: it counts the rows of the groups before its
own, where its own rows begin, and then writes them in order. So nothing is shared between programs, and the result is the same
in every run.

`topo.kernel` of this family: `tile` = `x` (rows read at a time), `warps`.
"""

from __future__ import annotations

from torch_mlir import ir

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.writer import Writer
from topo_opt.errors import UnsupportedError
from topo_opt.structured.access import RESHAPES
from topo_opt.structured.graph import Graph, Node

OP = "topo.group_rows"


def lower(kernel: Kernel) -> KernelSource:
    """The Triton kernel of a function of family `group_rows`.

    Raises:
        UnsupportedError: anything else in the kernel than the op on its argument.
    """
    graph, writer = kernel.graph, Writer(indent=1)
    node = op_of(graph)
    if any(n is not node and n.name not in RESHAPES for n in graph.nodes):
        raise UnsupportedError(f"a group_rows kernel with more in it than one {OP}")
    (count,) = graph.values[node.operands[0]].shape or (0,)
    groups = ir.IntegerAttr(node.op.attributes["groups"]).value
    pointers, params = kernel.pointer_params(set(graph.arguments))
    source = pointers[in_memory(graph, node.operands[0])]
    names = {v: f"out{p}" for p, v in enumerate(graph.returns)}
    order, offsets = (names.get(v) for v in node.results)
    block = kernel.attributes["tile"]["x"]
    line = writer.line

    def read_block(start: str) -> None:
        line(f"row = {start}tl.arange(0, XBLOCK)")
        mask = f", mask=row < {count}, other=-1" if count % block else ""
        line(f"found = tl.load({source} + row{mask})")

    def over_rows(body) -> None:
        if count <= block:
            body("")
            return
        with writer.block(f"for row0 in range(0, {count}, XBLOCK):"):
            body("row0 + ")

    def count_before(start: str) -> None:
        read_block(start)
        line("before += tl.sum(((found >= 0) & (found < group)).to(tl.int32), 0)")

    def place(start: str) -> None:
        if start:
            read_block(start)
        line("mine = (found == group).to(tl.int32)")
        if order:
            line(f"tl.store({order} + before + tl.cumsum(mine, 0) - 1, row, mask=mine > 0)")
        line("before += tl.sum(mine, 0)")

    line("group = tl.program_id(0)")
    line("before = 0")
    over_rows(count_before)
    if offsets:
        with writer.block("if group == 0:"):
            line(f"tl.store({offsets}, 0)")
    over_rows(place)
    if offsets:
        line(f"tl.store({offsets} + group + 1, before)")
    return KernelSource(
        name=kernel.name,
        source=kernel.define(params, ["XBLOCK"], writer.lines),
        params=tuple(params),
        grid=(groups, 1, 1),
        num_warps=kernel.attributes["tile"]["warps"],
        constexprs={"XBLOCK": block},
        pdl=kernel.pdl,
        family="group_rows",
    )


def op_of(graph: Graph) -> Node:
    """The op of a group_rows kernel."""
    for node in graph.nodes:
        if node.name == OP:
            return node
    raise UnsupportedError(f"a group_rows kernel without {OP}")


def in_memory(graph: Graph, value: int) -> int:
    """The argument that a value is, or is another shape of.

    Raises:
        UnsupportedError: the value is computed.
    """
    node = graph.producer(value)
    while node is not None:
        if node.name not in RESHAPES:
            raise UnsupportedError(f"{node.name} where a kernel reads rows in order from memory")
        value = node.operands[0]
        node = graph.producer(value)
    return value
