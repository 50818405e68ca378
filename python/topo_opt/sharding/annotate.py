"""Shardings in the IR, as upstream's `shard` dialect writes them.

    shard.grid @mesh(shape = 2x4) {topo.axes = ["data", "model"], topo.devices = ["gpu0", ...]}
    %s = shard.sharding @mesh split_axes = [[0], [1]] : !shard.sharding
    %y = shard.shard %x to %s : tensor<8x16xf32>                        how %x lies
    %z = shard.shard %y to %s annotate_for_users : tensor<8x16xf32>     how the readers of %z take it

Upstream has no word for terms of a sum that are still to be joined: `topo.partial` of a `shard.sharding` lists the axes, and
`topo.combiner` says how, where it is no addition.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_mlir import ir

from topo_opt.errors import InputError
from topo_opt.sharding.rule import Rule
from topo_opt.sharding.rule_assignment import axes_of
from topo_opt.sharding.spec import Mesh, Sharding, ShardingPlan
from topo_opt.structured.graph import Graph, read

RETURN = -1
"""Stands for the number of the `func.return` where a node is asked for."""


@dataclass
class Annotations:
    """Shardings by the numbers of `structured.graph.read(func)`, the annotations themselves not counted."""

    values: dict[int, Sharding] = field(default_factory=dict)
    """How a value lies."""
    uses: dict[tuple[int, int], Sharding] = field(default_factory=dict)
    """(node, operand) -> how the node takes it. `RETURN` is the node of returned values."""


def write_mesh(module: ir.Operation, mesh: Mesh) -> None:
    """Puts the grid in front of the module, in place of one that is there."""
    for view in list(module.regions[0].blocks[0].operations):
        if view.operation.name == "shard.grid":
            view.operation.erase()
    strings = [
        ir.ArrayAttr.get([ir.StringAttr.get(s) for s in names])
        for names in ([a for a, _ in mesh.axes], mesh.devices)
    ]
    ir.Operation.create(
        "shard.grid",
        attributes={
            "sym_name": ir.StringAttr.get(mesh.name),
            "shape": ir.DenseI64ArrayAttr.get(list(mesh.shape)),
            "topo.axes": strings[0],
            "topo.devices": strings[1],
        },
        ip=ir.InsertionPoint.at_block_begin(module.regions[0].blocks[0]),
        loc=ir.Location.unknown(module.context),
    )


def read_mesh(module: ir.Operation) -> Mesh | None:
    """The grid of a module; axes without names are called by their number.

    Raises:
        InputError: there are several grids, or sizes that are not static.
    """
    grids = [v.operation for v in module.regions[0].blocks[0].operations if v.operation.name == "shard.grid"]
    if not grids:
        return None
    if len(grids) > 1:
        raise InputError(f"the module has {len(grids)} grids, one was expected")
    attributes = grids[0].attributes
    shape = list(ir.DenseI64ArrayAttr(attributes["shape"]))
    if any(size < 1 for size in shape):
        raise InputError("the shape of the grid is not static")
    name = ir.StringAttr(attributes["sym_name"]).value
    axes = _strings(attributes, "topo.axes") or [str(i) for i in range(len(shape))]
    count = 1
    for size in shape:
        count *= size
    devices = _strings(attributes, "topo.devices") or [str(i) for i in range(count)]
    try:
        return Mesh(tuple(zip(axes, shape, strict=True)), tuple(devices), name)
    except ValueError as error:
        raise InputError(f"grid @{name}: {error}") from None


def _strings(attributes: ir.OpAttributeMap, name: str) -> list[str]:
    return [ir.StringAttr(a).value for a in ir.ArrayAttr(attributes[name])] if name in attributes else []


def lift(func: ir.Operation, mesh: Mesh) -> tuple[Graph, Annotations]:
    """Takes the annotations out of a function: its graph without them, and what they said.

    Raises:
        InputError: a sharding of another grid, or of more dimensions than its tensor has.
    """
    block = func.regions[0].blocks[0]
    shards = [v.operation for v in block.operations if v.operation.name == "shard.shard"]
    laid: list[tuple[ir.Value, Sharding]] = []
    used: list[tuple[ir.OpOperand, Sharding]] = []
    for op in shards:
        sharding = _parsed(op.operands[1].owner.operation, ir.RankedTensorType(op.results[0].type).rank, mesh)
        if "annotate_for_users" in op.attributes:
            used += [(use, sharding) for use in op.results[0].uses]
        else:
            laid.append((_source(op.operands[0]), sharding))
    places = [(_user(use, block), use.operand_number, s) for use, s in used]
    sources = [_source(op.operands[0]) for op in shards]
    for op, source in zip(shards, sources, strict=True):
        op.results[0].replace_all_uses_with(source)
    for op in reversed(shards):
        op.erase()
    for view in list(block.operations):
        if view.operation.name == "shard.sharding":
            view.operation.erase()
    graph = read(func)
    found = Annotations({graph.value_of(v): s for v, s in laid})
    nodes = {hash(n.op): n.id for n in graph.nodes}
    for (owner, inner), operand, sharding in places:
        node = nodes.get(hash(owner), RETURN)
        if inner is not None:  # read inside of a region
            operand = graph.nodes[node].operands.index(graph.value_of(inner.operands[operand]))
        found.uses[node, operand] = sharding
    return graph, found


def _source(value: ir.Value) -> ir.Value:
    """The value behind annotations."""
    while isinstance(value.owner, ir.Operation | ir.OpView) and value.owner.operation.name == "shard.shard":
        value = value.owner.operation.operands[0]
    return value


def _user(use: ir.OpOperand, block: ir.Block) -> tuple[ir.Operation, ir.Operation | None]:
    """The op of the function's block that a use belongs to, and the op inside of its region where it is one."""
    op = use.owner.operation
    inner = None
    while op.block != block:
        inner = inner or op
        op = op.parent.operation
    return op, inner


