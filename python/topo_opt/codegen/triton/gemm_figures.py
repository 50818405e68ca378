"""What the cost of a gemm kernel depends on, read off a rehearsal of it without any tile."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from topo_opt.codegen.triton.contraction import find_all
from topo_opt.codegen.triton.emit import Axis
from topo_opt.codegen.triton.gemm_base import Gemm
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.recorded_loads import ALIGNMENT, single_load
from topo_opt.codegen.triton.rehearsal import Load
from topo_opt.errors import UnsupportedError
from topo_opt.structured.graph import element_bytes
from topo_opt.structured.index import Expr, Symbol, contiguous_strides, strided, symbol


@dataclass(frozen=True)
class Figures:
    """Sizes of a gemm kernel.

    `columns` are those of one part, `products` the accumulators of a column: contractions times parts.
    """

    batch: int
    m: int
    columns: int
    k: int
    products: int
    element: str
    weight_bytes: float
    """Bytes that one step of k and one column of the tile read from the larger factors, all products together."""
    row_bytes: float
    """Bytes that one step of k and one row read from the smaller factors and for statistics."""
    contiguous: bool
    """Neighbours along k of the larger factors are neighbours in memory."""
    statistics: int
    early_statistics: bool
    """A factor waits for a statistic."""
    chunk: int = 1
    """Columns that an element of a result stands for (`gemm_row_parts`): a tile has whole chunks."""
    row_parts: int = 1
    """Parts of a row that the epilogue combines."""
    ragged: bool = False
    """A factor with aligned rows ends within a vector: its mask leaves single elements to loads through pointers."""
    alike: bool = False
    """Two products of the same rows in halves, whose weights a descriptor may span (`gemm_descriptors.Pair`)."""
    scattered: bool = False
    """Neither rows nor steps of k of the left factor are at one distance in memory, as of windows that overlap: its elements are loaded one by one."""

    @property
    def width(self) -> int:
        """Bytes of a factor as it is multiplied."""
        return element_bytes(self.element)

    @property
    def half(self) -> bool:
        """Whether tensor cores take the factors as they are."""
        return self.element in ("bf16", "f16")


def figures_of(kernel: Kernel) -> Figures:
    """The figures of a kernel; of its contractions alone where it can't be lowered, which lowering will then say."""
    try:
        return _Probe(kernel).figures()
    except UnsupportedError:
        found = find_all(kernel.graph)
        batch, m, n, k = found[0].counts
        element = kernel.graph.values[found[0].operand("left")[1]].element
        width = element_bytes(element)
        return Figures(batch, m, n, k, len(found), element, width * len(found), width, True, 0, False)


def loaded_factors(kernel: Kernel) -> list[tuple[int, Expr]]:
    """The value in memory and the element of it, over `b`, `m`, `n` and `k`, of every factor that is not computed."""
    try:
        return _Probe(kernel).loaded()
    except UnsupportedError:  # lowering says it
        return []


