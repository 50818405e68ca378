"""`topo-sink-row-scale`: row factors of a contraction's operand are multiplied to its result instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_mlir import ir

from topo_opt.codegen.triton.contraction import SMALL_ROWS, analyse
from topo_opt.errors import UnsupportedError
from topo_opt.passes.base import Pass
from topo_opt.passes.schedule.fusion_graph import how_few
from topo_opt.passes.schedule.roles import Roles, assign_roles, is_matrix_product
from topo_opt.passes.schedule.row_factors import Factors, Product, Slices, affine_map, is_cheap
from topo_opt.sim import Few
from topo_opt.structured.access import VIEWS
from topo_opt.structured.graph import Graph, Node, read

_NARROW_RANGE = "f16"


@dataclass(frozen=True)
class SinkRowScale(Pass):
    """Moves the row statistic of a norm from before a product to behind it.

    `contract(x * s[m] * w[k], W)`  -->  `contract(x * w[k], W) * s[m]`, for up to `rows` rows.

    The operand is rounded once; casts between `x` and the product are dropped. Statistic and operand are repeated for each
    contraction, so that each can become part of its kernel: no CSE may follow. Applies where the normalised value has no
    other readers. With f16 only when the operand that remains is a tensor the model itself stores, since `x * w` may exceed
    the type's range where the normalised product does not.
    """

    name = "topo-sink-row-scale"
    rows: int = SMALL_ROWS

    def apply(self, module) -> None:
        for view in module.operation.regions[0].blocks[0].operations:
            op = view.operation
            if op.name == "func.func" and op.regions[0].blocks and "topo.kernel" not in op.attributes:
                _sink(op, self.rows)


def _sink(function: ir.Operation, rows: int) -> None:
    graph = read(function)
    roles, users = assign_roles(graph), graph.users()
    products, dead = _accepted(roles, users, _candidates(roles, users, rows))
    for product in products:
        _rewrite(roles, product, dead)
    for node in reversed(graph.nodes):
        if node.id in dead and not any(_is_used(r) for r in node.op.results):
            node.op.erase()


def _is_used(value: ir.Value) -> bool:
    return next(iter(value.uses), None) is not None


def _candidates(roles: Roles, users: Sequence[Sequence[int]], rows: int) -> list[Product]:
    graph, factors = roles.graph, Factors(roles, users)
    found = []
    for node in graph.nodes:
        if (
            node.name != "linalg.contract"
            or not is_matrix_product(graph, node)
            or not _starts_at_zero(graph, node)
        ):
            continue
        try:
            contraction = analyse(graph, node)
        except UnsupportedError:
            continue
        few = contraction.counts[1] <= rows and how_few(graph, contraction) is not Few.MANY
        if few and (product := factors.product(contraction)) is not None:
            found.append(product)
    return [p for p in found if _in_range(graph, p)]


def _starts_at_zero(graph: Graph, node: Node) -> bool:
    fill = graph.producer(node.operands[2])
    zero = None if fill is None or fill.name != "linalg.fill" else graph.producer(fill.operands[0])
    return zero is not None and zero.name == "arith.constant" and zero.op.attributes["value"].value == 0.0


def _in_range(graph: Graph, product: Product) -> bool:
    """Whether what remains of the operand can't exceed its type where the scaled operand does not."""
    _, operand = product.contraction.operand("left")
    if graph.values[operand].element != _NARROW_RANGE:
        return True
    return len(product.rest) == 1 and graph.values[product.rest[0].value].element == _NARROW_RANGE


def _accepted(
    roles: Roles, users: Sequence[Sequence[int]], products: list[Product]
) -> tuple[list[Product], frozenset[int]]:
    """The products to rewrite, and the nodes that nothing needs afterwards."""
    products = [p for p in products if not _follows_norm(roles, users, p)]
    while True:
        dead = _dead(roles, users, products)
        kept = [p for p in products if _pays(roles, p, dead)]
        if len(kept) == len(products):
            return products, dead
        products = kept


