"""Structured IR as a `PlanGraph`: rules, work, and which tensors lie in memory between kernels.

Which operations share a kernel is guessed the way fusion decides: pointwise operations and views continue the kernel of
their latest operand; products, attention, lookups, updates, reductions and ATen calls start one. Only what passes from one
kernel to another is counted as memory traffic, in the narrowest type on the way.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from torch_mlir import ir

from topo_opt.estimate import RATES, matrix_ops, scalar_ops
from topo_opt.sharding.plan_graph import PlanGraph, PlanOp, PlanValue, Work
from topo_opt.sharding.plan_terms import Owners
from topo_opt.sharding.rule import Rule
from topo_opt.sharding.rule_nests import table_reads
from topo_opt.sharding.rules import FREE_OPS, sharding_rule
from topo_opt.sharding.transport import Transport
from topo_opt.structured.graph import Graph, Node, element_bytes, read

_MATRIX_OPS = ("linalg.contract", "topo.attention", "topo.grouped_product")
_HEAVY = (*_MATRIX_OPS, "topo.index_update", "topo.top_k", "tm_tensor.scan", "tm_tensor.scatter", "func.call")


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
        self.kernels = _kernels(graph, self.nodes)
        self.owners = Owners(graph)

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
        ops = []
        for node in self.nodes:
            rule, terms = sharding_rule(graph, node), None
            owns, terms = self.owners.follow(node, rule)
            operands = tuple(
                numbers.get(o, -1) if len(rule.operands[p]) == len(graph.values[o].shape or ()) else -1
                for p, o in enumerate(node.operands)
            )
            results = tuple(numbers.get(r, -1) for r in node.results)
            work = self._work(node, rule, traffic[node.id])
            ops.append(PlanOp(node.id, node.name, rule, operands, results, work, terms, owns))
        self._mark_returned(values, numbers)
        made = PlanGraph(ops, list(values.values()), _text(graph.func, "sym_name") or "main")
        stored = {s for s in self._stored.values()} | set(graph.returns)
        for value in made.values:
            value.in_memory = value.kind is not None or value.number in stored
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
        graph, self._stored = self.graph, dict[int, int]()
        reads: dict[int, list[tuple[int, int]]] = {n.id: [] for n in self.nodes}
        seen: set[tuple[int, int]] = set()
        for node in self.nodes:
            kernel = self.kernels[node.id]
            for position, operand in enumerate(node.operands):
                producer = graph.values[operand].node
                if not _is_tensor(graph, operand) or (
                    producer is not None and self.kernels.get(producer, -1) in (kernel, -1)
                ):
                    continue
                source = self._narrowest(operand)
                if (kernel, source) not in seen:
                    seen.add((kernel, source))
                    reads[node.id].append((position, graph.values[source].nbytes))
                if graph.values[source].node is not None:
                    self._stored[operand] = source
        written = set(self._stored.values()) | set(graph.returns)
        started: set[int] = set()
        found = {}
        for node in self.nodes:
            kernel = self.kernels[node.id]
            writes = tuple((p, graph.values[r].nbytes) for p, r in enumerate(node.results) if r in written)
            starts = kernel >= 0 and kernel not in started
            started.add(kernel)
            found[node.id] = _Traffic(tuple(reads[node.id]), writes, int(starts))
        return found

    def _narrowest(self, value: int) -> int:
        """The tensor with the fewest bytes from which pointwise operations on one tensor make `value`."""
        graph, best = self.graph, value
        while (node := graph.producer(value)) is not None and node.id in self.kernels:
            sources = [o for o in node.operands if _is_tensor(graph, o) and not _is_free(graph, o)]
            if len(sources) != 1 or _starts_kernel(graph, node):
                break
            if graph.values[sources[0]].numel != graph.values[value].numel:
                break
            value = sources[0]
            if graph.values[value].nbytes < graph.values[best].nbytes:
                best = value
        return best

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
            flops = float(scalar_ops(graph, node))
        if node.name == "topo.attention" and ir.BoolAttr(node.op.attributes["causal"]).value:
            triangular = rule.results[0][2][0] if rule.results[0][2] else -1
        if node.name == "topo.grouped_product":
            rows = (graph.values[node.operands[0]].shape or (0,))[0]
        return Work(flops, dtype, tuple(reads), tuple(writes), traffic.kernels, triangular, rows)


def _is_tensor(graph: Graph, value: int) -> bool:
    return graph.values[value].shape is not None


def _is_free(graph: Graph, value: int) -> bool:
    node = graph.producer(value)
    return node is not None and node.name in FREE_OPS


def _is_followed(graph: Graph, node: Node) -> bool:
    """Whether sharding the op is a question: it has to do with tensors, and is not made anew wherever it is used."""
    if node.name in FREE_OPS:
        return False
    return any(_is_tensor(graph, v) for v in (*node.operands, *node.results))


def _starts_kernel(graph: Graph, node: Node) -> bool:
    return node.name in _HEAVY or node.has_reduction or bool(table_reads(graph, node))


def _kernels(graph: Graph, nodes: list[Node]) -> dict[int, int]:
    """Kernel number of every node; -1 for what is computed from arguments alone by each kernel that reads it."""
    found: dict[int, int] = {}
    for node in nodes:
        if _starts_kernel(graph, node):
            found[node.id] = node.id
            continue
        producers = [p.id for o in node.operands if (p := graph.producer(o)) is not None and p.id in found]
        found[node.id] = max((found[p] for p in producers), default=-1)
    return found


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
