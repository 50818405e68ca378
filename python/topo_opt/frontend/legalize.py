"""Normalized FX graph -> the graph that is imported: contractions, attention, precision and ATen calls made explicit."""

import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils._pytree import tree_flatten

from topo_opt.errors import Remark
from topo_opt.frontend import attention_patterns, convolutions
from topo_opt.frontend.aten_export import call_template, source_line
from topo_opt.frontend.attention import attention
from topo_opt.frontend.contractions import CONTRACTIONS
from topo_opt.frontend.experts import find as find_experts
from topo_opt.frontend.externs import known_reason, schema_name
from topo_opt.frontend.fx_graph import FxProgram
from topo_opt.frontend.graph_builder import Argument, GraphBuilder
from topo_opt.frontend.index_updates import (
    index_copy,
    index_put,
    masked_put,
    masked_rows_put,
    puts_one_value,
    puts_rows_by_mask,
    updates_rows,
)
from topo_opt.frontend.precision import adapt_arguments, adapts, narrow_results
from topo_opt.frontend.rewrites import REWRITES
from topo_opt.frontend.rewrites_quantized import QUANTIZED
from topo_opt.frontend.signature import dtype_name
from topo_opt.frontend.top_k import top_k
from topo_opt.frontend.topo_ops import aten_call

aten = torch.ops.aten


@dataclass(frozen=True)
class LegalGraph:
    """The graph to import, whose outputs are the tensors among the program's, and what was left to ATen in it."""

    graph: fx.Graph
    remarks: tuple[Remark, ...]
    misses: tuple[str, ...] = ()
    """Attention that was not recognised: the reason, and where it stands in the model."""


# Rules that take the arguments of the op as they are; a wide result is narrowed to the op's type.
_RULES = {
    **CONTRACTIONS,
    aten.scaled_dot_product_attention.default: attention,
    aten.index_copy.default: index_copy,
    aten.topk.default: top_k,
}


def legalize(program: FxProgram, extern: Mapping[str, str]) -> LegalGraph:
    """Rewrites the graph of a static program.

    Args:
        extern: node name -> reason, for nodes to leave to ATen besides those that `externs.known_reason` names.
    """
    b = GraphBuilder(program.mode)
    env: dict[fx.Node, Argument] = {}
    remarks = []
    experts = find_experts(program.graph, extern)
    attentions = attention_patterns.find(program.graph, extern)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            env[node] = b.placeholder(node.name, node.meta["val"])
        elif node.op == "output":
            values = [env[v] for v in node.args[0] if isinstance(v, fx.Node)]
            b.graph.output(tuple(values))
        elif node in experts.dropped:
            continue
        elif node in attentions.found:
            with b.at(node):
                env[node] = attention_patterns.lower(b, node, env, attentions.found[node])
        elif node in experts.rules:
            with b.at(node):
                env[node] = experts.rules[node](b, node, env)
        elif node.target is operator.getitem:
            env[node] = env[node.args[0]][node.args[1]]
        elif reason := extern.get(node.name) or known_reason(node):
            with b.at(node):
                left = convolutions.leave(b, node, env, reason)
                env[node] = _leave(b, node, env, reason) if left is None else left
            remarks.append(Remark("left-to-aten", _subject(node), reason, source_line(node)))
        elif convolutions.is_lowered(node):
            with b.at(node):
                env[node] = convolutions.lower(b, node, env)
        else:
            with b.at(node):
                env[node] = _lower(b, node, env)
    b.graph.eliminate_dead_code()
    misses = tuple(f"{reason} ({source_line(n) or n.name})" for n, reason in attentions.misses.items())
    return LegalGraph(b.graph, tuple(remarks), misses)


def _lower(b: GraphBuilder, node: fx.Node, env: Mapping[fx.Node, Argument]) -> Argument:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
    target, expected = node.target, node.meta["val"]
    rule = _RULES.get(target) or QUANTIZED.get(schema_name(target))
    if target is aten.index_put.default:
        forms = (
            (updates_rows, index_put),
            (puts_one_value, masked_put),
            (puts_rows_by_mask, masked_rows_put),
        )
        rule = next((form for fits, form in forms if fits(*node.args, **node.kwargs)), None)
    if rule is not None:
        return narrow_results(b, rule(b, *args, **kwargs), expected)
    rewrite, adapted = REWRITES.get(target), adapts(node)
    if adapted:
        args, kwargs = adapt_arguments(b, node, args, kwargs)
    if rewrite is not None and (result := rewrite(b, *args, **kwargs)) is not None:
        return narrow_results(b, result, expected)
    if adapted:
        return narrow_results(b, b.emit(target, *args, **kwargs), expected)
    return b.call(target, args, kwargs, expected, node.name)


def _leave(b: GraphBuilder, node: fx.Node, env: Mapping[fx.Node, Argument], reason: str) -> Argument:
    """A call of ATen in place of the node; its results are the tensors among the node's, in order."""
    template, operands = call_template(node)
    tensors = [v for v in tree_flatten(node.meta["val"])[0] if isinstance(v, torch.Tensor)]
    values = [env[o] for o in operands]
    dtypes = [dtype_name(v.dtype) for v in (*(o.meta["val"] for o in operands), *tensors)]
    op = template.pop("op")
    texts = (op, json.dumps(template), reason, " ".join(dtypes))
    target = aten_call(len(values), len(tensors))
    call = b.call(target, (*texts, *values), {}, tensors if len(tensors) > 1 else tensors[0])
    results = iter(call if isinstance(call, list) else [call])
    if isinstance(node.meta["val"], list | tuple):
        return [next(results) if isinstance(v, torch.Tensor) else v for v in node.meta["val"]]
    return next(results)


def _subject(node: fx.Node) -> str:
    return str(node.target)
