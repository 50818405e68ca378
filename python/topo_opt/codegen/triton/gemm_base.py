"""What every form of a gemm kernel shares: its accumulators, its statistics, its epilogue and stores.

A rehearsal of the epilogue tells which accumulators there are: the distinct pairs of a contraction and the columns that
are asked of it. A form computes them, seeds them as values (`seed_product`, `seed_statistic`) and then stores the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from topo_opt.codegen.kernel_source import KernelSource, Param, Scratch
from topo_opt.codegen.triton import dependent_launch, exchange
from topo_opt.codegen.triton.contraction import find_all
from topo_opt.codegen.triton.element_types import compute_type, storage_type
from topo_opt.codegen.triton.emit import Axis, Value
from topo_opt.codegen.triton.gemm_row_parts import RowParts
from topo_opt.codegen.triton.gemm_terms import Accumulator, Block, Place, Statistic, is_identity
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.packed_weights import interleaved, steps_in_an_element
from topo_opt.codegen.triton.reductions import recognise
from topo_opt.codegen.triton.regions import evaluate_region
from topo_opt.codegen.triton.rehearsal import Load, RehearsingEmitter, Request
from topo_opt.codegen.triton.update import WRITES, destination
from topo_opt.codegen.triton.writer import Writer
from topo_opt.errors import UnsupportedError
from topo_opt.structured.access import domain_indices, forward_indices
from topo_opt.structured.graph import Node
from topo_opt.structured.index import Expr, contiguous_strides, delinearize, strided, symbol


@dataclass
class Gemm:
    """One kernel during emission. A form names its axes, then calls `plan` and emits."""

    kernel: Kernel

    def __post_init__(self) -> None:
        kernel, graph = self.kernel, self.kernel.graph
        self.contractions = find_all(graph)
        self.batch, self.m, self.n, self.k = self.contractions[0].counts
        self.parts: int = kernel.attributes.get("parts", 1)
        self.period: int = kernel.attributes.get("period", self.n // max(self.parts, 1))
        if self.parts < 1 or self.period < 1 or self.n % (self.parts * self.period):
            raise UnsupportedError(
                f"{self.parts} parts with period {self.period} in {self.n} columns",
                hint="parts * period divides the columns",
            )
        self.columns = self.n // self.parts
        self.row_parts = RowParts(self)
        self.tile = kernel.attributes.get("tile", {})
        self.pdl: bool = bool(kernel.attributes.get("pdl", False))
        self.element = graph.values[self.contractions[0].operand("left")[1]].element
        self._updates = {n.results[0]: n for n in graph.nodes if n.name in WRITES}
        read = {
            operand
            for node in graph.nodes
            for operand in node.operands
            if node.results[0] not in self._updates or operand not in destination(node)
        }
        pointers, self.params = kernel.pointer_params(read)
        columns = [self.column(part, symbol("n", self.columns)) for part in range(self.parts)]
        self.packed = steps_in_an_element(graph, pointers, self.contractions, columns)
        self.emitter = RehearsingEmitter(
            graph, Writer(indent=1), self._axes(), pointers, precision=kernel.precision_behind_products
        )
        self.exchange = exchange.InProduct(kernel, self.emitter)
        if self.exchange.described and self.batch > 1:
            raise UnsupportedError("a sum over devices of several products")

    @property
    def writer(self) -> Writer:
        """Where source goes now: a rehearsal has its own."""
        return self.emitter.writer

    # -- axes -------------------------------------------------------------------------------------------------------

    def _axes(self) -> dict[str, Axis]:
        raise NotImplementedError

    def axis(self, name: str, size: int, block: int, source: str | None = None) -> Axis:
        """A block axis; masked where blocks reach past the end."""
        return Axis(name, size, source or name, f"{source or name}_mask" if size % block else None)

    def define(self, axis: str, code: str) -> None:
        """Defines an axis variable and its mask."""
        found = self.emitter.axes[axis]
        self.writer.line(f"{found.source} = {code}")
        if found.mask:
            self.writer.line(f"{found.mask} = {found.source} < {found.size}")

    def define_batch(self) -> None:
        """Defines the batch index, the second program number."""
        if self.batch > 1:
            self.writer.line(f"b = tl.program_id(1){self.cast}")

    @property
    def cast(self) -> str:
        """What makes a program number wide enough for offsets, as source."""
        return ".to(tl.int64)" if self.kernel.wide else ""

    @property
    def batch_index(self) -> Expr:
        return symbol("b", self.batch)

    def column(self, part: int, position: Expr) -> Expr:
        """The column of the product that tile column `position` stands for in `part`."""
        if self.parts == 1:
            return position
        outer = position // self.period * (self.parts * self.period)
        return outer + part * self.period + position % self.period

    # -- what the epilogue needs ------------------------------------------------------------------------------------

    def places(self, row: Expr, position: Expr) -> list[Place]:
        """Where the values of a tile column go, in the order of the results."""
        graph = self.kernel.graph
        found: dict[Place, None] = {}
        for part in range(self.parts):
            column = self.column(part, position)
            for contraction in self.contractions:
                indices = contraction.result_indices(self.batch_index, row, column)
                reached = forward_indices(graph, contraction.node.results[0], indices)
                for number, value in enumerate(graph.returns):
                    update = self._updates.get(value)
                    source = value if update is None else _update_source(update)
                    if source in reached:
                        found[Place(number, value, tuple(reached[source]))] = None
        for value, chunks in self.row_parts.chunks.items():
            where = tuple(self.row_parts.indices(value, row))
            found[Place(graph.returns.index(value), value, where, chunks.size)] = None
        return sorted(found, key=lambda p: p.position)

    def check_coverage(self, places: Sequence[Place], elements: int) -> None:
        """Every result is written completely when each place stands for `elements` elements.

        Raises:
            UnsupportedError: a result is not one-to-one with the products.
        """
        graph = self.kernel.graph
        for position, value in enumerate(graph.returns):
            update = self._updates.get(value)
            shape = graph.values[value if update is None else _update_source(update)].shape or ()
            if sum(elements // p.columns for p in places if p.position == position) != prod(shape):
                raise UnsupportedError("a result of a gemm kernel that is not one-to-one with the product")

    def accumulator(self, request: Request, rows: Sequence[Expr]) -> Accumulator:
        """The product behind a request.

        Raises:
            UnsupportedError: it is asked for at a batch, row or column that no program of the tile has.
        """
        node, _, indices = request
        contraction = next(c for c in self.contractions if c.node.id == node)
        batch, row, column = contraction.position(indices)
        low, high = column.bounds
        if batch != self.batch_index or row not in rows or low < 0 or high >= self.n:
            raise UnsupportedError(f"a product is read at ({batch}, {row}, {column}), which no program holds")
        return Accumulator(request, contraction, row, column)

    def statistic(self, request: Request) -> Statistic:
        """The reduction behind a request.

        Raises:
            UnsupportedError: it is no reduction over k of a row, or its body is no known combination.
        """
        number, position, indices = request
        node = self.kernel.graph.nodes[number]
        sizes = [s for s, reduced in zip(node.domain, node.reduction) if reduced]
        if prod(sizes) not in (self.k, self.row_parts.parts):
            raise UnsupportedError(f"a reduction over {sizes} in a gemm kernel with k = {self.k}")
        if any(i.symbols & self._column_axes for i in indices):
            raise UnsupportedError("a reduction in a gemm kernel that depends on the column")
        found = recognise(node, position, self.kernel.graph.values[node.results[position]].element)
        if found is None:
            raise UnsupportedError("a reduction in a gemm kernel whose body is no known combination")
        return Statistic(request, node, found)

    @property
    def _column_axes(self) -> frozenset[str]:
        return frozenset(name for name in self.emitter.axes if name.startswith(("n", "k")))

    def order(
        self, operands: Sequence[Request], epilogue: Sequence[Request], k: Expr
    ) -> tuple[list[list[Statistic]], list[Statistic]]:
        """When statistics are computed.

        Args:
            operands, epilogue: what the factors of the products, and the epilogue, ask for.

        Returns:
            (those that must be known before the products, by how many others they wait for; those beside the products)
        """
        nested: dict[Request, list[Request]] = {}
        depth: dict[Request, int] = {}

        def visit(request: Request) -> int:
            if self.is_product(request):
                raise UnsupportedError("a product in a gemm kernel that depends on another product")
            if self.row_parts.is_sum(request):
                raise UnsupportedError("parts of rows that something before the epilogue depends on")
            if request not in depth:
                statistic = self.statistic(request)
                nested[request] = self.emitter.rehearse(lambda: self.term(statistic, k)).reductions
                depth[request] = 1 + max((visit(n) for n in nested[request]), default=-1)
            return depth[request]

        for request in (*operands, *epilogue):
            visit(request)
        first: dict[Request, None] = {}
        pending = [*operands, *(n for request in epilogue for n in nested[request])]
        while pending:
            request = pending.pop(0)
            first[request] = None
            pending.extend(n for n in nested[request] if n not in first)
        levels: list[list[Statistic]] = [[] for _ in range(1 + max((depth[r] for r in first), default=-1))]
        for request in first:
            levels[depth[request]].append(self.statistic(request))
        return levels, [self.statistic(r) for r in epilogue if r not in first]

    def is_product(self, request: Request) -> bool:
        """Whether a request is for a contraction, and not for a statistic."""
        return self.kernel.graph.nodes[request[0]].name == "linalg.contract"

    def sort(self, requests: Sequence[Request]) -> tuple[list[Request], list[Request], list[Statistic]]:
        """What an epilogue asks for: products, reductions over k, and reductions of parts of rows."""
        products = [r for r in requests if self.is_product(r)]
        parts = [r for r in requests if self.row_parts.is_sum(r)]
        beside = [r for r in requests if r not in products and r not in parts]
        return products, beside, [self.statistic(r) for r in parts]

    # -- values -----------------------------------------------------------------------------------------------------

    def operand(self, accumulator: Accumulator, side: str, k: Expr) -> Value:
        """A factor of a product, `left` or `right`, at index `k`."""
        contraction = accumulator.contraction
        position, value = contraction.operand(side)
        loop = contraction.loop(self.batch_index, accumulator.row, accumulator.column, k)
        return self.emitter.real(value, contraction.node.maps[position].apply(loop))

    def weights(self, accumulator: Accumulator, step: Expr) -> list[Value]:
        """The larger factor at all steps of k that share an element of memory, the `packed` ones from `step * packed` on."""
        return [self.operand(accumulator, "right", step * self.packed + j) for j in range(self.packed)]

    def statistic_element(self, statistic: Statistic) -> str:
        return self.kernel.graph.values[statistic.node.results[statistic.request[1]]].element

    def term(self, statistic: Statistic, k: Expr) -> Value:
        """What a statistic combines, at index `k`."""
        _, position, indices = statistic.request
        node = statistic.node
        sizes = [s for s, reduced in zip(node.domain, node.reduction) if reduced]
        loop = domain_indices(node, position, indices, delinearize(k, sizes))
        return evaluate_region(self.emitter, node, loop, statistic.recognised.term)

    def block_of_terms(self, statistic: Statistic, k: Expr, axes: tuple[str, str], shape: str) -> str:
        """What a statistic combines over `axes`, of which the second is that of `k`: neutral past the end."""
        value = self.term(statistic, k)
        source, mask = self.emitter.tensor(value), self.emitter.axes[axes[1]].mask
        if not set(axes) <= value.depends:
            source = self.writer.bind(f"tl.broadcast_to({source}, {shape})")
        neutral = statistic.combiner.identity
        zero = value.is_load and axes[1] in value.depends and neutral in ("0", "0.0")
        return self.writer.bind(f"tl.where({mask}, {source}, {neutral})") if mask and not zero else source

    def seed_product(self, accumulator: Accumulator, source: str, axes: Sequence[str]) -> None:
        """Makes `source` the value of a product, after its init is added."""
        number, position, indices = accumulator.request
        node = self.kernel.graph.nodes[number]
        loop = domain_indices(node, position, indices)
        init = self.emitter.real(node.operands[2], node.output_map(0).apply(loop))
        if not (init.is_literal and float(init.source) == 0.0):
            source = self.writer.bind(f"{source} + {self.emitter.tensor(init)}")
        self.emitter.seeds[(node.results[0], indices)] = Value(source, "f32", frozenset(axes))

    def seed_statistic(self, statistic: Statistic, source: str, axes: Sequence[str]) -> None:
        """Makes `source` the value of a statistic, after it is combined with its init."""
        _, position, indices = statistic.request
        node, combiner, element = statistic.node, statistic.combiner, self.statistic_element(statistic)
        if element.startswith("i"):
            source = self.writer.bind(f"{source}.to({compute_type(element)})")
        loop = domain_indices(node, position, indices)
        operand = node.operands[node.inputs + position]
        init = self.emitter.real(operand, node.output_map(position).apply(loop))
        if not (init.is_literal and is_identity(init, combiner)):
            source = self.writer.bind(combiner.combine(self.emitter.tensor(init), source))
        self.emitter.seeds[(node.results[position], indices)] = Value(source, element, frozenset(axes))

    def start(self) -> None:
        """Lets the next kernel start, unless that is to wait for the one before this."""
        for line in dependent_launch.at_start(self.kernel.late_trigger) if self.pdl else ():
            self.writer.line(line)
        self.exchange.begin(self.writer)

    def wait(self) -> None:
        """Waits for the kernel before this one, where it is launched dependently."""
        for line in dependent_launch.at_wait(self.kernel.late_trigger) if self.pdl else ():
            self.writer.line(line)
        self.exchange.turn(self.writer)

    @property
    def immutable(self) -> frozenset[int]:
        """Arguments, by value number, that no kernel writes."""
        positions = self.kernel.attributes.get("immutable", [])
        return frozenset(self.kernel.graph.arguments[p] for p in positions)

    def load_now(self, loads: Sequence[Load]) -> None:
        """Emits loads, so that later uses find them done."""
        for number, indices in loads:
            self.emitter.value(number, indices)

    def factor(self, value: Value, mask: str | None, k_axis: str, axes: set[str], shape: str) -> str:
        """A block of an operand of `tl.dot` in its storage type; what is past the end of k is zero."""
        source = value.narrow or f"{self.emitter.tensor(value)}.to({storage_type(self.element)})"
        # A masked axis of size one still has a block of more.
        wide = {a for a in axes if self.emitter.axes[a].size > 1 or self.emitter.axes[a].mask}
        if not wide <= value.depends or value.is_literal:
            source = f"tl.broadcast_to({source}, {shape})"
        if mask and not (value.is_load and k_axis in value.depends):
            source = f"tl.where({mask}, {source}, 0)"
        return source if source.isidentifier() else self.writer.bind(source)

    def packed_factor(
        self, values: Sequence[Value], mask: str | None, axis: str, axes: set[str], block: Block
    ) -> str:
        """As `factor`, of `weights` whose steps lie along `axis`."""
        parts = [self.factor(v, mask, axis, axes, block.of(self.packed)) for v in values]
        if self.packed == 1:
            return parts[0]
        joined = interleaved(parts)
        if block.k != len(block.shape) - 1:
            rank, new = len(block.shape), self.packed.bit_length() - 1
            order = [*range(block.k + 1), *range(rank, rank + new), *range(block.k + 1, rank)]
            joined = f"tl.permute({joined}, ({', '.join(map(str, order))}))"
        return self.writer.bind(f"tl.reshape({joined}, {block.of(1)})")

    # -- results ----------------------------------------------------------------------------------------------------

    def store(self, place: Place, axes: Sequence[str], shape: str) -> None:
        """Computes a result at its place and stores it, by way of its updating op where it has one."""
        pointer, update = f"out{place.position}", self._updates.get(place.value)
        if place.columns > 1:
            shape = self.row_parts.seed(place.value, symbol("m", self.m), place.indices, shape)
            axes = ["c" if axis == "n" else axis for axis in axes]
        if update is None:
            self.emitter.store(pointer, place.value, place.indices, axes, shape)
            return
        write = WRITES[update.name](self.emitter, update, list(place.indices))
        if write.atomic is not None:
            raise UnsupportedError("a product scattered with a combination", hint="only overwriting is fused")
        info = self.kernel.graph.values[place.value]
        where = strided(write.indices, contiguous_strides(info.shape or ()))
        guard = " & ".join(write.tests) or None
        self.emitter.store_scalar(pointer, write.value, where, info.element, axes, shape, guard)

    def store_all(self, places: Sequence[Place], axes: Sequence[str], shape: str) -> None:
        """As `store`, for all places of a block."""
        for place in places:
            self.store(place, axes, shape)

    def source(
        self,
        blocks: dict[str, int],
        grid: tuple[int, int, int],
        stages: int,
        scratch: Sequence[tuple[str, Scratch]] = (),
    ) -> KernelSource:
        """The finished kernel. `scratch` are named temporary buffers."""
        kernel = self.kernel
        scratch = [*scratch, *self.exchange.end(self.writer, grid[0])]
        params = [
            *self.params,
            *(Param(name, "scratch", i, buffer.dtype) for i, (name, buffer) in enumerate(scratch)),
        ]
        signature = ", ".join([p.name for p in params] + [f"{b}: tl.constexpr" for b in blocks])
        body = f"@triton.jit\ndef {kernel.name}({signature}):\n{self.writer.text()}"
        return KernelSource(
            name=kernel.name,
            source=kernel.file(body),
            params=tuple(params),
            grid=grid,
            num_warps=self.tile["warps"],
            num_stages=stages,
            constexprs=blocks,
            scratch=tuple(buffer for _, buffer in scratch),
            pdl=self.pdl,
            exchange=self.exchange.described,
            family="gemm",
        )


def _update_source(update: Node) -> int:
    return update.operands[1 if update.name == "topo.index_update" else 0]
