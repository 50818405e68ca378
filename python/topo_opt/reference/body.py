"""The body of a loop nest, evaluated over a whole (part of an) iteration space at once.

Values are space views (see `affine_access`). Only what a requested value needs is computed, which lets a reduction look
through `acc + a * b` without ever forming the product.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_mlir import ir

from topo_opt.errors import InputError, UnsupportedError
from topo_opt.reference import cast_ops, complex_ops  # noqa: F401  they add rows to SCALAR_OPS
from topo_opt.reference.affine_access import loop_index
from topo_opt.reference.element_types import value_dtype, wide
from topo_opt.reference.scalar_ops import SCALAR_OPS


@dataclass(frozen=True)
class Space:
    """A box of an iteration space: first index and number of iterations of each loop."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]

    def narrow(self, view: Tensor) -> Tensor:
        """The part of a space view over the full space that lies in this box."""
        for dim, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            if view.shape[dim] not in (1, count):
                view = view.narrow(dim, start, count)
            elif view.shape[dim] == 1 and count == 0:
                view = view.narrow(dim, 0, 0)
        return view


@dataclass(frozen=True)
class Node:
    """One op of the body; `inputs` and `outputs` are slots."""

    name: str
    op: ir.Operation
    evaluate: Callable[[list[Tensor], Space], Sequence[Tensor]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def captures(op: ir.Operation) -> list[ir.Value]:
    """Values used inside an op's regions and defined outside, in order of first use."""
    inside: set[int] = set()
    found: dict[int, ir.Value] = {}

    def visit(block: ir.Block) -> None:
        inside.update(hash(a) for a in block.arguments)
        for view in block.operations:
            inner = view.operation
            for operand in inner.operands:
                if hash(operand) not in inside:
                    found.setdefault(hash(operand), operand)
            for region in inner.regions:
                for nested in region.blocks:
                    visit(nested)
            inside.update(hash(r) for r in inner.results)

    for region in op.regions:
        for block in region.blocks:
            visit(block)
    return list(found.values())


class Body:
    """A prepared single-block region. Slots number arguments, then captured values, then op results."""

    def __init__(self, op: ir.Operation, region: int = 0):
        block = op.regions[region].blocks[0]
        outer = captures(op)
        slots = {hash(v): i for i, v in enumerate([*block.arguments, *outer])}
        self.rank_of_arguments = len(block.arguments)
        self.count = len(slots)
        self.nodes: list[Node] = []
        self.yields: tuple[int, ...] = ()
        self.producer: dict[int, Node] = {}
        for view in block.operations:
            inner = view.operation
            inputs = tuple(slots[hash(v)] for v in inner.operands)
            if inner.name in ("linalg.yield", "tensor.yield", "tm_tensor.yield"):
                self.yields = inputs
                continue
            outputs = tuple(range(self.count, self.count + len(inner.results)))
            self.count += len(outputs)
            slots.update((hash(r), slot) for r, slot in zip(inner.results, outputs, strict=True))
            node = Node(inner.name, inner, _prepare(inner), inputs, outputs)
            self.nodes.append(node)
            self.producer.update((slot, node) for slot in outputs)
        self._plans: dict[tuple[tuple[int, ...], frozenset[int]], list[Node]] = {}
        self._arguments_behind = self._find_arguments()

    def _find_arguments(self) -> list[frozenset[int]]:
        behind = [frozenset({s} if s < self.rank_of_arguments else ()) for s in range(self.count)]
        for node in self.nodes:
            union = frozenset().union(*(behind[s] for s in node.inputs))
            for slot in node.outputs:
                behind[slot] = union
        return behind

    def arguments_behind(self, slot: int) -> frozenset[int]:
        """The block arguments that a value depends on."""
        return self._arguments_behind[slot]

    def _plan(self, targets: tuple[int, ...], known: frozenset[int]) -> list[Node]:
        key = (targets, known)
        if key not in self._plans:
            needed = set(targets)
            chosen = []
            for node in reversed(self.nodes):
                is_check = not node.outputs and all(self._arguments_behind[s] <= known for s in node.inputs)
                if is_check or needed.intersection(node.outputs):
                    needed.update(node.inputs)
                    chosen.append(node)
            self._plans[key] = chosen[::-1]
        return self._plans[key]

    def evaluate(
        self,
        targets: Sequence[int],
        arguments: Sequence[Tensor | None],
        outer: Sequence[Tensor],
        space: Space,
    ) -> list[Tensor]:
        """The values of `targets` over `space`.

        Args:
            targets: slots wanted.
            arguments: space views of the block arguments; None for one that no target needs.
            outer: the captured values, in the order of `captures`.
            space: the box of iterations; the views already cover exactly this box.
        """
        known = frozenset(i for i, a in enumerate(arguments) if a is not None)
        values: list[Tensor | None] = [None] * self.count
        for slot, value in enumerate([*arguments, *outer]):
            values[slot] = _widen(value) if slot < self.rank_of_arguments and value is not None else value
        for node in self._plan(tuple(targets), known):
            operands = [values[s] for s in node.inputs]
            for slot, result in zip(node.outputs, node.evaluate(operands, space), strict=True):  # type: ignore[arg-type]
                values[slot] = result
        return [values[t] for t in targets]  # type: ignore[misc]


def _widen(value: Tensor) -> Tensor:
    return value.to(wide(value.dtype))


def _prepare(op: ir.Operation) -> Callable[[list[Tensor], Space], Sequence[Tensor]]:
    if op.name == "linalg.index":
        dim = op.attributes["dim"].value
        return lambda _, space: [loop_index(dim, len(space.starts), space.starts[dim], space.counts[dim])]
    return _prepare_scalar(op)


def prepare_scalar_op(op: ir.Operation) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """A function for a scalar op or `tensor.extract`, with its results in the dtypes of the op's types.

    Raises:
        UnsupportedError: no row for this op.
    """
    if op.name == "tensor.extract":
        return lambda operands: [_widen(gather(operands[0], operands[1:]))]
    if op.name not in SCALAR_OPS:
        raise UnsupportedError(
            f"the reference executor has no rule for {op.name}",
            where=str(op.location).removeprefix("loc(")[:120],
        )
    function, dtypes = SCALAR_OPS[op.name](op), [value_dtype(r.type) for r in op.results]

    def evaluate(operands: list[Tensor]) -> Sequence[Tensor]:
        given = function(*operands)
        results = given if isinstance(given, tuple) else (given,)
        return [r if r.dtype == dtype else r.to(dtype) for r, dtype in zip(results, dtypes)]

    return evaluate


def _prepare_scalar(op: ir.Operation) -> Callable[[list[Tensor], Space], Sequence[Tensor]]:
    evaluate = prepare_scalar_op(op)
    return lambda operands, _space: evaluate(operands)


def gather(source: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """`source[indices]` with each index checked, since torch would wrap a negative one.

    Raises:
        InputError: an index outside its dimension.
    """
    for dim, (index, size) in enumerate(zip(indices, source.shape, strict=True)):
        if index.numel() == 0:
            continue
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= size:
            raise InputError(
                f"index {low if low < 0 else high} is out of range for dimension {dim} of size {size}"
            )
    if not indices:
        return source
    return source[torch.broadcast_tensors(*indices)] if len(indices) > 1 else source[indices[0]]
