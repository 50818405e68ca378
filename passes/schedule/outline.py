"""Moving groups of ops into kernel functions and rebuilding the plan function around calls to them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch_mlir import ir
from torch_mlir.dialects import func

from topo_opt.errors import UnsupportedError
from topo_opt.passes.schedule.roles import Role, Roles, memory_operands
from topo_opt.structured.graph import Graph, Node

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """Compute nodes that become one kernel, in order, with the kernel's attributes."""

    nodes: tuple[Node, ...]
    attributes: Mapping[str, ir.Attribute]


def kernels_of(module: ir.Operation) -> dict[str, ir.Operation]:
    """The kernel functions of a module by name."""
    functions = (v.operation for v in module.regions[0].blocks[0].operations)
    return {
        ir.StringAttr(f.attributes["sym_name"]).value: f for f in functions if "topo.kernel" in f.attributes
    }


def called_by_plans(module: ir.Operation) -> set[str]:
    """The names of all functions that plan functions call."""
    functions = [
        v.operation for v in module.regions[0].blocks[0].operations if v.operation.name == "func.func"
    ]
    return {
        callee(inner.operation)
        for f in functions
        if "topo.kernel" not in f.attributes and f.regions[0].blocks
        for inner in f.regions[0].blocks[0].operations
        if inner.operation.name == "func.call"
    }


def callee(call: ir.Operation) -> str:
    """The name of the function that a `func.call` calls."""
    return ir.FlatSymbolRefAttr(call.attributes["callee"]).value


def kernel_name(made: ir.Operation, family: str) -> str:
    """The name of a kernel function: the digest of its text, in which it has another name."""
    # Local scope: otherwise the printer numbers, names and verifies the whole module for every kernel.
    text = made.get_asm(use_local_scope=True)
    return f"k_{family}_{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def name_kernel(made: ir.Operation, family: str, known: Container[str]) -> str:
    """Names a new kernel function; erases it where its name is `known`, as that of an equal one."""
    name = kernel_name(made, family)
    if name in known:
        made.erase()
    else:
        made.attributes["sym_name"] = ir.StringAttr.get(name, made.context)
    return name


def closure(roles: Roles, nodes: Sequence[Node]) -> tuple[list[Node], list[int]]:
    """Free ops and views that the nodes need (with the nodes), and the values that must come from memory.

    Both in the order of first need, so that equal layers give equal kernels wherever shared constants stand.
    """
    graph, inside = roles.graph, {n.id for n in nodes}
    order: dict[int, None] = {}
    inputs: dict[int, None] = {}

    def need(value: int) -> None:
        producer = graph.producer(value)
        if producer is None or (roles.of(producer) is Role.COMPUTE and producer.id not in inside):
            inputs[value] = None
        elif producer.id not in order and producer.id not in inside:
            for operand in producer.operands:
                need(operand)
            order[producer.id] = None

    for node in nodes:
        kept = memory_operands(node)
        for operand in node.operands:
            if operand in kept:
                inputs[operand] = None
            else:
                need(operand)
        order[node.id] = None
    return [graph.nodes[i] for i in order], list(inputs)


def computed_from(
    graph: Graph, results: Sequence[int], known: Container[int] = ()
) -> tuple[list[int], list[int]]:
    """Values (of `known`, and arguments) and nodes, in order, that `results` are computed from."""
    inputs: dict[int, None] = {}
    nodes: set[int] = set()
    waiting = list(results)
    while waiting:
        value = waiting.pop()
        producer = graph.producer(value)
        if value in known or producer is None:
            inputs[value] = None
        elif producer.id not in nodes:
            nodes.add(producer.id)
            waiting.extend(producer.operands)
    return sorted(inputs), sorted(nodes)


def results_of(roles: Roles, nodes: Sequence[Node], users: Sequence[Sequence[int]]) -> list[int]:
    """Values of the group that something outside reads, also through views and free ops, or that the plan holds in memory."""
    inside = {n.id for n in nodes}
    return [
        v for n in nodes for v in n.results if v in roles.in_memory or _read_outside(roles, v, inside, users)
    ]


