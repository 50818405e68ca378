"""Small graphs for the planner, op by op, without IR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from topo_opt.sharding.plan_graph import PlanGraph, PlanOp, PlanValue, Work
from topo_opt.sharding.rule import Factor, Rule


@dataclass
class Builder:
    """Values are numbers. Every operation reads its operands from memory and writes its result there."""

    element_bytes: int = 2
    ops: list[PlanOp] = field(default_factory=list)
    values: list[PlanValue] = field(default_factory=list)

    def argument(self, name: str, *shape: int, kind: str = "param") -> int:
        self.values.append(PlanValue(len(self.values), shape, self.element_bytes, name, kind))
        return len(self.values) - 1

    def op(
        self,
        name: str,
        operands: Sequence[int],
        factors: Sequence[Factor],
        dims: Sequence[Sequence[int]],
        flops: float = 0.0,
        label: str = "",
    ) -> int:
        """`dims` has for every operand, then for the result, the factor of each dimension."""
        carried = tuple(tuple((f,) for f in one) for one in dims)
        shape = tuple(factors[f].size for f in dims[-1])
        made = PlanValue(len(self.values), shape, self.element_bytes, label or f"{name} {len(self.ops)}")
        self.values.append(made)
        reads = tuple((p, self.values[o].nbytes) for p, o in enumerate(operands))
        work = Work(flops, "bf16", reads, ((0, made.nbytes),), 1)
        rule = Rule(tuple(factors), carried[:-1], carried[-1:])
        self.ops.append(PlanOp(len(self.ops), name, rule, tuple(operands), (made.number,), work))
        return made.number

    def product(self, x: int, weight: int, label: str = "") -> int:
        """x[m, k] times weight[n, k]."""
        (m, k), (n, _) = self.values[x].shape, self.values[weight].shape
        factors = (Factor(m, "parallel"), Factor(n, "parallel"), Factor(k, "reduction"))
        return self.op("product", (x, weight), factors, ((0, 2), (1, 2), (0, 1)), 2.0 * m * n * k, label)

    def pointwise(self, *operands: int, label: str = "") -> int:
        shape = self.values[operands[0]].shape
        factors = tuple(Factor(size, "parallel") for size in shape)
        places = tuple(range(len(shape)))
        return self.op("pointwise", operands, factors, (places,) * (len(operands) + 1), label=label)

    def attention(self, q: int, k: int, v: int) -> int:
        """q, k, v[heads, rows, depth]; keys stay together."""
        heads, rows, depth = self.values[q].shape
        factors = (
            Factor(heads, "parallel"),
            Factor(rows, "parallel"),
            Factor(depth, "replicated"),
            Factor(rows, "replicated"),
        )
        dims = ((0, 1, 2), (0, 3, 2), (0, 3, 2), (0, 1, 2))
        return self.op("attention", (q, k, v), factors, dims, 4.0 * heads * rows * rows * depth)

    def project(self, x: int, weight: int, label: str = "") -> int:
        """x[m, k] times weight[heads, depth, k] as [heads, m, depth]."""
        (m, k), (heads, depth, _) = self.values[x].shape, self.values[weight].shape
        factors = (
            Factor(m, "parallel"),
            Factor(heads, "parallel"),
            Factor(depth, "replicated"),
            Factor(k, "reduction"),
        )
        dims = ((0, 3), (1, 2, 3), (1, 0, 2))
        return self.op("project", (x, weight), factors, dims, 2.0 * m * heads * depth * k, label)

    def merge(self, x: int, weight: int, label: str = "") -> int:
        """x[heads, m, depth] times weight[n, heads, depth], added up over heads and depth."""
        (heads, m, depth), (n, _, _) = self.values[x].shape, self.values[weight].shape
        factors = (
            Factor(m, "parallel"),
            Factor(n, "parallel"),
            Factor(heads, "reduction"),
            Factor(depth, "replicated"),
        )
        return self.op(
            "merge", (x, weight), factors, ((2, 0, 3), (1, 2, 3), (0, 1)), 2.0 * m * n * heads * depth, label
        )

    def graph(self, *results: int) -> PlanGraph:
        for number in results:
            self.values[number].returned = True
        return PlanGraph(self.ops, self.values)
