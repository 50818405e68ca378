"""Everything a program keeps between calls: weights, state, constants, and one arena for all variants.

Weights are bound once and shared by all functions. State (the buffers that some function mutates) is shared too: prefill and
decode write the same KV cache. The arena is as large as the largest variant needs, and so is the scratch that kernels find zero
and leave zero; calls never overlap (one lock).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from topo_opt.errors import InputError, UntrustedError
from topo_opt.runtime.aten_program import AtenProgram
from topo_opt.runtime.dtypes import name_of, torch_dtype
from topo_opt.runtime.load_time import LoadTime
from topo_opt.runtime.plan import ALIGNMENT, Buffer, Plan, Variant
from topo_opt.runtime.rank_parts import padded
from topo_opt.runtime.weights import Part

if TYPE_CHECKING:
    from topo_opt.runtime.ranks import Ranks

Fetch = Callable[[str, Part | None], torch.Tensor | None]
"""A tensor of the model by its fully qualified name, or a part of it, on the CPU; None when it is not there. A tensor that is not of
the size that the part is of comes whole, for `Memory` to refuse."""
NAMED = ("param", "buffer", "constant")


@dataclass(frozen=True)
class Declared:
    """A tensor that the bundle expects from outside, under `name`. `shape` is that of the whole tensor.

    `dims`: over which axes of the mesh each dimension is split, for programs of several ranks.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    dims: tuple[tuple[str, ...], ...] | None = None


def declared_tensors(plan: Plan, aten: Mapping[str, AtenProgram]) -> dict[str, Declared]:
    """All named tensors that any function reads; raises `UntrustedError` when two functions disagree about one.

    Of a program for several ranks only what its variants read: the ATen programs are for one device.
    """
    out: dict[str, Declared] = {}
    sizes = {axis.name: axis.size for axis in plan.mesh}

    def add(entry: Declared) -> None:
        known = out.setdefault(entry.name, entry)
        if (known.dtype, known.shape, known.dims) != (entry.dtype, entry.shape, entry.dims):
            raise UntrustedError(
                f"{entry.name} is {known.dtype}{list(known.shape)} in one function and "
                f"{entry.dtype}{list(entry.shape)} in another"
            )

    for function in plan.functions.values():
        for variant in function.variants:
            for b in variant.buffers:
                if b.kind in NAMED and b.name is not None:
                    dims = b.sharding or ((),) * len(b.shape)
                    parts = [math.prod(sizes[axis] for axis in axes) for axes in dims]
                    shape = b.whole or tuple(size * count for size, count in zip(b.shape, parts, strict=True))
                    add(Declared(b.name, b.kind, b.dtype, shape, b.sharding))
    for program in aten.values() if not plan.mesh else ():
        for entry in program.inputs:
            if entry.kind in NAMED and entry.dtype is not None and entry.shape is not None:
                shape = tuple(s for s in entry.shape if s is not None)
                if len(shape) == len(entry.shape):
                    add(Declared(entry.target, entry.kind, entry.dtype, shape))
    return out


def mutated_names(plan: Plan, aten: Mapping[str, AtenProgram]) -> set[str]:
    """Names of the state: buffers that a kernel plan or an ATen program writes."""
    names = {v.buffers[b].name for f in plan.functions.values() for v in f.variants for b in v.mutated_state}
    for program in aten.values():
        kinds = {entry.target: entry.kind for entry in program.inputs}
        names |= {
            o.target for o in program.outputs if o.kind == "mutation" and kinds.get(o.target or "") in NAMED
        }
    return {n for n in names if n}


