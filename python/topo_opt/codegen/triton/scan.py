"""Cumulative ops along one dimension (`tm_tensor.scan`): an associative scan of row blocks with a carry.

What computes the scanned elements is part of the kernel, and so is what is computed from each result, at its place or at
another one (a flip).

A running sum of floats carries what rounding took from it along (Knuth's two-sum), so that its error does not grow with the
number of blocks.

`topo.kernel` of this family: `tile` (`x` rows, `r` columns of a block, `warps`).
"""

from __future__ import annotations

from math import prod

from torch_mlir import ir

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton.element_types import compute_type
from topo_opt.codegen.triton.emit import Axis, Emitter, Value
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.reductions import Combiner, combiner_of
from topo_opt.codegen.triton.writer import Writer
from topo_opt.errors import UnsupportedError
from topo_opt.structured.access import forward_indices
from topo_opt.structured.graph import Node
from topo_opt.structured.index import Expr, delinearize, symbol


def anchor_of(kernel: Kernel) -> tuple[Node, int]:
    """The scan of a kernel and its dimension."""
    for node in kernel.graph.nodes:
        if node.name == "tm_tensor.scan":
            return node, ir.IntegerAttr(node.op.attributes["dimension"]).value
    raise UnsupportedError("a scan kernel without tm_tensor.scan")


def scan_combiner(kernel: Kernel, node: Node) -> Combiner:
    """How elements combine."""
    block = node.op.regions[0].blocks[0]
    yielded = block.operations[len(block.operations) - 1].operation.operands[0]
    arguments = {hash(a) for a in block.arguments}
    op = None if hash(yielded) in arguments else yielded.owner.operation
    element = kernel.graph.values[node.results[0]].element
    found = (
        combiner_of(op.name, element)
        if op is not None and {hash(o) for o in op.operands} == arguments
        else None
    )
    if found is None:
        raise UnsupportedError("a scan whose body is not one associative op", hint="the op is left to ATen")
    return found


def lower(kernel: Kernel) -> KernelSource:
    """The Triton kernel of a function of family `scan`."""
    graph, writer = kernel.graph, Writer(indent=1)
    node, axis = anchor_of(kernel)
    if not ir.BoolAttr(node.op.attributes["inclusive"]).value:
        raise UnsupportedError("an exclusive scan", hint="the op is left to ATen")
    shape = graph.values[node.operands[0]].shape or ()
    length, outer = shape[axis], [s for d, s in enumerate(shape) if d != axis]
    count, tile = prod(outer), kernel.attributes["tile"]
    masks = {"x": "x_mask" if count % tile["x"] else None, "r": "r_mask" if length % tile["r"] else None}
    axes = {"x": Axis("x", count, "x", masks["x"]), "r": Axis("r", length, "r", masks["r"])}
    used = {v for n in graph.nodes for v in n.operands}
    pointers, params = kernel.pointer_params(used)
    emitter = Emitter(graph, writer, axes, pointers)
    combiner = scan_combiner(kernel, node)
    element = graph.values[node.results[0]].element

    program = "tl.program_id(0).to(tl.int64)" if kernel.wide else "tl.program_id(0)"
    writer.line(f"x = {program} * XBLOCK + tl.arange(0, XBLOCK)[:, None]")
    if masks["x"]:
        writer.line(f"x_mask = x < {count}")
    writer.line(f"carry = tl.full((XBLOCK, 1), {combiner.identity}, {compute_type(element)})")
    if combiner.is_float_sum:
        writer.line(f"lost = tl.full((XBLOCK, 1), 0.0, {compute_type(element)})")
    rows = delinearize(symbol("x", count), outer)
    indices = [*rows[:axis], symbol("r", length), *rows[axis:]]
    with emitter.scope(f"for r0 in range(0, {length}, RBLOCK):"):
        writer.line("r = r0 + tl.arange(0, RBLOCK)[None, :]")
        if masks["r"]:
            writer.line(f"r_mask = r < {length}")
        term = emitter.tensor(emitter.real(node.operands[0], indices))
        writer.line(f"term = tl.broadcast_to({term}, (XBLOCK, RBLOCK)).to({compute_type(element)})")
        if masks["r"]:
            writer.line(f"term = tl.where(r_mask, term, {combiner.identity})")
        _advance(writer, combiner, compute_type(element))
        emitter.seeds[(node.results[0], tuple(indices))] = Value("scanned", element, frozenset(("x", "r")))
        reached = forward_indices(graph, node.results[0], indices)
        for position, value in enumerate(graph.returns):
            if value != node.results[1]:
                where = _place(graph.values[value].shape, shape, reached.get(value))
                emitter.store(f"out{position}", value, where, ["x", "r"], "(XBLOCK, RBLOCK)")
    for position, value in enumerate(graph.returns):
        if value == node.results[1]:
            emitter.seeds[(value, tuple(rows))] = Value("carry", element, frozenset("x"))
            emitter.store(f"out{position}", value, rows, ["x"], "(XBLOCK, 1)")
    blocks = {"XBLOCK": tile["x"], "RBLOCK": tile["r"]}
    return KernelSource(
        name=kernel.name,
        source=kernel.define(params, blocks, writer.lines),
        params=tuple(params),
        grid=(-(-count // tile["x"]), 1, 1),
        num_warps=tile["warps"],
        constexprs=blocks,
        pdl=kernel.pdl,
        family="scan",
    )


def _advance(writer: Writer, combiner: Combiner, kind: str) -> None:
    """Scans the block `term` on from `carry` and takes it into `carry`; `kind` is the type both are computed in."""
    inside = f"tl.associative_scan(term, 1, {combiner.function_name})"
    block = f"{combiner.reduce('term')}.to({kind})"
    if not combiner.is_float_sum:
        writer.line(f"scanned = {combiner.combine('carry', inside)}")
        writer.line(f"carry = {combiner.combine('carry', block)}")
        return
    writer.line(f"scanned = carry + (lost + {inside})")
    writer.line(f"block = {block} + lost")
    writer.line("moved = carry + block")
    writer.line("kept = moved - carry")
    writer.line("lost = (carry - (moved - kept)) + (block - kept)")
    writer.line("lost = tl.where(lost == lost, lost, 0.0)")  # sums that are infinite
    writer.line("carry = moved")


def _place(shape: tuple[int, ...] | None, scanned: tuple[int, ...], indices: list[Expr] | None) -> list[Expr]:
    """Where a result has what is computed from an element of the scan; all of it is covered."""
    if indices is None or prod(shape or ()) != prod(scanned):
        raise UnsupportedError(f"a scan kernel that returns {shape} beside {scanned}")
    return indices
