"""plan.json: what runs, in which order, on which memory. `plan_check` reads it.

A *function* (what the user calls) has *variants*, one for each declared bucket of shapes. A variant is a table of
buffers and a straight list of steps over buffer numbers; all control flow was decided by the compiler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from topo_opt.runtime import strict_json
from topo_opt.runtime.dtypes import BY_TORCH
from topo_opt.runtime.strict_json import Json

SCHEMA = 5
ALIGNMENT = 256
"""Bytes: every arena offset is a multiple, so that wide loads and tensor descriptors always work."""
MAX_ELEMENTS = 1 << 46
MAX_SHARED_BYTES = 232448

Scalar = bool | int | float | str


@dataclass(frozen=True)
class Resources:
    """What the ahead-of-time compile for one GPU architecture measured."""

    target: str
    registers: int
    spills: int
    """Bytes of stack a thread, 0 when nothing is spilled."""
    shared: int
    """Bytes of shared memory a block."""


IN_ORDER, SWAPPED = 2, 3
"""Sizes of the first dimension of a descriptor of two tensors: a kernel can read them. Blocks never reach what would be a third."""


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor built on the host: elements, not bytes.

    With `beside`, the name of another parameter, it spans two tensors, wherever they lie: the first dimension says which, in the order
    of their addresses. Its stride is the distance between them, and its size `IN_ORDER`, or `SWAPPED` where the other one comes first.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    beside: str | None = None

    @classmethod
    def of(cls, made: Mapping[str, Any]) -> Descriptor:
        """From `KernelSource`'s plain data."""
        shape, strides, block = (tuple(int(n) for n in made[k]) for k in ("shape", "strides", "block"))
        return cls(shape, strides, block, made.get("beside"))


@dataclass(frozen=True)
class KernelParam:
    """One runtime parameter of a kernel; `dtype` is the Triton element type it points to."""

    name: str
    dtype: str
    descriptor: Descriptor | None = None


@dataclass(frozen=True)
class Exchange:
    """Memory that the ranks which differ on `axes` only write for one another while the kernel runs.

    Each of the `ranks` has a box of `nbytes`, all bits of which are set before the first launch. `memory`: GPUs reach each other's
    ("peers"), or boxes lie in the memory of the host that they share ("host"). Any number of launches, one behind the other, use the same boxes.
    """

    axes: tuple[str, ...]
    ranks: int
    nbytes: int
    memory: Literal["peers", "host"] = "peers"


@dataclass(frozen=True)
class Kernel:
    """One generated kernel and how to launch it."""

    file: str
    function: str
    family: str
    params: tuple[KernelParam, ...]
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
    constexprs: dict[str, int]
    pdl: bool = False
    resources: Resources | None = None
    exchange: Exchange | None = None


@dataclass(frozen=True)
class Buffer:
    """Memory with a type. `shape` in elements, always contiguous except for a "view".

    `name` is the fully qualified name of a param, buffer (state) or lifted constant. `data` names an entry of
    constants.safetensors, `splat` a constant of one repeated value; `offset` places a temp, in bytes of the arena, and a
    "zeroed" scratch, in bytes of the memory that every kernel finds zero and leaves zero. A "prepared" buffer is made from
    weights by a load step; those with one `name` are one. A "coordinate" buffer holds the place of this rank on the mesh,
    one number an axis. "boxes" and "turns" belong to the kernel `name`, which exchanges: the place of this rank, whether to wait and the
    addresses of the boxes; and whose turn it is among the sets of a box, for every program.

    `sharding`: over which axes of the mesh each dimension of the tensor is split of which `shape` is one part; `whole`: the shape of that
    tensor, where a dimension does not divide, so that the last parts have zeros at their end.
    """

    kind: Literal[
        "input", "param", "buffer", "constant", "prepared", "temp", "zeroed", "output", "view", "coordinate",
        "boxes", "turns",
    ]  # fmt: skip
    dtype: str
    shape: tuple[int, ...]
    name: str | None = None
    offset: int | None = None
    data: str | None = None
    splat: bool | int | float | str | None = None
    sharding: tuple[tuple[str, ...], ...] | None = None
    whole: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a contiguous tensor of this type."""
        return self.numel * BY_TORCH[self.dtype].itemsize


@dataclass(frozen=True)
class KernelStep:
    """A launch: one buffer for each parameter. `writes` are the buffers it changes."""

    tag: ClassVar[str] = "kernel"
    kernel: str
    buffers: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True)
class AtenStep:
    """A call left to ATen. `call` is the argument template; `dtypes` are the torch types its operands are seen as."""

    tag: ClassVar[str] = "aten"
    op: str
    call: Json
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    input_dtypes: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True)
class CopyStep:
    """`dst` becomes `src`; same shape and dtype size."""

    tag: ClassVar[str] = "copy"
    src: int
    dst: int


@dataclass(frozen=True)
class CollectiveStep:
    """A collective of the ranks that differ on `axes` only, the first axis the major one.

    `dim` is gathered, scattered or cut; an all-to-all cuts `dim` and joins along `source`.
    """

    tag: ClassVar[str] = "collective"
    kind: Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
    axes: tuple[str, ...]
    src: int
    dst: int
    dim: int = 0
    source: int = 0
    combiner: Literal["add", "mul", "max", "min", "or", "and"] = "add"


@dataclass(frozen=True)
class ViewStep:
    """`out` is elements of `base`: offset and strides in elements of base. Costs nothing, done once on load."""

    tag: ClassVar[str] = "view"
    out: int
    base: int
    offset: int
    strides: tuple[int, ...]


Step = KernelStep | AtenStep | CopyStep | ViewStep | CollectiveStep


@dataclass(frozen=True)
class InputLeaf:
    """One leaf of the user's arguments, guarded: a tensor of exactly this type, or a literal of exactly this value."""

    kind: Literal["tensor", "literal"]
    name: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    buffer: int | None = None
    """None when the program never reads the tensor."""
    value: Scalar | None = None
    mutated: bool = False
    """The program writes a new value into the caller's tensor."""
    sharding: tuple[tuple[str, ...], ...] | None = None
    """`shape` is that of one part of the caller's tensor, which every rank gives whole."""
    whole: tuple[int, ...] | None = None
    """As of its buffer."""