def random_tensor(entry: Declared, seed: int, device: torch.device) -> torch.Tensor:
    """A reproducible stand-in for a missing weight: small enough that activations stay finite through many layers.

    Matrices are normal with variance 1 / fan-in, vectors near 1 (scales) or 0 (biases), integers and state 0.
    """
    dtype = torch_dtype(entry.dtype)
    if not (dtype.is_floating_point or dtype.is_complex) or (entry.kind == "buffer" and len(entry.shape) > 1):
        return torch.zeros(entry.shape, dtype=dtype, device=device)
    digest = hashlib.sha256(f"{seed}/{entry.name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
    values = torch.randn(entry.shape, generator=generator, device=device, dtype=torch.float32)
    if len(entry.shape) > 1:
        values *= 1 / math.sqrt(max(1, math.prod(entry.shape[1:])))
    else:
        positive = any(word in entry.name for word in ("weight", "var", "scale", "freq"))
        values = values.mul_(0.02).add_(1.0 if positive else 0.0)
    return values.to(dtype)


class State(Mapping[str, torch.Tensor]):
    """The mutable buffers by name. Tensors are live: writing into one changes what the next call sees."""

    def __init__(self, memory: Memory):
        self._memory = memory

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._memory.mutable:
            raise KeyError(f"{name!r} is not a state buffer; there are {', '.join(self) or 'none'}")
        return self._memory.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._memory.mutable))

    def __len__(self) -> int:
        return len(self._memory.mutable)

    def reset(self) -> None:
        """Gives every buffer its initial value again."""
        with self._memory.lock:
            for name in self._memory.mutable:
                self._memory.tensors[name].copy_(self._memory.initial(name))


