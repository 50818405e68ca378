"""From annotated functions to the program of one device: local shapes, explicit collectives.

Every device runs the same program. Where what it computes depends on which device it is (the rows of an iota, the part of
a vocabulary), it reads the device's coordinates on the mesh from one more argument, `topo.kind = "coordinate"`, a tensor of
i64 with one number an axis.

    %y = linalg.contract ... ins(%x, %w : tensor<8x64xf32>, tensor<32x64xf32>)       x and w split along k over `model` (4)
 -->
    %p = linalg.contract ... ins(%x, %w : tensor<8x16xf32>, tensor<32x16xf32>)
    %y = shard.all_reduce %p on @mesh grid_axes = [1]

An op leaves its result as its assignment says. From there it is brought once into the sharding in which the value is annotated to lie, and for
readers that take it otherwise into theirs, once for each sharding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch_mlir import ir

from topo_opt.sharding.annotate import RETURN, Annotations
from topo_opt.sharding.collective import Step, emit, steps
from topo_opt.sharding.coordinate import coordinate_entry, coordinate_type
from topo_opt.sharding.loop_bodies import first_of_part
from topo_opt.sharding.padding import cut_part, shortened, stretched, uneven_dims
from topo_opt.sharding.partition_ops import LOCAL, Local
from topo_opt.sharding.rule import Rule
from topo_opt.sharding.rule_assignment import Assignment, Axes, assign, axes_of, fault, result_sharding
from topo_opt.sharding.rules import FREE_OPS, sharding_rules
from topo_opt.sharding.signature import slots
from topo_opt.sharding.spec import Mesh, Sharding
from topo_opt.sharding.transport import ROUNDED_SUMS, Transport, narrow, widen
from topo_opt.structured.graph import Graph, Node


def partition(graph: Graph, annotations: Annotations, mesh: Mesh, *, narrow_sums: bool = True) -> None:
    """Replaces the function of a graph by the program of one device.

    Args:
        annotations: complete, as `propagate` gives them; a value that they leave out is whole.
        narrow_sums: form sums in the type to which their readers round them, see `transport`.

    """
    _Partitioner(graph, annotations, mesh, narrow_sums=narrow_sums).run()


_LOADED = ("param", "constant", "input")
"""Arguments of which every device is given its part with zeros for padding. State has what the last call left there."""


@dataclass
class _Partitioner:
    graph: Graph
    annotations: Annotations
    mesh: Mesh
    rules: list[Rule] = field(default_factory=list)
    lies: dict[int, Sharding] = field(default_factory=dict)
    """Value -> the sharding it is in when it has been made."""
    local: dict[tuple[int, Sharding], ir.Value] = field(default_factory=dict)
    coordinate: ir.Value | None = None
    narrow_sums: bool = True
    narrowed: dict[int, ir.Value] = field(default_factory=dict)
    """Widened values by their hash -> what they were widened from."""
    clean: set[int] = field(default_factory=set)
    """Values by their hash whose padding is zero."""

    def run(self) -> None:
        graph = self.graph
        self.rules, self.transport = sharding_rules(graph), Transport(graph)
        old = graph.func
        with old.context, old.location:
            block = self._new_function(old)
            with ir.InsertionPoint(block):
                for node in graph.nodes:
                    if node.name not in FREE_OPS:
                        self._node(node)
                returned = [
                    self._wanted(RETURN, position, value) for position, value in enumerate(graph.returns)
                ]
                ir.Operation.create("func.return", operands=returned)
            self._finish(returned)

    def _new_function(self, old: ir.Operation) -> ir.Block:
        attributes = {name: old.attributes[name] for name in old.attributes}
        new = ir.Operation.create("func.func", attributes=attributes, regions=1, ip=ir.InsertionPoint(old))
        self.function = new
        block = new.regions[0].blocks.append()
        rewritten = _rewritten_names(old)
        for value, slot in zip(self.graph.arguments, slots(old, "arguments"), strict=True):
            sharding = self.annotations.values.get(value)
            handle = self.graph.handles[value]
            if sharding is None:
                sharding = Sharding.replicated(len(self.graph.values[value].shape or ()))
            argument = block.add_argument(
                self._type(value, sharding), handle.location if hasattr(handle, "location") else old.location
            )
            self.lies[value] = sharding
            self.local[value, sharding] = argument
            if slot.kind in _LOADED and slot.name not in rewritten:
                self.clean.add(hash(argument))
        self.coordinate = block.add_argument(coordinate_type(self.mesh), old.location)
        return block

    def _finish(self, returned: list[ir.Value]) -> None:
        old, new = self.graph.func, self.function
        block = new.regions[0].blocks[0]
        arguments = _entries(old, "arg_attrs", len(self.graph.arguments))
        results = _entries(old, "res_attrs", len(returned))
        for entry, value in zip(arguments, self.graph.arguments, strict=True):
            self._note(entry, value, self.lies[value])
        for position, (entry, value) in enumerate(zip(results, self.graph.returns, strict=True)):
            self._note(entry, value, self._use(RETURN, position, value))
        assert self.coordinate is not None
        if any(True for _ in self.coordinate.uses):
            arguments.append(coordinate_entry())
        else:
            block.erase_argument(len(block.arguments) - 1)
        kind_of = ir.FunctionType.get([a.type for a in block.arguments], [v.type for v in returned])
        new.attributes["function_type"] = ir.TypeAttr.get(kind_of)
        for name, entries in (("arg_attrs", arguments), ("res_attrs", results)):
            if any(entries):
                new.attributes[name] = ir.ArrayAttr.get([ir.DictAttr.get(e) for e in entries])
        old.erase()

    def _note(self, entry: dict[str, ir.Attribute], value: int, sharding: Sharding) -> None:
        """`topo.sharding`: the axes of every dimension, for whoever binds the argument; `topo.whole`: its sizes where parts are padded."""
        shape = self.graph.values[value].shape or ()
        if uneven_dims(sharding, shape, self.mesh):
            entry["topo.whole"] = ir.DenseI64ArrayAttr.get(list(shape))
        if not sharding.is_replicated:
            entry["topo.sharding"] = ir.ArrayAttr.get(
                [ir.ArrayAttr.get([ir.StringAttr.get(a) for a in axes]) for axes in sharding.dims]
            )

    def _type(self, value: int, sharding: Sharding) -> ir.Type:
        """The local type of a value."""
        info = self.graph.values[value]
        if info.shape is None:
            return self.graph.handles[value].type
        kind = ir.RankedTensorType(self.graph.handles[value].type)
        return ir.RankedTensorType.get(sharding.local_shape(info.shape, self.mesh), kind.element_type)

    def _use(self, node: int, operand: int, value: int) -> Sharding:
        """How a reader takes a value."""
        said = self.annotations.uses.get((node, operand))
        if said is not None:
            return said
        lies = self.annotations.values.get(value)
        if lies is not None:
            return Sharding(lies.dims)
        return Sharding.replicated(len(self.graph.values[value].shape or ()))

    def _wanted(self, node: int, operand: int, value: int) -> ir.Value:
        return self.value(value, self._use(node, operand, value))

    def value(self, value: int, want: Sharding) -> ir.Value:
        """A value in a sharding, at the insertion point."""
        key = (value, want)
        if key in self.local:
            return self.local[key]
        producer = self.graph.producer(value)
        if producer is not None and producer.name in FREE_OPS:
            self.local[key] = self._remake(producer, value, want)
        else:
            self.local[key] = self._convert(
                value, self.local[value, self.lies[value]], self.lies[value], want
            )
        return self.local[key]

    def _convert(self, number: int, value: ir.Value, have: Sharding, want: Sharding) -> ir.Value:
        """A value in another sharding. What moves is narrowed where readers round it anyway."""
        shape = self.graph.values[number].shape or ()
        padded = uneven_dims(want, shape, self.mesh)
        uneven = padded | uneven_dims(have, shape, self.mesh)
        found = steps(have, want, uneven)
        element = self._moved_element(number, found)
        moved = value if element is None else narrow(value, element)
        for step in found:
            moved = self._step(moved, step, shape, uneven)
        if element is not None:
            wide = widen(moved, self.graph.values[number].element)
            self.narrowed[hash(wide)] = moved
            moved = wide
        if padded and padded <= {step.dim for step in found if step.kind == "all_slice"}:
            self.clean.add(hash(moved))
        return moved

    def _step(self, value: ir.Value, step: Step, shape: Sequence[int], uneven: frozenset[int]) -> ir.Value:
        """One collective; dimensions that do not divide are padded in front of it and cut to their size behind it."""
        count = self.mesh.size(step.axes)
        room = -(-shape[step.dim] // count) if step.kind not in ("all_reduce", "all_gather") else 0
        if step.dim in uneven and room * count > shape[step.dim]:
            if step.kind == "all_slice":
                return cut_part(
                    value, step.dim, room, lambda: first_of_part(self.coordinate, self.mesh, step.axes, room)
                )
            value = stretched(value, step.dim, room * count)
        value = emit(value, step, self.mesh)
        joined = {"all_gather": step.dim, "all_to_all": step.source}.get(step.kind)
        if joined in uneven and ir.RankedTensorType(value.type).shape[joined] > shape[joined]:
            value = shortened(value, joined, shape[joined])
        return value

    def _moved_element(self, number: int, found: list[Step]) -> str | None:
        """The type in which a value goes through these steps, None for its own."""
        if not self.narrow_sums or not any(step.kind != "all_slice" for step in found):
            return None
        sums = [step for step in found if step.kind in ("all_reduce", "reduce_scatter")]
        if not sums:
            return self.transport.of_copy(number)
        if any(step.combiner not in ROUNDED_SUMS for step in sums):
            return None
        return self.transport.of_sum(number)

    def _remake(self, node: Node, value: int, want: Sharding) -> ir.Value:
        """A constant, fill or empty tensor of local shape; of a constant with many values the whole, and a cut of it."""
        if self.graph.values[value].shape is None:
            return node.op.clone().operation.results[0]
        kind = self._type(value, want)
        if node.name == "arith.constant":
            attribute = node.op.attributes["value"]
            if want.is_replicated:
                return node.op.clone().operation.results[0]
            if isinstance(attribute, ir.DenseElementsAttr) and attribute.is_splat:
                splat = ir.DenseElementsAttr.get_splat(kind, attribute.get_splat_value())
                return ir.Operation.create(node.name, results=[kind], attributes={"value": splat}).results[0]
            whole = Sharding.replicated(len(want.dims))
            return self._convert(value, self.value(value, whole), whole, want)
        if node.name == "tensor.empty":
            return ir.Operation.create(node.name, results=[kind]).results[0]
        copy = self._copy(
            node, [self.value(node.operands[0], Sharding(())), self.value(node.operands[1], want)]
        )
        copy.results[0].set_type(kind)
        return copy.results[0]

    def _copy(self, node: Node, operands: list[ir.Value]) -> ir.Operation:
        """The op with these operands, those that its regions capture included."""
        copy = node.op.clone().operation
        moved = {
            hash(self.graph.handles[number]): operand
            for number, operand in zip(node.operands, operands, strict=True)
        }
        own = len(list(copy.operands))
        for position in range(own):
            copy.operands[position] = operands[position]
        for region in copy.regions:
            _redirect(region, moved)
        return copy

    def _node(self, node: Node) -> None:
        rule = self.rules[node.id]
        uses = [self._use(node.id, position, value) for position, value in enumerate(node.operands)]
        assignment = self._assignment(node, rule, uses)
        operands = [
            self.value(value, self._taken(value, dims, use, assignment))
            for value, dims, use in zip(node.operands, rule.operands, uses, strict=True)
        ]
        results = [result_sharding(rule, position, assignment) for position in range(len(node.results))]
        terms = next((use for use in uses if use.partial), None)
        if terms is not None:
            # A product that owns rows by the split of its groups takes rows that are owned over the same axes.
            results = [
                Sharding(
                    r.dims,
                    (*terms.partial, *(a for a in r.partial if a not in terms.partial)),
                    terms.combiner,
                )
                for r in results
            ]
        types = [self._type(value, sharding) for value, sharding in zip(node.results, results, strict=True)]
        rounded = self.narrowed.get(hash(operands[0])) if node.name == "topo.demote" else None
        if rounded is not None and rounded.type == types[0]:
            self._settle(node.results[0], results[0], rounded)
            return
        copy = self._copy(node, operands)
        for result, kind in zip(copy.results, types, strict=True):
            result.set_type(kind)
        made = list(copy.results)
        if assignment and node.name in LOCAL:
            assert self.coordinate is not None
            clean = frozenset(p for p, operand in enumerate(operands) if hash(operand) in self.clean)
            place = Local(self.graph, node, rule, assignment, self.mesh, self.coordinate, copy, clean)
            made = LOCAL[node.name](place)
        for value, sharding, handle in zip(node.results, results, made, strict=True):
            self._settle(value, sharding, handle)

    def _taken(
        self, value: int, dims: tuple[tuple[int, ...], ...], use: Sharding, assignment: Assignment
    ) -> Sharding:
        if self.graph.values[value].shape is None:
            return Sharding(())
        return Sharding(axes_of(dims, assignment), use.partial, use.combiner)

    def _settle(self, value: int, sharding: Sharding, handle: ir.Value) -> None:
        """Brings a result into the sharding in which it lies; terms stay as long as no one asks for their sum."""
        self.lies[value] = sharding
        self.local[value, sharding] = handle
        said = self.annotations.values.get(value)
        if said is not None and not sharding.partial:
            said = Sharding(said.dims)  # copies are as good as terms, and stay copies for other readers
        if said is None or said == sharding or self.graph.values[value].shape is None:
            return
        if sharding.partial and said.dims == sharding.dims and not said.partial:
            wanted = self._asked(value)
            if len(wanted) == 1:  # the reader joins the terms, in the way that suits it
                return
        self.lies[value] = said
        self.local[value, said] = self._convert(value, handle, sharding, said)

    def _asked(self, value: int) -> set[Sharding]:
        """The shardings in which readers take a value."""
        if not self._readers:
            for node in self.graph.nodes:
                for position, operand in enumerate(node.operands):
                    self._readers.setdefault(operand, []).append((node.id, position))
            for position, operand in enumerate(self.graph.returns):
                self._readers.setdefault(operand, []).append((RETURN, position))
        return {self._use(node, position, value) for node, position in self._readers.get(value, [])}

    _readers: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def _assignment(self, node: Node, rule: Rule, uses: list[Sharding]) -> dict[int, Axes]:
        """The assignment that the annotated operands say."""
        given = [
            (dims, use.dims)
            for value, dims, use in zip(node.operands, rule.operands, uses, strict=True)
            if self.graph.values[value].shape is not None
        ]
        assignment = assign(rule, given, self.mesh)
        sentence = fault(rule, assignment, self.mesh)
        assert sentence is None, sentence
        return assignment


def _rewritten_names(func: ir.Operation) -> set[str | None]:
    """Names of tensors that any function of the module leaves a new value of."""
    functions = [
        view.operation
        for view in func.parent.regions[0].blocks[0].operations
        if view.operation.name == "func.func"
    ]
    return {slot.name for f in functions for slot in slots(f, "results") if slot.kind == "mutation"} - {None}


def _entries(func: ir.Operation, name: str, count: int) -> list[dict[str, ir.Attribute]]:
    if name not in func.attributes:
        return [{} for _ in range(count)]
    return [{a.name: a.attr for a in ir.DictAttr(entry)} for entry in ir.ArrayAttr(func.attributes[name])]


def _redirect(region: ir.Region, moved: dict[int, ir.Value]) -> None:
    for block in region.blocks:
        for view in block.operations:
            op = view.operation
            for position, operand in enumerate(op.operands):
                if hash(operand) in moved:
                    op.operands[position] = moved[hash(operand)]
            for inner in op.regions:
                _redirect(inner, moved)
