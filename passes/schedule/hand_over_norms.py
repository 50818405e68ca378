"""`topo-hand-over-norms`: what a product does to its rows before it starts moves into the kernel that makes the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import func

from topo_opt.codegen.triton import lower_kernel
from topo_opt.codegen.triton.contraction import SMALL_ROWS
from topo_opt.errors import UnsupportedError
from topo_opt.passes.base import Pass
from topo_opt.passes.schedule.leading_norm import LeadingNorm, norm_of, parts_of, sum_of_parts
from topo_opt.passes.schedule.outline import (
    called_by_plans,
    callee,
    clone_nodes,
    computed_from,
    kernels_of,
    name_kernel,
)
from topo_opt.passes.schedule.roles import Roles
from topo_opt.structured.graph import Graph, read


@dataclass(frozen=True)
class HandOverNorms(Pass):
    """Splits the norm between two products: the first one leaves `x * w` and sums of squares, the second one takes them.

    `%x = call @a(...); %y = call @b(%x, %w)`  -->  `%x, %xw, %p = call @a(..., %w); %y = call @b(%xw, %p)`

    Here `@b` computes `contract(x * w, W) * f(reduce(g(x)))`, as `topo-sink-row-scale` leaves it. Its loop then multiplies what
    it loads, without a detour of the rows through registers, and nothing reads whole rows only to reduce them: `p` has a number
    for every `CHUNK` columns. For products of more than `ALONE` rows, where `@a` is a product too.
    """

    name = "topo-hand-over-norms"
    rows: int = SMALL_ROWS

    def apply(self, module: Any) -> None:
        top = module.operation
        work = _Work(top, kernels_of(top), self.rows)
        for view in list(top.regions[0].blocks[0].operations):
            op = view.operation
            if op.name == "func.func" and op.regions[0].blocks and "topo.kernel" not in op.attributes:
                work.rewrite(op)
        work.erase_unused()


@dataclass
class _Work:
    """Kernels that were made, by what they were made from."""

    module: ir.Operation
    kernels: dict[str, ir.Operation]
    rows: int
    _norms: dict[str, LeadingNorm | None] = field(default_factory=dict)
    _graphs: dict[str, Graph] = field(default_factory=dict)
    _shares: dict[str, ir.Operation] = field(default_factory=dict)
    _makers: dict[tuple[str, int, str], str] = field(default_factory=dict)
    _readers: dict[str, str] = field(default_factory=dict)
    _lowers: dict[str, bool] = field(default_factory=dict)

    def rewrite(self, function: ir.Operation) -> None:
        """Hands over the norms of all products of a plan function whose rows another product makes."""
        calls = [
            v.operation for v in function.regions[0].blocks[0].operations if v.operation.name == "func.call"
        ]
        # By place: a call that takes a norm may make the rows of another one, and is replaced for each.
        places = {hash(c): i for i, c in enumerate(calls)}
        readers: dict[tuple[int, int], list[int]] = {}
        for place, call in enumerate(calls):
            norm = self._norm(callee(call))
            rows = None if norm is None else call.operands[norm.argument]
            if rows is not None and not isinstance(rows.owner, ir.Block) and self._is_product(rows.owner):
                maker = places[hash(rows.owner.operation)]
                readers.setdefault((maker, ir.OpResult(rows).result_number), []).append(place)
        for (maker, number), found in sorted(readers.items()):
            self._hand_over(calls, maker, number, found)

    def _is_product(self, view: ir.Operation | ir.OpView) -> bool:
        call = view.operation
        if call.name != "func.call" or callee(call) not in self.kernels:
            return False
        attributes = ir.DictAttr(self.kernels[callee(call)].attributes["topo.kernel"])
        return ir.StringAttr(attributes["family"]).value == "gemm" and "parts" not in attributes

    def _norm(self, name: str) -> LeadingNorm | None:
        if name not in self._norms:
            graph = self._graph(name)
            self._norms[name] = None if graph is None else norm_of(graph, self.rows)
        return self._norms[name]

    def _graph(self, name: str) -> Graph | None:
        if name not in self.kernels:
            return None
        if name not in self._graphs:
            self._graphs[name] = read(self.kernels[name])
        return self._graphs[name]

    def _hand_over(self, calls: list[ir.Operation], maker: int, number: int, readers: Sequence[int]) -> None:
        """Rewrites a product and those that take its result `number` where there is code for all, and replaces them in `calls`."""
        first, before = calls[readers[0]], calls[maker]
        norm = self._norm(callee(first))
        assert norm is not None
        shared = [r for r in readers if self._matches(first, calls[r])]
        others = [first.operands[p] for p in norm.others]
        made = self._maker(callee(before), number, callee(first))
        taken = {r: self._reader(callee(calls[r])) for r in shared}
        if not all(_is_before(o, calls[:maker]) for o in others) or not all(
            map(self._has_code, [made, *taken.values()])
        ):
            return
        count = len(before.results)
        new = calls[maker] = self._replace(before, made, [*before.operands, *others])
        for place, name in taken.items():
            norm = self._norm(callee(calls[place]))
            assert norm is not None
            operands = [o for p, o in enumerate(calls[place].operands) if p in norm.kept]
            calls[place] = self._replace(calls[place], name, [*operands, *list(new.results)[count:]])

    def _replace(self, call: ir.Operation, name: str, operands: Sequence[ir.Value]) -> ir.Operation:
        """A call of another kernel in place of this one, whose results are the first of the new ones."""
        types = ir.FunctionType(ir.TypeAttr(self.kernels[name].attributes["function_type"]).value).results
        with call.location, ir.InsertionPoint(call):
            new = func.CallOp(types, name, operands).operation
        for old, result in zip(call.results, new.results):
            old.replace_all_uses_with(result)
        call.erase()
        return new

    def _matches(self, first: ir.Operation, other: ir.Operation) -> bool:
        """Whether two calls leave the same to the kernel before them."""
        a, b = self._norm(callee(first)), self._norm(callee(other))
        assert a is not None and b is not None
        same = [first.operands[p] for p in a.others] == [other.operands[p] for p in b.others]
        return same and _text(self._share(callee(first))) == _text(self._share(callee(other)))

    # -- kernels ----------------------------------------------------------------------------------------------------

    def _share(self, name: str) -> ir.Operation:
        """A function of what the kernel leaves to the one before: (rows, other arguments) -> (factor, parts of the statistic)."""
        if name in self._shares:
            return self._shares[name]
        norm = self._norm(name)
        assert norm is not None
        graph = norm.graph
        inputs = [graph.arguments[p] for p in (norm.argument, *norm.others)]
        wanted = [norm.statistic.operands[0], *norm.results]
        made, body = self._function(
            [graph.handles[v].type for v in inputs],
            [*(graph.handles[v].type for v in norm.results), self._parts_of(norm)],
        )
        mapping = dict(zip(inputs, body.arguments))
        _, nodes = computed_from(graph, wanted)
        with graph.func.context, ir.InsertionPoint(body), ir.Location.unknown():
            clone_nodes(Roles(graph), [graph.nodes[n] for n in nodes], mapping)
            parts = parts_of(norm.statistic, mapping[norm.statistic.operands[0]], self._parts_of(norm))
            func.ReturnOp([*(mapping[v] for v in norm.results), parts])
        self._shares[name] = made
        return made

    def _maker(self, name: str, number: int, reader: str) -> str:
        """The kernel of a product that also computes, from its result `number`, what `reader` leaves to it."""
        text = _text(self._share(reader))
        if (name, number, text) in self._makers:
            return self._makers[name, number, text]
        graph, share = self._graph(name), read(self._share(reader))
        assert graph is not None
        inputs = [graph.handles[v].type for v in graph.arguments]
        inputs += [share.handles[v].type for v in share.arguments[1:]]
        outputs = [graph.handles[v].type for v in graph.returns] + [
            share.handles[v].type for v in share.returns
        ]
        made, body = self._function(inputs, outputs)
        made.attributes["topo.kernel"] = graph.func.attributes["topo.kernel"]
        mapping = dict(zip(graph.arguments, body.arguments))
        with graph.func.context, ir.InsertionPoint(body), ir.Location.unknown():
            clone_nodes(Roles(graph), graph.nodes, mapping)
            results = [mapping[v] for v in graph.returns]
            theirs = dict(
                zip(share.arguments, [results[number], *list(body.arguments)[len(graph.arguments) :]])
            )
            clone_nodes(Roles(share), share.nodes, theirs)
            func.ReturnOp([*results, *(theirs[v] for v in share.returns)])
        return self._makers.setdefault((name, number, text), self._named(made))

    def _parts_of(self, norm: LeadingNorm) -> ir.RankedTensorType:
        context = self.module.context
        unknown = ir.Location.unknown(context)
        return ir.RankedTensorType.get(norm.parts, ir.F32Type.get(context), loc=unknown)

    def _reader(self, name: str) -> str:
        """The kernel of a product that is given what its norm leaves to the kernel before."""
        if name in self._readers:
            return self._readers[name]
        norm = self._norm(name)
        assert norm is not None
        graph = norm.graph
        kept = [graph.arguments[p] for p in sorted(norm.kept)]
        given = [graph.handles[v].type for v in norm.results]
        made, body = self._function(
            [*(graph.handles[v].type for v in kept), *given, self._parts_of(norm)],
            [graph.handles[v].type for v in graph.returns],
        )
        made.attributes["topo.kernel"] = graph.func.attributes["topo.kernel"]
        arguments = list(body.arguments)
        mapping = dict(zip(kept, arguments))
        if norm.factor is not None:
            mapping[norm.factor] = arguments[-2]
        with graph.func.context, ir.InsertionPoint(body), ir.Location.unknown():
            for node in norm.still_needed():
                if node is norm.statistic:
                    init = mapping[node.operands[node.inputs]]
                    mapping[node.results[0]] = sum_of_parts(node, arguments[-1], init)
                else:
                    clone_nodes(Roles(graph), [node], mapping)
            func.ReturnOp([mapping[v] for v in graph.returns])
        return self._readers.setdefault(name, self._named(made))

    def _function(
        self, inputs: Sequence[ir.Type], outputs: Sequence[ir.Type]
    ) -> tuple[ir.Operation, ir.Block]:
        """A new function of the module and its body."""
        block = self.module.regions[0].blocks[0]
        with self.module.context, ir.Location.unknown(), ir.InsertionPoint(block):
            made = func.FuncOp("kernel", ir.FunctionType.get(inputs, outputs), visibility="private")
            return made.operation, made.add_entry_block()

    def _named(self, made: ir.Operation) -> str:
        name = name_kernel(made, "gemm", self.kernels)
        self.kernels.setdefault(name, made)
        return name

    def _has_code(self, name: str) -> bool:
        if name not in self._lowers:
            try:
                lower_kernel(self.kernels[name])
                self._lowers[name] = True
            except UnsupportedError:
                self._lowers[name] = False
        return self._lowers[name]

    def erase_unused(self) -> None:
        """Erases kernels that nothing calls any more."""
        called = called_by_plans(self.module)
        for share in self._shares.values():
            share.erase()
        for name, kernel in self.kernels.items():
            if name not in called:
                kernel.erase()


def _text(share: ir.Operation) -> str:
    return share.get_asm(use_local_scope=True)


def _is_before(value: ir.Value, calls: Sequence[ir.Operation]) -> bool:
    """Whether a value is there behind some calls."""
    return isinstance(value.owner, ir.Block) or any(value.owner.operation == c for c in calls)
