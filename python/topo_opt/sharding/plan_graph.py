"""What the planner sees of a function: operations with their rules and work, and the tensors between them.

Plain data without MLIR, so that it can be made by hand and handed to another process. `plan_reading.py` makes it from
structured IR.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from topo_opt.sharding.rule import Rule

if TYPE_CHECKING:
    from topo_opt.collectives.kernels import KernelKind

TermsKind = Literal["zero", "any", "sum"]
"""What a device holds of elements it does not own: zeros; anything; or nobody owns elements, and all hold addends."""


@dataclass(frozen=True)
class Terms:
    """How an operation works on disjoint terms (see `ShardingPlan.terms`).

    Args:
        operands: positions of the operands that are terms, all of one origin, and what each must hold of foreign elements.
        result: what the results then hold of foreign elements.
    """

    operands: tuple[tuple[int, TermsKind], ...]
    result: TermsKind


@dataclass(frozen=True)
class KernelWork:
    """All that the kernel of an operation does: operations of `dtype` on matrices, scalar ones in f32, and bytes."""

    flops: float
    dtype: str
    scalars: float
    nbytes: float


@dataclass(frozen=True)
class Work:
    """What one operation costs on one device when nothing is split.

    Args:
        flops: floating-point operations, a multiply-add counts as two.
        dtype: name of the rate in a topology for them.
        reads: operand position -> bytes that it reads from memory. Nothing for what its own kernel has just computed.
        writes: result position -> bytes that it leaves in memory.
        kernels: kernels that start with it.
        triangular: factor of causal rows, whose last part does more than its share; -1 when there is none.
        shared_rows: of a grouped product, the number of rows, from which follows how many matrices are read; 0 for others.
        kind: of the kernel that it makes; None for an operation that is a part of whatever kernel it stands in.
        shape: factors whose sizes multiply to the rows, columns and inner size of a product, or number of groups; rows come first for
            other kinds too.
        products: how many like it share its kernel, and so what the kernel takes to get going.
        beside: what its whole kernel does, which tells whether its part of the bytes or of the operations takes time; None
            where both count.
    """

    flops: float = 0.0
    dtype: str = "f32"
    reads: tuple[tuple[int, int], ...] = ()
    writes: tuple[tuple[int, int], ...] = ()
    kernels: int = 0
    triangular: int = -1
    shared_rows: int = 0
    kind: KernelKind | None = None
    shape: tuple[tuple[int, ...], ...] = ()
    products: int = 1
    beside: KernelWork | None = None


@dataclass(frozen=True)
class PlanOp:
    """One operation. `operands` has a value for every tensor operand that the planner follows, -1 for others.

    Two operations with equal `signature` cost the same under equal strategies.
    """

    node: int
    name: str
    rule: Rule
    operands: tuple[int, ...]
    results: tuple[int, ...]
    work: Work
    terms: Terms | None = None
    owns: int = -1
    """The reduction factor whose parts own elements (groups of a grouped product, rows of a lookup), or -1."""

    @property
    def signature(self) -> tuple[object, ...]:
        followed = tuple(o >= 0 for o in self.operands)
        return (self.rule, self.work, self.terms, self.owns, followed)


@dataclass
class PlanValue:
    """A tensor. `kind` is `topo.kind` of an argument and None for results; `number` is that of the structured graph."""

    number: int
    shape: tuple[int, ...]
    element_bytes: int
    name: str = ""
    kind: str | None = None
    producer: int = -1
    uses: list[tuple[int, int]] = field(default_factory=list)
    """(operation, operand position)."""
    returned: bool = False
    rewrites: int = -1
    """The argument whose new value this is, or -1."""
    in_memory: bool = True
    """Whether it is stored between kernels."""
    inside: bool = False
    """Whether the kernel that makes it reads it too: a collective on it cuts the kernel in two."""
    moved_element_bytes: int = 0
    """Bytes of an element on its way between devices (see `transport`), 0 for `element_bytes`."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.element_bytes

    @property
    def moved_bytes(self) -> int:
        """Size on the way between devices."""
        return math.prod(self.shape) * (self.moved_element_bytes or self.element_bytes)


@dataclass
class PlanGraph:
    """Operations in program order, and values; `name` is that of the function.

    `kinds[i]` is a number that operation i shares with those of equal signature. `parts` are the functions that were joined, each
    with its operations.
    """

    ops: list[PlanOp]
    values: list[PlanValue]
    name: str = "main"
    kinds: list[int] = field(default_factory=list)
    parts: tuple[tuple[str, range], ...] = ()

    def __post_init__(self) -> None:
        numbers: dict[object, int] = {}
        self.kinds = [numbers.setdefault(op.signature, len(numbers)) for op in self.ops]
        for value in self.values:
            value.uses = []
        for index, op in enumerate(self.ops):
            for position, operand in enumerate(op.operands):
                if operand >= 0:
                    self.values[operand].uses.append((index, position))
            for result in op.results:
                if result >= 0:
                    self.values[result].producer = index

    @property
    def functions(self) -> tuple[tuple[str, range], ...]:
        """Name and operations of every function of the graph."""
        return self.parts or ((self.name, range(len(self.ops))),)

    @property
    def arguments(self) -> list[int]:
        return [i for i, value in enumerate(self.values) if value.kind is not None]
