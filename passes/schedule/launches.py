"""The launches of a module's plan functions in their order, and what is complete when one of them starts before the one in front ends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from torch_mlir import ir

from topo_opt.codegen.plan_graph import Node, PlanGraph, read_plan_function
from topo_opt.codegen.triton.kernel import mark, plain
from topo_opt.codegen.triton.pack import is_pack, members_of


@dataclass(frozen=True)
class Launches:
    """The nodes of one plan function that run, in order: the plan leaves out those that make empty tensors only, so none of them is
    in front of any."""

    graph: PlanGraph
    dependent: frozenset[str]
    """Kernels that are launched dependently."""

    @cached_property
    def nodes(self) -> list[Node]:
        return [node for node in self.graph.nodes if any(self.graph.values[v].numel for v in node.outputs)]

    @cached_property
    def _made(self) -> dict[int, int]:
        """Root value -> number of the launch that makes it."""
        return {self.graph.values[v].root: i for i, node in enumerate(self.nodes) for v in node.outputs}

    @cached_property
    def _rewritten(self) -> set[int]:
        return {self.graph.values[node.inputs[a]].root for node in self.nodes for _, a in node.inout}

    def is_behind_kernel(self, number: int) -> bool:
        """Whether the launch in front of one waits for the one before it."""
        return number > 0 and self.nodes[number - 1].kernel in self.dependent

    def is_settled(self, number: int, value: int) -> bool:
        """Whether a value is complete when the kernel in front of a launch has waited: made two launches back or more, or an
        argument of the function, and rewritten by none."""
        root = self.graph.values[value].root
        return (
            self.is_behind_kernel(number)
            and root not in self._rewritten
            and self._made.get(root, -1) < number - 1
        )


@dataclass(frozen=True)
class Program:
    """All plan functions of a module with the functions that they call."""

    symbols: dict[str, Any]
    """Functions by name, as views."""
    kernels: dict[str, dict[str, Any]]
    """`topo.kernel` of those that are kernels, as Python data."""
    plans: dict[str, Launches]

    @classmethod
    def read(cls, module: ir.Operation) -> Program:
        """The program of a module."""
        symbols = {
            ir.StringAttr(view.operation.attributes["sym_name"]).value: view
            for view in module.regions[0].blocks[0].operations
            if view.operation.name == "func.func"
        }
        kernels = {
            name: plain(ir.DictAttr(view.operation.attributes["topo.kernel"]))
            for name, view in symbols.items()
            if "topo.kernel" in view.operation.attributes
        }
        dependent = frozenset(name for name, kernel in kernels.items() if kernel.get("pdl", False))
        plans = {
            name: Launches(read_plan_function(view, symbols, kinds=False), dependent)
            for name, view in symbols.items()
            if view.operation.regions[0].blocks and name not in kernels
        }
        return cls(symbols, kernels, plans)

    def of_families(self, families: frozenset[str]) -> set[str]:
        """The kernels of some families that are launched dependently."""
        return {n for n, k in self.kernels.items() if k["family"] in families and k.get("pdl", False)}

    def trigger_late_in_front(self, kernel: str) -> None:
        """The kernels that run in front of one let others start only when they have waited themselves."""
        pairs = [pair for plan in self.plans.values() for pair in pairwise(plan.nodes)]
        late = {"late_trigger": ir.BoolAttr.get(True)}
        for before in sorted({a.kernel for a, b in pairs if b.kernel == kernel}):
            function = self.symbols[before].operation
            for member in members_of(function) if is_pack(function) else ():
                mark(member.func, late)
            mark(function, late)
