"""What all forms of a grouped product share: its shape, its accumulators, operands and results.

Accumulators are the distinct columns that the results ask the product for: one for a plain product, two where gate and up stand
side by side in one matrix and meet in the epilogue. A program computes rows `a` and columns `n` of the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton.element_types import storage_type
from topo_opt.codegen.triton.emit import Axis, Scalar, Value
from topo_opt.codegen.triton.group_rows import in_memory
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.rehearsal import RehearsingEmitter
from topo_opt.codegen.triton.writer import Writer
from topo_opt.errors import UnsupportedError
from topo_opt.structured.graph import Graph, Node
from topo_opt.structured.index import Expr, delinearize, opaque, symbol

OP = "topo.grouped_product"
_ELEMENTS = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Problem:
    """One `topo.grouped_product` and the shape of what the kernel returns."""

    node: Node
    rows: int
    inner: int
    groups: int
    columns: int
    """Columns of the results, of which each row has as many."""
    element: str

    @property
    def is_sorted(self) -> bool:
        """Whether rows come with their order by group."""
        return len(self.node.operands) > 3


def read_problem(graph: Graph) -> Problem:
    """The product of a kernel.

    Raises:
        UnsupportedError: not exactly one product, types without a kernel, or results that are not the same columns of all rows.
    """
    nodes = [n for n in graph.nodes if n.name == OP]
    if len(nodes) != 1:
        raise UnsupportedError(f"an experts kernel with {len(nodes)} {OP} ops", hint="it takes exactly one")
    x, weights = (graph.values[o] for o in nodes[0].operands[:2])
    if x.element not in _ELEMENTS:
        raise UnsupportedError(f"a grouped product of {x.element}")
    rows, inner = x.shape or (0, 0)
    counts = {graph.values[v].numel or 0 for v in graph.returns}
    if 0 in (rows, inner) or len(counts) != 1 or (count := counts.pop()) % rows:
        raise UnsupportedError("results of an experts kernel that are not the same columns of all rows")
    return Problem(nodes[0], rows, inner, (weights.shape or (0,))[0], count // rows, x.element)


class ProductEmitter(RehearsingEmitter):
    """As its base; a grouped product is asked for as a reduction is."""

    def _compute(self, number: int, indices: tuple[Expr, ...]) -> Scalar:
        node = self.graph.producer(number)
        if node is None or node.name != OP or number in self.pointers:
            return super()._compute(number, indices)
        if self.on_reduction is None:
            raise UnsupportedError(
                "a grouped product is asked for at a row or column that is not the kernel's"
            )
        return self.on_reduction(node, 0, indices)


class Experts:
    """One experts kernel; a form adds its axes and its main loop."""

    def __init__(self, kernel: Kernel):
        self.kernel, self.graph = kernel, kernel.graph
        self.writer = Writer(indent=1)
        self.problem = read_problem(kernel.graph)
        self.tile = kernel.attributes["tile"]
        used = {v for n in self.graph.nodes for v in n.operands}
        self.pointers, self.params = kernel.pointer_params(used)
        self.emitter = ProductEmitter(
            self.graph, self.writer, self.axes(), self.pointers, precision=kernel.precision_behind_products
        )
        self.n = symbol("n", self.problem.columns)
        self.cast = ".to(tl.int64)" if kernel.wide else ""

    def axes(self) -> dict[str, Axis]:
        """The axes of the tile by name; `n` is among them."""
        raise NotImplementedError

    def axis(self, name: str, size: int, block: int) -> Axis:
        return Axis(name, size, name, f"{name}_mask" if size % block else None)

    def define(self, name: str, code: str) -> None:
        """Defines an axis variable and its mask."""
        axis = self.emitter.axes[name]
        self.writer.line(f"{axis.source} = {code}")
        if axis.mask:
            self.writer.line(f"{axis.mask} = {axis.source} < {axis.size}")

    @property
    def expert(self) -> Expr:
        """The group of the rows at hand, held by the variable `expert`."""
        return opaque("expert", 0, self.problem.groups - 1, frozenset())

    def pointer(self, operand: int) -> str:
        """The pointer of an operand of the product that is read as it is: groups, order, offsets."""
        return self.pointers[in_memory(self.graph, self.problem.node.operands[operand])]

    # -- operands -----------------------------------------------------------------------------------------------------

    def rows_of(self, a: Expr, k: Expr) -> Value:
        return self.emitter.real(self.problem.node.operands[0], [a, k])

    def weights_of(self, k: Expr, column: Expr) -> Value:
        return self.emitter.real(self.problem.node.operands[1], [self.expert, k, column])

    def factor(self, value: Value, k_axis: str, wide: set[str], shape: str) -> str:
        """A block of an operand in its storage type, spread over its axes, zero past the end of k."""
        element = self.problem.element
        narrow = value.narrow if value.element == element else None
        source = narrow or f"{self.emitter.tensor(value)}.to({storage_type(element)})"
        if value.is_literal or not {a for a in wide if self.emitter.axes[a].size > 1} <= value.depends:
            source = f"tl.broadcast_to({source}, {shape})"
        mask = self.emitter.axes[k_axis].mask
        if mask and not (value.is_load and k_axis in value.depends):
            source = f"tl.where({mask}, {source}, 0).to({storage_type(element)})"
        return source if source.isidentifier() else self.writer.bind(source)

    # -- results ------------------------------------------------------------------------------------------------------

    def places(self, a: Expr) -> list[list[Expr]]:
        """Indices of every result at row `a` and column n."""
        position = a * self.problem.columns + self.n
        return [delinearize(position, self.graph.values[v].shape or ()) for v in self.graph.returns]

    def columns_asked(self, a: Expr) -> list[Expr]:
        """Columns of the product that the results need: those of the accumulators.

        Raises:
            UnsupportedError: the results need the product at another row than their own.
        """
        needs = self.emitter.rehearse(
            lambda: [self.emitter.value(v, i) for v, i in zip(self.graph.returns, self.places(a))]
        )
        found = []
        for number, _, (row, column) in needs.reductions:
            if self.graph.nodes[number] is not self.problem.node or row != a:
                raise UnsupportedError("an experts kernel whose results are not computed row by row")
            if not column.symbols <= {"n"}:
                raise UnsupportedError("a column of a grouped product that depends on its row")
            found.append(column)
        if not found:
            raise UnsupportedError("an experts kernel whose results do not need its product")
        return found

    def finish(
        self, a: Expr, columns: Sequence[Expr], sums: Sequence[str], axes: Sequence[str], shape: str
    ) -> None:
        """Seeds the accumulators as the product and stores every result."""
        anchor = self.problem.node.results[0]
        element = self.graph.values[anchor].element
        for column, total in zip(columns, sums, strict=True):
            self.emitter.seeds[(anchor, (a, column))] = Value(total, element, frozenset(axes))
        for position, (value, indices) in enumerate(zip(self.graph.returns, self.places(a))):
            self.emitter.store(f"out{position}", value, indices, axes, shape)

    def source(self, blocks: dict[str, int], grid: tuple[int, int, int]) -> KernelSource:
        kernel = self.kernel
        return KernelSource(
            name=kernel.name,
            source=kernel.define(self.params, blocks, self.writer.lines),
            params=tuple(self.params),
            grid=grid,
            num_warps=self.tile["warps"],
            num_stages=self.tile.get("stages", 1),
            constexprs=blocks,
            pdl=kernel.pdl,
            family="experts",
        )
