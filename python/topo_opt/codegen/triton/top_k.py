"""The largest elements of short rows (`topo.top_k`), with what is computed of a row before and of its picks after.

A program holds whole rows. Each element becomes one 64-bit key, its value in an order that integers have above its position,
so that the largest key is the next pick and names its place; `k` picks are `k` maxima. Reductions over the row (a softmax
before) and over the picks (a renormalisation after) are done in the same block.

`topo.kernel` of this family: `tile` = `x` (rows of a block), `warps`.
"""

from __future__ import annotations

from math import prod

from torch_mlir import ir

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton.element_types import compute_type
from topo_opt.codegen.triton.emit import Axis, Emitter, Scalar, Value
from topo_opt.codegen.triton.kernel import Kernel, next_power_of_two
from topo_opt.codegen.triton.reductions import recognise
from topo_opt.codegen.triton.regions import evaluate_region
from topo_opt.codegen.triton.writer import Writer
from topo_opt.errors import UnsupportedError
from topo_opt.structured.access import domain_indices
from topo_opt.structured.graph import Graph, Node
from topo_opt.structured.index import Expr, delinearize, symbol

OP = "topo.top_k"
_FLOATS = ("f32", "f16", "bf16")
_INTEGERS = ("i32", "i16", "i8")
_NEVER = "-9223372036854775808"
_MAGNITUDE = "0x7FFFFFFF"


def lower(kernel: Kernel) -> KernelSource:
    """The Triton kernel of a function of family `top_k`.

    Raises:
        UnsupportedError: something in the kernel that is not of its rows or of their picks.
    """
    return _TopK(kernel).lower()


def anchor_of(graph: Graph) -> Node:
    """The op of a top_k kernel."""
    found = [n for n in graph.nodes if n.name == OP]
    if len(found) != 1:
        raise UnsupportedError(f"a top_k kernel with {len(found)} {OP} ops", hint="it takes exactly one")
    return found[0]


