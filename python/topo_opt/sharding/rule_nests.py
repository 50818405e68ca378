"""The factors of loop nests: loops are factors, and the indexing maps say which dimension of which tensor carries them.

A loop that indexes a dimension alone is a factor of that dimension. One that stands in a compound expression (a window,
`7 - d0`) is not split. Tables that a body reads with `tensor.extract` carry a loop where they are read at `linalg.index` of
it; elsewhere they are read at positions that only data tells and lie whole on every device, but for one case: a body that
does nothing but look up can look up in a part of its table, see `lookup`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_mlir import ir

from topo_opt.sharding.rule import DimFactors, Factor, FactorKind, Rule
from topo_opt.sharding.spec import Combiner
from topo_opt.structured.graph import Graph, Node

COMBINERS: dict[str, Combiner] = {
    "arith.addf": "add",
    "arith.addi": "add",
    "arith.mulf": "mul",
    "arith.muli": "mul",
    "arith.maximumf": "max",
    "arith.maxnumf": "max",
    "arith.maxsi": "max",
    "arith.minimumf": "min",
    "arith.minnumf": "min",
    "arith.minsi": "min",
    "arith.ori": "or",
    "arith.andi": "and",
}
"""Op of a body -> how partial results join. `ori` and `andi` of truth values only."""

_IDENTITY: dict[Combiner, float] = {"add": 0, "mul": 1}
"""What an accumulator must start from, since every device starts from it. The other combiners give the same again."""

_INDEX_CASTS = ("arith.index_cast", "arith.index_castui", "arith.extsi", "arith.extui")
_VALUE_CASTS = ("arith.extf", "arith.truncf")


@dataclass(frozen=True)
class TableRead:
    """A `tensor.extract` of a body: the table's value number, and for each of its dimensions the loop whose number is the index, or None."""

    op: ir.Operation
    table: int
    loops: tuple[int | None, ...]


def table_reads(graph: Graph, node: Node) -> list[TableRead]:
    """What the body of a `linalg.generic` reads of tensors from outside, in order."""
    if node.name != "linalg.generic" or "tensor.extract" not in node.body:
        return []
    found = []
    for view in node.op.regions[0].blocks[0].operations:
        op = view.operation
        if op.name == "tensor.extract":
            table, *indices = op.operands
            found.append(TableRead(op, graph.value_of(table), tuple(_loop(i) for i in indices)))
    return found


def _loop(index: ir.Value) -> int | None:
    """The loop of which an index is the number, None for anything else."""
    while isinstance(index.owner, ir.Operation | ir.OpView):
        op = index.owner.operation
        if op.name == "linalg.index":
            return int(ir.IntegerAttr(op.attributes["dim"]).value)
        if op.name not in _INDEX_CASTS:
            return None
        index = op.operands[0]
    return None


def lookup(graph: Graph, node: Node) -> tuple[TableRead, int] | None:
    """The read and the dimension of its table at which a body that only looks up takes its index from data.

    Such a body yields the element it has read, at most converted. Where a device holds some of the rows, it yields zero for
    the others, and the sum over all devices is the element.
    """
    reads = table_reads(graph, node)
    if len(reads) != 1 or node.has_reduction or len(node.results) != 1:
        return None
    yielded = list(node.op.regions[0].blocks[0].operations)[-1].operation.operands[0]
    while isinstance(yielded.owner, ir.Operation | ir.OpView) and yielded.owner.name in _VALUE_CASTS:
        yielded = yielded.owner.operation.operands[0]
    read = reads[0]
    open_dims = [dim for dim, loop in enumerate(read.loops) if loop is None]
    if yielded != read.op.results[0] or len(open_dims) != 1 or not _is_number(graph, read.table):
        return None
    return read, open_dims[0]


def _is_number(graph: Graph, value: int) -> bool:
    element = graph.values[value].element
    return element not in ("i1", "index") and not element.startswith("complex")


def combiner(graph: Graph, node: Node) -> Combiner | None:
    """How the partial results of a reduction join when its loops are split; None when no one combination does it for all results.

    Every result must be one op of its accumulator and a value that no accumulator is part of, and start from the op's
    identity.
    """
    if node.name == "linalg.contract":
        found: set[Combiner | None] = {"add"}
    else:
        block = node.op.regions[0].blocks[0]
        arguments = list(block.arguments)
        accumulators = arguments[node.inputs :]
        yielded = list(list(block.operations)[-1].operation.operands)
        found = {_combination(v, a, accumulators) for v, a in zip(yielded, accumulators, strict=True)}
    if len(found) != 1 or None in found:
        return None
    (kind,) = found
    assert kind is not None
    inits = node.operands[node.inputs : node.inputs + len(node.results)]
    neutral = kind not in _IDENTITY or all(_filled_with(graph, i, _IDENTITY[kind]) for i in inits)
    return kind if neutral else None


def _combination(yielded: ir.Value, own: ir.Value, accumulators: Sequence[ir.Value]) -> Combiner | None:
    if not isinstance(yielded.owner, ir.Operation | ir.OpView):
        return None
    op = yielded.owner.operation
    kind = COMBINERS.get(op.name)
    if kind is None or (kind in ("or", "and") and str(yielded.type) != "i1"):
        return None
    others = [v for v in op.operands if v != own]
    uses = sum(len(list(a.uses)) for a in accumulators)
    # Each accumulator is used once, by the op that combines it.
    return kind if len(others) == 1 and uses == len(accumulators) else None


