"""`topo-mark-settled-arguments`: which values of earlier launches a kernel may read before the one in front of it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch_mlir import ir

from topo_opt.codegen.plan_graph import Node, PlanGraph, read_plan_function
from topo_opt.codegen.triton.kernel import mark, plain
from topo_opt.codegen.triton.pack import is_pack, members_of
from topo_opt.passes.base import Pass

FAMILIES = frozenset({"attention"})
"""Kernels whose first loads decide where the others go, so that they gain when those come early. For all others a late trigger in
front would cost more than it brings (benchmarks/results/kernels-h200.md)."""


@dataclass(frozen=True)
class MarkSettledArguments(Pass):
    """Sets `settled` on kernels of some families, and `late_trigger` on the kernels that run in front of them.

    `%m = call @k_mask(%p); %q = call @k_gemm(%x); %y = call @k_attention(%q, %m)`
        -->  `@k_gemm` has `late_trigger = true`, `@k_attention` has `settled = array<i64: 1>`

    A kernel that starts while the one in front of it runs can't read what that one writes. What was written before that one is
    complete when the kernel in front lets others start only after its own wait. So an argument is settled when it was made two
    launches back or more, or is an input, and nothing rewrites it. It must be so at every call of the kernel.
    """

    name = "topo-mark-settled-arguments"

    def apply(self, module) -> None:
        symbols = {
            ir.StringAttr(view.operation.attributes["sym_name"]).value: view
            for view in module.operation.regions[0].blocks[0].operations
            if view.operation.name == "func.func"
        }
        kernels = {
            name: plain(ir.DictAttr(view.operation.attributes["topo.kernel"]))
            for name, view in symbols.items()
            if "topo.kernel" in view.operation.attributes
        }
        dependent = {name for name, kernel in kernels.items() if kernel.get("pdl", False)}
        readers = {name for name in dependent if kernels[name]["family"] in FAMILIES}
        graphs = [
            read_plan_function(view, symbols, kinds=False)
            for name, view in symbols.items()
            if view.operation.regions[0].blocks and name not in kernels
        ]
        orders = [(graph, launches(graph)) for graph in graphs]
        found = settled_arguments(orders, readers, dependent)
        for name, positions in found.items():
            more = sorted(set(positions) - set(kernels[name].get("immutable", ())))
            if more:
                mark(symbols[name].operation, {"settled": ir.DenseI64ArrayAttr.get(more)})
                for before in _in_front(orders, name):
                    _trigger_late(symbols[before].operation)


def launches(graph: PlanGraph) -> list[Node]:
    """The nodes that run, in order: the plan leaves out those that make empty tensors only, so none of them is in front of any."""
    return [node for node in graph.nodes if any(graph.values[v].numel for v in node.outputs)]


def settled_arguments(
    orders: Sequence[tuple[PlanGraph, list[Node]]], readers: set[str], dependent: set[str]
) -> dict[str, list[int]]:
    """Kernel of `readers` -> positions of the arguments that are settled at every call, when a kernel of `dependent` is in front."""
    found: dict[str, list[int]] = {}
    for graph, nodes in orders:
        root = [value.root for value in graph.values]
        made = {root[v]: i for i, node in enumerate(nodes) for v in node.outputs}
        rewritten = {root[node.inputs[a]] for node in nodes for _, a in node.inout}
        for i, node in enumerate(nodes):
            if node.kernel not in readers:
                continue
            behind = i > 0 and nodes[i - 1].kernel in dependent
            given = [
                p
                for p, v in enumerate(node.inputs)
                if behind and root[v] not in rewritten and made.get(root[v], -1) < i - 1
            ]
            found[node.kernel] = [p for p in found.get(node.kernel, given) if p in given]
    return found


def _in_front(orders: Sequence[tuple[PlanGraph, list[Node]]], kernel: str) -> list[str]:
    pairs = [pair for _, nodes in orders for pair in pairwise(nodes)]
    return sorted({a.kernel for a, b in pairs if b.kernel == kernel})


def _trigger_late(function: ir.Operation) -> None:
    late = {"late_trigger": ir.BoolAttr.get(True)}
    for member in members_of(function) if is_pack(function) else ():
        mark(member.func, late)
    mark(function, late)