class Memory:
    """Tensors of one loaded bundle on one device."""

    def __init__(
        self,
        declared: Mapping[str, Declared],
        mutable: Iterable[str],
        fetch: Fetch,
        device: torch.device,
        lock: AbstractContextManager[Any],
        *,
        random_seed: int | None = None,
        constants: Mapping[str, torch.Tensor] | None = None,
        ranks: Ranks | None = None,
    ):
        self.device, self.fetch, self.random_seed, self.ranks = device, fetch, random_seed, ranks
        self.declared, self.lock = dict(declared), lock
        self.mutable = sorted(set(mutable) & set(declared))
        self.constants = dict(constants or {})
        self.random_names: list[str] = []
        self._shared: set[str] = set()
        self.tensors = {name: self._bind(name) for name in self.declared}
        self.load_time = LoadTime(self.tensors, frozenset(self._shared))
        self._prepared: dict[str, torch.Tensor] = {}
        self._arena = torch.empty(0, dtype=torch.uint8, device=device)
        self._zeroed = torch.empty(0, dtype=torch.uint8, device=device)

    def initial(self, name: str) -> torch.Tensor:
        """The value of `name` as the model was saved, or as it was made up from the random seed."""
        entry = self.declared[name]
        if self.ranks is not None and entry.dims is not None:
            part = Part(self.ranks.part(entry.dims, entry.shape), entry.shape)
            return padded(self._initial(entry, part), self.ranks.room(entry.dims, entry.shape))
        return self._initial(entry, None)

    def _initial(self, entry: Declared, part: Part | None) -> torch.Tensor:
        name = entry.name
        found = self.fetch(name, part)
        if found is None:
            if self.random_seed is None:
                raise InputError(
                    f"the weight {name} ({entry.dtype}{list(entry.shape)}) is not in the bundle or its weight file",
                    hint="give the weights, or ask for random ones (--random-weights SEED, random_weights=SEED)",
                )
            if name not in self.random_names:
                self.random_names.append(name)
            made = random_tensor(entry, self.random_seed, self.device)
            return made if part is None else part.of(made).clone()  # the rest is not kept
        shape = entry.shape if part is None else part.shape
        if found.dtype != torch_dtype(entry.dtype) or tuple(found.shape) != shape:
            raise InputError(
                f"the weight {name} is {name_of(found.dtype)}{list(found.shape)}, the bundle was compiled for "
                f"{entry.dtype}{list(entry.shape)}"
            )
        return found

    def _bind(self, name: str) -> torch.Tensor:
        if self.ranks is not None:
            self.ranks.progress(f"reading the weight {name}")
        value = self.initial(name)
        bound = _allocate(
            lambda: value.to(self.device).contiguous(), value.numel() * value.element_size(), name
        )
        # A memory map can't be written and may start anywhere; descriptors need 16 bytes.
        own = bound.data_ptr() == value.data_ptr() and name in self.mutable
        if own or bound.data_ptr() % 16:
            return bound.clone()
        if bound is value:
            self._shared.add(name)
        return bound

    def arena(self, nbytes: int) -> torch.Tensor:
        """The shared arena, at least `nbytes` long. Call once for every variant before binding any of them."""
        if self._arena.numel() < nbytes:
            self._arena = _allocate(
                lambda: torch.empty(nbytes, dtype=torch.uint8, device=self.device), nbytes, "the arena"
            )
        return self._arena

    def zeroed(self, nbytes: int) -> torch.Tensor:
        """The scratch that is zero between launches, at least `nbytes` long; as for `arena`, call for every variant first."""
        if self._zeroed.numel() < nbytes:
            self._zeroed = _allocate(
                lambda: torch.zeros(nbytes, dtype=torch.uint8, device=self.device),
                nbytes,
                "the zeroed scratch",
            )
        return self._zeroed

    def clear_zeroed(self) -> None:
        """Makes the zeroed scratch zero again, for when a kernel did not come to its end."""
        self._zeroed.zero_()

    def bind(self, variant: Variant, *, given: frozenset[int] = frozenset()) -> list[torch.Tensor]:
        """One tensor for every buffer of `variant`; views are bound by their steps.

        Args:
            given: buffers that every call brings: they get no memory, but a tensor on "meta" at an aligned address.
        """
        regions = {"temp": self.arena(variant.arena_bytes), "zeroed": self.zeroed(variant.zeroed_bytes)}
        return [
            torch.empty(b.shape, dtype=torch_dtype(b.dtype), device="meta")
            if i in given
            else self._tensor(b, regions)
            for i, b in enumerate(variant.buffers)
        ]

    def _tensor(self, b: Buffer, regions: Mapping[str, torch.Tensor]) -> torch.Tensor:
        dtype = torch_dtype(b.dtype)
        if b.kind in regions and b.numel:
            start = b.offset or 0
            return regions[b.kind][start : start + b.nbytes].view(dtype).view(b.shape)
        if b.name is not None and b.kind in NAMED:
            return self.tensors[b.name]
        if b.kind == "prepared":
            return self._prepared_tensor(b, dtype)
        if b.kind == "constant":
            return self._constant(b, dtype)
        if b.kind in ("boxes", "turns"):
            assert self.ranks is not None
            boxes = self.ranks.boxes[b.name or ""]
            return boxes.words if b.kind == "boxes" else boxes.turns
        if b.kind == "coordinate":
            assert self.ranks is not None
            return torch.tensor(self.ranks.place, dtype=dtype, device=self.device)
        shape = (0,) if b.kind == "view" else b.shape
        return _allocate(lambda: torch.empty(shape, dtype=dtype, device=self.device), b.nbytes, "a buffer")

    def _prepared_tensor(self, b: Buffer, dtype: torch.dtype) -> torch.Tensor:
        name = b.name or ""
        if name not in self._prepared:
            self._prepared[name] = _allocate(
                lambda: torch.empty(b.shape, dtype=dtype, device=self.device), b.nbytes, "a prepared weight"
            )
        found = self._prepared[name]
        if (found.dtype, tuple(found.shape)) != (dtype, b.shape):
            raise UntrustedError(f"the prepared weight {name} has two types")
        return found

    def _constant(self, b: Buffer, dtype: torch.dtype) -> torch.Tensor:
        if b.splat is not None:
            if isinstance(b.splat, str):
                raise UntrustedError(f"a constant has the value {b.splat[:40]!r}, not a number")
            value = b.splat
            return _allocate(
                lambda: torch.full(b.shape, value, dtype=dtype, device=self.device), b.nbytes, "a constant"
            )
        raw = self.constants.get(b.data or "")
        if raw is None or raw.dtype != torch.uint8 or raw.numel() != b.nbytes:
            raise UntrustedError(f"constants.safetensors has no entry {b.data!r} of {b.nbytes} bytes")
        return raw.clone().view(dtype).reshape(b.shape).to(self.device)


def _allocate(make: Callable[[], torch.Tensor], nbytes: int, what: str) -> torch.Tensor:
    try:
        return make()
    except (RuntimeError, MemoryError, OverflowError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{what} of {nbytes} bytes can't be allocated: {reason[:200]}") from None


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the arena's alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
