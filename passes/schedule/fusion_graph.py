"""The dataflow of a function as the arrays that the native clustering takes: nodes, edges and how readers read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod

from topo_opt.codegen.triton.contraction import SMALL_ROWS, VECTOR_ROWS, Contraction, analyse
from topo_opt.codegen.triton.element_types import NARROW_FLOATS
from topo_opt.errors import UnsupportedError
from topo_opt.passes.schedule.roles import Role, Roles, kind_of
from topo_opt.sim import Alignment, Few, Kind, Rules, cluster
from topo_opt.structured.access import (
    VIEWS,
    domain_indices,
    is_empty_reduction,
    shows_windows,
    view_sources,
)
from topo_opt.structured.graph import Graph, Node
from topo_opt.structured.index import ZERO, Expr, delinearize, linearize, symbol


@dataclass(frozen=True)
class Read:
    """A reader needs `value` at `indices`; `exact` when it is read everywhere unconditionally through known indices."""

    value: int
    indices: tuple[Expr, ...]
    exact: bool = True
    reshaped_only: bool = True
    paired: bool = False
    """Read at the partner of a rotation instead; `indices` are those of the reader's own element."""


@dataclass(frozen=True)
class RowSpace:
    """Rows and columns of a reduction, and the row-major position of (x, r) in a tensor that spans both."""

    rows: int
    cols: int
    full: Expr


@dataclass
class FusionGraph:
    """Arrays for `topo_opt.sim.cluster`; `nodes[i]` is the graph node of entry i."""

    nodes: list[Node] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    cols: list[int] = field(default_factory=list)
    heights: list[int] = field(default_factory=list)
    few: list[int] = field(default_factory=list)
    orders: list[int] = field(default_factory=list)
    costs: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    input_bytes: list[int] = field(default_factory=list)
    held: list[bool] = field(default_factory=list)
    edges: list[tuple[int, int, int, int]] = field(default_factory=list)

    def part(self, nodes: Sequence[Node]) -> FusionGraph:
        """The arrays of some of the nodes: what comes from the others is read from memory, what they read is held."""
        place = {n.id: i for i, n in enumerate(self.nodes)}
        kept = [place[n.id] for n in nodes]
        entry = {old: new for new, old in enumerate(kept)}
        columns = {
            f.name: [getattr(self, f.name)[i] for i in kept] for f in fields(self) if f.name != "edges"
        }
        result = FusionGraph(**columns)
        for edge in self.edges:
            source, target, alignment, size = edge
            if source in entry and target in entry:
                result.edges.append((entry[source], entry[target], alignment, size))
            elif source in entry:
                result.held[entry[source]] = True
            elif target in entry:
                result.inputs[entry[target]] += 1
                result.input_bytes[entry[target]] += size
        return result

    def labels(self, rules: Rules, max_inputs: int, recompute: int) -> list[int]:
        """A kernel label per node (see `topo_opt.sim.cluster`)."""
        nodes = zip(
            self.kinds, self.rows, self.cols, self.heights, self.few, self.orders, self.costs,
            self.inputs, self.input_bytes, self.held,
        )  # fmt: skip
        plain = [tuple(map(int, n)) for n in nodes]
        return cluster(plain, self.edges, rules, max_inputs, recompute)


def parallel_and_reduced(node: Node) -> tuple[list[int], list[int]]:
    """Sizes of the parallel dimensions in result order and of the reduction dimensions."""
    kept = [d for d in node.output_map(0).positions() if d is not None]
    return [node.domain[d] for d in kept], [s for s, r in zip(node.domain, node.reduction) if r]


def row_space(graph: Graph, node: Node) -> RowSpace:
    """The row space of a reduction. The full order is that of the first operand spanning all dimensions."""
    rows, cols = parallel_and_reduced(node)
    x, r = symbol("x", prod(rows)), symbol("r", prod(cols))
    loop = loop_of(graph, node, x, r)
    for operand, index_map in zip(node.operands[: node.inputs], node.maps):
        shape = graph.values[operand].shape or ()
        if prod(shape) == prod(rows) * prod(cols) and index_map.is_projected_permutation:
            return RowSpace(prod(rows), prod(cols), linearize(index_map.apply(loop), shape))
    return RowSpace(prod(rows), prod(cols), x * prod(cols) + r)


def loop_of(graph: Graph, node: Node, x: Expr, r: Expr) -> list[Expr]:
    """Loop indices of a linalg op at row-major row x and column r."""
    _, cols = parallel_and_reduced(node)
    shape = graph.values[node.results[0]].shape or ()
    return domain_indices(node, 0, delinearize(x, shape), delinearize(r, cols))


