"""The kernels of a module that are worth a tile of their own, with what their calls say about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod

from torch_mlir import ir

from topo_opt.codegen.triton.kernel import plain
from topo_opt.codegen.triton.loops_tiles import EXCHANGED
from topo_opt.estimate import work_of
from topo_opt.topology import Device

_FROM_MEMORY = ("param", "buffer", "constant")


@dataclass(frozen=True)
class Subject:
    """A kernel to choose a tile for."""

    symbol: str
    func: ir.Operation
    weight: float = 1.0
    """Its part of the model's time."""
    cold: frozenset[int] | None = None
    """The arguments that are parameters, constants or state at some call: a step has pushed them out of L2 before the next one
    reads them. None where no call is known."""


def subjects_of(module: ir.Operation, device: Device, with_code: Collection[str]) -> list[Subject]:
    """The kernels that plan functions call, in the order of the module; all of them where there are no such functions.

    Args:
        with_code: symbols of the kernels that code generation takes.
    """
    functions = dict(_functions(module))
    kernels = {s: f for s, f in functions.items() if "topo.kernel" in f.attributes and s in with_code}
    plans = [f for f in functions.values() if "topo.function" in f.attributes]
    kernels = {s: f for s, f in kernels.items() if not _waits_for_devices(f)}
    if not plans:
        return [Subject(s, f, work_of(f).floor_ns(device)) for s, f in kernels.items()]
    launches: Counter[str] = Counter()
    cold: dict[str, set[int]] = {s: set() for s in kernels}
    for plan in plans:
        for symbol, positions in _calls(plan, functions):
            if symbol in kernels:
                launches[symbol] += 1
                cold[symbol] |= positions
    return [
        Subject(s, f, launches[s] * work_of(f).floor_ns(device), frozenset(cold[s]))
        for s, f in kernels.items()
        if launches[s]
    ]


def _waits_for_devices(func: ir.Operation) -> bool:
    """Whether a kernel is bound by what other devices give it, which no measurement on one shows."""
    attributes = plain(ir.DictAttr(func.attributes["topo.kernel"]))
    takes = attributes["family"] == "loops" and "exchange" in attributes
    return attributes["family"] == "move" or (takes and prod(attributes["rows"]) <= EXCHANGED)


def _functions(module: ir.Operation) -> Iterator[tuple[str, ir.Operation]]:
    for view in module.regions[0].blocks[0].operations:
        op = view.operation
        if op.name == "func.func":
            yield ir.StringAttr(op.attributes["sym_name"]).value, op


def _calls(plan: ir.Operation, functions: dict[str, ir.Operation]) -> Iterator[tuple[str, set[int]]]:
    """Every call of a plan function with the positions of operands that are parameters, constants or state."""
    block = plan.regions[0].blocks[0]
    kinds = (
        [plain(a).get("topo.kind") for a in ir.ArrayAttr(plan.attributes["arg_attrs"])]
        if "arg_attrs" in plan.attributes
        else []
    )
    stored = {hash(a) for a, kind in zip(block.arguments, kinds) if kind in _FROM_MEMORY}
    for view in block.operations:
        op = view.operation
        positions = {i for i, v in enumerate(op.operands) if hash(v) in stored}
        if op.name != "func.call":
            if positions:  # a view of it
                stored |= {hash(r) for r in op.results}
            continue
        symbol = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
        if "topo.at_load" in op.attributes:
            stored |= {hash(r) for r in op.results}
            continue
        yield symbol, positions
        callee = functions[symbol].attributes
        for result, argument in plain(callee["topo.inout"]) if "topo.inout" in callee else ():
            if argument in positions:
                stored.add(hash(op.results[result]))