def _read_outside(roles: Roles, value: int, inside: set[int], users: Sequence[Sequence[int]]) -> bool:
    for user in users[value]:
        node = roles.graph.nodes[user]
        if roles.of(node) is Role.COMPUTE:
            if user not in inside:
                return True
        elif any(_read_outside(roles, r, inside, users) for r in node.results):
            return True
    return False


@dataclass
class Outliner:
    """Makes kernel functions in a module; equal kernels are made once.

    Names are `k_<family>_<digest>`: the digest of the kernel's text, so that they do not depend on anything else.
    """

    module: ir.Operation
    made: set[str] = field(default_factory=set)
    """Names of the kernels in the module."""
    verdicts: dict[str, bool] = field(default_factory=dict)
    """Kernel name -> whether there is code for it."""
    _names: dict[tuple, str] = field(default_factory=dict)
    """Groups whose kernel is known, so that none is built only to find its name."""

    def make(self, roles: Roles, group: Group, inputs: Sequence[int], results: Sequence[int]) -> str:
        """Builds the kernel function of a group and returns its symbol name."""
        name = self._names.get(_key(roles, group, inputs, results))
        if name is None or name not in self.made:
            outlined, name = self._build(roles, group, inputs, results)
            if name in self.made:
                outlined.erase()
            else:
                self.made.add(name)
                outlined.attributes["sym_name"] = ir.StringAttr.get(name)
        return name

    def lowers(self, roles: Roles, group: Group, inputs: Sequence[int], results: Sequence[int]) -> bool:
        """Whether code generation finds every value of the group at indices that the kernel's tile has."""
        from topo_opt.codegen.triton import lower_kernel

        key = _key(roles, group, inputs, results)
        if key not in self._names:
            outlined, name = self._build(roles, group, inputs, results)
            self._names[key] = name
            if name not in self.verdicts:
                outlined.attributes["sym_name"] = ir.StringAttr.get(name)
                try:
                    lower_kernel(outlined)
                    self.verdicts[name] = True
                except UnsupportedError as error:
                    log.debug("group of %d ops is not one kernel: %s", len(group.nodes), error)
                    self.verdicts[name] = False
            outlined.erase()
        return self.verdicts[self._names[key]]

    def _build(
        self, roles: Roles, group: Group, inputs: Sequence[int], results: Sequence[int]
    ) -> tuple[ir.Operation, str]:
        """A new function at the end of the module, and the name that its text gives it."""
        handles = roles.graph.handles
        block = self.module.regions[0].blocks[0]
        kind = ir.FunctionType.get([handles[v].type for v in inputs], [handles[v].type for v in results])
        family = ir.StringAttr(group.attributes["family"]).value
        with ir.InsertionPoint(block), ir.Location.unknown():
            outlined = func.FuncOp("kernel", kind, visibility="private")
        outlined.operation.attributes["topo.kernel"] = ir.DictAttr.get(dict(group.attributes))
        body = outlined.add_entry_block()
        mapping = {v: a for v, a in zip(inputs, body.arguments)}
        needed, _ = closure(roles, group.nodes)
        with ir.InsertionPoint(body), ir.Location.unknown():
            clone_nodes(roles, needed, mapping)
            func.ReturnOp([mapping[v] for v in results])
        return outlined.operation, kernel_name(outlined.operation, family)


def _key(roles: Roles, group: Group, inputs: Sequence[int], results: Sequence[int]) -> tuple:
    """What tells one group of a module from another."""
    function = ir.StringAttr(roles.graph.func.attributes["sym_name"]).value
    attributes = tuple((name, str(value)) for name, value in sorted(group.attributes.items()))
    return function, tuple(n.id for n in group.nodes), tuple(inputs), tuple(results), attributes


def clone_nodes(roles: Roles, nodes: Iterable[Node], mapping: dict[int, ir.Value]) -> None:
    """Clones ops at the insertion point with operands replaced through `mapping`, which gets their results."""
    graph = roles.graph
    for node in nodes:
        copy = node.op.clone()
        _remap(copy.operation, graph.numbers, mapping)
        mapping.update(zip(node.results, copy.operation.results))


def _remap(op: ir.Operation, numbers: Mapping[int, int], mapping: Mapping[int, ir.Value]) -> None:
    for position, operand in enumerate(op.operands):
        number = numbers.get(hash(operand))
        if number is not None:
            op.operands[position] = mapping[number]
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                _remap(inner.operation, numbers, mapping)