class _TopK:
    def __init__(self, kernel: Kernel):
        self.kernel, self.writer = kernel, Writer(indent=1)
        graph = kernel.graph
        self.node = anchor_of(graph)
        source = graph.values[self.node.operands[0]]
        if source.element not in (*_FLOATS, *_INTEGERS):
            raise UnsupportedError(f"picking from elements of type {source.element}")
        *self.lead, self.columns = source.shape or ()
        self.rows = prod(self.lead)
        self.picks = ir.IntegerAttr(self.node.op.attributes["k"]).value
        self.element = source.element
        self.after = _after(graph, self.node)
        self.block = kernel.attributes["tile"]["x"]
        self.blocks = {
            "XBLOCK": self.block,
            "RBLOCK": next_power_of_two(self.columns),
            "KBLOCK": next_power_of_two(self.picks),
        }
        used = {v for n in graph.nodes for v in n.operands} | set(graph.returns)
        pointers, self.params = kernel.pointer_params(used)
        axes = {
            "x": Axis("x", self.rows, "x", "x_mask" if self.rows % self.block else None),
            "r": Axis("r", self.columns, "r", "r_mask" if self.columns != self.blocks["RBLOCK"] else None),
            "j": Axis("j", self.picks, "j", "j_mask" if self.picks != self.blocks["KBLOCK"] else None),
        }
        self.emitter = Emitter(graph, self.writer, axes, pointers, precision=kernel.precision)
        self.emitter.on_reduction = self._reduce

    def lower(self) -> KernelSource:
        kernel, line = self.kernel, self.writer.line
        program = "tl.program_id(0).to(tl.int64)" if kernel.wide else "tl.program_id(0)"
        line(f"x = {program} * XBLOCK + tl.arange(0, XBLOCK)[:, None]")
        line("r = tl.arange(0, RBLOCK)[None, :]")
        line("j = tl.arange(0, KBLOCK)[None, :]")
        for axis in self.emitter.axes.values():
            if axis.mask:
                line(f"{axis.mask} = {axis.source} < {axis.size}")
        self._pick()
        for position, value in enumerate(kernel.graph.returns):
            self._store(position, value)
        return KernelSource(
            name=kernel.name,
            source=kernel.define(self.params, self.blocks, self.writer.lines),
            params=tuple(self.params),
            grid=(-(-self.rows // self.block), 1, 1),
            num_warps=kernel.attributes["tile"]["warps"],
            constexprs=self.blocks,
            pdl=kernel.pdl,
            family="top_k",
        )

    # -- picking ------------------------------------------------------------------------------------------------------

    def _pick(self) -> None:
        """Picks from all rows, and seeds the results of the op."""
        line, bind = self.writer.line, self.writer.bind
        x = symbol("x", self.rows)
        rows = delinearize(x, self.lead)
        value = self.emitter.real(self.node.operands[0], [*rows, symbol("r", self.columns)])
        source = bind(f"tl.broadcast_to({self.emitter.tensor(value)}, (XBLOCK, RBLOCK))")
        largest = ir.BoolAttr(self.node.op.attributes["largest"]).value
        rank = self._rank(source)
        if not largest:
            rank = bind(f"~{rank}")
        line(f"keys = {rank}.to(tl.int64) * 4294967296 + ({self.columns - 1} - r)")
        if mask := self.emitter.axes["r"].mask:
            line(f"keys = tl.where({mask}, keys, {_NEVER})")
        line("picked = tl.zeros((XBLOCK, KBLOCK), tl.int64)")
        with self.writer.block(f"for step in range({self.picks}):"):
            line("best = tl.max(keys, axis=1)[:, None]")
            line("picked = tl.where(j == step, best, picked)")
            line(f"keys = tl.where(keys == best, {_NEVER}, keys)")
        line(f"places = {self.columns - 1} - (picked & 0xFFFFFFFF)")
        line("ranks = (picked >> 32).to(tl.int32)")
        values = self._unrank("ranks" if largest else bind("~ranks"))
        indices = (*rows, symbol("j", self.picks))
        for result, name, element in zip(self.node.results, (values, "places"), (self.element, "i64")):
            self.emitter.seeds[(result, indices)] = Value(name, element, frozenset("xj"))

    def _rank(self, source: str) -> str:
        """32-bit integers in the order of the values: NaN last, and both zeros the same."""
        bind = self.writer.bind
        if self.element in _INTEGERS:
            return bind(f"{source}.to(tl.int32)")
        bits = bind(f"({source} + 0.0).to(tl.int32, bitcast=True)")
        ranks = bind(f"{bits} ^ (({bits} >> 31) & {_MAGNITUDE})")
        return bind(f"tl.where({source} == {source}, {ranks}, {_MAGNITUDE})")

    def _unrank(self, ranks: str) -> str:
        bind = self.writer.bind
        if self.element in _INTEGERS:
            return bind(f"{ranks}.to({compute_type(self.element)})")
        bits = bind(f"{ranks} ^ (({ranks} >> 31) & {_MAGNITUDE})")
        return bind(f"{bits}.to(tl.float32, bitcast=True)")

    # -- reductions ---------------------------------------------------------------------------------------------------

    def _reduce(self, node: Node, position: int, indices: tuple[Expr, ...]) -> Scalar:
        """A reduction over the row, or over its picks when it depends on them."""
        if any({"r", "j"} & i.symbols for i in indices):
            raise UnsupportedError("a reduction is read at another row than the kernel's own")
        name, length = ("j", self.picks) if node.id in self.after else ("r", self.columns)
        sizes = [s for s, reduced in zip(node.domain, node.reduction) if reduced]
        element = self.kernel.graph.values[node.results[position]].element
        known = recognise(node, position, element)
        if prod(sizes) != length or known is None:
            raise UnsupportedError(f"a reduction over {sizes} beside rows of {length}")
        loop = domain_indices(node, position, indices, delinearize(symbol(name, length), sizes))
        shape = "(XBLOCK, KBLOCK)" if name == "j" else "(XBLOCK, RBLOCK)"
        term = self.writer.bind(
            f"tl.broadcast_to({self.emitter.tensor(evaluate_region(self.emitter, node, loop, known.term))}, {shape})"
        )
        if mask := self.emitter.axes[name].mask:
            term = self.writer.bind(f"tl.where({mask}, {term}, {known.combiner.identity})")
        total = self.writer.bind(f"{known.combiner.reduce(term)}.to({compute_type(element)})")
        init = self.emitter.real(
            node.operands[node.inputs + position],
            node.output_map(position).apply(domain_indices(node, position, indices)),
        )
        if not (init.is_literal and init.source == known.combiner.identity):
            total = self.writer.bind(known.combiner.combine(self.emitter.tensor(init), total))
        return Value(total, element, frozenset("x"))

    # -- results ------------------------------------------------------------------------------------------------------

    def _store(self, position: int, value: int) -> None:
        """A result of the rows, of their elements, or of their picks, whichever its size says."""
        info = self.kernel.graph.values[value]
        producer = self.kernel.graph.producer(value)
        picks = producer is not None and (producer.id in self.after or producer is self.node)
        x, name, length = symbol("x", self.rows), "j" if picks else "r", self.picks if picks else self.columns
        if info.numel == self.rows * length:
            place = x * length + symbol(name, length)
            axes, shape = ["x", name], f"(XBLOCK, {'KBLOCK' if picks else 'RBLOCK'})"
        elif info.numel == self.rows:
            place, axes, shape = x, ["x"], "(XBLOCK, 1)"
        else:
            raise UnsupportedError(f"a result of {info.numel} elements of {self.rows} rows")
        self.emitter.store(f"out{position}", value, delinearize(place, info.shape or ()), axes, shape)


def _after(graph: Graph, anchor: Node) -> frozenset[int]:
    """Nodes that depend on the results of the op."""
    reached, found = set(anchor.results), set()
    for node in graph.nodes:
        if any(o in reached for o in node.operands):
            found.add(node.id)
            reached.update(node.results)
    return frozenset(found)
