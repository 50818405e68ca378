"""Operands of contractions as products of factors: which of them depend on the row alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch_mlir import ir

from topo_opt.codegen.triton.contraction import Contraction
from topo_opt.passes.schedule.roles import Role, Roles
from topo_opt.structured.access import VIEWS, domain_indices, is_movement, view_sources
from topo_opt.structured.graph import Graph, Node
from topo_opt.structured.index import Div, Expr, Mod, Symbol, symbol

FLOATS = ("bf16", "f16", "f32")


@dataclass(frozen=True)
class Factor:
    """The element of `value` at `indices` (expressions over the loops of the contraction); `inverse`: divided by it."""

    value: int
    indices: tuple[Expr, ...]
    inverse: bool = False


@dataclass
class Product:
    """The left operand of a contraction as a product of factors.

    `scales` depend on the row (or the batch) alone, `rest` is what remains. `chain` are the nodes between the operand and the
    factors, `scaled` those of them whose value contains a scale.
    """

    contraction: Contraction
    scales: list[Factor] = field(default_factory=list)
    rest: list[Factor] = field(default_factory=list)
    chain: set[int] = field(default_factory=set)
    scaled: set[int] = field(default_factory=set)

    def operand_indices(self) -> list[Expr]:
        """Indices of the left operand over the loops of the contraction."""
        position, _ = self.contraction.operand("left")
        node = self.contraction.node
        return node.maps[position].apply([symbol(f"d{d}", size) for d, size in enumerate(node.domain)])


@dataclass
class Factors:
    """Takes operands apart. `users` are the users of every value of the graph."""

    roles: Roles
    users: Sequence[Sequence[int]]

    @property
    def graph(self) -> Graph:
        return self.roles.graph

    def product(self, contraction: Contraction) -> Product | None:
        """The left operand of a contraction with the row factors apart; None when it has none."""
        _, value = contraction.operand("left")
        columns = frozenset(f"d{d}" for d in contraction.k)
        found = Product(contraction)
        for factor in self._take_apart(value, found.operand_indices(), False, columns, found):
            (found.scales if self._is_scale(factor, columns) else found.rest).append(factor)
        return found if found.scales and found.rest else None

    def _is_scale(self, factor: Factor, columns: frozenset[str]) -> bool:
        info = self.graph.values[factor.value]
        if info.shape is None or any(i.symbols & columns for i in factor.indices):
            return False
        return info.numel > 1 or factor.value in self.reduced

    @cached_property
    def reduced(self) -> frozenset[int]:
        """Values that a reduction has a part in, with nothing but views and pointwise ops after it."""
        found: set[int] = set()
        for node in self.graph.nodes:
            passes_on = node.is_loop_nest or node.name in VIEWS
            if node.has_reduction or (passes_on and any(o in found for o in node.operands)):
                found.update(node.results)
        return frozenset(found)

    def _take_apart(
        self, value: int, indices: Sequence[Expr], inverse: bool, columns: frozenset[str], into: Product
    ) -> list[Factor]:
        whole = [Factor(value, tuple(indices), inverse)]
        node = self.graph.producer(value)
        info = self.graph.values[value]
        if node is None or info.element not in FLOATS:
            return whole
        inner = self._operands(node, info.position, indices)
        if inner is None:
            return whole
        chain, scaled = set(into.chain), set(into.scaled)
        found = [
            f
            for operand, where, divides in inner
            for f in self._take_apart(operand, where, inverse != divides, columns, into)
        ]
        if any(self._is_scale(f, columns) for f in found):
            into.chain.add(node.id)
            into.scaled.add(node.id)
            return found
        # What other ops read too exists anyway, and what is narrow is read as such.
        kept = self._narrows(node) if len(inner) == 1 else len(self.users[value]) > 1
        if kept:
            into.chain, into.scaled = chain, scaled
            return whole
        into.chain.add(node.id)
        return found

    def _narrows(self, node: Node) -> bool:
        source = self.graph.values[node.operands[0]].element
        return source not in FLOATS or (
            self.graph.values[node.results[0]].element != "f32" and source == "f32"
        )

    def _operands(
        self, node: Node, position: int, indices: Sequence[Expr]
    ) -> list[tuple[int, list[Expr], bool]] | None:
        """What a view or a product reads: (value, indices, whether it divides); None for any other op."""
        if node.name in VIEWS or is_movement(node):
            sources = view_sources(self.graph, node, indices, position)
            if len(sources) != 1 or sources[0].conditions:
                return None
            # The maps of a loop nest read whole dimensions: a part of a tensor stays what it is.
            if self.graph.values[sources[0].value].numel > self.graph.values[node.results[0]].numel:
                return None
            return [(sources[0].value, sources[0].indices, False)]
        if node.name != "linalg.generic" or node.has_reduction or len(node.results) != 1:
            return None
        read = _body_factors(self.graph, node)
        if read is None:
            return None
        loop = domain_indices(node, 0, indices)
        return [
            (value, node.maps[place].apply(loop) if place is not None else [], divides)
            for value, place, divides in read
        ]


def _body_factors(graph: Graph, node: Node) -> list[tuple[int, int | None, bool]] | None:
    """The factors of a body that only multiplies, divides and casts: (value, operand position or None, divides)."""
    block = node.op.regions[0].blocks[0]
    places = {hash(a): i for i, a in enumerate(block.arguments) if i < node.inputs}
    inside = {hash(r): o.operation for o in block.operations for r in o.operation.results}
    found: list[tuple[int, int | None, bool]] = []

    def visit(value: ir.Value, divides: bool) -> bool:
        place = places.get(hash(value))
        if place is not None:
            found.append((node.operands[place], place, divides))
            return True
        op = inside.get(hash(value))
        if op is None:
            known = graph.numbers.get(hash(value))
            if known is None or str(value.type) not in FLOATS:
                return False
            found.append((known, None, divides))
            return True
        if op.name in ("arith.extf", "arith.truncf"):
            return str(value.type) in FLOATS and visit(op.operands[0], divides)
        if op.name in ("arith.mulf", "arith.divf"):
            right = divides != (op.name == "arith.divf")
            return visit(op.operands[0], divides) and visit(op.operands[1], right)
        return False

    terminator = block.operations[len(block.operations) - 1].operation
    return found if visit(terminator.operands[0], False) else None


def affine_map(indices: Sequence[Expr], dims: Mapping[str, int], count: int) -> ir.AffineMap:
    """Index expressions as an affine map over `count` dimensions; `dims` gives the dimension of every symbol."""

    def expression(expr: Expr) -> ir.AffineExpr:
        total = ir.AffineConstantExpr.get(expr.constant)
        for atom, coefficient in expr.terms:
            match atom:
                case Symbol(name=name):
                    term = ir.AffineDimExpr.get(dims[name])
                case Div(operand=operand, divisor=divisor):
                    term = ir.AffineExpr.get_floor_div(expression(operand), divisor)
                case Mod(operand=operand, divisor=divisor):
                    term = ir.AffineExpr.get_mod(expression(operand), divisor)
                case _:
                    raise ValueError(f"{atom} is no affine expression")
            total = ir.AffineExpr.get_add(total, ir.AffineExpr.get_mul(term, coefficient))
        return total

    return ir.AffineMap.get(count, 0, [expression(i) for i in indices])


def is_cheap(roles: Roles, value: int, limit: int, depth: int = 8) -> bool:
    """Whether a value is made from arguments by at most `depth` element-wise ops on no more than `limit` elements: `1 + w`."""
    graph = roles.graph
    node = graph.producer(value)
    if node is None:
        return True
    gathers = node.is_loop_nest and any(
        graph.values[o].shape is not None for o in node.operands[len(node.maps) :]
    )
    if depth == 0 or node.has_reduction or gathers or graph.values[value].numel > limit:
        return False
    if roles.of(node) is Role.COMPUTE and node.name not in ("linalg.generic", "topo.demote"):
        return False
    return all(is_cheap(roles, o, limit, depth - 1) for o in node.operands)


@dataclass
class Slices:
    """What a row scale is computed from: which nodes may be computed again beside a contraction.

    `dead` are the nodes that nothing needs once the products are rewritten; `stops` values that exist in memory.
    """

    roles: Roles
    dead: frozenset[int]
    stops: frozenset[int]
    rows: int
    _known: dict[tuple[int, bool], bool] = field(default_factory=dict)

    def repeats(self, value: int, below_reduction: bool = False) -> bool:
        """Whether `value` is computed again: one reduction over whole rows, and pointwise ops before and after it."""
        key = (value, below_reduction)
        if key not in self._known:
            self._known[key] = self._repeats(value, below_reduction)
        return self._known[key]

    def _repeats(self, value: int, below_reduction: bool) -> bool:
        graph = self.roles.graph
        node = graph.producer(value)
        if node is None or value in self.stops:
            return False
        if self.roles.of(node) is not Role.COMPUTE:
            return any(self.repeats(o, below_reduction) for o in node.operands)
        if node.name != "linalg.generic" and node.name != "topo.demote":
            return False
        if node.has_reduction:
            return not below_reduction and not any(
                self._blocks(o, True) for o in node.operands[: node.inputs]
            )
        small = graph.values[value].numel <= self.rows
        return (small or node.id in self.dead) and not any(
            self._blocks(o, below_reduction) for o in node.operands
        )

    def _blocks(self, value: int, below_reduction: bool) -> bool:
        """Whether `value` is neither computed again nor in memory without it."""
        graph = self.roles.graph
        node = graph.producer(value)
        if node is None or value in self.stops or self.repeats(value, below_reduction):
            return False
        if self.roles.of(node) is not Role.COMPUTE:
            return any(self._blocks(o, below_reduction) for o in node.operands)
        return node.id in self.dead