class _Probe(Gemm):
    """Every axis is one block."""

    def _axes(self) -> dict[str, Axis]:
        sizes = {"m": self.m, "n": self.columns, "k": self.k, "kp": self.k // self.packed}
        parts = self.row_parts.axes(self.columns)
        return (
            parts
            | {name: Axis(name, size, name) for name, size in sizes.items()}
            | {"b": Axis("b", self.batch, "b", scalar=True)}
        )

    def figures(self) -> Figures:
        m, n, k = symbol("m", self.m), symbol("n", self.columns), symbol("k", self.k)
        places = self.places(m, n)
        self.check_coverage(places, self.batch * self.m * self.columns)
        needs = self.emitter.rehearse(lambda: self.store_all(places, ("m", "n"), "(BLOCK_M, BLOCK_N)"))
        asked, beside, row_sums = self.sort(needs.reductions)
        products = [self.accumulator(r, [m]) for r in asked]
        step = symbol("kp", self.k // self.packed) if self.packed > 1 else k
        right = self.emitter.rehearse(lambda: [self.weights(a, step) for a in products])
        left = self.emitter.rehearse(lambda: [self.operand(a, "left", k) for a in products])
        early, late = self.order([*right.reductions, *left.reductions], beside, k)
        statistics = [s for level in [*early, late] for s in level]
        rows = self.emitter.rehearse(
            lambda: [[self.operand(a, "left", k) for a in products], [self.term(s, k) for s in statistics]]
        )
        steps = [self._step(load) for load in right.loads]
        return Figures(
            self.batch,
            self.m,
            self.columns,
            self.k,
            max(len(products), 1),
            self.element,
            sum(size * min(step, 1.0) for size, step in steps) / self.packed or element_bytes(self.element),
            sum(size * min(step, 1.0) for size, step in map(self._step, rows.loads)),
            all(step <= 1.0 for _, step in steps),
            len(statistics),
            any(early),
            self.row_parts.chunk,
            self.row_parts.parts if row_sums else 1,
            any(map(self._is_ragged, [*right.loads, *left.loads])),
            len(products) == 2 and len({*left.loads}) == 1 and self._alike(right.loads),
            any(map(self._is_scattered, left.loads)),
        )

    def _alike(self, loads: Sequence[Load]) -> bool:
        """Whether two operands in memory lie there in the same way."""
        graph = self.kernel.graph
        if len(loads) != 2 or any(number not in graph.arguments for number, _ in loads):
            return False
        (first, start), (second, other) = (
            (graph.arguments.index(number), strided(i, contiguous_strides(graph.values[number].shape or ())))
            for number, i in loads
        )
        halves = all(graph.values[number].element in ("bf16", "f16") for number, _ in loads)
        if first == second:
            return halves and start.terms == other.terms
        return halves and start == other and {first, second} <= self.kernel.immutable

    def _is_scattered(self, load: Load) -> bool:
        """Whether a factor is as `Figures.scattered` says."""
        number, indices = load
        terms = strided(indices, contiguous_strides(self.kernel.graph.values[number].shape or ())).terms
        axes = {name for atom, _ in terms for name in atom.symbols()}
        return {"m", "k"} <= axes and not any(isinstance(atom, Symbol) for atom, _ in terms)

    def _is_ragged(self, load: Load) -> bool:
        """Whether a factor is as `Figures.ragged` says."""
        number, indices = load
        info = self.kernel.graph.values[number]
        vector = max(1, ALIGNMENT // element_bytes(info.element))
        terms = strided(indices, contiguous_strides(info.shape or ())).terms
        along = [atom for atom, step in terms if step == 1]
        aligned = all(step % vector == 0 for _, step in terms if step != 1)
        return aligned and any(isinstance(a, Symbol) and a.size % vector > 0 for a in along)

    def loaded(self) -> list[tuple[int, Expr]]:
        places = [
            symbol(name, size)
            for name, size in (("b", self.batch), ("m", self.m), ("n", self.n), ("k", self.k))
        ]
        self.emitter.axes = {
            n: Axis(n, s, n) for n, s in (("b", self.batch), ("m", self.m), ("n", self.n), ("k", self.k))
        }
        found = []
        for contraction in self.contractions:
            loop = contraction.loop(*places)
            for side in ("left", "right"):
                position, value = contraction.operand(side)
                with suppress(UnsupportedError):  # computed
                    found.append(
                        single_load(self.emitter, value, contraction.node.maps[position].apply(loop))
                    )
        return found

    def _step(self, load: Load) -> tuple[float, float]:
        """Bytes of an element and how far one step of k moves in memory; a fraction where several steps share an element."""
        number, indices = load
        info = self.kernel.graph.values[number]
        position = strided(indices, contiguous_strides(info.shape or ()))
        along = [(a, c) for a, c in position.terms if a.symbols() & {"k", "kp"}]
        moves = [c / getattr(a, "divisor", 1) for a, c in along]
        whole = all(isinstance(a, Symbol) for a, _ in along)
        return float(element_bytes(info.element)), abs(moves[0]) if moves and (
            whole or len(moves) == 1
        ) else 0.0
