"""One static program -> one structured function, leaving to ATen what cannot be lowered and saying why."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch_mlir import ir

from topo_opt.errors import Remark
from topo_opt.frontend.aten_export import source_line
from topo_opt.frontend.externs import can_leave, known_reason
from topo_opt.frontend.fx_graph import FxProgram
from topo_opt.frontend.graph_builder import GraphBuilder
from topo_opt.frontend.import_torch import ImportFailure, import_graph, located_node
from topo_opt.frontend.legalize import legalize
from topo_opt.frontend.signature import InputRecord, OutputRecord, Signature, dtype_name
from topo_opt.passes import pass_class
from topo_opt.passes.base import PassFailure

INGEST_PASSES = ("topo-raise-named-ops", "topo-lower-torch", "topo-verify-structured")

# Each round leaves at least one more kind of op to ATen; a program with more kinds that fail is left whole.
_MAX_ROUNDS = 40

_REFUSED = "torch-mlir refused it: "

OnStage = Callable[[str, str], None] | None


@dataclass(frozen=True)
class Lowered:
    """`module` with the one function, or None when the whole function is left to ATen; `extern`: what was left, by node."""

    module: ir.Module | None
    remarks: tuple[Remark, ...]
    extern: dict[str, str] = field(default_factory=dict)


def lower_program(
    context: ir.Context,
    program: FxProgram,
    symbol: str,
    function: str,
    sizes: Mapping[str, int],
    extra: Mapping[str, str] | None = None,
    on_stage: OnStage = None,
) -> Lowered:
    """Lowers `program` as public function `symbol`.

    When a node is refused, all nodes with its op and types of operands are left to ATen and the program is lowered again.

    Args:
        function, sizes: recorded as the attributes `topo.function` and `topo.bucket`.
        extra: node name -> reason: left to ATen from the start, with all nodes of the same kind.
        on_stage: called with (symbol, stage) before each stage.
    """
    if program.whole_reason is not None:
        return Lowered(None, (program.whole_reason,))
    attributes = {"topo.function": function, "topo.bucket": dict(sizes)}
    extern = _alike(program, extra or {})
    refusal = Refusal(None, "")
    for _ in range(_MAX_ROUNDS):
        outcome = _attempt(context, program, symbol, attributes, extern, on_stage)
        if isinstance(outcome, Lowered):
            return outcome
        refusal = outcome
        more = _blamed(context, program, refusal, extern)
        if not more:
            break
        extern.update(more)
    line = next((source_line(n) for n in program.graph.nodes if n.name == refusal.node), None)
    return Lowered(None, (Remark("left-to-aten", symbol, _REFUSED + f"{refusal.reason}", line),))


@dataclass(frozen=True)
class Refusal:
    """What the lowering said, and the node of the normalized graph it said it about (None: not known)."""

    node: str | None
    reason: str


def _attempt(
    context: ir.Context,
    program: FxProgram,
    symbol: str,
    attributes: Mapping[str, Any],
    extern: Mapping[str, str],
    on_stage: OnStage = None,
) -> Lowered | Refusal:
    enter = on_stage or (lambda symbol, stage: None)
    enter(symbol, "legalize")
    legal = legalize(program, extern)
    if legal.misses:
        attributes = {**attributes, "topo.missed": legal.misses}
    try:
        enter(symbol, "import")
        module = import_graph(context, legal.graph, symbol, program.signature, attributes)
        for name in INGEST_PASSES:
            enter(symbol, name)
            pass_class(name)().apply(module)
    except ImportFailure as failure:
        return Refusal(failure.node, failure.reason)
    except PassFailure as failure:
        return Refusal(
            located_node(failure.location) if failure.location else None, _sentence(failure.message)
        )
    return Lowered(module, legal.remarks, dict(extern))


def _sentence(message: str) -> str:
    """The diagnostic without the op it was about, which MLIR prints after a colon."""
    first = message.splitlines()[0].partition(": %")[0].partition(': "')[0].strip().rstrip(":")
    return "it has no lowering for it" if first.startswith("failed to legalize operation") else first


def _blamed(
    context: ir.Context, program: FxProgram, refusal: Refusal, extern: Mapping[str, str]
) -> dict[str, str]:
    """The nodes to leave to ATen after a refusal: those like the one it names, else those that cannot be lowered alone."""
    nodes = {n.name: n for n in program.graph.nodes if n.op == "call_function"}
    culprit = nodes.get(refusal.node or "")
    if culprit is not None and culprit.name not in extern and can_leave(culprit):
        kind = kind_of_node(culprit)
        reason = _REFUSED + f"{refusal.reason}"
        return {n.name: reason for n in nodes.values() if kind_of_node(n) == kind}
    found: dict[str, str] = {}
    verdicts: dict[Any, Refusal | None] = {}
    for node in nodes.values():
        if node.name in extern or known_reason(node) or not can_leave(node):
            continue
        kind = kind_of_node(node)
        if kind not in verdicts:
            outcome = _attempt(context, single(program, node), "probe", {}, {})
            verdicts[kind] = outcome if isinstance(outcome, Refusal) else None
        if verdict := verdicts[kind]:
            found[node.name] = _REFUSED + f"{verdict.reason}"
    return found


def _alike(program: FxProgram, chosen: Mapping[str, str]) -> dict[str, str]:
    """The chosen nodes that can be left to ATen, and those of their kinds, with their reasons."""
    nodes = [n for n in program.graph.nodes if n.op == "call_function" and can_leave(n)]
    reasons = {kind_of_node(n): chosen[n.name] for n in nodes if n.name in chosen} if chosen else {}
    return {n.name: reasons[kind_of_node(n)] for n in nodes if reasons and kind_of_node(n) in reasons}


def kind_of_node(node: fx.Node) -> tuple[Any, ...]:
    """Nodes that are alike are refused alike: the op, types and ranks of its tensors, and its other arguments."""
    described = [str(node.target)]
    for value in (*node.all_input_nodes, node):
        described += [_described(t) for t in _tensors(value.meta["val"])]
    others = fx.map_arg((node.args, dict(node.kwargs)), lambda n: None)
    return (*described, str(others) if len(str(others)) < 200 else "")


def _described(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{tensor.dim()}"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    for item in value if isinstance(value, list | tuple) else [value]:
        if isinstance(item, torch.Tensor):
            yield item


def single(program: FxProgram, node: fx.Node) -> FxProgram:
    """A program of one node, its tensor operands as inputs and its tensor results as outputs."""
    b = GraphBuilder(program.mode)
    env = {n: b.placeholder(n.name, n.meta["val"]) for n in node.all_input_nodes}
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
    with b.at(node):
        result = b.call(node.target, args, kwargs, node.meta["val"], node.name)
    results = [r for r in (result if isinstance(result, list) else [result]) if isinstance(r, fx.Node)]
    b.graph.output(tuple(results))
    inputs = [
        InputRecord(n.name, "input", n.name, dtype_name(v.dtype), tuple(v.shape))
        for n, v in ((n, n.meta["val"]) for n in env)
    ]
    outputs = [
        OutputRecord("output", str(i), dtype_name(r.meta["val"].dtype), tuple(r.meta["val"].shape))
        for i, r in enumerate(results)
    ]
    leaf = {"type": "leaf"}
    return FxProgram(b.graph, Signature(tuple(inputs), tuple(outputs), leaf, leaf), {}, program.mode)
