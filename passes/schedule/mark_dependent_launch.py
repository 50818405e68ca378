"""`topo-mark-dependent-launch`: which kernels start before the one in front of them ends, and what they may read by then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch_mlir import ir

from topo_opt.codegen.plan_graph import Node, PlanGraph, read_plan_function
from topo_opt.codegen.triton.kernel import mark
from topo_opt.passes.base import Pass

FIRST_CAPABILITY = 90
"""Compute capability (times ten) from which on grids can depend on each other (PTX ISA, griddepcontrol)."""


@dataclass(frozen=True)
class MarkDependentLaunch(Pass):
    """Sets `pdl` and `immutable` on every kernel that a plan function calls.

    `topo.kernel = {family = "loops"}`  -->  `topo.kernel = {family = "loops", immutable = array<i64: 1>, pdl = true}`

    `immutable` are the arguments that are parameters or constants at every call, seen through views that alias, and that no
    kernel rewrites and no function gives a new value: they may be loaded before the kernel waits for the one before it.
    Nothing is marked for a machine (`topology`, by name or file) that can't launch kernels dependently.
    """

    name = "topo-mark-dependent-launch"
    topology: str | None = None

    def apply(self, module) -> None:
        if self.topology and not _can_depend(self.topology):
            return
        symbols = {
            ir.StringAttr(view.operation.attributes["sym_name"]).value: view
            for view in module.operation.regions[0].blocks[0].operations
            if view.operation.name == "func.func"
        }
        graphs = [
            read_plan_function(view, symbols, kinds=False)
            for view in symbols.values()
            if view.operation.regions[0].blocks and "topo.kernel" not in view.operation.attributes
        ]
        for symbol, arguments in immutable_arguments(graphs).items():
            immutable = ir.DenseI64ArrayAttr.get(arguments)
            mark(symbols[symbol].operation, {"immutable": immutable, "pdl": ir.BoolAttr.get(True)})


def immutable_arguments(graphs: Sequence[PlanGraph]) -> dict[str, list[int]]:
    """Kernel -> positions of the arguments that are never written, for every kernel that is called."""
    changed = {r.name for g in graphs for r in g.results if r.kind == "mutation"}
    rewritten = {name for g in graphs for name in _rewritten_names(g)}
    found: dict[str, list[int]] = {}
    for graph in graphs:
        fixed = {
            a.value
            for a in graph.arguments
            if a.kind in ("param", "constant", "prepared") and a.name not in changed | rewritten
        }
        fixed |= set(graph.constants)
        for node in (*graph.load_nodes, *graph.nodes):
            if node.kind != "kernel":
                continue
            given = _positions(graph, node, fixed)
            before = found.get(node.kernel, given)
            found[node.kernel] = [p for p in before if p in given]
    return found


def _positions(graph: PlanGraph, node: Node, fixed: set[int]) -> list[int]:
    own = {argument for _, argument in node.inout}
    return [p for p, v in enumerate(node.inputs) if graph.values[v].root in fixed and p not in own]


def _rewritten_names(graph: PlanGraph) -> set[str]:
    """Plan arguments that some kernel of the function rewrites (the plan may still make a copy for it)."""
    names: Mapping[int, str] = {a.value: a.name for a in graph.arguments}
    roots = [graph.values[n.inputs[argument]].root for n in graph.nodes for _, argument in n.inout]
    return {names[r] for r in roots if r in names}


def _can_depend(topology: str) -> bool:
    from topo_opt.topology import load

    target = load(topology).primary.target
    return (target.capability or 0) >= FIRST_CAPABILITY
