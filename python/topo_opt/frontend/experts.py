"""Mixtures of experts: products with the matrix that each row picks, as `topo::grouped_product`.

Models bring the rows of one expert together first, since a library wants them so: they sort the assignments (token, expert) by
expert, gather, multiply group by group, and put the rows back in order.

    perm = sort(expert)[1]; y = grouped_mm(x[perm // k], w, cumsum(histc(expert))); z = act(y)[inverse(perm)]

What is computed row by row between the gather and the way back is the same in the order that the rows had before. So every
node in sorted order stands for its rows in the original one (`SortedRows`), sorting and counting disappear, and how rows
are brought together is left to the kernel. A product of gathered matrices, `bmm(w[expert], x)`, is the same op.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from topo_opt.frontend.graph_builder import Argument, GraphBuilder
from topo_opt.frontend.topo_ops import GROUPED_PRODUCT

aten = torch.ops.aten
Env = Mapping[fx.Node, Argument]
Rule = Callable[[GraphBuilder, fx.Node, Env], Argument]

_SORTS = (aten.sort.default, aten.sort.stable)
_CASTS = (aten._to_copy.default,)
_TYPES = (torch.float32, torch.float16, torch.bfloat16)
# Ops that compute every row (index of the first dim) from the same row of their operands, besides pointwise ones.
_BY_ROW = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.expand.default,
    aten.clone.default, aten._to_copy.default, aten.alias.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.linear.default, aten.rms_norm.default, aten.layer_norm.default,
}  # fmt: skip
# Ops along one dim, which must not be the first: op -> position of the dim among the arguments.
_ALONG = {
    aten.split_with_sizes.default: 2, aten.slice.Tensor: 1, aten.select.int: 1, aten.cat.default: 1,
    aten.softmax.int: 1, aten._softmax.default: 1, aten.sum.dim_IntList: 1, aten.mean.dim: 1, aten.amax.default: 1,
}  # fmt: skip


@dataclass
class Experts:
    """What `find` saw: a rule for every node that is not lowered as it stands, and nodes that nothing needs any more."""

    rules: dict[fx.Node, Rule] = field(default_factory=dict)
    dropped: set[fx.Node] = field(default_factory=set)


def find(graph: fx.Graph, extern: Mapping[str, str]) -> Experts:
    """Products of experts in a static graph.

    Args:
        extern: names of nodes that are left to ATen; a group of assignments with one of them stays as it is.
    """
    found = Experts()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _SORTS:
            rows = SortedRows(node)
            if rows.follow() and not any(n.name in extern for n in (*rows.rules, *rows.dropped)):
                found.rules.update(rows.rules)
                found.dropped |= rows.dropped
        elif node.target is aten.bmm.default and node.name not in extern:
            gathered = _gathered_matrices(node)
            if gathered is not None:
                found.rules[node] = gathered
    return found


class _Escapes(Exception):
    """A value in sorted order reaches something that is not computed row by row."""


class SortedRows:
    """The nodes between one sort of assignments by expert and the way back to their order."""

    def __init__(self, sort: fx.Node):
        self.sort = sort
        self.rules: dict[fx.Node, Rule] = {}
        self.dropped: set[fx.Node] = {sort}
        self.count = 0
        self.expert: fx.Node | None = None
        self.sorted: set[fx.Node] = set()
        self.places: set[fx.Node] = set()
        """The permutation itself."""
        self.experts: set[fx.Node] = set()
        """The sorted experts, also in another type."""
        self.histograms: set[fx.Node] = set()
        self.offsets: set[fx.Node] = set()
        self.inverses: set[fx.Node] = set()
        self.products = 0
        self.bins: set[int] = set()

    def follow(self) -> bool:
        """Whether everything that is computed from the sort can be computed in the original order; fills the rules."""
        source = self.sort.args[0]
        value = source.meta["val"] if isinstance(source, fx.Node) else None
        descending = _argument(self.sort, "descending", False)
        if value is None or value.dim() != 1 or value.dtype not in (torch.int64, torch.int32) or descending:
            return False
        self.expert, self.count = source, value.shape[0]
        try:
            node = self.sort.next
            while node.op != "output":
                if any(self._known(n) for n in node.all_input_nodes):
                    self._visit(node)
                node = node.next
            if any(self._known(n) for n in node.all_input_nodes):
                return False
        except _Escapes:
            return False
        return self.products > 0 and len(self.bins) == 1

    def _known(self, node: fx.Node) -> bool:
        return node in self.dropped or node in self.sorted

    def _visit(self, node: fx.Node) -> None:
        for step in (
            self._part_of_sort, self._gather, self._counts, self._inverse, self._product, self._sum_back, self._by_row,
        ):  # fmt: skip
            if step(node):
                return
        raise _Escapes

    def _keep(self, node: fx.Node, rule: Rule | None = None) -> bool:
        """`node` is in sorted order; its rule gives the same rows in the original one."""
        self.sorted.add(node)
        if rule is not None:
            self.rules[node] = rule
        return True

    def _drop(self, node: fx.Node, group: set[fx.Node]) -> bool:
        group.add(node)
        self.dropped.add(node)
        return True

    # -- steps --------------------------------------------------------------------------------------------------------

    def _part_of_sort(self, node: fx.Node) -> bool:
        if node.target is not operator.getitem or node.args[0] is not self.sort:
            return False
        if node.args[1] == 0:
            self.experts.add(node)
            return self._keep(node, lambda b, n, env: env[self.expert])
        self.places.add(node)
        return self._keep(node, self._positions)

    def _positions(self, b: GraphBuilder, node: fx.Node, env: Env) -> Argument:
        value = node.meta["val"]
        return b.emit(aten.arange.start_step, 0, self.count, dtype=value.dtype, device=value.device)

    def _gather(self, node: fx.Node) -> bool:
        if node.target is not aten.index.Tensor or len(node.args[1]) != 1:
            return False
        source, (index,) = node.args
        if source in self.sorted:
            if index not in self.inverses:
                raise _Escapes
            self.rules[node] = lambda b, n, env: env[source]
            return True
        if index not in self.sorted:
            raise _Escapes
        if index in self.places and source.meta["val"].shape[0] == self.count:
            return self._keep(node, lambda b, n, env: env[source])
        share = self._tokens(index)
        if share is not None and source.meta["val"].shape[0] * share == self.count:
            return self._keep(node, lambda b, n, env: _repeated(b, env[source], share))
        return self._keep(node)

    def _tokens(self, index: fx.Node) -> int | None:
        """k when `index` is the permutation divided by k: the tokens of the assignments, k of them a token."""
        floor = index.target is aten.div.Tensor_mode and index.kwargs.get("rounding_mode") == "floor"
        if not floor and index.target is not aten.floor_divide.default:
            return None
        place, share = index.args
        return share if place in self.places and isinstance(share, int) and share > 0 else None

    def _counts(self, node: fx.Node) -> bool:
        """Rows of every expert, and where each ends."""
        source = node.args[0] if node.args else None
        if node.target in _CASTS and source in self.experts:
            self.experts.add(node)
            return self._keep(node)
        if node.target is aten.histc.default and source in self.experts:
            bins, low, high = (*node.args[1:], *[0] * 3)[:3]
            if (low, high) != (0, bins - 1):
                raise _Escapes
            self.bins.add(bins)
            return self._drop(node, self.histograms)
        if source in self.histograms and node.target is aten.cumsum.default:
            return self._drop(node, self.offsets)
        if source in (self.histograms | self.offsets) and node.target in _CASTS:
            return self._drop(node, self.histograms if source in self.histograms else self.offsets)
        return False

    def _inverse(self, node: fx.Node) -> bool:
        """`inverse[perm] = arange`, or the order of the permutation."""
        if node.target is aten.index_put.default and node.args[1] and node.args[1][0] in self.places:
            dest, index, values = node.args[:3]
            counts = values.target is aten.arange.start_step and list(values.args[:2]) == [0, self.count]
            if len(index) != 1 or dest in self.sorted or not counts or _argument(node, "accumulate", False):
                raise _Escapes
            return self._drop(node, self.inverses)
        return False

    def _product(self, node: fx.Node) -> bool:
        name = node.target._schema.name if isinstance(node.target, OpOverload) else ""
        if name not in ("aten::_grouped_mm", "transformers::grouped_mm_fallback"):
            return False
        x, weights, offsets = node.args[:3]
        plain = all(a is None for a in node.args[3:]) and all(v is None for v in node.kwargs.values())
        dims = weights.meta["val"].dim(), x.meta["val"].dim()
        if x not in self.sorted or offsets not in self.offsets or not plain or dims != (3, 2):
            raise _Escapes
        if self.bins != {weights.meta["val"].shape[0]} or x.meta["val"].dtype not in _TYPES:
            raise _Escapes
        self.products += 1
        return self._keep(node, lambda b, n, env: grouped_product(b, env[x], env[weights], env[self.expert]))

    def _sum_back(self, node: fx.Node) -> bool:
        """Rows added to their token's: `index_add(dest, 0, perm // k, rows)`."""
        if node.target is not aten.index_add.default or node.args[3] not in self.sorted:
            return False
        dest, dim, index, rows = node.args[:4]
        share = self._tokens(index)
        if share is None or dest.meta["val"].shape[0] * share != self.count:
            raise _Escapes
        if dim != 0 or node.kwargs.get("alpha", 1) != 1 or dest in self.sorted:
            raise _Escapes
        self.rules[node] = lambda b, n, env: _summed(b, env[dest], env[rows], share)
        return True

    def _by_row(self, node: fx.Node) -> bool:
        value = node.meta["val"]
        if node.target is operator.getitem:
            return self._keep(node)
        first = value[0] if isinstance(value, list | tuple) else value
        if not isinstance(node.target, OpOverload) or first.dim() == 0 or first.shape[0] != self.count:
            return False
        if any(n in self.dropped for n in node.all_input_nodes):
            return False
        inputs = [n for n in node.all_input_nodes if n in self.sorted]
        if torch.Tag.pointwise in node.target.tags:
            return _aligned(node, inputs, first) and self._keep(node)
        whole = all(n.meta["val"].dim() and n.meta["val"].shape[0] == self.count for n in inputs)
        if node.target in _BY_ROW:
            return whole and inputs == [node.args[0]] and self._keeps_first(node) and self._keep(node)
        if node.target in _ALONG:
            return whole and self._along_others(node) and self._keep(node)
        return False

    def _keeps_first(self, node: fx.Node) -> bool:
        """A norm over all dims would mix rows."""
        if node.target in (aten.rms_norm.default, aten.layer_norm.default):
            return len(node.args[1]) < node.args[0].meta["val"].dim()
        if node.target is aten.linear.default:
            return node.args[0].meta["val"].dim() > 1
        return True

    def _along_others(self, node: fx.Node) -> bool:
        position, names = _ALONG[node.target], ("dim", "dims")
        default = 0 if node.target in (aten.split_with_sizes.default, aten.cat.default) else None
        found = next((node.kwargs[n] for n in names if n in node.kwargs), default)
        dims = node.args[position] if len(node.args) > position else found
        operands = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
        if dims is None or not all(o in self.sorted for o in operands):
            return False
        rank = operands[0].meta["val"].dim()
        return all(d % rank != 0 for d in (dims if isinstance(dims, list | tuple) else [dims]))