def _parsed(op: ir.Operation, rank: int, mesh: Mesh) -> Sharding:
    grid = ir.FlatSymbolRefAttr(op.attributes["grid"]).value
    if grid != mesh.name:
        raise InputError(f"a sharding is of grid @{grid}, the module has @{mesh.name}")
    names = [axis for axis, _ in mesh.axes]
    text = str(op.attributes["split_axes"]).removeprefix("#shard<axisarray").removesuffix(">")
    split = [[int(n) for n in part.split(",") if n.strip()] for part in _parts(text)]
    partial = (
        list(ir.DenseI64ArrayAttr(op.attributes["topo.partial"])) if "topo.partial" in op.attributes else []
    )
    while split and not split[-1]:
        split.pop()
    used = [a for axes in split for a in axes] + partial
    if len(split) > rank or any(not 0 <= a < len(names) for a in used):
        raise InputError(
            f"a sharding {text} does not fit a tensor of rank {rank} on a grid of {len(names)} axes"
        )
    dims = tuple(tuple(names[a] for a in axes) for axes in split) + ((),) * (rank - len(split))
    combiner = (
        ir.StringAttr(op.attributes["topo.combiner"]).value if "topo.combiner" in op.attributes else "add"
    )
    try:
        return Sharding(dims, tuple(names[a] for a in partial), combiner)  # type: ignore[arg-type]
    except ValueError as error:
        raise InputError(str(error)) from None


def _parts(text: str) -> list[str]:
    """`[[0], [], [1, 2]]` -> `0`, ``, `1, 2`."""
    inner = text.strip()[1:-1].strip()
    return [part.strip().strip("[]") for part in inner.replace("],", "]|").split("|")] if inner else []


def write(graph: Graph, annotations: Annotations, mesh: Mesh) -> None:
    """Puts annotations into the function of a graph, which afterwards no longer describes it.

    A use is written where the reader takes the value otherwise than it lies, or takes terms of a sum: without, it takes the sum.
    """
    writer = _Writer(graph, mesh)
    for number in range(len(graph.values)):
        lies = annotations.values.get(number)
        uses = writer.uses_of(number)
        handle = graph.handles[number]
        if lies is not None:
            handle = writer.shard(handle, lies, for_users=False)
            for node, operand in uses:
                writer.redirect(node, operand, number, handle)
        made: dict[Sharding, ir.Value] = {}
        for node, operand in uses:
            wanted = annotations.uses.get((node, operand))
            if wanted is None or (wanted == lies and not wanted.partial):
                continue
            if lies is None and wanted.is_replicated:
                continue
            if wanted not in made:
                made[wanted] = writer.shard(handle, wanted, for_users=True)
            writer.redirect(node, operand, number, made[wanted])