@dataclass(frozen=True)
class OutputLeaf:
    """One leaf of the result: a buffer, or a literal (None included)."""

    kind: Literal["tensor", "literal"]
    buffer: int | None = None
    dtype: str | None = None
    value: Scalar | None = None
    sharding: tuple[tuple[str, ...], ...] | None = None
    """Every rank returns its part."""
    whole: tuple[int, ...] | None = None
    """The shape of the result that is split, where a dimension does not divide: the last parts are shorter."""


@dataclass(frozen=True)
class Variant:
    """One function for one bucket of shapes."""

    symbol: str
    bucket: dict[str, int]
    inputs: tuple[InputLeaf, ...]
    outputs: tuple[OutputLeaf, ...]
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    arena_bytes: int
    """Peak of the memory plan."""
    naive_bytes: int
    """Sum over all temps: what the arena would be without reuse."""
    zeroed_bytes: int = 0
    """The largest zeroed scratch of one launch; all launches of a program share it, one after the other."""
    load_steps: tuple[Step, ...] = ()
    """Kernels and views that are run once, when the program is loaded: what weights are repacked by."""

    @property
    def mutated_state(self) -> tuple[int, ...]:
        """State buffers that some step writes, in order of number, without repetition."""
        owner = {s.out: s.base for s in (*self.load_steps, *self.steps) if isinstance(s, ViewStep)}
        roots = set()
        for step in self.steps:
            for b in written(step):
                while b in owner:
                    b = owner[b]
                roots.add(b)
        return tuple(sorted(b for b in roots if self.buffers[b].kind == "buffer"))


@dataclass(frozen=True)
class Function:
    """What the user calls. The trees are those of `runtime.pytree`; None: arguments and results are flat."""

    variants: tuple[Variant, ...]
    in_tree: Json = None
    out_tree: Json = None
    aten_reason: str | None = None
    """Why there is no variant: the whole function is left to ATen."""


@dataclass(frozen=True)
class MeshAxis:
    """One axis of the mesh: its name and how many ranks it has."""

    name: str
    size: int


@dataclass(frozen=True)
class Plan:
    """The whole of plan.json. `mesh` is empty for a program of one device; rank r is place r of the mesh in row-major order."""

    schema: int
    kernels: dict[str, Kernel]
    functions: dict[str, Function]
    meta: dict[str, Json] = field(default_factory=dict)
    mesh: tuple[MeshAxis, ...] = ()
    devices: tuple[str, ...] = ()
    """The devices of the topology that the ranks were planned for."""

    @property
    def ranks(self) -> int:
        """How many processes run the program."""
        return math.prod(axis.size for axis in self.mesh)

    def to_json(self) -> Json:
        """JSON values, deterministic in the plan."""
        return strict_json.encode(self)


def written(step: Step) -> tuple[int, ...]:
    """Buffers that a step writes."""
    match step:
        case KernelStep():
            return step.writes
        case AtenStep():
            return step.outputs
        case CopyStep() | CollectiveStep():
            return (step.dst,)
    return ()


def read(step: Step) -> tuple[int, ...]:
    """Buffers that a step may read; a kernel may read whatever it is given."""
    match step:
        case KernelStep():
            return step.buffers
        case AtenStep():
            return step.inputs
        case CopyStep() | CollectiveStep():
            return (step.src,)
    return ()
