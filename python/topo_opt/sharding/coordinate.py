"""The argument with which every device tells a program for all of them where on the mesh it is."""

from __future__ import annotations

from torch_mlir import ir

from topo_opt.sharding.signature import slots
from topo_opt.sharding.spec import Mesh

COORDINATE = "coordinate"
"""`topo.kind` and `topo.name` of an i64 tensor with one number an axis of the mesh."""


def coordinate_type(mesh: Mesh) -> ir.Type:
    """One i64 an axis."""
    return ir.RankedTensorType.get([len(mesh.axes)], ir.IntegerType.get_signless(64))


def coordinate_entry() -> dict[str, ir.Attribute]:
    """The attributes of the argument."""
    texts = {"topo.kind": COORDINATE, "topo.name": COORDINATE, "topo.dtype": "int64"}
    return {name: ir.StringAttr.get(text) for name, text in texts.items()}


def coordinate_of(func: ir.Operation, mesh: Mesh) -> ir.Value:
    """The coordinates in a function, which gets the argument, its last, where it has none."""
    block = func.regions[0].blocks[0]
    described = slots(func, "arguments")
    for slot, argument in zip(described, block.arguments, strict=True):
        if slot.kind == COORDINATE:
            return argument
    with func.context:
        kind = coordinate_type(mesh)
        argument = block.add_argument(kind, func.location)
        old = ir.FunctionType(ir.TypeAttr(func.attributes["function_type"]).value)
        entries = (
            list(ir.ArrayAttr(func.attributes["arg_attrs"]))
            if "arg_attrs" in func.attributes
            else [ir.DictAttr.get({}) for _ in described]
        )
        func.attributes["function_type"] = ir.TypeAttr.get(
            ir.FunctionType.get([*old.inputs, kind], list(old.results))
        )
        func.attributes["arg_attrs"] = ir.ArrayAttr.get([*entries, ir.DictAttr.get(coordinate_entry())])
    return argument
