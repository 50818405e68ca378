"""`topo-count-recognised`: what was recognised in a model, as counts on its functions for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir

from topo_opt.passes.base import Pass
from topo_opt.passes.ingest.dead_ops import plan_functions
from topo_opt.structured.access import VIEWS, is_movement
from topo_opt.structured.graph import Graph, Node, read
from topo_opt.structured.index import Div, Mod, symbol
from topo_opt.structured.trace import origins

COUNTS = "topo.recognised"
_NEARBY = 24
"""Steps within which an op belongs to the same pattern."""
_ACTIVATIONS = ("math.exp", "math.erf", "math.tanh", "arith.maximumf")


@dataclass(frozen=True)
class CountRecognised(Pass):
    """Sets `topo.recognised` on every function: how often each pattern occurs in it.

    | count | what it counts |
    |---|---|
    | `attention`, `attention.causal`, `.window`, `.length`, `.padding`, `.mask`, `.additive`, `.softcap`, `.grouped` | `topo.attention`, by what it says |
    | `rotary.half`, `rotary.interleaved`, `rotary.partial` | `topo.rotate_half` |
    | `norm.rms`, `norm.layer`, `norm.query_key` | statistics of squares that are divided by; the last on the way to an attention |
    | `gated_activation` | products with an activation, both of contractions |
    | `cache_append` | `topo.index_update` of an argument |
    | `experts.route`, `experts.product` | `topo.top_k`, `topo.grouped_product` |
    """

    name = "topo-count-recognised"

    def apply(self, module: Any) -> None:
        """Counts in the module's functions; nothing else changes."""
        with module.context:
            for function in plan_functions(module.operation):
                counts = count(read(function))
                i64 = ir.IntegerType.get_signless(64)
                function.attributes[COUNTS] = ir.DictAttr.get(
                    {name: ir.IntegerAttr.get(i64, counts[name]) for name in sorted(counts)}
                )


def count(graph: Graph) -> Counter[str]:
    """Occurrences of every pattern in a function."""
    return Counter(name for node in graph.nodes for name in _names(graph, node))


def _names(graph: Graph, node: Node) -> Iterator[str]:
    rule = _RULES.get(node.name)
    if rule is not None:
        yield from rule(graph, node)


def _attention(graph: Graph, node: Node) -> Iterator[str]:
    yield "attention"
    attributes = node.op.attributes
    has_mask, has_positions = list(ir.DenseI32ArrayAttr(attributes["operandSegmentSizes"]))[3:]
    tests = {
        "causal": bool(attributes["causal"].value) or ("high" in attributes and not _is_length(node)),
        "window": "low" in attributes,
        "length": bool(has_positions),
        "softcap": "softcap" in attributes,
        "grouped": _is_grouped(graph, node),
    }
    yield from (f"attention.{name}" for name, holds in tests.items() if holds)
    if has_mask:
        mask = graph.values[node.operands[3]]
        rows = (mask.shape or ())[2]
        yield f"attention.{'additive' if mask.element != 'i1' else 'padding' if rows == 1 else 'mask'}"
    for operand in node.operands[:2]:
        if _near(graph, operand, lambda n: _norm(graph, n) is not None, stop=("linalg.contract",)):
            yield "norm.query_key"


def _is_length(node: Node) -> bool:
    """Whether the upper bound does not depend on the row: the length of what is filled."""
    bounds = ir.AffineMapAttr(node.op.attributes["high"]).value
    return all("d0" not in str(expr) for expr in bounds.results)


def _is_grouped(graph: Graph, node: Node) -> bool:
    """Whether several query heads read the same keys, by the op's own grouping or because keys are expanded."""
    (batch, heads, *_), (_, groups, keys, depth) = (
        graph.values[node.operands[i]].shape or () for i in (0, 1)
    )
    if groups < heads:
        return True
    names = [symbol(n, s) for n, s in (("b", batch), ("h", heads), ("n", keys), ("d", depth))]
    for origin in origins(graph, node.operands[1], names):
        used = [a for index in origin.indices for a, _ in index.terms if "h" in a.symbols()]
        if not used and heads > 1:
            return True
        if used and all(isinstance(a, Div) for a in used) and not any(isinstance(a, Mod) for a in used):
            return True
    return False


def _rotary(graph: Graph, node: Node) -> Iterator[str]:
    yield f"rotary.{'interleaved' if ir.BoolAttr(node.op.attributes['interleaved']).value else 'half'}"
    source = graph.producer(node.operands[0])
    if source is not None and source.name == "tensor.extract_slice":
        before, after = (graph.values[v].shape or () for v in (source.operands[0], source.results[0]))
        if before and after and before[-1] > after[-1]:
            yield "rotary.partial"


def _loop_nest(graph: Graph, node: Node) -> Iterator[str]:
    if (norm := _norm(graph, node)) is not None:
        yield norm
    if _is_gated(graph, node):
        yield "gated_activation"


