"""`topo-split-long-rows`: a kernel whose few rows are too long for the programs they give becomes one kernel a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_mlir import ir
from torch_mlir.dialects import func

from topo_opt.errors import UnsupportedError
from topo_opt.passes.base import Pass
from topo_opt.passes.schedule.outline import callee, clone_nodes, computed_from, kernels_of, name_kernel
from topo_opt.passes.schedule.roles import VIEWS, Roles
from topo_opt.structured.graph import Graph

if TYPE_CHECKING:
    from topo_opt.codegen.triton.kernel import Kernel
    from topo_opt.codegen.triton.loops import Loops

PASSED_ON = (*VIEWS, "topo.demote")
"""Ops whose operand is stored rather than their result: it may be wider, and is no copy."""


@dataclass(frozen=True)
class Stage:
    """A kernel to be: what it computes, from arguments and results of the stages before it."""

    results: tuple[int, ...]
    attributes: ir.DictAttr


@dataclass(frozen=True)
class SplitLongRows(Pass):
    """Takes the passes of a row kernel apart, where its rows would leave most cores of the machine (`topology`) idle.

    `%y = call @row_norm(%x)`  -->  `%scale = call @stage(%x); %y = call @last(%x, %scale)`

    Every stage reduces whole rows and can share a row between programs; the last one runs over all elements and reads what
    was computed of a row (a mean, a root), not its sums. A kernel that needs one pass and stores rows only stays: sharing its
    rows is a matter of its tile.
    """

    name = "topo-split-long-rows"
    topology: str | None = None

    def apply(self, module) -> None:
        from topo_opt.codegen.triton.kernel import Kernel
        from topo_opt.codegen.triton.target import Target

        target = Target.named(self.topology) if self.topology else Target()
        block = module.operation.regions[0].blocks[0]
        functions = [v.operation for v in block.operations if v.operation.name == "func.func"]
        split: dict[str, _Split] = {}
        for op in functions:
            if "topo.kernel" in op.attributes and "topo.inout" not in op.attributes:
                kernel = Kernel(op, target)
                stages = stages_of(kernel) if kernel.attributes["family"] == "loops" else []
                if stages:
                    split[kernel.name] = _Split(module.operation, kernel.graph, stages)
        for op in functions:
            if "topo.kernel" not in op.attributes and op.regions[0].blocks:
                _replace_calls(op, split)
        for found in split.values():
            found.graph.func.erase()


def stages_of(kernel: Kernel) -> list[Stage]:
    """The stages that a kernel is better off as; empty when it stays whole."""
    from topo_opt.codegen.triton.looped_rows import LoopedRows
    from topo_opt.codegen.triton.loops import Loops
    from topo_opt.codegen.triton.loops_tiles import default_tile

    graph = kernel.graph
    tile = default_tile(kernel)
    loops = Loops(kernel, tile=tile)
    space = loops.space
    blocks = space.blocks
    if space.persistent or space.parts > 1 or blocks >= kernel.target.cores:
        return []
    try:
        looped = LoopedRows(loops)
        levels, pairs = looped.levels()
        if any(looped.sequential_of(level, pairs) for level in levels):
            return []
    except UnsupportedError:
        return []
    full = tuple(v for v in graph.returns if loops.is_full(v))
    rows = tuple(v for v in graph.returns if not loops.is_full(v))
    values = [_once(graph.nodes[n].results[p] for n, p, _ in level) for level in levels]
    if not values or len(values) + bool(full) < 2:
        return []
    values[-1] = _once([*values[-1], *rows, *_of_rows(loops, full, {v for level in values for v in level})])
    old = ir.DictAttr(graph.func.attributes["topo.kernel"])
    stages = [Stage(results, old) for results in values]
    if full:
        stages.append(Stage(_once(full), _elementwise(graph, full[0])))
    return _needed_later(graph, stages)


def _of_rows(loops: Loops, full: Sequence[int], reduced: set[int]) -> list[int]:
    """The values of a row each, computed from reductions, that the full results are computed from."""
    graph, found, seen = loops.kernel.graph, [], set()
    waiting = list(full)
    while waiting:
        value = waiting.pop()
        producer = graph.producer(value)
        if value in seen or producer is None:
            continue
        seen.add(value)
        if loops.is_full(value) or producer.name in PASSED_ON or not _is_row_value(loops, value, reduced):
            waiting.extend(producer.operands)
        else:
            found.append(value)
    return sorted(found)


def _is_row_value(loops: Loops, value: int, reduced: set[int]) -> bool:
    """Whether a kernel of rows can store the value: it needs nothing but reductions of its own row."""
    from topo_opt.codegen.triton.looped_rows import LoopedRows

    graph = loops.kernel.graph
    if graph.values[value].numel != loops.space.row_count or not _depends(graph, value, reduced):
        return False
    try:
        return bool(LoopedRows(loops).asked_by(value))
    except UnsupportedError:
        return False


def _depends(graph: Graph, value: int, targets: set[int]) -> bool:
    waiting, seen = [value], set()
    while waiting:
        value = waiting.pop()
        producer = graph.producer(value)
        if value in targets:
            return True
        if producer is not None and producer.id not in seen:
            seen.add(producer.id)
            waiting.extend(producer.operands)
    return False


def _needed_later(graph: Graph, stages: Sequence[Stage]) -> list[Stage]:
    """The stages with only such results as are returned or read by later ones."""
    kept: list[Stage] = []
    needed = set(graph.returns)
    for number in range(len(stages) - 1, -1, -1):
        known = set(graph.arguments).union(*(s.results for s in stages[:number]))
        results = tuple(v for v in stages[number].results if v in needed)
        needed.update(computed_from(graph, [v for v in results if v not in known], known)[0])
        kept.insert(0, Stage(results, stages[number].attributes))
    return kept


def _once(values) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))


def _elementwise(graph: Graph, value: int) -> ir.DictAttr:
    shape = list(graph.values[value].shape or ())
    identity = ir.AffineMap.get_identity(len(shape), graph.func.context)
    with graph.func.context:
        return ir.DictAttr.get(
            {
                "family": ir.StringAttr.get("loops"),
                "rows": ir.DenseI64ArrayAttr.get(shape),
                "cols": ir.DenseI64ArrayAttr.get([]),
                "full_shape": ir.DenseI64ArrayAttr.get(shape),
                "full_map": ir.AffineMapAttr.get(identity),
            }
        )


@dataclass
class _Split:
    """The kernel functions of the stages; equal ones are made once."""

    module: ir.Operation
    graph: Graph
    stages: Sequence[Stage]
    made: list[tuple[str, list[int], tuple[int, ...]]] = field(default_factory=list)
    """Symbol, inputs and results of every stage, as values of the kernel."""

    def __post_init__(self) -> None:
        known: set[int] = set(self.graph.arguments)
        for stage in self.stages:
            new = tuple(v for v in stage.results if v not in known)
            inputs, nodes = computed_from(self.graph, new, known)
            self.made.append((self._function(inputs, nodes, new, stage.attributes), inputs, new))
            known |= set(new)

    def _function(
        self, inputs: list[int], nodes: list[int], results: tuple[int, ...], attributes: ir.DictAttr
    ) -> str:
        graph, block = self.graph, self.module.regions[0].blocks[0]
        with graph.func.context, ir.Location.unknown(), ir.InsertionPoint(block):
            kind = ir.FunctionType.get(
                [graph.handles[v].type for v in inputs], [graph.handles[v].type for v in results]
            )
            made = func.FuncOp("kernel", kind, visibility="private")
        made.operation.attributes["topo.kernel"] = attributes
        body = made.add_entry_block()
        mapping = dict(zip(inputs, body.arguments))
        with graph.func.context, ir.InsertionPoint(body), ir.Location.unknown():
            clone_nodes(Roles(graph), [graph.nodes[n] for n in nodes], mapping)
            func.ReturnOp([mapping[v] for v in results])
        return name_kernel(made.operation, "loops", kernels_of(self.module))


def _replace_calls(function: ir.Operation, split: dict[str, _Split]) -> None:
    for view in list(function.regions[0].blocks[0].operations):
        call = view.operation
        if call.name != "func.call":
            continue
        found = split.get(callee(call))
        if found is None:
            continue
        graph = found.graph
        values: dict[int, ir.Value] = dict(zip(graph.arguments, call.operands))
        with call.location, ir.InsertionPoint(call):
            for name, inputs, results in found.made:
                types = [graph.handles[v].type for v in results]
                made = func.CallOp(types, name, [values[v] for v in inputs])
                values.update(zip(results, made.operation.results))
        for position, value in enumerate(graph.returns):
            call.results[position].replace_all_uses_with(values[value])
        call.erase()
