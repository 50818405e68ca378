"""Who owns which element: how far a product with split groups can be followed before its sum has to be formed.

A grouped product whose matrices are split gives every device the rows of its own matrices and zeros for the others. What
is computed of such rows element by element stays with their owner, up to a second product with the same groups, so that
experts need no communication between their products. Ownership depends on the dimensions that stand for the rows; it ends
where rows are added up, and what is left then is a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from topo_opt.sharding.plan_graph import Terms, TermsKind
from topo_opt.sharding.rule import Rule
from topo_opt.sharding.rule_nests import lookup
from topo_opt.structured.graph import Graph, Node

_VIEWS = ("tensor.expand_shape", "tensor.collapse_shape", "tensor.extract_slice", "topo.demote")


@dataclass(frozen=True)
class _Owned:
    """Elements whose owner follows from `origin` (a value with group numbers) at the indices of `dims`, in this order."""

    origin: int
    dims: tuple[int, ...]
    kind: TermsKind


class Owners:
    """Follows ownership through a function, node by node in program order."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._known: dict[int, _Owned] = {}

    def follow(self, node: Node, rule: Rule) -> tuple[int, Terms | None]:
        """The factor of `rule` whose parts own elements of the result or -1, and how the op takes owned operands or None."""
        if node.name == "topo.grouped_product":
            return self._product(node, rule)
        if node.name == "linalg.generic" and lookup(self.graph, node) is not None:
            row = len(node.domain)  # the factor behind the loops, of the table that is looked up in
            return (row if row < len(rule.factors) else -1), None
        held = [(p, self._known[o]) for p, o in enumerate(node.operands) if o in self._known]
        if not held or len({(o.origin) for _, o in held}) != 1:
            return -1, None
        result = self._through(node, rule, held)
        if result is None:
            return -1, None
        if result.kind != "sum":
            self._known[node.results[0]] = result
        return -1, Terms(tuple((p, o.kind) for p, o in held), result.kind)

    def _product(self, node: Node, rule: Rule) -> tuple[int, Terms | None]:
        if len(node.operands) == 5 or rule.factors[3].kind != "reduction":
            return -1, None
        rows, groups = node.operands[0], node.operands[2]
        self._known[node.results[0]] = _Owned(groups, (0,), "zero")
        held = self._known.get(rows)
        if held is not None and held != _Owned(groups, (0,), held.kind):
            return 3, None
        return 3, Terms(((0, "any"),), "zero")

    def _through(self, node: Node, rule: Rule, held: list[tuple[int, _Owned]]) -> _Owned | None:
        if len(node.results) != 1 or (node.name != "linalg.generic" and node.name not in _VIEWS):
            return None
        moved = {self._moved(rule, p, o) for p, o in held}
        if len(moved) != 1 or None in moved:
            return None
        (dims,) = moved
        assert dims is not None
        origin = held[0][1].origin
        if node.name in _VIEWS:
            return _Owned(origin, dims, held[0][1].kind)
        stays_zero = gives_zero(node, {p for p, o in held if o.kind == "zero"})
        added = {f for p, o in held for d in o.dims for f in rule.operands[p][d]}
        if any(rule.factors[f].kind == "reduction" for f in added):
            return _Owned(origin, (), "sum") if stays_zero and len(held) == 1 else None
        return _Owned(origin, dims, "zero" if stays_zero else "any")

    def _moved(self, rule: Rule, position: int, owned: _Owned) -> tuple[int, ...] | None:
        """The result's dimensions that stand for the owner's, or None where a factor is lost or mixed; nothing where it is added up."""
        source = rule.operands[position]
        if any(d >= len(source) for d in owned.dims):
            return None
        factors = [f for d in owned.dims for f in source[d]]
        if len([d for d in owned.dims if source[d]]) != len(owned.dims):
            return None
        place = {f: d for d, carried in enumerate(rule.results[0]) for f in carried}
        reduced = [f for f in factors if rule.factors[f].kind == "reduction"]
        if reduced:
            return ()
        if any(f not in place for f in factors):
            return None
        dims: list[int] = []
        for f in factors:
            if not dims or dims[-1] != place[f]:
                dims.append(place[f])
        if len(set(dims)) != len(dims):
            return None
        carried = [f for d in dims for f in rule.results[0][d]]
        return tuple(dims) if carried == factors else None


_ZERO_IF_ALL = ("arith.extf", "arith.truncf", "arith.negf", "arith.addf", "arith.subf")
_ZERO_IF_ANY = ("arith.mulf",)


def gives_zero(node: Node, zeros: set[int]) -> bool:
    """Whether the body gives zero where the operands in `zeros` are; of a sum, adds nothing to its accumulator."""
    block = node.op.regions[0].blocks[0]
    arguments = list(block.arguments)
    known = {a for p, a in enumerate(arguments) if p in zeros}
    if node.has_reduction:
        known |= set(arguments[node.inputs :])
    for view in block.operations:
        op = view.operation
        if op.name == "linalg.yield":
            return all(v in known for v in op.operands)
        inputs = list(op.operands)
        if (op.name in _ZERO_IF_ALL and all(v in known for v in inputs)) or (
            op.name in _ZERO_IF_ANY and any(v in known for v in inputs)
        ):
            known.update(op.results)
    return False
