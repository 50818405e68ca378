"""Collectives that fewer, smaller or no collectives can stand for. Each rewrite shows what it makes of what.

All of them are exact but for the order in which terms are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod

from torch_mlir import ir

from topo_opt.sharding.collective import COLLECTIVES, Step, emit, read
from topo_opt.sharding.signature import slots
from topo_opt.sharding.spec import Mesh
from topo_opt.structured.graph import element_bytes

Rewrite = Callable[[ir.Operation, Step, Mesh], bool]


def simplify(func: ir.Operation, mesh: Mesh) -> None:
    """Applies `REWRITES` to the function until none applies any more."""
    changed = True
    while changed:
        changed = False
        for op in list(_collectives(func)):
            step = read(op, mesh)
            with op.location:
                changed = any(rewrite(op, step, mesh) for rewrite in REWRITES)
            if changed:
                break  # ops are gone


def _collectives(func: ir.Operation) -> Iterator[ir.Operation]:
    for view in func.regions[0].blocks[0].operations:
        if view.operation.name in (*COLLECTIVES, "shard.all_slice"):
            yield view.operation


def nbytes(value: ir.Value) -> int:
    """Bytes of a tensor."""
    kind = ir.RankedTensorType(value.type)
    return prod(kind.shape) * element_bytes(str(kind.element_type))


def _producer(value: ir.Value, name: str) -> ir.Operation | None:
    owner = value.owner
    if isinstance(owner, ir.Block):
        return None
    return owner.operation if owner.operation.name == name else None


def _users(value: ir.Value) -> list[ir.Operation]:
    return [use.owner.operation for use in value.uses]


def _replace(op: ir.Operation, value: ir.Value) -> None:
    op.results[0].replace_all_uses_with(value)
    op.erase()


def _drop(op: ir.Operation) -> None:
    if not _users(op.results[0]):
        op.erase()


def slice_of_gather(op: ir.Operation, step: Step, mesh: Mesh) -> bool:
    """`all_slice(all_gather(x, d), d)` --> `x`; along another dimension --> `all_to_all(x)`."""
    gather = _producer(op.operands[0], "shard.all_gather") if step.kind == "all_slice" else None
    if gather is None:
        return False
    made = read(gather, mesh)
    if made.axes != step.axes:
        return False
    source = gather.operands[0]
    if made.dim != step.dim:
        with ir.InsertionPoint(op):
            source = emit(source, Step("all_to_all", step.axes, step.dim, made.dim), mesh)
    _replace(op, source)
    _drop(gather)
    return True


def slice_of_sum(op: ir.Operation, step: Step, mesh: Mesh) -> bool:
    """`all_slice(all_reduce(x), d)`, all readers of the sum taking that part --> `reduce_scatter(x, d)`.

    A sum over more axes than the slice keeps the others: `all_reduce(reduce_scatter(x))`.
    """
    total = _producer(op.operands[0], "shard.all_reduce") if step.kind == "all_slice" else None
    if total is None:
        return False
    made = read(total, mesh)
    users = _users(total.results[0])
    same = all(u.name == "shard.all_slice" and read(u, mesh) == step for u in users)
    if not same or not set(step.axes) <= set(made.axes):
        return False
    rest = tuple(axis for axis in made.axes if axis not in step.axes)
    with ir.InsertionPoint(total):
        scatter = Step("reduce_scatter", step.axes, step.dim, combiner=made.combiner)
        part = emit(total.operands[0], scatter, mesh)
        if rest:
            part = emit(part, replace(made, axes=rest), mesh)
    for user in users:
        _replace(user, part)
    total.erase()
    return True


def narrow_before_gather(op: ir.Operation, step: Step, mesh: Mesh) -> bool:
    """`f(all_gather(x))`, f of every element for itself and no larger --> `all_gather(f(x))`, where f is the only reader."""
    if step.kind != "all_gather":
        return False
    users = _users(op.results[0])
    if len(users) != 1 or not is_unary(users[0]):
        return False
    (user,) = users
    if nbytes(user.results[0]) > nbytes(op.results[0]):
        return False
    source = op.operands[0]
    with ir.InsertionPoint(op), user.location:
        local = apply_unary(user, source)
        moved = emit(local, step, mesh)
    _replace(user, moved)
    op.erase()
    return True


def is_unary(op: ir.Operation) -> bool:
    """Whether an op computes every element of its result from the element of one tensor at the same place."""
    if op.name == "topo.demote":
        return True
    if op.name != "linalg.generic" or len(op.results) != 1 or len(op.operands) != 2:
        return False
    maps = [ir.AffineMapAttr(a).value for a in ir.ArrayAttr(op.attributes["indexing_maps"])]
    identity = ir.AffineMap.get_identity(maps[0].n_dims)
    body = [v.operation for v in op.regions[0].blocks[0].operations]
    return (
        all(m == identity for m in maps)
        and all(b.name not in ("linalg.index", "tensor.extract") for b in body)
        and not list(op.regions[0].blocks[0].arguments[1].uses)
        and _producer(op.operands[1], "tensor.empty") is not None
    )


def apply_unary(op: ir.Operation, source: ir.Value) -> ir.Value:
    """A unary op on another tensor, at the insertion point."""
    shape = ir.RankedTensorType(source.type).shape
    kind = ir.RankedTensorType.get(shape, ir.RankedTensorType(op.results[0].type).element_type)
    copy = op.clone().operation
    copy.operands[0] = source
    if op.name == "linalg.generic":
        empty = ir.Operation.create("tensor.empty", [kind])
        empty.move_before(copy)
        copy.operands[1] = empty.results[0]
    copy.results[0].set_type(kind)
    return copy.results[0]


REWRITES: tuple[Rewrite, ...] = (slice_of_gather, slice_of_sum, narrow_before_gather)


def merge_small(func: ir.Operation, mesh: Mesh, most_bytes: int) -> None:
    """`all_reduce(a), all_reduce(b)` --> `all_reduce(a and b side by side)`, taken apart again.

    For sums of equal axes, combiner and element type, each of at most `most_bytes`, where nothing between them needs the first one.
    """
    waiting: list[ir.Operation] = []
    for view in list(func.regions[0].blocks[0].operations):
        op = view.operation
        # Nothing that reads a sum may stand in front of the one it is merged with.
        if any(set(map(hash, _reads(op))) & {hash(w.results[0])} for w in waiting):
            _merge(waiting, mesh)
            waiting = []
        if op.name == "shard.all_reduce" and nbytes(op.operands[0]) <= most_bytes:
            if waiting and not _alike(waiting[0], op, mesh):
                _merge(waiting, mesh)
                waiting = []
            waiting.append(op)
    _merge(waiting, mesh)


def _reads(op: ir.Operation) -> Iterator[ir.Value]:
    yield from op.operands
    for region in op.regions:
        for block in region.blocks:
            for view in block.operations:
                yield from _reads(view.operation)


def _alike(one: ir.Operation, other: ir.Operation, mesh: Mesh) -> bool:
    types = [ir.RankedTensorType(op.operands[0].type).element_type for op in (one, other)]
    return read(one, mesh) == read(other, mesh) and types[0] == types[1]


def _merge(ops: Sequence[ir.Operation], mesh: Mesh) -> None:
    """Sums in the order of the block, of which the last one is where all operands are known."""
    if len(ops) < 2:
        return
    last, step = ops[-1], read(ops[0], mesh)
    with ir.InsertionPoint(last), last.location:
        flat = [_reshaped(op.operands[0], None) for op in ops]
        sizes = [ir.RankedTensorType(v.type).shape[0] for v in flat]
        kind = ir.RankedTensorType.get([sum(sizes)], ir.RankedTensorType(flat[0].type).element_type)
        i64 = ir.IntegerType.get_signless(64)
        joined = ir.Operation.create(
            "tensor.concat", [kind], flat, {"dim": ir.IntegerAttr.get(i64, 0)}
        ).results[0]
        total = emit(joined, step, mesh)
        first = 0
        parts = []
        for op, size in zip(ops, sizes, strict=True):
            parts.append(_reshaped(_slice(total, first, size), op.results[0].type))
            first += size
    for op, part in zip(ops, parts, strict=True):
        _replace(op, part)


def _slice(value: ir.Value, first: int, size: int) -> ir.Value:
    kind = ir.RankedTensorType.get([size], ir.RankedTensorType(value.type).element_type)
    i64 = ir.DenseI64ArrayAttr.get
    attributes = {
        "static_offsets": i64([first]),
        "static_sizes": i64([size]),
        "static_strides": i64([1]),
        "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 0, 0, 0]),
    }
    return ir.Operation.create("tensor.extract_slice", [kind], [value], attributes).results[0]


def _reshaped(value: ir.Value, wanted: ir.Type | None) -> ir.Value:
    """A tensor in one dimension (None), or one of one dimension in the shape that is wanted."""
    kind = ir.RankedTensorType(value.type if wanted is None else wanted)
    shape, element = list(kind.shape), kind.element_type
    flat = ir.RankedTensorType.get([prod(shape)], element)
    if shape == list(flat.shape):
        return value
    i64 = ir.IntegerType.get_signless(64)
    dims = [ir.IntegerAttr.get(i64, d) for d in range(len(shape))]
    groups = ir.ArrayAttr.get([ir.ArrayAttr.get(dims)] if dims else [])
    if wanted is None:
        if not dims:
            return _expand(value, flat, ir.ArrayAttr.get([]), [1])
        return ir.Operation.create(
            "tensor.collapse_shape", [flat], [value], {"reassociation": groups}
        ).results[0]
    if not dims:
        return ir.Operation.create(
            "tensor.collapse_shape", [kind], [value], {"reassociation": groups}
        ).results[0]
    return _expand(value, kind, groups, shape)


def _expand(value: ir.Value, kind: ir.Type, groups: ir.Attribute, shape: Sequence[int]) -> ir.Value:
    attributes = {"reassociation": groups, "static_output_shape": ir.DenseI64ArrayAttr.get(list(shape))}
    return ir.Operation.create("tensor.expand_shape", [kind], [value], attributes).results[0]


_WEIGHTS = ("param", "constant")


def hoist_gathers(functions: Sequence[ir.Operation], mesh: Mesh, most_bytes: int) -> None:
    """`all_gather(%weight)` --> a weight that is loaded whole, along that dimension.

    Where all readers in all functions gather the weight in the same way, no function rewrites it and the whole takes at
    most `most_bytes`: larger ones are split to save memory.
    """
    found: dict[str, list[tuple[ir.Operation, int]]] = {}
    barred: set[str] = set()
    steps: dict[str, Step] = {}
    for func in functions:
        barred |= {s.name for s in slots(func, "results") if s.kind == "mutation" and s.name}
        for number, slot in enumerate(slots(func, "arguments")):
            if slot.kind not in _WEIGHTS or slot.name is None or slot.dims is None:
                continue
            argument = func.regions[0].blocks[0].arguments[number]
            found.setdefault(slot.name, []).append((func, number))
            for user in _users(argument):
                step = read(user, mesh) if user.name == "shard.all_gather" else None
                whole = step is not None and nbytes(user.results[0]) <= most_bytes
                if step is not None and slot.whole is not None and not _is_cut(user, slot.whole, step.dim):
                    whole = False
                if step is None or not whole or steps.setdefault(slot.name, step) != step:
                    barred.add(slot.name)
    for name, places in found.items():
        if name in steps and name not in barred:
            for func, number in places:
                _load_gathered(func, number, steps[name], mesh)


def _is_cut(gather: ir.Operation, shape: Sequence[int], dim: int) -> bool:
    """Whether all readers of a gather cut its padding off, where it has any."""
    if ir.RankedTensorType(gather.results[0].type).shape[dim] == shape[dim]:
        return True
    return all(
        user.name == "tensor.extract_slice"
        and ir.RankedTensorType(user.results[0].type).shape[dim] == shape[dim]
        for user in _users(gather.results[0])
    )


def _load_gathered(func: ir.Operation, number: int, step: Step, mesh: Mesh) -> None:
    argument = func.regions[0].blocks[0].arguments[number]
    kind = ir.RankedTensorType(argument.type)
    shape = list(kind.shape)
    padded = shape[step.dim] = shape[step.dim] * mesh.size(step.axes)
    whole = slots(func, "arguments")[number].whole
    if whole is not None:
        shape[step.dim] = whole[step.dim]
    argument.set_type(ir.RankedTensorType.get(shape, kind.element_type))
    for user in _users(argument):
        if padded > shape[step.dim]:
            for cut in _users(user.results[0]):  # what was cut to its size is loaded so
                _replace(cut, argument)
            user.erase()
        else:
            _replace(user, argument)
    old = ir.FunctionType(ir.TypeAttr(func.attributes["function_type"]).value)
    inputs = [a.type for a in func.regions[0].blocks[0].arguments]
    func.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, list(old.results)))
    entries = list(ir.ArrayAttr(func.attributes["arg_attrs"]))
    entry = {a.name: a.attr for a in ir.DictAttr(entries[number])}
    dims = [
        [ir.StringAttr(a).value for a in ir.ArrayAttr(axes)] for axes in ir.ArrayAttr(entry["topo.sharding"])
    ]
    dims[step.dim] = dims[step.dim][: len(dims[step.dim]) - len(step.axes)]
    del entry["topo.sharding"]
    if whole is not None and all(size % mesh.size(axes) == 0 for size, axes in zip(whole, dims, strict=True)):
        del entry["topo.whole"]
    if any(dims):
        entry["topo.sharding"] = ir.ArrayAttr.get(
            [ir.ArrayAttr.get([ir.StringAttr.get(a) for a in axes]) for axes in dims]
        )
    entries[number] = ir.DictAttr.get(entry)
    func.attributes["arg_attrs"] = ir.ArrayAttr.get(entries)
