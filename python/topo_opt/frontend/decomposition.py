"""An exported program taken apart into ATen ops, with what torch trips over put right before."""

import copy
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec

from topo_opt.frontend.effect_tokens import without_effect_tokens
from topo_opt.frontend.keep_table import keep_table
from topo_opt.frontend.strided_views import base_of


def decompose(ep: ExportedProgram) -> ExportedProgram:
    """`ep` as ATen ops without mutation, ops of the keep table whole; `ep` itself where torch cannot take it apart."""
    return try_decompose(ep)[0]


def try_decompose(ep: ExportedProgram) -> tuple[ExportedProgram, str | None]:
    """As `decompose`, with torch's reason when it cannot take the program apart (ops of `prims` that give views, for one)."""
    _drop_derived_ranges(ep)
    ep = _without_alias_guards(_with_plain_inputs(ep))
    whole = _with_written_constants_as_buffers(_with_buffers_for_constants(ep))
    try:
        return without_effect_tokens(whole.run_decompositions(keep_table())), None
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        return without_effect_tokens(ep), str(error).partition("\n")[0][:200] or type(error).__name__


def _with_plain_inputs(ep: ExportedProgram) -> ExportedProgram:
    """`ep` for inputs in memory as they are, where the examples were conjugated or negated views (`x.mH`).

    Such a view is lazy: ops that look at memory refuse it, and the runtime resolves what it is given.
    """
    lazy = [node for node in ep.graph.find_nodes(op="placeholder") if _is_lazy(node.meta.get("val"))]
    if not lazy:
        return ep
    plain = copy.copy(ep)
    plain._graph_module = copy.deepcopy(ep.graph_module)
    for node in plain.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if _is_lazy(value):
            with value.fake_mode:
                node.meta["val"] = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=value.device
                )
    return plain


def _without_alias_guards(ep: ExportedProgram) -> ExportedProgram:
    """`ep` without guards on the tensors that its example inputs were views of: inputs that come now have no such `_base`."""
    guards = getattr(ep, "_guards_code", None) or []
    kept = [guard for guard in guards if "._base" not in guard]
    if len(kept) == len(guards):
        return ep
    free = copy.copy(ep)
    free._guards_code = kept
    return free


def _is_lazy(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg())


def _with_buffers_for_constants(ep: ExportedProgram) -> ExportedProgram:
    """`ep` without lifted constants that are buffers of the same program, which read and write the buffer instead.

    A static cache of Hugging Face is lifted both ways, and `run_decompositions` fails on arguments that alias. Two arguments
    for one tensor would also hide that one of them changes.
    """
    specs = ep.graph_signature.input_specs
    keys = [storage_key(ep, s.target) if s.target is not None else None for s in specs]
    buffers: dict[Any, int] = {
        key: i for i, key in enumerate(keys) if key is not None and specs[i].kind is InputKind.BUFFER
    }
    constants = [i for i, spec in enumerate(specs) if spec.kind is InputKind.CONSTANT_TENSOR]
    twice = {i: buffers[keys[i]] for i in constants if keys[i] in buffers}
    if not twice:
        return ep
    merged = copy.copy(ep)
    merged._graph_module = copy.deepcopy(ep.graph_module)
    nodes = merged.graph.find_nodes(op="placeholder")
    for constant, buffer in twice.items():
        nodes[constant].replace_all_uses_with(nodes[buffer])
        merged.graph.erase_node(nodes[constant])
    merged._graph_signature = ExportGraphSignature(
        [s for i, s in enumerate(specs) if i not in twice], list(ep.graph_signature.output_specs)
    )
    merged.graph_module.recompile()
    return merged


def _with_written_constants_as_buffers(ep: ExportedProgram) -> ExportedProgram:
    """`ep` whose lifted constants that the program writes into (a tensor in an attribute) are buffers, as torch wants them."""
    nodes = ep.graph.find_nodes(op="placeholder")
    specs = list(ep.graph_signature.input_specs)
    written = {base for node in ep.graph.nodes for base in _written_bases(node)}
    chosen = [i for i, s in enumerate(specs) if s.kind is InputKind.CONSTANT_TENSOR and nodes[i] in written]
    if not chosen:
        return ep
    for i in chosen:
        specs[i] = InputSpec(InputKind.BUFFER, specs[i].arg, specs[i].target, persistent=False)
    changed = copy.copy(ep)
    changed._graph_signature = ExportGraphSignature(specs, list(ep.graph_signature.output_specs))
    return changed


def _written_bases(node: fx.Node) -> list[fx.Node]:
    """The tensors whose memory the node writes into, seen through views."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    arguments = zip(node.target._schema.arguments, node.args)  # what is not given is not written
    return [
        base_of(value)
        for argument, value in arguments
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node)
    ]


def _drop_derived_ranges(ep: ExportedProgram) -> None:
    """Removes ranges of expressions (`2*s0`) from the shape environment of a program read from a file.

    `torch.export.load` puts them among the ranges of symbols, where `run_decompositions` fails on them.
    """
    for node in ep.graph.find_nodes(op="placeholder"):
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        ranges = getattr(getattr(mode, "shape_env", None), "var_to_range", {})
        for key in [key for key in ranges if not isinstance(key, sympy.Symbol)]:
            del ranges[key]


def storage_key(ep: ExportedProgram, target: str) -> tuple[Any, ...] | None:
    """What two lifted tensors share exactly when they are the same tensor."""
    tensor = ep.state_dict.get(target)
    if tensor is None:
        tensor = ep.constants.get(target)
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return None
    view = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return tensor.untyped_storage()._cdata, *view