def _norm(graph: Graph, node: Node) -> str | None:
    """The kind of norm whose statistic a loop nest takes the root of."""
    if not {"math.rsqrt", "math.sqrt"} & node.body:
        return None
    squares = _found(
        graph, node.operands[: node.inputs], lambda n: _sums_squares(graph, n), through=_is_row_op
    )
    if squares is None:
        return None
    centred = _found(graph, squares.operands[: squares.inputs], _subtracts, through=_is_pointwise)
    return "norm.rms" if centred is None else "norm.layer"


def _sums_squares(graph: Graph, node: Node) -> bool:
    if not (node.name == "linalg.generic" and node.has_reduction and "arith.addf" in node.body):
        return False
    return _squares(node) or any(
        (made := graph.producer(o)) is not None and _squares(made) for o in node.operands[: node.inputs]
    )


def _squares(node: Node) -> bool:
    """Whether a body multiplies a value with itself, or takes a power of it."""
    if node.name != "linalg.generic":
        return False
    for view in node.op.regions[0].blocks[0].operations:
        op = view.operation
        if op.name in ("math.powf", "math.fpowi"):
            return True
        if op.name == "arith.mulf" and (
            hash(op.operands[0]) == hash(op.operands[1]) or _same_operand(node, op)
        ):
            return True
    return False


def _same_operand(node: Node, op: ir.Operation) -> bool:
    """Whether both factors are block arguments for one operand, read alike."""
    places = {hash(a): i for i, a in enumerate(node.op.regions[0].blocks[0].arguments)}
    a, b = (places.get(hash(o)) for o in op.operands)
    if a is None or b is None or max(a, b) >= len(node.operands):
        return False
    return node.operands[a] == node.operands[b] and node.maps[a] == node.maps[b]


def _subtracts(node: Node) -> bool:
    return "arith.subf" in node.body


def _is_gated(graph: Graph, node: Node) -> bool:
    """Whether a body multiplies an activated contraction with another one."""
    if node.has_reduction or node.inputs != 2 or "arith.mulf" not in node.body:
        return False
    a, b = (_Way.to(graph, operand) for operand in node.operands[:2])
    if not (a.sources and b.sources) or a.activated == b.activated:
        return False
    return a.sources != b.sources  # x * sigmoid(x) is an activation itself


@dataclass(frozen=True)
class _Way:
    """What is on the pointwise way to a value: the contractions that it starts at, each with the slice of it that is read,
    and whether there is an activation."""

    sources: frozenset[tuple[int, int | None]]
    activated: bool

    @staticmethod
    def to(graph: Graph, value: int) -> _Way:
        activated, sources, seen = False, set(), {value}
        waiting: list[tuple[int, int | None, int]] = [(value, None, 0)]
        while waiting:
            current, part, steps = waiting.pop()
            node = graph.producer(current)
            if node is None or steps > _NEARBY:
                continue
            if node.name == "linalg.contract":
                sources.add((current, part))
            elif _is_pointwise(node):
                activated |= bool(set(_ACTIVATIONS) & node.body)
                part = current if node.name == "tensor.extract_slice" else part
                waiting += [(o, part, steps + 1) for o in node.operands if o not in seen]
                seen.update(node.operands)
        return _Way(frozenset(sources), activated)


def _append(graph: Graph, node: Node) -> Iterator[str]:
    if node.operands[0] in graph.arguments and node.results[0] in graph.returns:
        yield "cache_append"


def _near(graph: Graph, value: int, test: Callable[[Node], bool], stop: tuple[str, ...]) -> bool:
    """Whether a node that passes a test is on the way to a value, with nothing but pointwise ops and views in between."""
    found = _found(graph, [value], test, through=lambda n: n.name not in stop and _is_pointwise(n))
    return found is not None


def _found(
    graph: Graph, values: list[int], test: Callable[[Node], bool], through: Callable[[Node], bool]
) -> Node | None:
    waiting, seen = [(v, 0) for v in reversed(values)], set()
    while waiting:
        value, steps = waiting.pop()
        node = graph.producer(value)
        if node is None or node.id in seen or steps > _NEARBY:
            continue
        seen.add(node.id)
        if test(node):
            return node
        if through(node):
            waiting += [(o, steps + 1) for o in reversed(node.operands)]
    return None


def _is_pointwise(node: Node) -> bool:
    return (
        node.name in VIEWS
        or node.name == "topo.rotate_half"
        or (node.name == "linalg.generic" and not node.has_reduction)
    )


def _is_row_op(node: Node) -> bool:
    return _is_pointwise(node) or is_movement(node)


_RULES: dict[str, Callable[[Graph, Node], Iterator[str]]] = {
    "topo.attention": _attention,
    "topo.rotate_half": _rotary,
    "topo.index_update": _append,
    "topo.top_k": lambda graph, node: iter(("experts.route",)),
    "topo.grouped_product": lambda graph, node: iter(("experts.product",)),
    "linalg.generic": _loop_nest,
}
