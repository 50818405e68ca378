"""`topo-mark-settled-arguments`: which values of earlier launches a kernel may read before the one in front of it ends."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch_mlir import ir

from topo_opt.codegen.triton.kernel import mark
from topo_opt.passes.base import Pass
from topo_opt.passes.schedule.launches import Program

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
        program = Program.read(module.operation)
        for name, positions in settled_arguments(program, program.of_families(FAMILIES)).items():
            more = sorted(set(positions) - set(program.kernels[name].get("immutable", ())))
            if more:
                mark(program.symbols[name].operation, {"settled": ir.DenseI64ArrayAttr.get(more)})
                program.trigger_late_in_front(name)


def settled_arguments(program: Program, readers: Collection[str]) -> dict[str, list[int]]:
    """Kernel of `readers` -> positions of the arguments that are settled at every call."""
    found: dict[str, list[int]] = {}
    for plan in program.plans.values():
        for i, node in enumerate(plan.nodes):
            if node.kernel in readers:
                given = [p for p, v in enumerate(node.inputs) if plan.is_settled(i, v)]
                found[node.kernel] = [p for p in found.get(node.kernel, given) if p in given]
    return found
