"""`topo-exchange-parts`: parts of tensors that change places between devices are moved by kernels."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import func

from topo_opt.codegen.triton.exchange_boxes import ELEMENTS
from topo_opt.codegen.triton.kernel import plain
from topo_opt.errors import UnsupportedError
from topo_opt.passes.base import Pass
from topo_opt.passes.schedule.exchange_means import Means
from topo_opt.passes.schedule.outline import called_by_plans, callee, kernels_of, name_kernel
from topo_opt.sharding.annotate import read_mesh
from topo_opt.sharding.collective import Step, emit
from topo_opt.structured.graph import element_bytes

KINDS = ("all_gather", "all_to_all", "reduce_scatter")


@dataclass(frozen=True)
class ExchangeParts(Pass):
    """Makes kernels of collectives that move parts of tensors, where that is faster than a call of the library.

    `%y = call @collective.all_to_all.0(%x)`  -->  `%y = call @k_move_01(%x)` of
    `func.func private @k_move_01(%x) {topo.kernel = {family = "move", ...}} { %0 = shard.all_to_all %x on @mesh ...; return %0 }`

    The kernel stores parts where they belong, on both sides (`codegen.triton.move`). `topology` says how long both ways take and where
    the memory lies through which devices exchange.
    """

    name = "topo-exchange-parts"
    topology: str | None = None

    def apply(self, module: Any) -> None:
        top = module.operation
        mesh = read_mesh(top)
        if mesh is None or len(mesh.devices) < 2 or self.topology is None:
            return
        means, kernels, called = Means(self.topology, mesh), kernels_of(top), called_by_plans(top)
        for view in list(top.regions[0].blocks[0].operations):
            declared = view.operation
            if "topo.collective" not in declared.attributes:
                continue
            symbol = ir.StringAttr(declared.attributes["sym_name"]).value
            name = _kernel(declared, means, kernels) if symbol in called else None
            if name is not None:
                _redirect(top, symbol, name)
                declared.erase()


def _kernel(declared: ir.Operation, means: Means, kernels: dict[str, ir.Operation]) -> str | None:
    """The kernel that does what a collective does; None where there is none, or none that is faster."""
    said = plain(declared.attributes["topo.collective"])
    signature = ir.FunctionType(ir.TypeAttr(declared.attributes["function_type"]).value)
    (given,), (result,) = (map(ir.RankedTensorType, types) for types in (signature.inputs, signature.results))
    element = str(given.element_type)
    if said["kind"] not in KINDS or element not in ELEMENTS or said["combiner"] != "add":
        return None
    nbytes = max(prod(given.shape), prod(result.shape)) * element_bytes(element)
    entry = means.entry(said["kind"], nbytes, said["axes"], declared.context)
    if entry is None or not means.in_order(said["axes"]):
        return None
    step = Step(said["kind"], tuple(said["axes"]), said["dim"], said["source"], said["combiner"])
    with declared.context, ir.Location.unknown(), ir.InsertionPoint(declared):
        made = func.FuncOp("kernel", signature, visibility="private")
        with ir.InsertionPoint(made.add_entry_block()):
            func.ReturnOp([emit(made.arguments[0], step, means.mesh)])
        described = {"family": ir.StringAttr.get("move"), "exchange": entry}
        made.operation.attributes["topo.kernel"] = ir.DictAttr.get(described)
    from topo_opt.codegen.triton import lower_kernel

    try:
        lower_kernel(made.operation)
    except UnsupportedError:
        made.operation.erase()
        return None
    found = name_kernel(made.operation, "move", kernels)
    kernels.setdefault(found, made.operation)
    return found


def _redirect(module: ir.Operation, symbol: str, name: str) -> None:
    """Has plans call another function."""
    for view in module.regions[0].blocks[0].operations:
        if view.operation.name != "func.func" or not view.operation.regions[0].blocks:
            continue
        for inner in view.operation.regions[0].blocks[0].operations:
            op = inner.operation
            if op.name == "func.call" and callee(op) == symbol:
                op.attributes["callee"] = ir.FlatSymbolRefAttr.get(name, op.context)
