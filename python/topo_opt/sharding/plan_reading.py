"""Structured IR as a `PlanGraph`: rules, work, and which tensors lie in memory between kernels.

Only what passes from one kernel to another (`plan_kernels.py`) is counted as memory traffic.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch_mlir import ir

from topo_opt.codegen.triton.contraction import analyse
from topo_opt.estimate import RATES, matrix_ops, scalar_ops
from topo_opt.sharding.plan_graph import KernelWork, PlanGraph, PlanOp, PlanValue, Work
from topo_opt.sharding.plan_kernels import kernels_of
from topo_opt.sharding.plan_terms import Owners
from topo_opt.sharding.rule import Rule
from topo_opt.sharding.rule_nests import table_reads
from topo_opt.sharding.rules import FREE_OPS, sharding_rule
from topo_opt.sharding.transport import Transport
from topo_opt.structured.graph import Graph, Node, element_bytes, read

if TYPE_CHECKING:
    from topo_opt.collectives.kernels import KernelKind

_MATRIX_OPS: Mapping[str, KernelKind] = {
    "linalg.contract": "product",
    "topo.attention": "attention",
    "topo.grouped_product": "grouped_product",
}


def read_plan_graph(func: ir.Operation, *, narrow_sums: bool = True) -> PlanGraph:
    """The function with everything that the planner needs; free of MLIR.

    Args:
        narrow_sums: as `partition` will be asked.
    """
    graph = read(func)
    made = _Reader(graph).plan_graph()
    if narrow_sums:
        transport = Transport(graph)
        for value in made.values:
            moved = (transport.of_sum if _may_be_terms(made, value) else transport.of_copy)(value.number)
            value.moved_element_bytes = 0 if moved is None else element_bytes(moved)
    return made


def _may_be_terms(graph: PlanGraph, value: PlanValue) -> bool:
    """Whether an operation can leave a value as terms of a sum."""
    if value.producer < 0:
        return False
    op = graph.ops[value.producer]
    return op.terms is not None or any(factor.kind == "reduction" for factor in op.rule.factors)


@dataclass(frozen=True)
class _Traffic:
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    kernels: int


class _Reader:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.nodes = [n for n in graph.nodes if _is_followed(graph, n)]
        self.kernels = kernels_of(graph)
        self.owners = Owners(graph)
        self._chooses_experts = any(n.name == "topo.grouped_product" for n in graph.nodes)

    def plan_graph(self) -> PlanGraph:
        graph = self.graph
        values = {a: self._argument(i, a) for i, a in enumerate(graph.arguments) if _is_tensor(graph, a)}
        for node in self.nodes:
            for r in node.results:
                if _is_tensor(graph, r):
                    info = graph.values[r]
                    name = _name(graph, node, r)
                    values[r] = PlanValue(r, info.shape or (), element_bytes(info.element), name)
        numbers = {number: i for i, number in enumerate(values)}
        traffic = self._traffic()
        rules = {node.id: sharding_rule(graph, node) for node in self.nodes}
        works = self._beside({n.id: self._work(n, rules[n.id], traffic[n.id]) for n in self.nodes})
        ops = []
        for node in self.nodes:
            rule = rules[node.id]
            owns, terms = self.owners.follow(node, rule)
            operands = tuple(
                numbers.get(o, -1) if len(rule.operands[p]) == len(graph.values[o].shape or ()) else -1
                for p, o in enumerate(node.operands)
            )
            results = tuple(numbers.get(r, -1) for r in node.results)
            ops.append(PlanOp(node.id, node.name, rule, operands, results, works[node.id], terms, owns))
        self._mark_returned(values, numbers)
        made = PlanGraph(ops, list(values.values()), _text(graph.func, "sym_name") or "main")
        inside = self._inside()
        for value in made.values:
            value.in_memory = value.kind is not None or value.number in self._stored
            value.inside = value.number in inside
        return made

    def _argument(self, position: int, number: int) -> PlanValue:
        info, attributes = self.graph.values[number], _attributes(self.graph.func, "arg_attrs", position)
        name = attributes.get("topo.name", f"argument {position}")
        kind = attributes.get("topo.kind", "input")
        return PlanValue(number, info.shape or (), element_bytes(info.element), name, kind)

    def _mark_returned(self, values: dict[int, PlanValue], numbers: dict[int, int]) -> None:
        by_name = {v.name: numbers[n] for n, v in values.items() if v.kind in ("buffer", "input")}
        for position, number in enumerate(self.graph.returns):
            if number not in values:
                continue
            values[number].returned = True
            attributes = _attributes(self.graph.func, "res_attrs", position)
            if attributes.get("topo.kind") == "mutation" and values[number].kind is None:
                values[number].rewrites = by_name.get(attributes.get("topo.name", ""), -1)
                values[number].name = values[number].name or attributes.get("topo.name", "")

    def _traffic(self) -> dict[int, _Traffic]:
        """What every node reads from and writes to memory, and which one starts the kernel."""
        graph, kernels = self.graph, self.kernels
        self._stored = set[int](map(kernels.base, graph.returns))
        reads: dict[int, list[tuple[int, int]]] = {n.id: [] for n in self.nodes}
        seen: set[tuple[int, int]] = set()
        for node in self.nodes:
            kernel = kernels.of.get(node.id)
            if kernel is None:
                continue
            for position, operand in enumerate(node.operands):
                if not _is_tensor(graph, operand):
                    continue
                source = kernels.base(operand)
                producer = graph.producer(source)
                if producer is not None and kernels.of.get(producer.id) in (kernel, None):
                    continue
                if producer is not None:
                    self._stored.add(source)
                if (kernel, source) not in seen:
                    seen.add((kernel, source))
                    reads[node.id].append((position, self._read_bytes(operand, source)))
        started: set[int] = set()
        found = {}
        for node in self.nodes:
            kernel = kernels.of.get(node.id)
            writes = tuple(
                (p, graph.values[r].nbytes) for p, r in enumerate(node.results) if r in self._stored
            )
            starts = kernel is not None and kernel not in started
            if kernel is not None:
                started.add(kernel)
            found[node.id] = _Traffic(
                tuple(reads[node.id]), writes if kernel is not None else (), int(starts)
            )
        return found

    def _inside(self) -> set[int]:
        """Values that their own kernel reads, as they are or through views."""
        kernels, found = self.kernels, set[int]()
        for node in reversed(self.nodes):
            for operand in node.operands:
                if kernels.is_view(node):
                    if node.results[0] in found:
                        found.add(operand)
                    continue
                maker = self.graph.producer(kernels.base(operand))
                if maker is not None and kernels.of.get(maker.id, -1) == kernels.of.get(node.id, -2):
                    found.add(operand)
        return found

    def _read_bytes(self, view: int, source: int) -> int:
        """A view may have less of its source, or repeat it, or widen it."""
        seen, whole = self.graph.values[view], self.graph.values[source]
        return min(seen.numel * element_bytes(whole.element), whole.nbytes)

    def _work(self, node: Node, rule: Rule, traffic: _Traffic) -> Work:
        graph = self.graph
        reads, writes = list(traffic.reads), list(traffic.writes)
        if node.name == "topo.index_update":  # the rest of the destination stays as it is
            size = graph.values[node.operands[1]].nbytes
            reads, writes = [(p, n) for p, n in reads if p == 1], [(0, size)]
        tables = {read.table for read in table_reads(graph, node)}
        for position, nbytes in list(reads):
            if node.operands[position] in tables:  # costs what is looked up, not what the table holds
                reads.remove((position, nbytes))
                writes.append((0, min(nbytes, graph.values[node.results[0]].nbytes)))
        dtype, triangular, rows = "f32", -1, 0
        if node.name in _MATRIX_OPS:
            dtype = RATES.get(graph.values[node.operands[0]].element, "f32")
            flops = float(matrix_ops(graph, node))
        else:
            flops = 0.0 if self.kernels.is_view(node) else _scalar_flops(graph, node)
        if node.name == "topo.attention" and ir.BoolAttr(node.op.attributes["causal"]).value:
            triangular = rule.results[0][2][0] if rule.results[0][2] else -1
        if node.name == "topo.grouped_product":
            rows = (graph.values[node.operands[0]].shape or (0,))[0]
        made = Work(flops, dtype, tuple(reads), tuple(writes), traffic.kernels, triangular, rows)
        if node.name == "topo.top_k" and self._chooses_experts:
            return replace(made, kind="top_k", reads=())
        kind = _MATRIX_OPS.get(node.name)
        return made if kind is None else replace(made, kind=kind, shape=_shape(graph, node, rule))

    def _beside(self, works: Mapping[int, Work]) -> dict[int, Work]:
        """Gives operations that are a part of a kernel what the kernel does as a whole."""
        whole: dict[int, KernelWork] = {}
        products: dict[int, int] = {}
        for node, kernel in self.kernels.of.items():
            if (work := works.get(node)) is None:
                continue
            known = whole.get(kernel, KernelWork(0.0, "f32", 0.0, 0.0))
            nbytes = known.nbytes + sum(size for _, size in (*work.reads, *work.writes))
            if work.kind is None:
                whole[kernel] = replace(known, scalars=known.scalars + work.flops, nbytes=nbytes)
            else:
                products[kernel] = products.get(kernel, 0) + 1
                whole[kernel] = replace(
                    known, flops=known.flops + work.flops, dtype=work.dtype, nbytes=nbytes
                )
        made = dict(works)
        for node, kernel in self.kernels.of.items():
            if (work := works.get(node)) is not None:
                part = {"beside": whole[kernel]} if work.kind is None else {"products": products[kernel]}
                made[node] = replace(work, **part)
        return made


# Operations of f32 that a function takes, a multiply-add counted as two: CUDA's erff has about 25 instructions, tanhf and others
# 20, what the special function units have about 5; a division is Newton's method on a reciprocal.
_FUNCTIONS = {"math.erf": 50, "math.exp": 10, "math.rsqrt": 10, "math.absf": 1, "arith.divf": 16}
_OTHER_FUNCTION = 40


def _scalar_flops(graph: Graph, node: Node) -> float:
    """`scalar_ops`, functions with what they take."""
    counted = float(scalar_ops(graph, node))
    if not node.is_loop_nest:
        return counted
    names = [o.operation.name for o in node.op.regions[0].blocks[0].operations]
    taken = [_FUNCTIONS.get(n, _OTHER_FUNCTION if n.startswith("math.") else 1) for n in names]
    return counted + math.prod(node.domain) * (sum(taken) - len(taken))


def _shape(graph: Graph, node: Node, rule: Rule) -> tuple[tuple[int, ...], ...]:
    """The factors of rows, columns and inner dimension (of experts their number); of attention those of rows that share keys."""
    if node.name == "linalg.contract":
        found = analyse(graph, node)
        return found.m, found.n, found.k
    if node.name == "topo.attention":
        _, heads, rows, columns = rule.results[0]
        return (*heads[1:], *rows), columns, ()
    rows, columns = rule.results[0]
    return rows, columns, (len(rule.factors) - 1,)


def _is_tensor(graph: Graph, value: int) -> bool:
    return graph.values[value].shape is not None


def _is_followed(graph: Graph, node: Node) -> bool:
    """Whether sharding the op is a question: it has to do with tensors, and is not made anew wherever it is used."""
    if node.name in FREE_OPS:
        return False
    return any(_is_tensor(graph, v) for v in (*node.operands, *node.results))


def _name(graph: Graph, node: Node, value: int) -> str:
    """What a reader knows a tensor by: the place in the model that its op came from."""
    named = re.match(r'loc\("(?:fxnode:)?([^"]*)"(?!:\d)', str(node.op.location))
    return named[1] if named else f"{node.name} {value}"


def _text(op: ir.Operation, name: str) -> str:
    return ir.StringAttr(op.attributes[name]).value if name in op.attributes else ""


def _attributes(func: ir.Operation, which: str, position: int) -> dict[str, str]:
    """The string attributes of an argument or result."""
    if which not in func.attributes:
        return {}
    entry = ir.DictAttr(ir.ArrayAttr(func.attributes[which])[position])
    return {a.name: a.attr.value for a in entry if isinstance(a.attr, ir.StringAttr)}


def total_bytes(graph: PlanGraph, kinds: tuple[str, ...]) -> int:
    """Bytes of all arguments of these kinds."""
    return sum(math.prod(v.shape) * v.element_bytes for v in graph.values if v.kind in kinds)
