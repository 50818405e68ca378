"""Parts of a tensor that change places between devices: `shard.all_gather`, `shard.all_to_all` and `shard.reduce_scatter`.

A program has a range of the elements of a part. It gives those of the part that is for each other rank to the box of that rank, waits
for the same range of what each of them gives, and stores it where it belongs (`exchange`): nothing is packed or unpacked.

    all_gather      part = operand         -->  result = parts side by side along `gather_axis`
    all_to_all      part = operand cut along `split_axis`  -->  result = parts side by side along `concat_axis`
    reduce_scatter  part = operand cut along `scatter_dim`  -->  result = sum of the parts in f32, in the order of the ranks

`topo.kernel` of this family: `exchange` (`axes`, `ranks`, `memory`), `tile` (`x` elements of a part, `warps`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch_mlir import ir

from topo_opt.codegen.kernel_source import TURNS, KernelSource, Scratch
from topo_opt.codegen.triton.element_types import storage_type
from topo_opt.codegen.triton.emit import Axis, Emitter
from topo_opt.codegen.triton.exchange_boxes import PARAMS, Boxes, Partners, described
from topo_opt.codegen.triton.kernel import Kernel, next_power_of_two
from topo_opt.codegen.triton.writer import Writer
from topo_opt.errors import UnsupportedError
from topo_opt.structured.index import contiguous_strides, delinearize, strided, symbol

_CUT = {"shard.all_gather": None, "shard.all_to_all": "split_axis", "shard.reduce_scatter": "scatter_dim"}
_JOINED = {"shard.all_gather": "gather_axis", "shard.all_to_all": "concat_axis", "shard.reduce_scatter": None}
"""Op -> attribute that names the dimension along which its operand is cut, its result joined; None where it is neither."""
BLOCK, WARPS = 2048, 4
"""Elements of a program, 32 bytes of halves a thread, and its warps."""
HELD = 128
"""Elements of all ranks that a thread holds at a time, at most: they wait in registers."""


@dataclass(frozen=True)
class Parts:
    """What moves: the shape of a part, and how far apart parts lie in the operand and in the result, in elements."""

    shape: tuple[int, ...]
    from_step: int
    to_step: int
    summed: bool

    @property
    def numel(self) -> int:
        return prod(self.shape)


def parts_of(kernel: Kernel, ranks: int) -> Parts:
    """The parts of the collective in a kernel.

    Raises:
        UnsupportedError: it holds something else, or its parts are not equal.
    """
    graph = kernel.graph
    if len(graph.nodes) != 1 or graph.nodes[0].name not in _CUT:
        raise UnsupportedError("a kernel that moves parts holds one collective")
    node = graph.nodes[0]
    given, result = (graph.values[v].shape or () for v in (node.operands[0], node.results[0]))
    cut, joined = (_dimension(node.op, table[node.name]) for table in (_CUT, _JOINED))
    shape = tuple(size // ranks if d == cut else size for d, size in enumerate(given))
    if tuple(size * ranks if d == joined else size for d, size in enumerate(shape)) != result:
        raise UnsupportedError(f"parts of {given} among {ranks} ranks do not make {result}")
    return Parts(shape, _step(shape, cut, given), _step(shape, joined, result), joined is None)


def _dimension(op: ir.Operation, name: str | None) -> int | None:
    return None if name is None else ir.IntegerAttr(op.attributes[name]).value


def _step(part: Sequence[int], dim: int | None, whole: Sequence[int]) -> int:
    return 0 if dim is None else part[dim] * contiguous_strides(whole)[dim]


def default_tile(kernel: Kernel) -> dict[str, int]:
    """Elements of a program and its warps."""
    ranks = Partners.of(kernel.attributes["exchange"]).ranks
    return {"x": max(32 * WARPS, min(BLOCK, HELD * 32 * WARPS // next_power_of_two(ranks))), "warps": WARPS}


def lower(kernel: Kernel) -> KernelSource:
    """The Triton kernel of a function of family `move`.

    Raises:
        UnsupportedError: elements that can't tell that they have arrived, a single element, or more than one collective.
    """
    graph, writer, tile = kernel.graph, Writer(indent=1), kernel.attributes["tile"]
    partners = Partners.of(kernel.attributes["exchange"])
    parts, node = parts_of(kernel, partners.ranks), graph.nodes[0] if graph.nodes else None
    if node is None or parts.numel < 2:
        raise UnsupportedError("a part of one element")
    operand, result = graph.values[node.operands[0]], graph.values[node.results[0]]
    boxes = Boxes(partners, operand.element, parts.numel, tile["warps"])
    programs = -(-parts.numel // tile["x"])
    mask = "x_mask" if parts.numel % tile["x"] else None
    pointers, params = kernel.pointer_params({node.operands[0]})
    emitter = Emitter(graph, writer, {"x": Axis("x", parts.numel, "x", mask)}, pointers)
    program = "tl.program_id(0).to(tl.int64)" if kernel.wide else "tl.program_id(0)"
    writer.line(f"x = {program} * XBLOCK + tl.arange(0, XBLOCK)")
    if mask:
        writer.line(f"{mask} = x < {parts.numel}")
    boxes.begin(writer, gives=True, takes=True)
    boxes.turn(writer, "tl.program_id(0)")
    indices = delinearize(symbol("x", parts.numel), parts.shape)
    start, end = (
        emitter.index(strided(indices, contiguous_strides(info.shape or ()))) for info in (operand, result)
    )
    guard = f", mask={mask}, other=0.0" if mask else ""
    source = pointers[node.operands[0]]
    loads = [
        f"tl.load({source} + {_at(start, rank * parts.from_step)}{guard})" for rank in range(partners.ranks)
    ]
    loaded = [writer.bind(load, "a") for load in loads]
    bits = [boxes.bits(writer, name) for name in loaded]
    boxes.give(writer, bits, "x", mask)
    store = f", mask={mask}" if mask else ""
    if parts.summed:
        total = boxes.add_up(emitter, bits, "x", mask, operand.element)
        writer.line(f"tl.store(out0 + {end}, {total}.to({storage_type(operand.element)}){store})")
    else:
        for rank, name in enumerate(boxes.take(emitter, bits, "x", mask)):
            value = f"{name}.to({storage_type(operand.element)}, bitcast=True)"
            writer.line(f"tl.store(out0 + {_at(end, rank * parts.to_step)}, {value}{store})")
    boxes.end(writer, "tl.program_id(0)")
    params += PARAMS
    blocks = {"XBLOCK": tile["x"]}
    return KernelSource(
        name=kernel.name,
        source=kernel.define(params, blocks, writer.lines),
        params=tuple(params),
        grid=(programs, 1, 1),
        num_warps=tile["warps"],
        constexprs=blocks,
        scratch=(boxes.words, Scratch("i32", programs, role=TURNS)),
        pdl=kernel.pdl,
        exchange=described(boxes),
        family="move",
    )


def _at(offset: str, constant: int) -> str:
    return f"{offset} + {constant}" if constant else offset
