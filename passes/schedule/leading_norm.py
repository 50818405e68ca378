"""What the kernel of a product does to its rows before it multiplies: a factor for each element, and a sum of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import linalg

from topo_opt.codegen.triton.contraction import find_all
from topo_opt.codegen.triton.gemm_row_parts import MOST_PARTS
from topo_opt.codegen.triton.reductions import combiner_of, recognise
from topo_opt.errors import UnsupportedError
from topo_opt.passes.schedule.outline import computed_from
from topo_opt.structured.access import VIEWS
from topo_opt.structured.graph import Graph, Node

CHUNK, FEWEST = 32, 16
"""Columns that a part of a sum stands for: what is read of a row is then a sixteenth of the row in bf16, and tiles have a multiple
of so many. Never fewer than `FEWEST`."""
ALONE = 2
"""Rows up to which products are best off in the vector form, which reads whole rows and needs no parts of sums."""


@dataclass(frozen=True)
class LeadingNorm:
    """What the kernel of a product computes from one of its arguments alone.

    Attributes:
        argument: its position; rows of a tensor in memory.
        statistic: the reduction of its rows.
        factor: the left operand of the products, computed from it and from `others`; None where it is the argument itself.
    """

    graph: Graph
    argument: int
    statistic: Node
    factor: int | None

    @property
    def parts(self) -> list[int]:
        """Shape of the parts of the statistic."""
        graph = self.graph
        *rows, columns = graph.values[self.statistic.operands[0]].shape or ()
        return [*rows, columns // _chunk(columns)]

    @property
    def kept(self) -> frozenset[int]:
        """Positions of the arguments that the kernel still reads when factor and sum are given."""
        graph = self.graph
        used = {o for node in self.still_needed() if node is not self.statistic for o in node.operands}
        return frozenset(p for p, a in enumerate(graph.arguments) if a in used or a in graph.returns)

    def still_needed(self) -> list[Node]:
        """The nodes that the results need when the factor is given, and the statistic needs no more than its start."""
        graph, seen = self.graph, set()
        waiting = list(graph.returns)
        while waiting:
            value = waiting.pop()
            node = graph.producer(value)
            if node is None or value == self.factor or node.id in seen:
                continue
            seen.add(node.id)
            waiting.extend(node.operands[node.inputs :] if node is self.statistic else node.operands)
        return [n for n in graph.nodes if n.id in seen]

    @property
    def results(self) -> list[int]:
        """The factor, where it is computed."""
        return [] if self.factor is None else [self.factor]

    @property
    def others(self) -> list[int]:
        """Positions of the other arguments that the factor is computed from."""
        if self.factor is None:
            return []
        places = [self.graph.arguments.index(a) for a in computed_from(self.graph, [self.factor])[0]]
        return [p for p in places if p != self.argument]


def _chunk(columns: int) -> int:
    """Columns of a part: the largest power of two up to `CHUNK` that divides them."""
    return min(columns & -columns, CHUNK)


def norm_of(graph: Graph, rows: int) -> LeadingNorm | None:
    """What the kernel of a product with up to `rows` rows can leave to the kernel that makes its rows; None without a norm."""
    try:
        contractions = find_all(graph)
    except UnsupportedError:
        return None
    batch, m, _, _ = contractions[0].counts
    statistics = [n for n in graph.nodes if n.name == "linalg.generic" and n.has_reduction]
    factors = {c.operand("left")[1] for c in contractions}
    if batch > 1 or not ALONE < m <= rows or len(statistics) != 1 or len(factors) != 1:
        return None
    (statistic,), (factor,) = statistics, factors
    if not _is_row_sum(graph, statistic):
        return None
    rows_of, before = computed_from(graph, [statistic.operands[0]])
    arguments, nodes = computed_from(graph, [factor])
    if len(rows_of) != 1 or rows_of[0] not in arguments:
        return None
    if not all(_is_elementwise(graph.nodes[n]) for n in (*before, *nodes)):
        return None
    argument = graph.arguments.index(rows_of[0])
    plain = all(graph.nodes[n].name in VIEWS for n in nodes)
    return LeadingNorm(graph, argument, statistic, None if plain else factor)


def _is_row_sum(graph: Graph, node: Node) -> bool:
    """Whether a reduction adds up the last dimension of one tensor, in f32."""
    shape = graph.values[node.operands[0]].shape or ()
    result = graph.values[node.results[0]]
    reduced = [d for d, r in enumerate(node.reduction) if r]
    if len(node.results) != 1 or node.inputs != 1 or len(reduced) != 1 or result.element != "f32":
        return False
    places = node.maps[0].positions() if node.maps[0].is_projected_permutation else []
    if (
        len(places) != len(shape)
        or None in places
        or places[-1] != reduced[0]
        or len(set(places)) != len(places)
    ):
        return False
    found = recognise(node, 0, result.element)
    chunk = _chunk(shape[-1])
    return (
        found is not None
        and found.combiner == combiner_of("arith.addf", "f32")
        and chunk >= FEWEST
        and 2 <= shape[-1] // chunk <= MOST_PARTS
    )


def _is_elementwise(node: Node) -> bool:
    free = ("tensor.empty", "linalg.fill", "arith.constant", "topo.demote", *VIEWS)
    return node.name in free or (node.name == "linalg.generic" and not node.has_reduction)


def parts_of(statistic: Node, value: ir.Value, kind: ir.RankedTensorType) -> ir.Value:
    """The statistic of every `CHUNK` columns of a tensor."""
    source = ir.RankedTensorType(value.type)
    rank, chunk = len(source.shape), _chunk(source.shape[-1])
    apart = ir.RankedTensorType.get([*kind.shape, chunk], source.element_type)
    groups = [[d] for d in range(rank - 1)] + [[rank - 1, rank]]
    i64 = ir.IntegerType.get_signless(64)
    expanded = ir.Operation.create(
        "tensor.expand_shape",
        results=[apart],
        operands=[value],
        attributes={
            "reassociation": ir.ArrayAttr.get(
                [ir.ArrayAttr.get([ir.IntegerAttr.get(i64, d) for d in g]) for g in groups]
            ),
            "static_output_shape": ir.DenseI64ArrayAttr.get(list(apart.shape)),
        },
    ).results[0]
    zero = ir.FloatAttr.get(ir.F32Type.get(), 0.0)
    scalar = ir.Operation.create(
        "arith.constant", results=[ir.F32Type.get()], attributes={"value": zero}
    ).results[0]
    empty = ir.Operation.create("tensor.empty", results=[kind]).results[0]
    init = linalg.fill(scalar, outs=[empty])
    identity = ir.AffineMap.get_identity(rank + 1)
    rows = ir.AffineMap.get(rank + 1, 0, [ir.AffineDimExpr.get(d) for d in range(rank)])
    return _reduced(statistic, expanded, init, [identity, rows], [False] * rank + [True], whole_body=True)


def sum_of_parts(statistic: Node, parts: ir.Value, init: ir.Value) -> ir.Value:
    """The statistic of whole rows from its parts."""
    maps = [ir.AffineMapAttr(a).value for a in ir.ArrayAttr(statistic.op.attributes["indexing_maps"])]
    return _reduced(statistic, parts, init, maps, statistic.reduction, whole_body=False)


def _reduced(
    statistic: Node,
    value: ir.Value,
    init: ir.Value,
    maps: Sequence[ir.AffineMap],
    reduction: Sequence[bool],
    whole_body: bool,
) -> ir.Value:
    """A reduction with the body of `statistic`, or one that only adds."""
    kinds = {False: "#linalg.iterator_type<parallel>", True: "#linalg.iterator_type<reduction>"}
    attributes = {
        "indexing_maps": ir.ArrayAttr.get([ir.AffineMapAttr.get(m) for m in maps]),
        "iterator_types": ir.ArrayAttr.get([ir.Attribute.parse(kinds[bool(r)]) for r in reduction]),
        "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 1]),
    }
    made = ir.Operation.create(
        "linalg.generic", results=[init.type], operands=[value, init], attributes=attributes, regions=1
    )
    if whole_body:
        copy = statistic.op.clone().operation
        copy.regions[0].blocks[0].append_to(made.regions[0])
        copy.erase()
        return made.results[0]
    f32 = ir.F32Type.get()
    block = made.regions[0].blocks.append(f32, f32, arg_locs=[ir.Location.current] * 2)
    with ir.InsertionPoint(block):
        total = ir.Operation.create("arith.addf", results=[f32], operands=list(block.arguments)).results[0]
        ir.Operation.create("linalg.yield", operands=[total])
    return made.results[0]
