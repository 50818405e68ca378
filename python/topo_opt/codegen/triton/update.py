"""Indexed writes into an existing buffer: `topo.index_update` and `tm_tensor.scatter`.

The kernel runs over the elements that are written, not over the buffer; the result is the destination argument itself
(`topo.inout`). `topo.kernel` of this family: `tile` (`x` block size, `warps`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from torch_mlir import ir

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton.element_types import NARROW_FLOATS
from topo_opt.codegen.triton.emit import Axis, Emitter, Value
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.reductions import depends_on
from topo_opt.codegen.triton.regions import Region
from topo_opt.codegen.triton.writer import Writer
from topo_opt.errors import UnsupportedError
from topo_opt.structured.graph import Node
from topo_opt.structured.index import Expr, contiguous_strides, delinearize, opaque, strided, symbol

ANCHORS = ("topo.index_update", "tm_tensor.scatter")


@dataclass(frozen=True)
class Write:
    """Where one element goes: indices in the destination, tests that they are inside it, and how it is combined."""

    value: Value
    indices: list[Expr]
    tests: list[str]
    atomic: str | None = None


def written(kernel: Kernel) -> tuple[Node, tuple[int, ...]]:
    """The updating op of a kernel and the shape of what it writes."""
    for node in kernel.graph.nodes:
        if node.name in ANCHORS:
            source = node.operands[1] if node.name == "topo.index_update" else node.operands[0]
            return node, kernel.graph.values[source].shape or ()
    raise UnsupportedError("an update kernel without an updating op")


def lower(kernel: Kernel) -> KernelSource:
    """The Triton kernel of a function of family `update`."""
    graph, writer = kernel.graph, Writer(indent=1)
    anchor, shape = written(kernel)
    count, tile = prod(shape), kernel.attributes["tile"]
    used = {v for node in graph.nodes for v in node.operands} - set(destination(anchor))
    pointers, params = kernel.pointer_params(used)
    x_mask = "x_mask" if count % tile["x"] else None
    emitter = Emitter(
        graph, writer, {"x": Axis("x", count, "x", x_mask)}, pointers, precision=kernel.precision
    )
    program = "tl.program_id(0).to(tl.int64)" if kernel.wide else "tl.program_id(0)"
    writer.line(f"x = {program} * XBLOCK + tl.arange(0, XBLOCK)[:, None]")
    if x_mask:
        writer.line(f"x_mask = x < {count}")
    x = symbol("x", count)
    write = WRITES[anchor.name](emitter, anchor, delinearize(x, shape))
    for position, value in enumerate(graph.returns):
        if value == anchor.results[0]:
            _store(emitter, f"out{position}", anchor, write)
        else:
            emitter.store(
                f"out{position}", value, delinearize(x, graph.values[value].shape or ()), ["x"], "(XBLOCK, 1)"
            )
    blocks = {"XBLOCK": tile["x"]}
    return KernelSource(
        name=kernel.name,
        source=kernel.define(params, blocks, writer.lines),
        params=tuple(params),
        grid=(max(-(-count // tile["x"]), 1), 1, 1),
        num_warps=tile["warps"],
        constexprs=blocks,
        pdl=kernel.pdl,
        family="update",
    )


def destination(anchor: Node) -> list[int]:
    """The value that an updating op rewrites."""
    return [anchor.operands[0 if anchor.name == "topo.index_update" else 2]]


def _store(emitter: Emitter, pointer: str, anchor: Node, write: Write) -> None:
    info = emitter.graph.values[anchor.results[0]]
    where = strided(write.indices, contiguous_strides(info.shape or ()))
    guard = " & ".join(write.tests) or None
    if write.atomic is None:
        emitter.store_scalar(pointer, write.value, where, info.element, ["x"], "(XBLOCK, 1)", guard)
        return
    source = f"tl.broadcast_to({emitter.tensor(write.value)}, (XBLOCK, 1))"
    offset = (
        f"tl.broadcast_to({emitter.index(where)}, (XBLOCK, 1))"
        if not where.is_constant
        else f"tl.full((XBLOCK, 1), {where.constant}, tl.int32)"
    )
    masks = [m for m in (emitter.axes["x"].mask, guard) if m]
    mask = f", mask={' & '.join(masks)}" if masks else ""
    emitter.writer.line(f"{write.atomic}({pointer} + {offset}, {source}{mask}, sem='relaxed')")


def _loaded_index(emitter: Emitter, value: int, indices: Sequence[Expr], size: int) -> tuple[Expr, list[str]]:
    """A destination index read from memory, and the test that it is inside `size`."""
    found = emitter.real(value, indices)
    if found.index is not None:
        return found.index, []
    return opaque(found.source, 0, max(size - 1, 0), found.depends), [
        emitter.inside(found.source, size, found.depends)
    ]


def _index_update(emitter: Emitter, node: Node, indices: list[Expr]) -> Write:
    axis = ir.IntegerAttr(node.op.attributes["dim"]).value
    destination, source, index = node.operands[:3]
    size = (emitter.graph.values[destination].shape or ())[axis]
    place, tests = _loaded_index(emitter, index, [indices[axis]], size)
    return Write(emitter.real(source, indices), [*indices[:axis], place, *indices[axis + 1 :]], tests)


def _scatter(emitter: Emitter, node: Node, indices: list[Expr]) -> Write:
    updates, positions, original = node.operands[:3]
    shape = emitter.graph.values[original].shape or ()
    skipped = len(shape) - (len(indices) - 1)
    place = [indices[1 + d - skipped] if d >= skipped else Expr(()) for d in range(len(shape))]
    tests: list[str] = []
    for column, axis in enumerate(ir.DenseI64ArrayAttr(node.op.attributes["dimension_map"])):
        offset, inside = _loaded_index(emitter, positions, [indices[0], Expr((), column)], shape[axis])
        place[axis] = place[axis] + offset
        tests.extend(inside)
    value = emitter.real(updates, indices)
    atomic, term = _combination(emitter, node)
    if term is not None:
        update = node.op.regions[0].blocks[0].arguments[0]
        found = Region(emitter, {hash(update): lambda: value}).scalar(term)
        assert isinstance(found, Value)
        value = found
    return Write(value, place, tests, atomic)


_ATOMICS = {
    "arith.addf": "tl.atomic_add", "arith.addi": "tl.atomic_add",
    "arith.maxsi": "tl.atomic_max", "arith.minsi": "tl.atomic_min",
}  # fmt: skip


def _combination(emitter: Emitter, node: Node) -> tuple[str | None, ir.Value | None]:
    """The atomic that combines with what is there and what it combines, in terms of the update; (None, None) overwrites."""
    block = node.op.regions[0].blocks[0]
    update, current = block.arguments
    yielded = block.operations[len(block.operations) - 1].operation.operands[0]
    if hash(yielded) == hash(update):
        return None, None
    element = emitter.graph.values[node.results[0]].element
    op = None if isinstance(yielded.owner, ir.Block) else yielded.owner.operation
    terms = [] if op is None else [o for o in op.operands if hash(o) != hash(current)]
    known = op is not None and len(op.operands) == 2 and len(terms) == 1
    alone = known and not depends_on(terms[0], {hash(current)}, {hash(update)})
    atomic = _ATOMICS.get(op.name) if op is not None and alone else None
    if atomic is None or element in (*NARROW_FLOATS, "i1", "i8", "i16"):
        name = "its body" if op is None else op.name
        raise UnsupportedError(
            f"a scatter that combines by {name} in {element} has no atomic", hint="the op is left to ATen"
        )
    return atomic, terms[0]


# Updating op -> where and what it writes, for the element of its source at the given indices.
WRITES: dict[str, Callable[[Emitter, Node, list[Expr]], Write]] = {
    "topo.index_update": _index_update,
    "tm_tensor.scatter": _scatter,
}