def _aligned(node: fx.Node, inputs: list[fx.Node], result: torch.Tensor) -> bool:
    """Whether a pointwise op reads row i of its sorted operands, and of others what is the same for all rows."""
    for operand in node.all_input_nodes:
        value = operand.meta["val"]
        rows = value.dim() == result.dim() and value.shape[0] == result.shape[0]
        spread = value.dim() < result.dim() or value.shape[0] == 1
        if not (rows if operand in inputs else spread):
            return False
    return True


def _argument(node: fx.Node, name: str, default: Any) -> Any:
    schema = node.target._schema
    position = next((i for i, a in enumerate(schema.arguments) if a.name == name), None)
    if position is not None and len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


# -- what the rules emit ------------------------------------------------------------------------------------------------


def grouped_product(b: GraphBuilder, x: fx.Node, weights: fx.Node, expert: fx.Node) -> fx.Node:
    """`x[a] @ weights[expert[a]]` for every row a, narrowed to the type of `x`."""
    from topo_opt.frontend.precision import narrow_results

    value = x.meta["val"]
    shape = value.shape[0], weights.meta["val"].shape[2]
    wide = torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype
    with b.mode:
        product = torch.empty(shape, dtype=wide, device=value.device)
        narrow = torch.empty(shape, dtype=value.dtype, device=value.device)
    return narrow_results(b, b.call(GROUPED_PRODUCT, (x, weights, expert), {}, product), narrow)


