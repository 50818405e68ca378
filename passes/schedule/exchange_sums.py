"""`topo-exchange-sums`: small sums over devices are added up inside the kernels that read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import func

from topo_opt.codegen.triton.contraction import SMALL_ROWS, VECTOR_ROWS, find_all
from topo_opt.codegen.triton.exchange import SUMMED
from topo_opt.codegen.triton.exchange_boxes import ELEMENTS
from topo_opt.codegen.triton.kernel import mark, plain
from topo_opt.errors import UnsupportedError
from topo_opt.passes.base import Pass
from topo_opt.passes.schedule.exchange_means import Means
from topo_opt.passes.schedule.outline import called_by_plans, callee, clone_nodes, kernels_of, name_kernel
from topo_opt.passes.schedule.roles import Roles
from topo_opt.sharding.annotate import read_mesh
from topo_opt.structured.graph import element_bytes, read


@dataclass(frozen=True)
class ExchangeSums(Pass):
    """Takes sums over devices into kernels, where that is faster than a call of the library.

    `%s = call @all_reduce(%p); %y = call @add(%x, %s)`  -->  `%y = call @add_of_parts(%x, %p)`

    `%p = call @product(%a, %w); %s = call @all_reduce(%p); %y = call @add(%x, %s)`  -->  `%y = call @product_and_add(%a, %w, %x)` of few rows

    The product that makes a part also gives it to the other devices, and the kernel that reads the sum adds up what they give; of few rows
    both are one (`codegen.triton.exchange`). Where the part comes from elsewhere the reader gives it first. Where the sum has several
    readers, or one that reads an element more than once, a kernel of its own stores it. `topology` says how long both ways
    take and where the memory lies through which devices exchange.
    """

    name = "topo-exchange-sums"
    topology: str | None = None

    def apply(self, module: Any) -> None:
        mesh = read_mesh(module.operation)
        if mesh is None or len(mesh.devices) < 2 or self.topology is None:
            return
        work = _Work(module.operation, Means(self.topology, mesh))
        for view in list(module.operation.regions[0].blocks[0].operations):
            op = view.operation
            if op.name == "func.func" and op.regions[0].blocks and "topo.kernel" not in op.attributes:
                work.rewrite(op)
        work.erase_unused()


@dataclass
class _Work:
    module: ir.Operation
    means: Means
    kernels: dict[str, ir.Operation] = field(init=False)
    collectives: dict[str, Any] = field(init=False)
    _at: dict[int, int] = field(default_factory=dict)
    """Operation -> its place in the function."""
    _busy: set[int] = field(default_factory=set)
    """Places at which a sum is taken."""
    _marked: dict[tuple[str, str, str], str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kernels = kernels_of(self.module)
        functions = (v.operation for v in self.module.regions[0].blocks[0].operations)
        self.collectives = {
            ir.StringAttr(f.attributes["sym_name"]).value: plain(f.attributes["topo.collective"])
            for f in functions
            if "topo.collective" in f.attributes
        }

    def rewrite(self, function: ir.Operation) -> None:
        """Takes the sums of one plan function into kernels."""
        ops = [view.operation for view in function.regions[0].blocks[0].operations]
        self._at = {_key(op): i for i, op in enumerate(ops) if len(op.results)}
        sums = {}
        for i, op in enumerate(ops):
            if op.name == "func.call" and callee(op) in self.collectives:
                entry = self._entry(op)
                if entry is not None:
                    sums[i] = (op, entry)
        self._busy = set(sums)
        for op, entry in sums.values():
            self._take(op, entry)

    def _entry(self, call: ir.Operation) -> ir.DictAttr | None:
        """What `topo.kernel` says of the sum, without the argument; None for what is no small sum."""
        said = self.collectives[callee(call)]
        kind = ir.RankedTensorType(call.results[0].type)
        element = str(kind.element_type)
        if said["kind"] != "all_reduce" or said["combiner"] != "add" or element not in ELEMENTS:
            return None
        nbytes = prod(kind.shape) * element_bytes(element)
        return self.means.entry("all_reduce", nbytes, said["axes"], call.context)

    def _take(self, call: ir.Operation, entry: ir.DictAttr) -> None:
        partial, total = call.operands[0], call.results[0]
        reader, here = self._only_reader(total), self._at[_key(call)]
        if self._merge(call, reader, entry):
            return
        giver = self._giver(partial, entry, here, here if reader is None else self._at[_key(reader)])
        given = {"given": ir.BoolAttr.get(giver is not None, call.context)}
        name = None
        if reader is not None:
            operands = list(reader.operands)
            position = next(i for i, o in enumerate(operands) if o == total)
            name = self._taker(callee(reader), position, entry, given)
        if reader is not None and name is not None:
            operands[position] = partial
            self._busy.remove(here)
            self._busy.add(self._at[_key(reader)])
            self._replace(reader, name, operands)
            call.erase()
        else:
            name = self._taker(self._copier(ir.RankedTensorType(total.type)), 0, entry, given)
            if name is None:  # a call of the library it stays
                self._busy.remove(here)
                return
            self._replace(call, name, [partial])
        if giver is not None:
            maker = partial.owner.operation
            self._replace(maker, giver, list(maker.operands))

    def _merge(self, call: ir.Operation, reader: ir.Operation | None, entry: ir.DictAttr) -> bool:
        """Makes one kernel of the product of few rows that makes a part and of what reads the sum; whether that was possible."""
        partial, total = call.operands[0], call.results[0]
        maker = self._maker(partial)
        if maker is None or len(maker.results) != 1 or len(list(partial.uses)) != 1:
            return False
        position = 0 if reader is None else list(reader.operands).index(total)
        name = self._merged(callee(maker), "" if reader is None else callee(reader), position, entry)
        if name is None and reader is not None:
            reader, name = None, self._merged(callee(maker), "", 0, entry)
        if name is None:
            return False
        last, operands = call if reader is None else reader, list(maker.operands)
        if reader is not None:
            operands += [o for i, o in enumerate(reader.operands) if i != position]
        self._busy.remove(self._at[_key(call)])
        self._busy.add(self._at[_key(last)])
        self._replace(last, name, operands)
        if reader is not None:
            call.erase()
        maker.erase()
        return True

    def _merged(self, maker: str, reader: str, position: int, entry: ir.DictAttr) -> str | None:
        """The kernel of a product, a sum over devices of its result, and of `reader` ("" for none) of which that is argument `position`."""
        known = (maker, f"{reader}:{position}", str(entry))
        if known not in self._marked:
            self._marked[known] = self._make_merged(maker, reader, position, entry)
        return self._marked[known]

    def _make_merged(self, maker: str, reader: str, position: int, entry: ir.DictAttr) -> str | None:
        if not self._can_be_marked(maker, "gemm") or (reader and not self._can_be_marked(reader, "loops")):
            return None
        graphs = [read(self.kernels[name]) for name in (maker, reader) if name]
        product, last = graphs[0], graphs[-1]
        part = product.returns[0]
        if not VECTOR_ROWS < find_all(product)[0].counts[1] <= SMALL_ROWS or product.producer(part) is None:
            return None
        others = [v for i, v in enumerate(last.arguments) if i != position] if reader else []
        inputs = [product.handles[v].type for v in product.arguments]
        inputs += [last.handles[v].type for v in others]
        kind = ir.FunctionType.get(inputs, [last.handles[v].type for v in last.returns])
        block = self.module.regions[0].blocks[0]
        with self.module.context, ir.Location.unknown(), ir.InsertionPoint(block):
            made = func.FuncOp("kernel", kind, visibility="private")
            body = made.add_entry_block()
        made.operation.attributes["topo.kernel"] = self.kernels[maker].attributes["topo.kernel"]
        mark(made.operation, {"exchange": entry})
        mapping = dict(zip(product.arguments, body.arguments))
        with self.module.context, ir.Location.unknown(), ir.InsertionPoint(body):
            clone_nodes(Roles(product), product.nodes, mapping)
            mapping[part].owner.operation.attributes[SUMMED] = ir.UnitAttr.get()
            if reader:
                theirs = dict(zip(others, list(body.arguments)[len(product.arguments) :]))
                theirs[last.arguments[position]] = mapping[part]
                clone_nodes(Roles(last), last.nodes, theirs)
                mapping = theirs
            func.ReturnOp([mapping[v] for v in last.returns])
        return self._named(made.operation, "gemm")

    def _maker(self, partial: ir.Value) -> ir.Operation | None:
        """The call of a kernel that makes a value."""
        maker = None if isinstance(partial.owner, ir.Block) else partial.owner.operation
        if maker is None or maker.name != "func.call" or callee(maker) not in self.kernels:
            return None
        return maker

    def _can_be_marked(self, name: str, family: str) -> bool:
        kernel = self.kernels[name]
        attributes = plain(kernel.attributes["topo.kernel"])
        marked = "exchange" in attributes or "gives" in attributes
        return attributes["family"] == family and not marked and "topo.inout" not in kernel.attributes

    def _named(self, made: ir.Operation, family: str) -> str | None:
        """Names a new kernel if it has code; None and no kernel if it has none."""
        from topo_opt.codegen.triton import lower_kernel

        # Names are digests of a text in which every kernel has the same one.
        made.attributes["sym_name"] = ir.StringAttr.get("kernel", made.context)
        try:
            lower_kernel(made)
        except UnsupportedError:
            made.erase()
            return None
        found = name_kernel(made, family, self.kernels)
        self.kernels.setdefault(found, made)
        return found

    def _giver(self, partial: ir.Value, entry: ir.DictAttr, here: int, reader: int) -> str | None:
        """The kernel that makes a part and gives it to the other devices; None where the maker cannot.

        Nor may another sum be on its way until the reader at that place takes this one: the slices may be the same.
        """
        maker = self._maker(partial)
        if maker is None:
            return None
        if any(self._at[_key(maker)] < i <= reader and i != here for i in self._busy):
            return None
        result = {"result": _integer(ir.OpResult(partial).result_number, maker.context)}
        return self._mark(callee(maker), "gemm", "gives", result, entry)

    def _taker(
        self, name: str, position: int, entry: ir.DictAttr, given: dict[str, ir.Attribute]
    ) -> str | None:
        """The kernel that adds up its argument `position` over devices; None where it has no code for that."""
        argument = {"argument": _integer(position, self.module.context), **given}
        return self._mark(name, "loops", "exchange", argument, entry)

    def _only_reader(self, value: ir.Value) -> ir.Operation | None:
        """The call of a kernel that is the only use of a value."""
        uses = list(value.uses)
        owner = uses[0].owner.operation if len(uses) == 1 else None
        if owner is None or owner.name != "func.call" or callee(owner) not in self.kernels:
            return None
        return owner

    def _replace(self, call: ir.Operation, name: str, operands: Sequence[ir.Value]) -> None:
        with call.location, ir.InsertionPoint(call):
            made = func.CallOp([r.type for r in call.results], name, operands).operation
        self._at[_key(made)] = self._at[_key(call)]
        for old, new in zip(call.results, made.results):
            old.replace_all_uses_with(new)
        call.erase()

    def _mark(
        self, name: str, family: str, key: str, own: dict[str, ir.Attribute], entry: ir.DictAttr
    ) -> str | None:
        """The kernel with one more entry in `topo.kernel`, if it is of that family and has code then."""
        with entry.context:
            said = ir.DictAttr.get({**own, **{n.name: n.attr for n in entry}})
        known = (name, key, str(said))
        if known not in self._marked:
            self._marked[known] = self._make(name, family, key, said)
        return self._marked[known]

    def _make(self, name: str, family: str, key: str, said: ir.DictAttr) -> str | None:
        if not self._can_be_marked(name, family):
            return None
        before = self.kernels[name]
        with before.context, ir.InsertionPoint(self.module.regions[0].blocks[0]):
            made = before.clone().operation
        mark(made, {key: said})
        return self._named(made, family)

    def _copier(self, kind: ir.RankedTensorType) -> str:
        """A kernel that copies a tensor."""
        rank, sizes = len(kind.shape), ", ".join(map(str, kind.shape))
        identity = ir.AffineMapAttr.get(ir.AffineMap.get_identity(rank, kind.context))
        iterators = ", ".join(['"parallel"'] * rank)
        text = f"""func.func private @kernel(%a: {kind}) -> {kind} attributes {{topo.kernel = {{family = "loops",
            rows = array<i64: {sizes}>, cols = array<i64>, full_shape = array<i64: {sizes}>, full_map = {identity}}}}} {{
          %e = tensor.empty() : {kind}
          %c = linalg.generic {{indexing_maps = [{identity}, {identity}], iterator_types = [{iterators}]}}
            ins(%a : {kind}) outs(%e : {kind}) {{
          ^bb0(%x: {kind.element_type}, %o: {kind.element_type}):
            linalg.yield %x : {kind.element_type}
          }} -> {kind}
          return %c : {kind}
        }}""".replace("array<i64: >", "array<i64>")
        with kind.context, ir.Location.unknown():
            made = ir.Operation.parse(text)
            ir.InsertionPoint(self.module.regions[0].blocks[0]).insert(made)
            name = name_kernel(made.operation, "loops", self.kernels)
        self.kernels.setdefault(name, made.operation)
        return name

    def erase_unused(self) -> None:
        """Erases kernels and collectives that nothing calls any more."""
        block = self.module.regions[0].blocks[0]
        functions = [v.operation for v in block.operations if v.operation.name == "func.func"]
        called = called_by_plans(self.module)
        for function in functions:
            name = ir.StringAttr(function.attributes["sym_name"]).value
            replaced = name in self.kernels or name in self.collectives
            if replaced and name not in called:
                function.erase()


def _key(op: ir.Operation) -> int:
    """Tells an operation with results from others. The hash of an operation itself is that of its Python object."""
    return hash(op.results[0])


def _integer(value: int, context: ir.Context) -> ir.IntegerAttr:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64, context), value)
