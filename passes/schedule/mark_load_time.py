"""`topo-mark-load-time`: kernels that see nothing but weights run once, when a program is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from torch_mlir import ir

from topo_opt.codegen.plan_graph import AT_LOAD, PlanGraph, read_plan_function
from topo_opt.codegen.triton.kernel import plain
from topo_opt.passes.base import Pass
from topo_opt.passes.ingest.dead_ops import plan_functions
from topo_opt.structured.access import RESHAPES

_MOST_GROWTH = 2
"""Bytes of results for each byte of operands, at most: they stay in memory besides the weights that they were made from."""
_SETTLED = ("param", "constant", "coordinate")


@dataclass(frozen=True)
class MarkLoadTime(Pass):
    """Marks calls of kernels whose operands are the same at every call of the program.

    `%1 = call @k_loops_01(%weight)`  -->  `%1 = call @k_loops_01(%weight) {topo.at_load = "5b0c..."}`

    Such operands are parameters and constants that no function rewrites, the place of a device on the mesh, views of them, and results of calls that are marked.
    The plan computes the results when it is loaded and keeps them; calls with the same digest share them, in every function
    and bucket. What computes more than one value for each element of its operands stays: a weight that a kernel widens for
    itself is read faster than its wide copy.
    """

    name = "topo-mark-load-time"

    def apply(self, module: Any) -> None:
        """Marks the calls of all plan functions."""
        symbols = {
            ir.StringAttr(view.operation.attributes["sym_name"]).value: view
            for view in module.operation.regions[0].blocks[0].operations
            if view.operation.name == "func.func"
        }
        functions = plan_functions(module.operation)
        graphs = [
            read_plan_function(symbols[ir.StringAttr(f.attributes["sym_name"]).value], symbols, kinds=False)
            for f in functions
        ]
        changed = {name for graph in graphs for name in _changed(graph)}
        with module.context:
            for function in functions:
                _mark(function, {s: v.operation for s, v in symbols.items()}, changed)


def _changed(graph: PlanGraph) -> Iterator[str]:
    """Names of the arguments that a function gives a new value, or whose memory one of its kernels may write."""
    yield from (r.name for r in graph.results if r.kind == "mutation")
    names = {a.value: a.name for a in graph.arguments}
    for node in graph.nodes:
        roots = (graph.values[node.inputs[argument]].root for _, argument in node.inout)
        yield from (names[r] for r in roots if r in names)


def _mark(function: ir.Operation, symbols: dict[str, ir.Operation], changed: set[str]) -> None:
    block = function.regions[0].blocks[0]
    settled: dict[ir.Value, str] = {}
    if "arg_attrs" in function.attributes:
        for argument, attributes in zip(block.arguments, ir.ArrayAttr(function.attributes["arg_attrs"])):
            described = plain(attributes)
            kind, name = described.get("topo.kind"), described.get("topo.name")
            if kind in _SETTLED and name not in changed:
                settled[argument] = f"{kind} {name}"
    for view in block.operations:
        op = view.operation
        if op.name in RESHAPES and op.operands[0] in settled:
            settled[op.results[0]] = f"{settled[op.operands[0]]} as {op.results[0].type}"
        elif op.name == "func.call" and _is_small(op, symbols) and all(v in settled for v in op.operands):
            digest = _digest(op, [settled[v] for v in op.operands])
            op.attributes[AT_LOAD] = ir.StringAttr.get(digest)
            settled |= {r: f"{digest} {i}" for i, r in enumerate(op.results)}


def _is_small(call: ir.Operation, symbols: dict[str, ir.Operation]) -> bool:
    """Whether a call is one of a kernel over elements, without memory of its own, whose results are hardly larger than its operands."""
    callee = symbols[ir.FlatSymbolRefAttr(call.attributes["callee"]).value]
    if "topo.kernel" not in callee.attributes or "topo.inout" in callee.attributes:
        return False
    kernel = plain(ir.DictAttr(callee.attributes["topo.kernel"]))
    if kernel["family"] != "loops" or prod(kernel.get("cols", ())) > 1:
        return False
    return sum(map(_nbytes, call.results)) <= _MOST_GROWTH * sum(map(_nbytes, call.operands))


def _nbytes(value: ir.Value) -> int:
    from topo_opt.structured.graph import element_bytes

    kind = ir.RankedTensorType(value.type)
    return prod(kind.shape) * element_bytes(str(kind.element_type))


def _digest(call: ir.Operation, operands: list[str]) -> str:
    """Names what a call computes: the symbol of a kernel tells its code."""
    text = "\n".join([str(call.attributes["callee"]), *operands])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