def _repeated(b: GraphBuilder, x: fx.Node, share: int) -> fx.Node:
    """Every row `share` times."""
    rows, *rest = x.meta["val"].shape
    spread = b.emit(aten.expand.default, b.emit(aten.unsqueeze.default, x, 1), [rows, share, *rest])
    return b.emit(aten.reshape.default, spread, [rows * share, *rest])


def _summed(b: GraphBuilder, dest: fx.Node, rows: fx.Node, share: int) -> fx.Node:
    from topo_opt.frontend.precision import narrow_results

    count, *rest = rows.meta["val"].shape
    parts = b.emit(aten.reshape.default, rows, [count // share, share, *rest])
    wide = [b.emit(aten._to_copy.default, n, dtype=torch.float32) for n in (parts, dest)]
    total = b.emit(aten.add.Tensor, b.emit(aten.sum.dim_IntList, wide[0], [1]), wide[1])
    return narrow_results(b, total, dest.meta["val"])


def _gathered_matrices(node: fx.Node) -> Rule | None:
    """The rule of a `bmm` one of whose sides is `w[expert]` and the other a vector for each, or None."""
    left, right = node.args
    for matrix, vector, axis in ((left, right, 2), (right, left, 1)):
        if not _is_gather(matrix) or vector.meta["val"].shape[axis] != 1:
            continue
        weights, (expert,) = matrix.args

        def rule(b: GraphBuilder, n: fx.Node, env: Env, w=weights, e=expert, v=vector, a=axis) -> Argument:
            kept = env[w] if a == 1 else b.emit(aten.permute.default, env[w], [0, 2, 1])
            shape = [d for i, d in enumerate(v.meta["val"].shape) if i != a]
            x = b.emit(aten.reshape.default, env[v], shape)
            group = _from_start(b, env[e], w.meta["val"].shape[0])
            product = grouped_product(b, x, kept, group)
            return b.emit(aten.unsqueeze.default, product, a)

        return rule
    return None


def _is_gather(node: fx.Node) -> bool:
    if node.target is not aten.index.Tensor or len(node.args[1]) != 1:
        return False
    weights, (expert,) = node.args
    if expert is None or weights.meta["val"].dtype not in _TYPES:
        return False
    index = expert.meta["val"]
    return weights.meta["val"].dim() == 3 and index.dim() == 1 and index.dtype in (torch.int64, torch.int32)


def _from_start(b: GraphBuilder, expert: fx.Node, count: int) -> fx.Node:
    """Experts counted from the end made positions; those that a top-k picked need no test."""
    from topo_opt.frontend.topo_ops import TOP_K

    source = expert
    while source.target in (aten.view.default, aten.reshape.default, aten.clone.default):
        source = source.args[0]
    if source.target is operator.getitem and source.args[0].target is TOP_K:
        return expert
    from_end = b.emit(aten.add.Scalar, expert, count)
    return b.emit(aten.where.self, b.emit(aten.lt.Scalar, expert, 0), from_end, expert)