def reads(graph: Graph, node: Node, x: Expr, r: Expr = ZERO) -> Iterator[Read]:
    """What a compute op reads directly when it computes its element x (and column r)."""
    if is_empty_reduction(node):
        for operand in node.operands:
            yield _anywhere(graph, operand)
    elif node.is_loop_nest:
        loop = loop_of(graph, node, x, r)
        for operand, index_map in zip(node.operands, node.maps):
            plain = index_map.is_projected_permutation or index_map.mirrored() is not None
            yield Read(operand, tuple(index_map.apply(loop)), True, plain)
        for operand in node.operands[len(node.maps) :]:
            yield _anywhere(graph, operand)
    elif node.name in VIEWS:
        shape = graph.values[node.results[0]].shape or ()
        for source in view_sources(graph, node, delinearize(x, shape)):
            exact = not any(c.decided() is None for c in source.conditions)
            yield Read(source.value, tuple(source.indices), exact, exact)
    elif node.name == "topo.rotate_half":
        shape = graph.values[node.results[0]].shape or ()
        yield Read(node.operands[0], tuple(delinearize(x, shape)), paired=True)
    elif node.name == "tm_tensor.scan":
        shape = graph.values[node.operands[0]].shape or ()
        yield Read(node.operands[0], tuple(delinearize(x, shape)))
    elif node.name == "topo.index_update":
        shape = graph.values[node.operands[1]].shape or ()
        yield _anywhere(graph, node.operands[0])
        yield Read(node.operands[1], tuple(delinearize(symbol("x", prod(shape)), shape)))
        yield _anywhere(graph, node.operands[2])
    else:
        for operand in node.operands:
            yield _anywhere(graph, operand)


def _anywhere(graph: Graph, value: int) -> Read:
    return Read(value, tuple(ZERO for _ in graph.values[value].shape or ()), False, False)


def resolve(roles: Roles, read: Read) -> Iterator[Read]:
    """A read followed through views and free ops to values that compute ops or arguments hold."""
    node = roles.graph.producer(read.value)
    if node is None or roles.of(node) is Role.COMPUTE:
        yield read
    elif roles.of(node) is Role.VIEW:
        position = roles.graph.values[read.value].position
        for source in view_sources(roles.graph, node, read.indices, position):
            plain = _shows_each_once(roles.graph, node)
            inner = replace(
                read,
                value=source.value,
                indices=tuple(source.indices),
                reshaped_only=read.reshaped_only and plain,
            )
            yield from resolve(roles, inner)
    else:
        for operand in node.operands:
            yield from resolve(roles, _anywhere(roles.graph, operand))


def _shows_each_once(graph: Graph, node: Node) -> bool:
    """Whether a view is known to show every element of its source once."""
    if node.name == "tensor.extract_slice" or shows_windows(node):
        return False
    return graph.values[node.results[0]].numel == graph.values[node.operands[0]].numel


def build(roles: Roles) -> FusionGraph:
    """The fusion graph of a function."""
    graph, result = roles.graph, FusionGraph()
    entry = {}
    orders: dict[tuple[int, int, Expr], int] = {}
    shapes: dict[tuple[int, int, int, int], int] = {}
    spaces: dict[int, RowSpace] = {}
    sides: dict[int, tuple[int, int]] = {}
    for node in roles.compute_nodes():
        entry[node.id] = len(result.nodes)
        kind = kind_of(graph, node)
        rows, cols, order = graph.values[node.results[0]].numel if node.results else 1, 1, 0
        height, few = rows, Few.MANY
        if kind is Kind.UPDATE and node.name == "topo.index_update":
            rows = graph.values[node.operands[1]].numel
        if rows == 0:
            kind = Kind.FIXED
        elif kind is Kind.REDUCTION:
            space = spaces[node.id] = row_space(graph, node)
            rows, cols = space.rows, space.cols
            order = orders.setdefault((rows, cols, space.full), len(orders))
        elif kind is Kind.CONTRACTION and (problem := _product(graph, node)) is not None:
            batch, m, _, cols = problem.counts
            height, few = batch * m, how_few(graph, problem)
            order = shapes.setdefault(problem.counts, len(shapes) + 1)
            sides[node.id] = problem.operand("left")[0], problem.operand("right")[0]
        result.nodes.append(node)
        result.kinds.append(kind)
        result.rows.append(rows)
        result.cols.append(cols)
        result.heights.append(height)
        result.few.append(few)
        result.orders.append(order)
        result.costs.append(_cost(node))
        result.inputs.append(0)
        result.input_bytes.append(0)
        result.held.append(any(r in roles.in_memory for r in node.results))
    for node in result.nodes:
        if node.id in sides:
            _add_operands(roles, result, entry, node, sides[node.id])
        else:
            _add_edges(roles, result, entry, orders, spaces, node)
    return result


def how_few(graph: Graph, problem: Contraction) -> Few:
    """Which forms of product there are for a contraction's rows (see `codegen.triton.gemm`)."""
    m = problem.counts[1]
    if m <= VECTOR_ROWS:
        return Few.VECTOR
    half = graph.values[problem.operand("left")[1]].element in NARROW_FLOATS
    return Few.FEW if half and m <= SMALL_ROWS else Few.MANY


