"""What changes inside of an op when it is computed for a part: sizes in attributes, positions, and which rows are ours.

`LOCAL[name](place)` gets the copied op, whose operands and result types are local already, and returns its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_mlir import ir

from topo_opt.passes.ingest.mask_bounds import affine
from topo_opt.sharding.loop_bodies import (
    binary,
    compare,
    constant,
    first_of_part,
    generic,
    index_cast,
    index_constant,
    loop_number,
    select,
)
from topo_opt.sharding.owned_rows import rows_of_ours
from topo_opt.sharding.padding import all_inside, masked, neutral
from topo_opt.sharding.rule import Rule
from topo_opt.sharding.rule_assignment import Assignment, Axes
from topo_opt.sharding.rule_aten import declaration
from topo_opt.sharding.rule_nests import COMBINERS, TableRead, lookup, table_reads
from topo_opt.sharding.rule_ops import ROW, row_offset
from topo_opt.sharding.spec import Mesh
from topo_opt.structured.access import kept_dims, slice_parameters
from topo_opt.structured.graph import Graph, Node, evaluate
from topo_opt.structured.index import Expr, Opaque, symbol


@dataclass(frozen=True)
class Local:
    """An op that is computed for a part of its factors. `graph` and `node` are the op before, `copy` the local one."""

    graph: Graph
    node: Node
    rule: Rule
    assignment: Assignment
    mesh: Mesh
    coordinate: ir.Value
    copy: ir.Operation
    clean: frozenset[int] = frozenset()
    """Operands whose padding is zero."""

    def size(self, factor: int) -> int:
        """The local size of a factor, padding included."""
        return -(-self.rule.factors[factor].size // self.mesh.size(self.assignment.get(factor, ())))

    def has_padding(self, factor: int) -> bool:
        """Whether the last devices have less of a factor than its local size."""
        return self.rule.factors[factor].size % self.mesh.size(self.assignment.get(factor, ())) != 0

    def first_of(self, factor: int) -> ir.Value:
        """Where the part of this device of a factor that is split starts, an index; at the insertion point."""
        return self.first(self.assignment[factor], self.size(factor))

    def first(self, axes: Axes, size: int) -> ir.Value:
        """Where the part of this device starts, an index; at the insertion point. `size` is that of one part."""
        return first_of_part(self.coordinate, self.mesh, axes, size)


def _nest(place: Local) -> list[ir.Value]:
    """A body that asks which iteration it is in gets the number among all iterations; tables are read at local positions."""
    node, copy = place.node, place.copy
    block = copy.regions[0].blocks[0]
    if node.body & {"linalg.index", "tensor.extract"}:
        _number_locally(place, block)
    loops = [loop for loop in range(len(node.domain)) if place.has_padding(loop)]
    guarded = [op for view in block.operations if (op := view.operation).name in _GUARDED]
    reduced = [loop for loop in loops if node.reduction[loop]]
    if guarded:
        inside = _inside(place, block, loops) if loops else None
        for op in guarded if inside is not None else ():
            _guard(op, inside)
    if reduced:
        _skip_padding(place, block, _inside(place, block, reduced))
    return list(copy.results)


def _number_locally(place: Local, block: ir.Block) -> None:
    node = place.node
    reads = table_reads(place.graph, node)
    extracts = [v.operation for v in block.operations if v.operation.name == "tensor.extract"]
    _shift_indices(place, block)
    for read, extract in zip(reads, extracts, strict=True):
        _read_locally(place, block, read, extract)
    found = lookup(place.graph, node)
    if found is not None and len(node.domain) in place.assignment:
        _mask_lookup(place, extracts[0], found[1])


_GUARDED: dict[str, tuple[slice, int]] = {
    "tensor.extract": (slice(1, None), 0),
    "cf.assert": (slice(0, 1), 1),
    **dict.fromkeys(
        (
            *(
                f"arith.{op}"
                for op in ("divsi", "divui", "floordivsi", "ceildivsi", "ceildivui", "remsi", "remui")
            ),
            "math.ipowi",
        ),
        (slice(1, 2), 1),
    ),
}
"""What may not be computed from anything: operands that get a number which is always right, and that number."""


def _inside(place: Local, block: ir.Block, loops: Sequence[int]) -> ir.Value:
    """At the beginning of a body: whether the iteration is none of padding."""
    with ir.InsertionPoint.at_block_begin(block), place.copy.location:
        return all_inside([(loop, place.first_of(loop), place.rule.factors[loop].size) for loop in loops])


def _guard(op: ir.Operation, inside: ir.Value) -> None:
    positions, number = _GUARDED[op.name]
    with ir.InsertionPoint(op), op.location:
        for position in range(len(op.operands))[positions]:
            operand = op.operands[position]
            op.operands[position] = select(inside, operand, constant(operand.type, number))


def _skip_padding(place: Local, block: ir.Block, inside: ir.Value) -> None:
    """Every accumulator is combined with what changes nothing where the iteration is one of padding."""
    arguments, terminator = list(block.arguments), list(block.operations)[-1].operation
    for accumulator, yielded in zip(arguments[place.node.inputs :], terminator.operands, strict=True):
        op = yielded.owner.operation
        combined = COMBINERS[op.name]
        with ir.InsertionPoint(op), op.location:
            for position, operand in enumerate(op.operands):
                if operand != accumulator:
                    nothing = neutral(operand.type, combined)
                    op.operands[position] = select(inside, operand, nothing)


def _contract(place: Local) -> list[ir.Value]:
    """Padding of what is added up is zero in both factors, as anything times zero need not be zero."""
    inner = [
        f
        for f, factor in enumerate(place.rule.factors)
        if factor.kind == "reduction" and place.has_padding(f)
    ]
    _clear_padding(place, inner, range(2))
    return list(place.copy.results)


def _clear_padding(place: Local, factors: Sequence[int], operands: Sequence[int]) -> None:
    """Gives the op zeros where these factors have padding."""
    for position in operands:
        dims = {
            d: f for d, carried in enumerate(place.rule.operands[position]) for f in carried if f in factors
        }
        if not dims or position in place.clean:
            continue
        with ir.InsertionPoint(place.copy), place.copy.location:
            # The coordinates are read in the body.
            bounds = {d: (f, place.rule.factors[f].size) for d, f in dims.items()}
            place.copy.operands[position] = masked(place.copy.operands[position], bounds, place.first_of)


def _shift_indices(place: Local, block: ir.Block) -> None:
    for view in list(block.operations):
        op = view.operation
        if op.name != "linalg.index":
            continue
        loop = ir.IntegerAttr(op.attributes["dim"]).value
        axes = place.assignment.get(loop)
        if not axes:
            continue
        with ir.InsertionPoint.after(op), op.location:
            first = place.first(axes, place.size(loop))
            moved = ir.Operation.create("arith.addi", [op.results[0].type], [op.results[0], first])
        op.results[0].replace_all_uses_except(moved.results[0], [moved])


def _read_locally(place: Local, block: ir.Block, read: TableRead, extract: ir.Operation) -> None:
    """A dimension of a table that is split along with a loop is read at the local number of the iteration."""
    dims = place.rule.operands[place.node.operands.index(read.table)]
    for position, (loop, carried) in enumerate(zip(read.loops, dims, strict=True)):
        if loop is None or carried != (loop,) or loop not in place.assignment:
            continue
        with ir.InsertionPoint(extract), extract.location:
            extract.operands[1 + position] = loop_number(loop)


def _mask_lookup(place: Local, extract: ir.Operation, dim: int) -> None:
    """Looks up what this device has; zero for rows of others."""
    factor = len(place.node.domain)
    rows = place.size(factor)
    with ir.InsertionPoint(extract), extract.location:
        asked = extract.operands[1 + dim]
        here = binary("arith.subi", asked, place.first(place.assignment[factor], rows))
        zero = index_constant(0)
        inside = binary("arith.andi", compare("sge", here, zero), compare("slt", here, index_constant(rows)))
        extract.operands[1 + dim] = select(inside, here, zero)
    element = extract.results[0]
    with ir.InsertionPoint.after(extract), extract.location:
        nothing = constant(element.type, 0)
        chosen = ir.Operation.create("arith.select", [element.type], [inside, element, nothing])
    element.replace_all_uses_except(chosen.results[0], [chosen])


def _shape_of(place: Local) -> list[int]:
    return list(ir.RankedTensorType(place.copy.results[0].type).shape)


def _i64(values: Sequence[int]) -> ir.Attribute:
    return ir.DenseI64ArrayAttr.get(list(values))


def _expand(place: Local) -> list[ir.Value]:
    place.copy.attributes["static_output_shape"] = _i64(_shape_of(place))
    return list(place.copy.results)


def _slice(place: Local) -> list[ir.Value]:
    """Dimensions that are taken whole are taken whole of the part."""
    inserts = place.node.name == "tensor.insert_slice"
    _, sizes, _ = slice_parameters(place.node)
    small = place.graph.values[place.node.operands[0] if inserts else place.node.results[0]].shape or ()
    large = place.rule.results[0] if inserts else place.rule.operands[0]
    local = list(sizes)
    for dim, kept in enumerate(kept_dims(sizes, small)):
        if kept is not None and large[dim]:
            local[dim] = place.size(large[dim][0])
    place.copy.attributes["static_sizes"] = _i64(local)
    return list(place.copy.results)


def _grouped_product(place: Local) -> list[ir.Value]:
    """Experts of other devices are none of ours; their rows are zero."""
    rows, inner, _, experts = range(4)
    # Matrices are looked up by number, so that padding has that of one which exists.
    _clear_padding(place, [f for f in (rows,) if place.has_padding(f)], [2])
    _clear_padding(place, [f for f in (inner,) if place.has_padding(f)], [0, 1])
    axes = place.assignment.get(experts)
    if not axes:
        return list(place.copy.results)
    copy, count = place.copy, place.size(experts)
    with ir.InsertionPoint(copy), copy.location:
        group = _local_group(place, copy.operands[2], axes, count)
        copy.operands[2] = group
    with ir.InsertionPoint.after(copy), copy.location:
        return [rows_of_ours(copy.results[0], group, count)]


def _local_group(place: Local, group: ir.Value, axes: Axes, count: int) -> ir.Value:
    """The groups counted from the first one of this device; those of others outside of [0, count)."""
    element = ir.RankedTensorType(group.type).element_type

    def body(arguments: Sequence[ir.Value]) -> ir.Value:
        first = index_cast(place.first(axes, count), element)
        return binary("arith.subi", arguments[0], first)

    rows = ir.AffineMap.get_identity(1)
    return generic([group], [rows], rows, ir.RankedTensorType(group.type), body)


def _attention(place: Local) -> list[ir.Value]:
    """Rows are counted among all rows, by their positions: see `row_offset`."""
    axes = place.assignment.get(ROW)
    if not axes or row_offset(place.node) == "free":
        return list(place.copy.results)
    copy, i64 = place.copy, ir.IntegerType.get_signless(64)
    segments = list(ir.DenseI32ArrayAttr(copy.attributes["operandSegmentSizes"]))
    operands = list(copy.operands)
    old = operands.pop() if segments[4] else None
    rows = place.size(ROW)
    with ir.InsertionPoint(copy), copy.location:
        kind = ir.RankedTensorType(old.type) if old is not None else ir.RankedTensorType.get([1, 1], i64)

        def body(arguments: Sequence[ir.Value]) -> ir.Value:
            first = index_cast(place.first(axes, rows), i64)
            return binary("arith.addi", arguments[0], first) if arguments else first

        cells = ir.AffineMap.get_identity(2)
        given = [old] if old is not None else []
        positions = generic(given, [cells] * len(given), cells, kind, body)
        attributes = {name: copy.attributes[name] for name in copy.attributes}
        if old is None:
            attributes |= _bounds_from_positions(attributes)
        segments[4] = 1
        attributes["operandSegmentSizes"] = ir.DenseI32ArrayAttr.get(segments)
        made = ir.Operation.create(copy.name, [copy.results[0].type], [*operands, positions], attributes)
    copy.erase()
    return list(made.results)


def _bounds_from_positions(attributes: dict[str, ir.Attribute]) -> dict[str, ir.Attribute]:
    """The bounds of an attention without positions, for rows m that stand at m + p: `causal` and every bound of m."""
    far = 1 << 40
    row, position = symbol("m", far), Expr(((Opaque("p", -far, far, frozenset()), 1),))
    found: dict[str, ir.Attribute] = {"causal": ir.BoolAttr.get(False)}
    dims = ir.AffineDimExpr.get(0), ir.AffineDimExpr.get(1)
    for name in ("low", "high"):
        bounds = (
            [evaluate(b, [row + position, row * 0]) for b in ir.AffineMapAttr(attributes[name]).value.results]
            if name in attributes
            else []
        )
        if name == "high" and ir.BoolAttr(attributes["causal"]).value:
            bounds.append(row + position + 1)
        if bounds:
            found[name] = ir.AffineMapAttr.get(ir.AffineMap.get(2, 0, [affine(b, *dims) for b in bounds]))
    return found


def _call(place: Local) -> list[ir.Value]:
    """A declaration of the op on parts."""
    copy = place.copy
    callee = declaration(place.graph.func, place.node.op)
    kind = ir.FunctionType.get([v.type for v in copy.operands], [v.type for v in copy.results])
    copy.attributes["callee"] = ir.FlatSymbolRefAttr.get(_declared_as(callee, kind))
    return list(copy.results)


def _declared_as(callee: ir.Operation, kind: ir.FunctionType) -> str:
    """The symbol of a declaration like `callee` of this type, which is made where there is none yet."""
    name = ir.StringAttr(callee.attributes["sym_name"]).value
    symbols = ir.SymbolTable(callee.parent.operation)
    number = 0
    while (symbol := f"{name}.part{number}") in symbols:
        if ir.TypeAttr(symbols[symbol].operation.attributes["function_type"]).value == kind:
            return symbol
        number += 1
    made = callee.clone(ip=ir.InsertionPoint(callee)).operation
    made.attributes["sym_name"] = ir.StringAttr.get(symbol)
    made.attributes["function_type"] = ir.TypeAttr.get(kind)
    return symbol


LOCAL: dict[str, Callable[[Local], list[ir.Value]]] = {
    "func.call": _call,
    "linalg.contract": _contract,
    "linalg.generic": _nest,
    "tensor.expand_shape": _expand,
    "tensor.extract_slice": _slice,
    "tensor.insert_slice": _slice,
    "topo.attention": _attention,
    "topo.grouped_product": _grouped_product,
}
"""Ops without a row change by their operands and results alone."""
