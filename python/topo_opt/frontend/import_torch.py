"""Legal FX graph -> a function in the torch dialect, its ops located by graph node and source line."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch_mlir import ir
from torch_mlir.extras import fx_importer

from topo_opt.frontend.aten_export import source_line
from topo_opt.frontend.graph_builder import SOURCE
from topo_opt.frontend.signature import InputRecord, OutputRecord, Signature

# The importer's table has the numbers of complex types one too high: torch counts 8, 9, 10.
fx_importer.TORCH_DTYPE_TO_INT.update({torch.complex32: 8, torch.complex64: 9, torch.complex128: 10})

# Locations are `loc("fxnode:NAME"("file":line))`; `located_node` reads them.
_PREFIX = "fxnode:"


def import_graph(
    context: ir.Context, graph: fx.Graph, name: str, signature: Signature, attributes: Mapping[str, Any]
) -> ir.Module:
    """A module in the torch dialect with the legal graph as public function `name`.

    Args:
        signature: describes the function's arguments and results.
        attributes: of the function, by name: text, a dictionary of integers, or a tuple of texts.

    Raises:
        ImportFailure: a node that the importer refuses.
    """
    with context, ir.Location.unknown():
        module = ir.Module.create()
    importer = fx_importer.FxImporter(module=module, graph_node_importer_cls=_NodeImporter)
    importer._cc = _LocatedCache(context)
    function = importer.import_stateless_graph(graph, func_name=name)
    with context:
        arguments = [_described(r) for r in signature.inputs if r.kind != "literal"]
        results = [_described(r) for r in signature.outputs if r.kind != "literal"]
        function.attributes["arg_attrs"] = ir.ArrayAttr.get(arguments)
        function.attributes["res_attrs"] = ir.ArrayAttr.get(results)
        for key, value in attributes.items():
            function.attributes[key] = _attribute(value)
    return module


class ImportFailure(Exception):
    """The importer refused a node: `node` is its name in the normalized graph, `reason` what it said."""

    def __init__(self, node: str, reason: str):
        super().__init__(f"{node}: {reason}")
        self.node, self.reason = node, reason


def located_node(location: ir.Location) -> str | None:
    """The graph node that an op with this location came from, or None."""
    return next((name for name in _names(location)), None)


def located_line(location: ir.Location) -> str | None:
    """`file:line` of the user's model for an op with this location, or None."""
    if isinstance(location, ir.FileLineColLoc):
        return f"{location.filename}:{location.start_line}"
    for child in _children(location):
        if line := located_line(child):
            return line
    return None


def _names(location: ir.Location) -> Sequence[str]:
    if isinstance(location, ir.NameLoc) and location.name_str.startswith(_PREFIX):
        return [location.name_str.removeprefix(_PREFIX)]
    return [name for child in _children(location) for name in _names(child)]


def _children(location: ir.Location) -> Sequence[ir.Location]:
    if isinstance(location, ir.NameLoc):
        return [location.child_loc]
    if isinstance(location, ir.FusedLoc):
        return list(location.locations)
    if isinstance(location, ir.CallSiteLoc):
        return [location.callee, location.caller]
    return []


class _LocatedCache(fx_importer.ContextCache):
    """Names the graph node in each location; keeps one frame of the stack instead of all."""

    def get_node_location(self, node: fx.Node) -> ir.Location:
        line = source_line(node)
        inner = ir.Location.unknown(self._c)
        if line is not None:
            file, _, number = line.rpartition(":")
            inner = ir.Location.file(file, int(number), 0, self._c)
        if node.op != "call_function":
            return inner
        return ir.Location.name(_PREFIX + node.meta.get(SOURCE, node.name), inner, self._c)


class _NodeImporter(fx_importer.GraphNodeImporter):
    """Says which node could not be imported."""

    def _import_torch_op_overload(self, loc: ir.Location, node: fx.Node, *rest: Any) -> None:
        try:
            super()._import_torch_op_overload(loc, node, *rest)
        except (AssertionError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            sentence = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ImportFailure(node.meta.get(SOURCE, node.name), sentence) from error


def _described(record: InputRecord | OutputRecord) -> ir.DictAttr:
    name = record.target
    fields = {"topo.kind": record.kind, "topo.name": name, "topo.dtype": record.dtype or ""}
    return ir.DictAttr.get({key: ir.StringAttr.get(value) for key, value in fields.items()})


def _attribute(value: Any) -> ir.Attribute:
    if isinstance(value, str):
        return ir.StringAttr.get(value)
    if isinstance(value, tuple):
        return ir.ArrayAttr.get([ir.StringAttr.get(v) for v in value])
    i64 = ir.IntegerType.get_signless(64)
    return ir.DictAttr.get({k: ir.IntegerAttr.get(i64, v) for k, v in value.items()})