def _product(graph: Graph, node: Node) -> Contraction | None:
    try:
        return analyse(graph, node)
    except UnsupportedError:
        return None


def _add_operands(
    roles: Roles, result: FusionGraph, entry: dict[int, int], node: Node, sides: tuple[int, int]
) -> None:
    """Edges into a contraction: through its left operand, its right operand, or otherwise (its init, or several)."""
    alignments = {sides[0]: Alignment.LEFT, sides[1]: Alignment.RIGHT}
    found = [
        (base, alignments.get(position, Alignment.OTHER))
        for position, operand in enumerate(node.operands)
        for base in resolve(roles, _anywhere(roles.graph, operand))
    ]
    _connect(roles, result, entry, node, found)


def _connect(
    roles: Roles, result: FusionGraph, entry: dict[int, int], node: Node, found: Sequence[tuple[Read, int]]
) -> None:
    """One edge for each node that is read, and what is read from memory."""
    graph, target = roles.graph, entry[node.id]
    worst: dict[int, int] = {}
    read: set[int] = set()
    for base, alignment in found:
        producer = graph.producer(base.value)
        if producer is not None:
            source = entry[producer.id]
            worst[source] = _worse(worst.get(source), int(alignment))
            continue
        result.inputs[target] += 1
        if base.value not in read:
            read.add(base.value)
            info = graph.values[base.value]
            # A gather touches no more elements than it makes.
            touched = info.numel if base.exact else min(info.numel, result.rows[target] * result.cols[target])
            result.input_bytes[target] += info.nbytes // max(info.numel, 1) * touched
    for source, alignment in worst.items():
        size = sum(graph.values[v].nbytes for v in result.nodes[source].results)
        result.edges.append((source, target, alignment, size))


def _add_edges(
    roles: Roles,
    result: FusionGraph,
    entry: dict[int, int],
    orders: dict[tuple[int, int, Expr], int],
    spaces: dict[int, RowSpace],
    node: Node,
) -> None:
    graph, target = roles.graph, entry[node.id]
    rows, cols = result.rows[target], result.cols[target]
    if rows == 0 or result.kinds[target] is Kind.FIXED:
        found = [_anywhere(graph, operand) for operand in node.operands]
    else:
        found = list(reads(graph, node, symbol("x", rows), symbol("r", cols)))
    bases = []
    for read in found:
        for base in resolve(roles, read):
            producer = graph.producer(base.value)
            alignment: int = Alignment.OTHER
            if producer is not None:
                source = entry[producer.id]
                alignment = _alignment(graph, base, result, source, target, orders, spaces.get(node.id))
                if base.paired:
                    near = alignment in (Alignment.SAME, Alignment.PERMUTED)
                    alignment = Alignment.PAIRED if near else Alignment.OTHER
            bases.append((base, alignment))
    _connect(roles, result, entry, node, bases)


def _worse(a: int | None, b: int) -> int:
    """One edge stands for all reads between two nodes: reads that differ make it OTHER."""
    return b if a is None or a == b else int(Alignment.OTHER)


def _alignment(
    graph: Graph,
    read: Read,
    result: FusionGraph,
    source: int,
    target: int,
    orders: dict[tuple[int, int, Expr], int],
    space: RowSpace | None,
) -> int:
    shape = graph.values[read.value].shape
    if shape is None or not read.exact or 0 in shape:
        return Alignment.OTHER
    position = linearize(read.indices, shape)
    rows, cols = result.rows[target], result.cols[target]
    if space is not None:
        if prod(shape) == rows * cols and position == space.full:
            return Alignment.SAME
        if prod(shape) == rows and position == symbol("x", rows):
            return Alignment.ROW + result.orders[target] if cols > 1 else Alignment.SAME
        return Alignment.OTHER
    if prod(shape) == rows:
        if position == symbol("x", rows):
            return Alignment.SAME
        return Alignment.PERMUTED if read.reshaped_only and _is_one_to_one(read, shape) else Alignment.OTHER
    for (order_rows, order_cols, full), number in orders.items():
        if (
            order_rows == prod(shape)
            and order_rows * order_cols == rows
            and position.substitute({"x": full}) == symbol("x", order_rows)
        ):
            return Alignment.ROW + number
    return Alignment.OTHER


def _is_one_to_one(read: Read, shape: Sequence[int]) -> bool:
    """Whether as many elements are read as the producer has: every index covers its dimension."""
    return all(index.bounds == (0, size - 1) for index, size in zip(read.indices, shape))


_TRANSCENDENTAL = 8  # scalar ops that one math function is worth


def _cost(node: Node) -> int:
    """Scalar ops per element."""
    total = 0
    for region in node.op.regions:
        for block in region.blocks:
            for inner in block.operations:
                name = inner.operation.name
                total += (
                    _TRANSCENDENTAL
                    if name.startswith("math.")
                    else 0
                    if "constant" in name or "yield" in name
                    else 1
                )
    return max(total, 1)
