"""Calls that torch threads on effect tokens, as plain calls.

`run_decompositions` orders ops with a side effect by a token that the program takes, passes from call to call and returns:

    t1, = with_effects(t0, aten._linalg_check_errors.default, info, 'linalg.inv')  -->  the call itself

A token has no value and no place in the caller's arguments. The order of the graph, which the runtime keeps, says the same.
"""

import copy
import operator

import torch
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind


def without_effect_tokens(ep: ExportedProgram) -> ExportedProgram:
    """`ep` without tokens among its inputs and outputs; `ep` itself when it has none.

    The check of a factorization becomes the factorization's own (`check_errors=True`), so that a singular matrix is an error
    as it is in eager.
    """
    signature = ep.graph_signature
    taken = [spec.kind is InputKind.TOKEN for spec in signature.input_specs]
    given = [spec.kind is OutputKind.TOKEN for spec in signature.output_specs]
    if not any(taken) and not any(given):
        return ep
    plain = copy.copy(ep)
    plain._graph_module = copy.deepcopy(ep.graph_module)
    graph = plain.graph
    (output,) = graph.find_nodes(op="output")
    output.args = (tuple(value for value, token in zip(output.args[0], given, strict=True) if not token),)
    for node in reversed(graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects)):
        _unwrap(node)
    for node, token in zip(graph.find_nodes(op="placeholder"), taken, strict=True):
        if token:
            graph.erase_node(node)
    plain._graph_signature = ExportGraphSignature(
        [spec for spec, token in zip(signature.input_specs, taken, strict=True) if not token],
        [spec for spec, token in zip(signature.output_specs, given, strict=True) if not token],
    )
    graph.lint()
    plain.graph_module.recompile()
    return plain


def _unwrap(node: fx.Node) -> None:
    """Replaces `(token, *results) = with_effects(token, op, *args)`, whose token nobody needs any more."""
    _, target, *args = node.args
    with node.graph.inserting_before(node):
        call = node.graph.call_function(target, tuple(args), dict(node.kwargs))  # type: ignore[arg-type]
    call.meta = {key: value for key, value in node.meta.items() if key != "val"}
    values = node.meta["val"][1:]
    single = len(target._schema.returns) == 1  # type: ignore[union-attr]
    call.meta["val"] = values[0] if single else tuple(values)
    for item in list(node.users):
        index = item.args[1]
        assert item.target is operator.getitem and isinstance(index, int)
        if index > 0 and single:
            item.replace_all_uses_with(call)
        if index > 0 and not single:
            item.args = (call, index - 1)
        else:
            node.graph.erase_node(item)
    node.graph.erase_node(node)
    _fold_check(call)


def _fold_check(call: fx.Node) -> None:
    """`_linalg_check_errors(getitem(linalg_inv_ex(x), 1), ...)` --> `linalg_inv_ex(x, check_errors=True)`"""
    if call.target is not torch.ops.aten._linalg_check_errors.default:
        return
    info = call.args[0]
    producer = info.args[0] if isinstance(info, fx.Node) and info.target is operator.getitem else None
    if not isinstance(producer, fx.Node) or not isinstance(producer.target, OpOverload):
        return
    if any(a.name == "check_errors" and a.kwarg_only for a in producer.target._schema.arguments):
        producer.update_kwarg("check_errors", True)
        call.graph.erase_node(call)