def _dead(roles: Roles, users: Sequence[Sequence[int]], products: Sequence[Product]) -> frozenset[int]:
    """Nodes whose only readers, directly or not, are the scaled operands of the products."""
    graph = roles.graph
    operand_of = {p.contraction.node.id: p.contraction.operand("left")[1] for p in products}
    alive = roles.in_memory.union(v for p in products for v in _kept(roles, p))
    dead: set[int] = set()
    for node in reversed(graph.nodes):
        if node.id in operand_of or node.name == "func.call" or not alive.isdisjoint(node.results):
            continue
        readers = [(v, graph.nodes[u]) for v in node.results for u in users[v]]
        if readers and all(
            u.id in dead or (operand_of.get(u.id) == v and u.operands.count(v) == 1) for v, u in readers
        ):
            dead.add(node.id)
    return frozenset(dead)


def _follows_norm(roles: Roles, users: Sequence[Sequence[int]], product: Product) -> bool:
    """Whether what remains comes out of a kernel that reduces rows: the norm is better off in there, in the same pass."""
    graph = roles.graph
    batch, m, _, _ = product.contraction.counts
    waiting, seen = list(_kept(roles, product)), set()
    while waiting:
        value = waiting.pop()
        node = graph.producer(value)
        if node is None or value in seen or node.name == "linalg.contract":
            continue
        seen.add(value)
        if node.has_reduction:
            return True
        if node.name in VIEWS or node.is_loop_nest:
            # Beyond what several ops read is another kernel, unless it is only a number a row.
            waiting.extend(
                o for o in node.operands if len(users[o]) == 1 or graph.values[o].numel <= batch * m
            )
    return False


def _pays(roles: Roles, product: Product, dead: frozenset[int]) -> bool:
    """Whether the scaled value goes away with the rewrite, and the scale becomes part of the kernel."""
    if not product.scaled <= dead:
        return False
    slices = _slices(roles, product, dead)
    producers = {f.value: roles.graph.producer(f.value) for f in product.scales}
    return all(slices.repeats(v) or p is None or p.id not in dead for v, p in producers.items())


def _slices(roles: Roles, product: Product, dead: frozenset[int]) -> Slices:
    batch, m, _, _ = product.contraction.counts
    return Slices(roles, dead, frozenset(_kept(roles, product)), batch * m)


def _kept(roles: Roles, product: Product) -> list[int]:
    """What remains of the operand and must be in memory: what costs nothing is computed again for each contraction."""
    k = product.contraction.counts[3]
    return [f.value for f in product.rest if not is_cheap(roles, f.value, k)]


def _rewrite(roles: Roles, product: Product, dead: frozenset[int]) -> None:
    """Gives a contraction its own operand without the scales, and multiplies them to its result."""
    graph, contraction = roles.graph, product.contraction
    node = contraction.node
    copies = _Copies(roles, _slices(roles, product, dead))
    with ir.InsertionPoint(node.op), node.op.location:
        scales = [copies.of(f.value) for f in product.scales]
        position, _ = contraction.operand("left")
        node.op.operands[position] = _operand(
            roles.graph, product, [copies.of(f.value) for f in product.rest]
        )
    with ir.InsertionPoint.after(node.op), node.op.location:
        result = node.op.results[0]
        dims, count = _places(node, 2)
        identity = ir.AffineMap.get_identity(count)
        maps = [identity, *(affine_map(f.indices, dims, count) for f in product.scales), identity]
        inverse = [False, *(f.inverse for f in product.scales)]
        scaled = _multiply([result, *scales], maps, inverse, graph.values[node.results[0]].shape or ())
        result.replace_all_uses_except(scaled, [scaled.owner.operation])


def _places(node: Node, position: int) -> tuple[dict[str, int], int]:
    """Where the loops of a contraction are in its operand (or result) `position`, and the operand's rank."""
    places = node.maps[position].positions()
    return {f"d{d}": i for i, d in enumerate(places) if d is not None}, len(places)