class _Writer:
    def __init__(self, graph: Graph, mesh: Mesh):
        self.graph, self.mesh = graph, mesh
        self.block = graph.func.regions[0].blocks[0]
        self.shardings: dict[Sharding, ir.Value] = {}
        self.users: dict[int, list[tuple[int, int]]] = {}
        for node in graph.nodes:
            for position, value in enumerate(node.operands):
                self.users.setdefault(value, []).append((node.id, position))
        for position, value in enumerate(graph.returns):
            self.users.setdefault(value, []).append((RETURN, position))
        self.terminator = list(self.block.operations)[-1].operation

    def uses_of(self, value: int) -> list[tuple[int, int]]:
        return self.users.get(value, [])

    def sharding(self, sharding: Sharding) -> ir.Value:
        if sharding not in self.shardings:
            names = [axis for axis, _ in self.mesh.axes]
            # The attribute has no form for no dimensions.
            split = [[names.index(a) for a in axes] for axes in sharding.dims] or [[]]
            empty = ir.DenseI64ArrayAttr.get([])
            attributes = {
                "grid": ir.FlatSymbolRefAttr.get(self.mesh.name),
                "split_axes": ir.Attribute.parse(f"#shard<axisarray{split}>"),
                "static_sharded_dims_offsets": empty,
                "static_halo_sizes": empty,
                "operandSegmentSizes": ir.DenseI32ArrayAttr.get([0, 0]),
            }
            if sharding.partial:
                attributes["topo.partial"] = ir.DenseI64ArrayAttr.get(
                    [names.index(a) for a in sharding.partial]
                )
                if sharding.combiner != "add":
                    attributes["topo.combiner"] = ir.StringAttr.get(sharding.combiner)
            self.shardings[sharding] = ir.Operation.create(
                "shard.sharding",
                results=[ir.Type.parse("!shard.sharding")],
                attributes=attributes,
                ip=ir.InsertionPoint.at_block_begin(self.block),
            ).results[0]
        return self.shardings[sharding]

    def shard(self, value: ir.Value, sharding: Sharding, *, for_users: bool) -> ir.Value:
        """Annotates a value right behind where it is made."""
        said = self.sharding(sharding)
        owner = value.owner
        if isinstance(owner, ir.Block):
            # Behind all shardings, which stand at the beginning of the block.
            first = next(v.operation for v in self.block.operations if v.operation.name not in _AT_BEGINNING)
            place = ir.InsertionPoint(first)
        else:
            place = ir.InsertionPoint.after(owner.operation)
        attributes = {"annotate_for_users": ir.UnitAttr.get()} if for_users else {}
        return ir.Operation.create("shard.shard", [value.type], [value, said], attributes, ip=place).results[
            0
        ]

    def redirect(self, node: int, position: int, number: int, value: ir.Value) -> None:
        op = self.terminator if node == RETURN else self.graph.nodes[node].op
        if position < len(op.operands):
            op.operands[position] = value
            return
        for region in op.regions:
            for block in region.blocks:
                for view in block.operations:
                    inner = view.operation
                    for place, operand in enumerate(inner.operands):
                        if _source(operand) == self.graph.handles[number]:
                            inner.operands[place] = value


_AT_BEGINNING = ("shard.sharding",)


def of_plan(graph: Graph, rules: list[Rule], plan: ShardingPlan) -> Annotations:
    """What the annotations of a plan are."""
    found = Annotations(dict(plan.shardings))
    for node, rule in zip(graph.nodes, rules, strict=True):
        assignment = plan.assignments.get(node.id, {})
        terms = plan.terms.get(node.id, ())
        for position, (value, dims) in enumerate(zip(node.operands, rule.operands, strict=True)):
            if graph.values[value].shape is not None:
                lies = plan.shardings.get(value)
                is_sum = lies is not None and bool(terms) and set(terms) <= set(lies.partial)
                found.uses[node.id, position] = Sharding(axes_of(dims, assignment), terms if is_sum else ())
    return found


def annotate(func: ir.Operation, plan: ShardingPlan) -> None:
    """Writes a plan into a function; the grid is `write_mesh`'s."""
    from topo_opt.sharding.rules import sharding_rules

    graph = read(func)
    with func.context, func.location:
        write(graph, of_plan(graph, sharding_rules(graph), plan), plan.mesh)
