"""What a function says of its arguments and results: `topo.kind`, `topo.name`, `topo.dtype`, `topo.sharding`, `topo.whole`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch_mlir import ir

Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Slot:
    """One argument or result, as far as it is described. `dims`: the axes of every dimension; None when it is whole.

    `whole`: the shape of the tensor of which this is a part, where parts have padding.
    """

    kind: str | None = None
    name: str | None = None
    dims: Dims | None = None
    whole: tuple[int, ...] | None = None


def slots(func: ir.Operation, which: Literal["arguments", "results"]) -> list[Slot]:
    """What is said of every argument or result."""
    kind = ir.FunctionType(ir.TypeAttr(func.attributes["function_type"]).value)
    count = len(kind.inputs if which == "arguments" else kind.results)
    attribute = "arg_attrs" if which == "arguments" else "res_attrs"
    if attribute not in func.attributes:
        return [Slot() for _ in range(count)]
    return [_slot(ir.DictAttr(entry)) for entry in ir.ArrayAttr(func.attributes[attribute])]


def _slot(entry: ir.DictAttr) -> Slot:
    texts = {
        key: ir.StringAttr(entry[f"topo.{key}"]).value for key in ("kind", "name") if f"topo.{key}" in entry
    }
    dims = None
    if "topo.sharding" in entry:
        dims = tuple(
            tuple(ir.StringAttr(axis).value for axis in ir.ArrayAttr(axes))
            for axes in ir.ArrayAttr(entry["topo.sharding"])
        )
    whole = tuple(ir.DenseI64ArrayAttr(entry["topo.whole"])) if "topo.whole" in entry else None
    return Slot(texts.get("kind"), texts.get("name"), dims, whole)