def _operand(graph: Graph, product: Product, values: Sequence[ir.Value]) -> ir.Value:
    """The product of what remains, in the type of the operand it replaces."""
    position, operand = product.contraction.operand("left")
    info, first = graph.values[operand], product.rest[0]
    shape, inverse = info.shape or (), [f.inverse for f in product.rest]
    dims, count = _places(product.contraction.node, position)
    identity = ir.AffineMap.get_identity(count)
    maps = [*(affine_map(f.indices, dims, count) for f in product.rest), identity]
    if len(values) == 1 and not first.inverse and graph.values[first.value].element == info.element:
        same = graph.values[first.value].shape == shape and list(first.indices) == product.operand_indices()
        return values[0] if same else _multiply(values, maps, inverse, shape, info.element)
    wide = _multiply(values, maps, inverse, shape)
    if info.element == "f32":
        return wide
    narrow = ir.RankedTensorType.get(list(shape), _float(info.element))
    return ir.Operation.create("topo.demote", results=[narrow], operands=[wide]).results[0]


def _multiply(
    values: Sequence[ir.Value],
    maps: Sequence[ir.AffineMap],
    inverse: Sequence[bool],
    shape: Sequence[int],
    element: str = "f32",
) -> ir.Value:
    """A loop nest over `shape` that multiplies (or divides by) its inputs in f32, in order."""
    kind = ir.RankedTensorType.get(list(shape), _float(element))
    # Scalars are captured by the body.
    tensors = [v for v in values if isinstance(v.type, ir.RankedTensorType)]
    kept = [m for v, m in zip(values, maps) if isinstance(v.type, ir.RankedTensorType)]
    empty = ir.Operation.create("tensor.empty", results=[kind]).results[0]
    parallel = ir.Attribute.parse("#linalg.iterator_type<parallel>")
    attributes = {
        "indexing_maps": ir.ArrayAttr.get([ir.AffineMapAttr.get(m) for m in [*kept, maps[-1]]]),
        "iterator_types": ir.ArrayAttr.get([parallel] * len(shape)),
        "operandSegmentSizes": ir.DenseI32ArrayAttr.get([len(tensors), 1]),
    }
    made = ir.Operation.create(
        "linalg.generic", results=[kind], operands=[*tensors, empty], attributes=attributes, regions=1
    )
    elements = [v.type.element_type for v in tensors] + [kind.element_type]
    location = ir.Location.current
    block = made.regions[0].blocks.append(*elements, arg_locs=[location] * len(elements))
    arguments = iter(block.arguments)
    with ir.InsertionPoint(block):
        factors = [next(arguments) if isinstance(v.type, ir.RankedTensorType) else v for v in values]
        if element != "f32":
            total = factors[0]
        else:
            total = None
            for factor, divides in zip(map(_widened, factors), inverse):
                total = _combined(total, factor, divides)
        ir.Operation.create("linalg.yield", operands=[total])
    return made.results[0]


def _combined(total: ir.Value | None, factor: ir.Value, divides: bool) -> ir.Value:
    if total is None and not divides:
        return factor
    f32 = ir.F32Type.get()
    if total is None:
        one = ir.FloatAttr.get(f32, 1.0)
        total = ir.Operation.create("arith.constant", results=[f32], attributes={"value": one}).results[0]
    name = "arith.divf" if divides else "arith.mulf"
    return ir.Operation.create(name, results=[f32], operands=[total, factor]).results[0]


def _widened(value: ir.Value) -> ir.Value:
    f32 = ir.F32Type.get()
    if value.type == f32:
        return value
    return ir.Operation.create("arith.extf", results=[f32], operands=[value]).results[0]


def _float(element: str) -> ir.Type:
    return {"bf16": ir.BF16Type, "f16": ir.F16Type, "f32": ir.F32Type}[element].get()


@dataclass
class _Copies:
    """Repeats what `slices` says at the insertion point."""

    roles: Roles
    slices: Slices

    def __post_init__(self) -> None:
        self.made: dict[tuple[int, bool], ir.Value] = {}

    def of(self, value: int, below_reduction: bool = False) -> ir.Value:
        """The value, computed again where the slices allow."""
        graph = self.roles.graph
        if not self.slices.repeats(value, below_reduction):
            return graph.handles[value]
        key = (value, below_reduction)
        if key not in self.made:
            node = graph.producer(value)
            assert node is not None
            below = below_reduction or node.has_reduction
            operands = [self.of(o, below) for o in node.operands[: len(list(node.op.operands))]]
            copy = node.op.clone().operation
            for place, operand in enumerate(operands):
                copy.operands[place] = operand
            self.made.update({(r, below_reduction): v for r, v in zip(node.results, copy.results)})
        return self.made[key]
