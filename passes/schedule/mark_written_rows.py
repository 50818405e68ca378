"""`topo-mark-written-rows`: which row of its keys and values the kernel in front of an attention writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from torch_mlir import ir
from torch_mlir.dialects import func

from topo_opt.codegen.plan_graph import AT_LOAD
from topo_opt.codegen.triton.kernel import mark
from topo_opt.codegen.triton.pack import is_pack, members_of
from topo_opt.passes.base import Pass
from topo_opt.passes.schedule.launches import Launches, Program
from topo_opt.passes.schedule.outline import callee
from topo_opt.structured.graph import Graph, read

FAMILIES = frozenset({"attention"})
_RESHAPES = ("tensor.expand_shape", "tensor.collapse_shape")


@dataclass(frozen=True)
class MarkWrittenRows(Pass):
    """Gives an attention the number of the row that the kernel in front of it writes to its keys and values.

    `%c = call @k_append(%cache, %x, %at); %y = call @k_attention(%q, %c)`
        -->  `%y = call @k_attention(%q, %c, %at)`, of which `written = [array<i64: 1, 2, 2>]` (argument, argument with the number,
             dimension of the rows) and `settled` has 2; `@k_append` has `late_trigger = true`

    All other rows of that argument are complete before the kernel in front has finished. This holds where its result is one of its
    arguments but for one row (`topo.index_update` at one index), at an index that is complete too. It must hold at every call of the
    attention; at some of them all rows of an argument may be complete.
    """

    name = "topo-mark-written-rows"

    def apply(self, module) -> None:
        program = Program.read(module.operation)
        written = cache(lambda kernel, result: _written_row(program.symbols[kernel].operation, result))
        calls: dict[str, list[_Call]] = {name: [] for name in sorted(program.of_families(FAMILIES))}
        for name, plan in program.plans.items():
            operations = _operations(program, name, plan)
            for number, node in enumerate(plan.nodes):
                if node.kernel in calls:
                    calls[node.kernel].append(_Call.find(plan, number, operations, written))
        for name, found in calls.items():
            some = {row for call in found for row in call.rows}
            rows = {(a, dim) for a, dim in some if all((a, dim) in c.rows or a in c.complete for c in found)}
            if rows and len({None if call.index is None else call.index.type for call in found}) == 1:
                _give_index(program, name, sorted(rows), found)
                program.trigger_late_in_front(name)


@dataclass(frozen=True)
class _Row:
    """Where a kernel's result is one of its arguments but for one row: positions of the argument and of that with its index."""

    argument: int
    index: int
    dim: int


@dataclass(frozen=True)
class _Call:
    """One call of an attention: its arguments, each with the dimension of its rows, of which the kernel in front writes that at
    `index`."""

    operation: ir.Operation
    complete: frozenset[int] = frozenset()
    """Arguments of which all rows are complete before the kernel in front has finished."""
    rows: tuple[tuple[int, int], ...] = ()
    index: ir.Value | None = None

    @classmethod
    def find(
        cls,
        plan: Launches,
        number: int,
        operations: Mapping[int, ir.Operation],
        written: Callable[[str, int], _Row | None],
    ) -> _Call:
        """The call of a launch; no rows where it is not known that one is written, or which.

        Args:
            operations: the calls of kernels by the number of their launch.
            written: the row of a kernel's result that is not as in one of its arguments, where it is one.
        """
        if not plan.is_behind_kernel(number):
            return cls(operations[number])
        node, front, values = plan.nodes[number], plan.nodes[number - 1], plan.graph.values
        complete = frozenset(p for p, value in enumerate(node.inputs) if plan.is_settled(number, value))
        rewritten = {argument for _, argument in node.inout}
        found: dict[int, list[tuple[int, int]]] = {}
        for position, value in enumerate(node.inputs):
            root = values[value].root
            if root not in front.outputs or position in rewritten or not plan.graph.covers_root(value):
                continue
            result = front.outputs.index(root)
            row = written(front.kernel, result)
            if (
                row is None
                or (result, row.argument) not in front.inout
                or values[value].shape != values[root].shape
            ):
                continue
            if plan.is_settled(number, front.inputs[row.index]):
                found.setdefault(row.index, []).append((position, row.dim))
        if not found:
            return cls(operations[number], complete)
        index = min(found, key=lambda i: (-len(found[i]), i))
        return cls(operations[number], complete, tuple(found[index]), operations[number - 1].operands[index])


def _operations(program: Program, name: str, plan: Launches) -> dict[int, ir.Operation]:
    """The calls of kernels of a plan function by the number of their launch."""
    body = program.symbols[name].operation.regions[0].blocks[0]
    calls = [
        view.operation
        for view in body.operations
        if view.operation.name == "func.call"
        and callee(view.operation) in program.kernels
        and AT_LOAD not in view.operation.attributes
    ]
    kernels = [id(node) for node in plan.graph.nodes if node.kind == "kernel"]
    by_node = dict(zip(kernels, calls, strict=True))
    return {i: by_node[id(node)] for i, node in enumerate(plan.nodes) if id(node) in by_node}


def _written_row(function: ir.Operation, result: int) -> _Row | None:
    """The row of a kernel's result that is not as in one of its arguments, where it is one."""
    if is_pack(function):
        for member in members_of(function):
            own = result - member.first_result
            if (
                0
                <= own
                < len(ir.FunctionType(ir.TypeAttr(member.func.attributes["function_type"]).value).results)
            ):
                row = _written_row(member.func, own)
                return row and _Row(member.arguments[row.argument], member.arguments[row.index], row.dim)
        return None
    graph = read(function)
    node = graph.producer(graph.returns[result])
    if node is None or node.name != "topo.index_update":
        return None
    destination, index = node.operands[0], _without_reshapes(graph, node.operands[2])
    if not {destination, index} <= set(graph.arguments) or graph.values[index].numel != 1:
        return None
    dim = ir.IntegerAttr(node.op.attributes["dim"]).value
    return _Row(graph.arguments.index(destination), graph.arguments.index(index), dim)


def _without_reshapes(graph: Graph, value: int) -> int:
    while (node := graph.producer(value)) is not None and node.name in _RESHAPES:
        value = node.operands[0]
    return value


def _give_index(program: Program, name: str, rows: Sequence[tuple[int, int]], calls: Sequence[_Call]) -> None:
    """Adds the number of the written row to a kernel's arguments and to its calls."""
    function = program.symbols[name].operation
    kind = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    position, first = len(kind.inputs), calls[0].index
    assert first is not None, "a call whose rows are known has their index"
    with function.context, function.location:
        function.regions[0].blocks[0].add_argument(first.type, ir.Location.unknown())
        with_index = ir.FunctionType.get([*kind.inputs, first.type], kind.results)
        function.attributes["function_type"] = ir.TypeAttr.get(with_index)
    written = [ir.DenseI64ArrayAttr.get([argument, position, dim]) for argument, dim in rows]
    settled = ir.DenseI64ArrayAttr.get([*program.kernels[name].get("settled", ()), position])
    mark(function, {"written": ir.ArrayAttr.get(written), "settled": settled})
    for call in calls:
        old = call.operation
        with old.location, ir.InsertionPoint(old):
            new = func.CallOp(list(kind.results), name, [*old.operands, call.index]).operation
        for before, after in zip(old.results, new.results):
            before.replace_all_uses_with(after)
        old.erase()
