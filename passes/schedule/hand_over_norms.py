"""`topo-hand-over-norms`: what a product does to its rows before it starts moves into the kernel that makes the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import func

from topo_opt.codegen.triton import lower_kernel
from topo_opt.codegen.triton.contraction import SMALL_ROWS
from topo_opt.errors import UnsupportedError
from topo_opt.passes.base import Pass
from topo_opt.passes.schedule.leading_norm import LeadingNorm, norm_of, parts_of, sum_of_parts
from topo_opt.passes.schedule.outline import callee, clone_nodes, kernels_of, name_kernel
from topo_opt.passes.schedule.roles import Roles
from topo_opt.structured.graph import Graph, read


@dataclass(frozen=True)
class HandOverNorms(Pass):
    """Splits the norm between two products: the first one leaves `x * w` and sums of squares, the second one takes them.

    `%x = call @a(...); %y = call @b(%x, %w)`  -->  `%x, %xw, %p = call @a(..., %w); %y = call @b(%xw, %p)`

    Here `@b` computes `contract(x * w, W) * f(reduce(g(x)))`, as `topo-sink-row-scale` leaves it. Its loop then multiplies what
    it loads, without a detour of the rows through registers, and nothing reads whole rows only to reduce them: `p` has a number
    for every `CHUNK` columns. For products of more than `VECTOR_ROWS` rows, where `@a` is a product too.
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
    _lowers: dict[str, bool] = field(default_factory=dict)

    def rewrite(self, function: ir.Operation) -> None:
        """Hands over the norms of all products of a plan function whose rows another product makes."""
        calls = [
            v.operation for v in function.regions[0].blocks[0].operations if v.operation.name == "func.call"
        ]
        readers: dict[tuple[int, int], list[ir.Operation]] = {}
        makers: dict[int, ir.Operation] = {}
        for call in calls:
            norm = self._norm(callee(call))
            if norm is None:
                continue
            maker = call.operands[norm.argument].owner
            if isinstance(maker, ir.Block) or not self._is_product(maker.operation):
                continue
            number = ir.OpResult(call.operands[norm.argument]).result_number
            makers[hash(maker.operation)] = maker.operation
            readers.setdefault((hash(maker.operation), number), []).append(call)
        order = {hash(c): i for i, c in enumerate(calls)}
        for (maker_id, number), found in sorted(readers.items(), key=lambda r: (order[r[0][0]], r[0][1])):
            maker = makers[maker_id]
            new = self._hand_over(maker, number, found, order)
            if new is not None:
                makers[maker_id] = new

    def _is_product(self, call: ir.Operation) -> bool:
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

    def _hand_over(
        self, maker: ir.Operation, number: int, readers: Sequence[ir.Operation], order: Mapping[int, int]
    ) -> ir.Operation | None:
        """Rewrites a product and those that take its result `number`; the new call, None where nothing was done."""
        first = self._norm(callee(readers[0]))
        assert first is not None
        shared = [c for c in readers if self._matches(readers[0], c)]
        others = [readers[0].operands[p] for p in first.others]
        if not all(_is_before(o, maker, order) for o in others):
            return None
        graph = self._graph(callee(maker))
        assert graph is not None
        made = self._named(self._maker(graph, number, read(self._share(callee(readers[0])))))
        taken = [(c, self._named(self._reader(self._norm(callee(c))))) for c in shared]
        if not self._has_code(made) or not all(self._has_code(n) for _, n in taken):
            return None
        types = ir.FunctionType(ir.TypeAttr(self.kernels[made].attributes["function_type"]).value).results
        with maker.location, ir.InsertionPoint(maker):
            new = func.CallOp(types, made, [*maker.operands, *others]).operation
        given = list(new.results)[len(list(maker.results)) :]
        for old, result in zip(maker.results, new.results):
            old.replace_all_uses_with(result)
        maker.erase()
        for call, name in taken:
            norm = self._norm(callee(call))
            assert norm is not None
            operands = [o for p, o in enumerate(call.operands) if p in norm.kept]
            with call.location, ir.InsertionPoint(call):
                result = func.CallOp([r.type for r in call.results], name, [*operands, *given]).operation
            for old, value in zip(call.results, result.results):
                old.replace_all_uses_with(value)
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
        nodes = {n.id: n for value in wanted for n in norm.needed(value)[0]}
        with graph.func.context, ir.InsertionPoint(body), ir.Location.unknown():
            clone_nodes(Roles(graph), [nodes[i] for i in sorted(nodes)], mapping)
            parts = parts_of(norm.statistic, mapping[norm.statistic.operands[0]], self._parts_of(norm))
            func.ReturnOp([*(mapping[v] for v in norm.results), parts])
        self._shares[name] = made
        return made

    def _maker(self, graph: Graph, number: int, share: Graph) -> ir.Operation:
        """The kernel of a product that also computes, from its result `number`, the share of the next one."""
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
        return made

    def _parts_of(self, norm: LeadingNorm) -> ir.RankedTensorType:
        context = self.module.context
        unknown = ir.Location.unknown(context)
        return ir.RankedTensorType.get(norm.parts, ir.F32Type.get(context), loc=unknown)

    def _reader(self, norm: LeadingNorm | None) -> ir.Operation:
        """The kernel of a product that is given what its norm leaves to the kernel before."""
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
        return made

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
        block = self.module.regions[0].blocks[0]
        functions = [v.operation for v in block.operations if v.operation.name == "func.func"]
        called = {
            callee(inner.operation)
            for f in functions
            if "topo.kernel" not in f.attributes and f.regions[0].blocks
            for inner in f.regions[0].blocks[0].operations
            if inner.operation.name == "func.call"
        }
        for share in self._shares.values():
            share.erase()
        for name, kernel in self.kernels.items():
            if name not in called:
                kernel.erase()


def _text(share: ir.Operation) -> str:
    return share.get_asm(use_local_scope=True)


def _is_before(value: ir.Value, call: ir.Operation, order: Mapping[int, int]) -> bool:
    """Whether a value is there when a call is made."""
    if isinstance(value.owner, ir.Block):
        return True
    place = order.get(hash(value.owner.operation))
    return place is not None and place < order[hash(call)]
