"""Pointwise ops and reductions over whole rows.

The tile has two axes: `x`, a block of rows (parallel dimensions, row-major), and `r`, the reduction dimensions. Without
reduction there is only `x`, or `y` and `x` where operands lie along two axes. When the row fits in one block the kernel is
*persistent*: one read of the input. Otherwise it loops over blocks of the row (`looped_rows`).

`topo.kernel` of this family: `rows`, `cols` (sizes of the two spaces), `full_shape` and `full_map` (affine map from rows and
cols to the indices of a tensor that spans both, which fixes the row-major order of full-size results), `tile`
(`x`, `r` block sizes, `warps`; `parts`: programs that share the columns of a block of rows; `y`, `across`, `inner`,
`inner_cols`: `iteration_space`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from torch_mlir import ir

from topo_opt.codegen.kernel_source import KernelSource, Scratch
from topo_opt.codegen.triton import exchange_boxes
from topo_opt.codegen.triton.element_types import compute_type
from topo_opt.codegen.triton.emit import Axis, Emitter, Scalar, Value
from topo_opt.codegen.triton.exchange import Taker
from topo_opt.codegen.triton.iteration_space import read_space
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.looped_rows import LoopedRows
from topo_opt.codegen.triton.reductions import Combiner, recognise
from topo_opt.codegen.triton.regions import evaluate_region
from topo_opt.codegen.triton.writer import Writer
from topo_opt.errors import UnsupportedError
from topo_opt.structured.access import domain_indices
from topo_opt.structured.graph import Node
from topo_opt.structured.index import Expr, delinearize, symbol

Request = tuple[int, int, tuple[Expr, ...]]
"""A reduction that is needed: node, result position, result indices."""


def lower(kernel: Kernel) -> KernelSource:
    """The Triton kernel of a function of family `loops`."""
    return Loops(kernel).lower()


@dataclass
class Loops:
    """Emission of one kernel; `looped_rows` and its accumulators ask for rows, terms and results."""

    kernel: Kernel
    writer: Writer = field(default_factory=lambda: Writer(indent=1))
    tile: Mapping[str, int] = field(default_factory=dict)
    """Instead of that of `topo.kernel`, where it is given."""

    def __post_init__(self) -> None:
        kernel, graph = self.kernel, self.kernel.graph
        self.tile = self.tile or kernel.attributes["tile"]
        self.space = space = read_space(kernel, self.tile)
        used = {v for node in graph.nodes for v in node.operands} | set(graph.returns)
        pointers, self.params = kernel.pointer_params(used)
        self.taker = Taker.of(kernel, space.blocks, self.tile["warps"])
        self._summed_pointer = "" if self.taker is None else pointers.pop(self.taker.value)
        self.emitter = Emitter(graph, self.writer, self._axes(), pointers, precision=kernel.precision)
        held = space.persistent and not space.y_block
        self.emitter.on_reduction = self._reduce_now if held else self.reduction_missing

    def lower(self) -> KernelSource:
        kernel, graph = self.kernel, self.kernel.graph
        space, params = self.space, list(self.params)
        scratch: tuple[Scratch, ...] = ()
        self._define_rows()
        if self.taker is not None:
            self._sum_over_ranks(self.taker)
            params, scratch = [*params, *exchange_boxes.PARAMS], self.taker.scratch
        if space.persistent:
            self.define_cols("tl.arange(0, RBLOCK)[None, :]")
            for position in range(len(graph.returns)):
                self.store(position)
        else:
            looped = LoopedRows(self)
            looped.lower()
            params, scratch = params + looped.params, tuple(looped.scratch)
        blocks = {"YBLOCK": space.y_block} if space.y_block else {}
        blocks |= {"XBLOCK": space.x_block} | ({"RBLOCK": space.r_block} if space.col_count > 1 else {})
        return KernelSource(
            name=kernel.name,
            source=kernel.define(params, blocks, self.writer.lines),
            params=tuple(params),
            scratch=scratch,
            grid=(space.blocks, space.parts, 1),
            num_warps=self.tile["warps"],
            num_stages=self.tile.get("stages", 1 if space.persistent else 3),
            constexprs=blocks,
            pdl=kernel.pdl,
            exchange=self.taker.described if self.taker else None,
            taken=self.taker.argument if self.taker else None,
            family="loops",
        )

    def _sum_over_ranks(self, taker: Taker) -> None:
        """The sum of the operand that is exchanged, at the one place where this kernel may read it."""
        space = self.space
        if space.col_count > 1 or space.y_block or space.row_count != taker.numel:
            raise UnsupportedError("an operand that is summed over ranks is read more than once")
        indices = tuple(delinearize(space.x, taker.shape))
        for value, info in enumerate(self.kernel.graph.values):
            # What is read at the same place is asked for before this waits.
            if value in self.emitter.pointers and info.shape == taker.shape:
                self.emitter.value(value, indices)
        total = taker.emit(self.emitter, indices, self._summed_pointer)
        self.emitter.seeds[taker.value, indices] = total

    # -- axes -------------------------------------------------------------------------------------------------------

    def _axes(self) -> dict[str, Axis]:
        space = self.space
        x_mask = "x_mask" if space.x_count % space.x_block else None
        covered = space.part_columns * space.parts if space.parts > 1 else space.r_block
        r_mask = "r_mask" if covered and space.r_count % covered else None
        axes = {"x": Axis("x", space.x_count, "x", x_mask), "r": Axis("r", space.r_count, "r", r_mask)}
        if space.y_block:
            y_mask = "y_mask" if space.y_count % space.y_block else None
            axes["y"] = Axis("y", space.y_count, "y", y_mask)
        if space.q_count > 1:
            axes["q"] = Axis("q", space.q_count, "q", scalar=True)
        if space.outer_count > 1:
            axes["b"] = Axis("b", space.outer_count, "b", scalar=True)
        return axes

    def _define_rows(self) -> None:
        """Defines the rows of the block and their masks; neighbouring programs have neighbouring blocks along x."""
        space, axes = self.space, self.emitter.axes
        program = "tl.program_id(0).to(tl.int64)" if self.kernel.wide else "tl.program_id(0)"
        along_x = "[None, :]" if space.y_block else "[:, None]"
        if space.blocks == space.x_blocks:
            self.writer.line(f"x = {program} * XBLOCK + tl.arange(0, XBLOCK){along_x}")
        else:
            self.writer.line(f"program = {program}")
            self._define_block("x", "program", space.x_blocks, along_x)
        if axes["x"].mask:
            self.writer.line(f"x_mask = x < {space.x_count}")
        if space.y_block:
            behind = f"program // {space.x_blocks}" if space.x_blocks > 1 else "program"
            self._define_block("y", behind, space.y_blocks, "[:, None]")
            if axes["y"].mask:
                self.writer.line(f"y_mask = y < {space.y_count}")
        if "b" in axes:
            of_rows = space.x_blocks * space.y_blocks
            self.writer.line(f"b = program // {of_rows}" if of_rows > 1 else "b = program")

    def _define_block(self, axis: str, number: str, blocks: int, direction: str) -> None:
        """Defines an axis whose block is the remainder of `number` by the number of blocks."""
        block = f"{axis.upper()}BLOCK"
        elements = f"tl.arange(0, {block}){direction}"
        if blocks > 1:
            self.writer.line(f"{axis} = {number} % {blocks} * {block} + {elements}")
        else:
            self.writer.line(f"{axis} = {elements}{'.to(tl.int64)' if self.kernel.wide else ''}")

    def define_cols(self, source: str) -> None:
        """Defines `r`, the columns of the block, and its mask."""
        if self.space.col_count == 1:
            return
        self.writer.line(f"r = {source}")
        if self.emitter.axes["r"].mask:
            self.writer.line(f"r_mask = r < {self.space.r_count}")

    @property
    def tile_shape(self) -> str:
        """Source of the shape of a block."""
        return "(XBLOCK, RBLOCK)" if self.space.col_count > 1 else self._rows_shape

    @property
    def _rows_shape(self) -> str:
        return "(YBLOCK, XBLOCK)" if self.space.y_block else "(XBLOCK, 1)"

    # -- results ----------------------------------------------------------------------------------------------------

    def is_full(self, value: int) -> bool:
        """Whether a result has an element for every row and column."""
        return self.space.col_count > 1 and self.kernel.graph.values[value].numel != self.space.row_count

    def result_indices(self, value: int) -> list[Expr]:
        """Indices of a result at the block's rows and columns."""
        shape = self.kernel.graph.values[value].shape or ()
        return delinearize(self.space.full if self.is_full(value) else self.space.x, shape)

    def store(self, position: int) -> None:
        """Computes and stores a result of the kernel."""
        value = self.kernel.graph.returns[position]
        indices = self.result_indices(value)
        shape = self.tile_shape if self.is_full(value) else self._rows_shape
        rows = ("y", "x") if self.space.y_block else ("x",)
        axes = (*rows, "r") if self.is_full(value) else rows
        self.emitter.store(f"out{position}", value, indices, axes, shape)

    # -- reductions -------------------------------------------------------------------------------------------------

    def reduction_loop(self, node: Node, column: Expr) -> list[Expr]:
        """Indices of a reduction's own dimensions at a column."""
        sizes = [s for s, reduced in zip(node.domain, node.reduction) if reduced]
        if prod(sizes) != self.space.col_count:
            raise UnsupportedError(f"a reduction over {sizes} in a kernel of {self.space.col_count} columns")
        return delinearize(column, sizes)

    def term(self, node: Node, position: int, indices: tuple[Expr, ...]) -> tuple[Value, Combiner] | None:
        """The masked value to reduce and its combiner, or None when the body is not a known combination."""
        element = self.kernel.graph.values[node.results[position]].element
        loop = domain_indices(node, position, indices, self.reduction_loop(node, self.space.r))
        if node.name == "linalg.contract":
            return self._contract_term(node, loop, element)
        known = recognise(node, position, element)
        if known is None:
            return None
        term = self.region_value(node, loop, known.term)
        return self._masked(term, known.combiner.identity, element), known.combiner

    def _contract_term(self, node: Node, loop: list[Expr], element: str) -> tuple[Value, Combiner]:
        factors = [self.emitter.real(node.operands[i], node.maps[i].apply(loop)) for i in range(2)]
        texts = [f"{self.emitter.tensor(f)}.to({compute_type(element)})" for f in factors]
        product = Value(self.writer.bind(" * ".join(texts)), element, factors[0].depends | factors[1].depends)
        return self._masked(product, "0", element), Combiner("+", "0", None)

    def region_value(self, node: Node, loop: list[Expr], wanted: ir.Value) -> Value:
        """A scalar of a node's region at loop indices."""
        return evaluate_region(self.emitter, node, loop, wanted)

    def unmasked_term(self, node: Node, position: int, indices: tuple[Expr, ...]) -> Value:
        """As `term` for a body that is a known combination; past the last column it may be anything."""
        known = recognise(node, position, self.kernel.graph.values[node.results[position]].element)
        assert known is not None
        loop = domain_indices(node, position, indices, self.reduction_loop(node, self.space.r))
        return self.region_value(node, loop, known.term)

    def starts_from_identity(
        self, node: Node, position: int, indices: tuple[Expr, ...], combiner: Combiner
    ) -> bool:
        """Whether what a reduction starts from changes nothing."""
        init = self._init(node, position, indices)
        return init.is_literal and _same_number(init.source, combiner.identity)

    def spread(self, value: Value) -> str:
        """Source of a value with one element for every row and column of the block."""
        source = self.emitter.tensor(value)
        if self.space.col_count > 1 and ("r" not in value.depends or "x" not in value.depends):
            source = self.writer.bind(f"tl.broadcast_to({source}, {self.tile_shape})")
        return source

    def _masked(self, value: Value, identity: str, element: str) -> Value:
        source = self.spread(value)
        mask = self.emitter.axes["r"].mask
        if mask and self.space.col_count > 1:
            source = self.writer.bind(f"tl.where({mask}, {source}, {identity})")
        return Value(source, element, value.depends | {"x", "r"})

    def _init(self, node: Node, position: int, indices: tuple[Expr, ...]) -> Value:
        loop = domain_indices(node, position, indices)
        operand = node.operands[node.inputs + position]
        return self.emitter.real(operand, node.output_map(position).apply(loop))

    def finish(self, node: Node, position: int, indices: tuple[Expr, ...], reduced: str, combiner) -> Value:
        """The result of a reduction from its reduced terms and what it starts from."""
        element = self.kernel.graph.values[node.results[position]].element
        total = self.writer.bind(
            f"{reduced}.to({compute_type(element)})" if element.startswith("i") else reduced
        )
        if not self.starts_from_identity(node, position, indices, combiner):
            init = self._init(node, position, indices)
            total = self.writer.bind(combiner.combine(self.emitter.tensor(init), total))
        return Value(total, element, frozenset("x"))

    def _reduce_now(self, node: Node, position: int, indices: tuple[Expr, ...]) -> Scalar:
        """Persistent kernels: the whole row is in the tile."""
        if any("r" in i.symbols for i in indices):
            raise UnsupportedError("a reduction is read at another row than the kernel's own")
        found = self.term(node, position, indices)
        if found is None:
            return self.sequential(node, indices)[position]
        term, combiner = found
        return self.finish(node, position, indices, combiner.reduce(term.source), combiner)

    def reduction_missing(self, node: Node, position: int, indices: tuple[Expr, ...]) -> Scalar:
        """For places where every reduction must be known already."""
        raise UnsupportedError("a reduction is read at another row than the kernel's own")

    def sequential(self, node: Node, indices: tuple[Expr, ...]) -> list[Scalar]:
        """Any body at all: one column after the other, every row in parallel."""
        graph = self.kernel.graph
        elements = [graph.values[v].element for v in node.results]
        states = []
        for position, element in enumerate(elements):
            name = self.writer.fresh("acc")
            init = self.emitter.tensor(self._init(node, position, indices))
            self.writer.line(f"{name} = tl.broadcast_to({init}, (XBLOCK, 1)).to({compute_type(element)})")
            states.append(name)
        axes = self.emitter.axes
        counter, column = self.writer.fresh("step"), self.writer.fresh("col")
        self.emitter.axes = dict(axes) | {column: Axis(column, self.space.col_count, column)}
        saved, self.emitter.on_reduction = self.emitter.on_reduction, self.reduction_missing
        try:
            with self.emitter.scope(f"for {counter} in range(0, {self.space.col_count}):"):
                self.writer.line(f"{column} = tl.full((1, 1), {counter}, tl.int32)")
                loop = domain_indices(
                    node, 0, indices, self.reduction_loop(node, symbol(column, self.space.col_count))
                )
                current = [Value(s, e, frozenset("x")) for s, e in zip(states, elements)]
                updated = self.emitter.body(node, loop, range(len(states)), current)
                texts = [self.emitter.tensor(v) for v in updated if isinstance(v, Value)]
                fresh = [self.writer.fresh("new") for _ in states]
                for name, text, element in zip(fresh, texts, elements):
                    self.writer.line(
                        f"{name} = tl.broadcast_to({text}, (XBLOCK, 1)).to({compute_type(element)})"
                    )
                for state, name in zip(states, fresh):
                    self.writer.line(f"{state} = {name}")
        finally:
            self.emitter.axes, self.emitter.on_reduction = axes, saved
        return [Value(s, e, frozenset("x")) for s, e in zip(states, elements)]


def _same_number(a: str, b: str) -> bool:
    """Whether two literals are the same number."""
    names = {"True": "1", "False": "0"}
    left, right = (names.get(t, t).removeprefix("float('").removesuffix("')") for t in (a, b))
    return float(left) == float(right)