def _filled_with(graph: Graph, value: int, number: float) -> bool:
    """Whether a tensor has this number everywhere."""
    node = graph.producer(value)
    if node is not None and node.name == "linalg.fill":
        node = graph.producer(node.operands[0])
    if node is None or node.name != "arith.constant":
        return False
    attribute = node.op.attributes["value"]
    if isinstance(attribute, ir.DenseElementsAttr):
        if not attribute.is_splat:
            return False
        attribute = attribute.get_splat_value()
    return isinstance(attribute, ir.FloatAttr | ir.IntegerAttr) and attribute.value == number


def nest_rule(graph: Graph, node: Node) -> Rule:
    """Factor i is loop i; one more factor, the last, is the table dimension of a `lookup`."""
    maps = [_map_dims(node, position) for position in range(len(node.maps))]
    fixed = _unsplittable(node, maps)
    kinds = _kinds(graph, node, maps, fixed)
    joined = combiner(graph, node) if "reduction" in kinds else None
    if joined is None:
        kinds = ["replicated" if kind == "reduction" else kind for kind in kinds]
    tables, by_data, blocked = _tables(graph, node)
    factors = [
        Factor(size, "replicated" if loop in blocked else kind, joined or "add")
        for loop, (size, kind) in enumerate(zip(node.domain, kinds, strict=True))
    ]
    if by_data is not None:
        table, dim, size = by_data
        tables[table] = (*tables[table][:dim], (len(factors),), *tables[table][dim + 1 :])
        factors.append(Factor(size, "reduction", "add"))
    operands = list(maps)
    for position, value in enumerate(node.operands):
        carried = tables.get(value, ((),) * len(graph.values[value].shape or ()))
        if position >= len(operands):
            operands.append(carried)
        elif value in tables:
            operands[position] = ((),) * len(carried)
    return Rule(tuple(factors), tuple(operands), tuple(maps[node.inputs :]))


def _map_dims(node: Node, position: int) -> DimFactors:
    """Loop of every dimension of an operand; nothing where the index is a constant or compound."""
    return tuple(
        (r.position,) if isinstance(r, ir.AffineDimExpr) else () for r in node.maps[position].results
    )


def _unsplittable(node: Node, maps: Sequence[DimFactors]) -> set[int]:
    """Loops in compound expressions, and loops that index two dimensions of one tensor."""
    found: set[int] = set()
    for index_map, dims in zip(node.maps, maps, strict=True):
        alone = [d for carried in dims for d in carried]
        found.update(d for d in alone if alone.count(d) > 1)
        if not index_map.is_projected_permutation:
            for result in index_map.results:
                if not isinstance(result, ir.AffineDimExpr | ir.AffineConstantExpr):
                    found.update(_dims_of(result))
    return found


def _dims_of(expr: ir.AffineExpr) -> set[int]:
    if isinstance(expr, ir.AffineDimExpr):
        return {expr.position}
    if isinstance(expr, ir.AffineConstantExpr):
        return set()
    return _dims_of(expr.lhs) | _dims_of(expr.rhs)  # type: ignore[attr-defined]


def _kinds(graph: Graph, node: Node, maps: Sequence[DimFactors], fixed: set[int]) -> list[FactorKind]:
    outputs = [{d for carried in dims for d in carried} for dims in maps[node.inputs :]]
    kinds: list[FactorKind] = []
    for loop, reduced in enumerate(node.reduction):
        held = sum(loop in output for output in outputs)
        if loop in fixed or held not in (0, len(outputs)) or (not reduced and not held):
            kinds.append("replicated")
        elif held:
            kinds.append("replicated" if reduced else "parallel")
        else:
            kinds.append("reduction")
    return kinds


def _tables(graph: Graph, node: Node) -> tuple[dict[int, DimFactors], tuple[int, int, int] | None, set[int]]:
    """Factors of the tables that the body reads; (table, dimension, size) of a lookup; loops that tables keep from being split."""
    tables: dict[int, DimFactors] = {}
    blocked: set[int] = set()
    operands = node.operands[: len(node.maps)]
    for read in table_reads(graph, node):
        shape = graph.values[read.table].shape or ()
        whole = [
            loop if loop is not None and node.domain[loop] == size else None
            for loop, size in zip(read.loops, shape)
        ]
        carried = tuple(() if loop is None or whole.count(loop) > 1 else (loop,) for loop in whole)
        known = tables.setdefault(read.table, carried)
        tables[read.table] = tuple(a if a == b else () for a, b in zip(known, carried, strict=True))
        if read.table in operands:
            blocked.update(d for dims in _map_dims(node, operands.index(read.table)) for d in dims)
            tables[read.table] = ((),) * len(shape)
    found = lookup(graph, node)
    if found is None or found[0].table in operands:
        return tables, None, blocked
    read, dim = found
    return tables, (read.table, dim, (graph.values[read.table].shape or ())[dim]), blocked
