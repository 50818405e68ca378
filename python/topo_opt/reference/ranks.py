"""Programs of one device on all devices of a mesh, in one process: each op on every rank, collectives between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_mlir import ir

from topo_opt.errors import InputError
from topo_opt.reference.binding import find_function, result_attributes
from topo_opt.reference.element_types import as_dtype, as_signless
from topo_opt.reference.program import Program, Step, evaluates
from topo_opt.runtime.dtypes import torch_dtype
from topo_opt.sharding import collective
from topo_opt.sharding.annotate import read_mesh
from topo_opt.sharding.parts import global_shape, groups, part, position
from topo_opt.sharding.signature import Dims, Slot, slots
from topo_opt.sharding.spec import Combiner, Mesh

_COMBINE: dict[Combiner, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "or": torch.bitwise_or,
    "and": torch.bitwise_and,
}


@dataclass(frozen=True)
class Collective:
    """A step that needs all ranks."""

    op: ir.Operation

    def __call__(self, operands: list[Tensor]) -> Sequence[Tensor]:
        raise InputError(
            f"{self.op.name} is of a program for several devices",
            hint="reference.ranks.run_ranks evaluates such",
        )

    def on_all(self, operands: Sequence[Tensor], mesh: Mesh) -> list[Tensor]:
        """The result of every rank, from the operand of every rank."""
        step = collective.read(self.op, mesh)
        if step.kind == "all_slice":
            return [
                _cut(t, step.dim, mesh.size(step.axes), position(mesh, step.axes, r))
                for r, t in enumerate(operands)
            ]
        results: list[Tensor | None] = [None] * len(operands)
        for group in groups(mesh, step.axes):
            given = [operands[rank] for rank in group]
            for rank, result in zip(group, _GROUP[step.kind](step, given), strict=True):
                results[rank] = result
        return [r for r in results if r is not None]


def _cut(tensor: Tensor, dim: int, parts: int, place: int) -> Tensor:
    size = tensor.shape[dim] // parts
    return tensor.narrow(dim, place * size, size)


def _joined(step: collective.Step, given: Sequence[Tensor]) -> Tensor:
    total = given[0]
    for term in given[1:]:
        total = _COMBINE[step.combiner](total, term)
    return total


def _all_reduce(step: collective.Step, given: Sequence[Tensor]) -> list[Tensor]:
    return [_joined(step, given)] * len(given)


def _reduce_scatter(step: collective.Step, given: Sequence[Tensor]) -> list[Tensor]:
    total = _joined(step, given)
    return [_cut(total, step.dim, len(given), place) for place in range(len(given))]


def _all_gather(step: collective.Step, given: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat(list(given), step.dim)] * len(given)


def _all_to_all(step: collective.Step, given: Sequence[Tensor]) -> list[Tensor]:
    """Device i gets part i along `dim` of all devices, joined along `source`."""
    return [
        torch.cat([_cut(t, step.dim, len(given), place) for t in given], step.source)
        for place in range(len(given))
    ]


_GROUP: dict[str, Callable[[collective.Step, Sequence[Tensor]], list[Tensor]]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
}


@evaluates(*collective.COLLECTIVES, "shard.all_slice")
def prepare_collective(op: ir.Operation, program: Program) -> Step:
    """All of them work across ranks, a cut by the coordinates of its own."""
    return Collective(op)


def run_ranks(module: ir.Module, symbol: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Evaluates a function of `topo-partition` on all devices of the module's grid.

    Args:
        inputs: one whole tensor per argument but the coordinates, as for the function before it was partitioned.

    Returns:
        The whole results. Of a result that is not split, all ranks must have the same bits.

    Raises:
        InputError: a module without a grid, inputs that do not fit, or ranks that disagree about a result.
    """
    mesh = read_mesh(module.operation)
    if mesh is None:
        raise InputError("the module has no grid, so it is no program for several devices")
    func = find_function(module, symbol)
    arguments = [_arguments(func, inputs, mesh, rank) for rank in range(len(mesh.devices))]
    function = Program(module).function(symbol)
    values: list[list[Tensor | None]] = [
        [*given, *[None] * (function.slots - len(given))] for given in arguments
    ]
    with torch.no_grad():
        for line in function.lines:
            given = [[held[s] for s in line.inputs] for held in values]
            if isinstance(line.step, Collective):
                made = [[t] for t in line.step.on_all([g[0] for g in given], mesh)]  # type: ignore[misc]
            else:
                made = [list(line.step(g)) for g in given]  # type: ignore[arg-type]
            for held, results in zip(values, made, strict=True):
                for slot, result in zip(line.outputs, results, strict=True):
                    held[slot] = result
                for slot in line.dead:
                    held[slot] = None
        return [
            _whole([held[s] for held in values], slot, attributes, mesh, position)  # type: ignore[misc]
            for position, (s, slot, attributes) in enumerate(
                zip(
                    function.returned,
                    slots(func, "results"),
                    result_attributes(func),
                    strict=True,
                )
            )
        ]


def _arguments(func: ir.Operation, inputs: Sequence[Tensor], mesh: Mesh, rank: int) -> list[Tensor]:
    remaining, found = list(inputs), []
    for slot in slots(func, "arguments"):
        if slot.kind == "coordinate":
            found.append(torch.tensor(mesh.coordinates(rank), dtype=torch.int64))
            continue
        if not remaining:
            raise InputError(f"the function takes more than the {len(inputs)} tensors given")
        tensor = as_signless(remaining.pop(0).detach())
        if slot.dims is not None:
            tensor = _part(tensor, slot.dims, mesh, rank)
        found.append(tensor)
    if remaining:
        raise InputError(
            f"the function takes {len(inputs) - len(remaining)} tensors, {len(inputs)} were given"
        )
    return found


def _part(tensor: Tensor, dims: Dims, mesh: Mesh, rank: int) -> Tensor:
    """What a device holds, zeros for padding included."""
    room = [-(-size // mesh.size(axes)) for size, axes in zip(tensor.shape, dims, strict=True)]
    for dim, (first, count) in enumerate(part(dims, tensor.shape, mesh, rank)):
        tensor = tensor.narrow(dim, first, count)
    if list(tensor.shape) == room:
        return tensor
    padded = tensor.new_zeros(room)
    padded[tuple(slice(count) for count in tensor.shape)] = tensor
    return padded


def _whole(given: list[Tensor], slot: Slot, attributes: dict[str, str], mesh: Mesh, position: int) -> Tensor:
    local = given[0]
    split = slot.dims if slot.dims is not None else ((),) * local.dim()
    shape = global_shape(split, local.shape, mesh, slot.whole)
    whole = torch.empty(shape, dtype=local.dtype)
    written: dict[tuple[tuple[int, int], ...], int] = {}
    for rank, tensor in enumerate(given):
        box = part(split, shape, mesh, rank)
        target = whole
        for dim, (first, count) in enumerate(box):
            target, tensor = target.narrow(dim, first, count), tensor.narrow(dim, 0, count)
        if box in written and not torch.equal(_bits(target), _bits(tensor)):
            raise InputError(f"ranks {written[box]} and {rank} have different copies of result {position}")
        written[box] = rank
        target.copy_(tensor)
    dtype = torch_dtype(attributes["dtype"]) if "dtype" in attributes else None
    return whole if dtype is None else as_dtype(whole, dtype)


def _bits(tensor: Tensor) -> Tensor:
    """The tensor with NaN as a number, so that equal ones compare equal."""
    return tensor.nan_to_num(nan=12345.0) if tensor.dtype.is_floating_point else tensor
