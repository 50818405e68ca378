"""Reads plan.json: types first, then everything that types don't say, so that executors can trust every number."""

from __future__ import annotations

import math
from collections.abc import Mapping

from topo_opt.errors import UntrustedError
from topo_opt.runtime import strict_json
from topo_opt.runtime.dtypes import BY_TORCH, BY_TRITON
from topo_opt.runtime.plan import (
    ALIGNMENT,
    IN_ORDER,
    MAX_ELEMENTS,
    MAX_SHARED_BYTES,
    SCHEMA,
    AtenStep,
    Buffer,
    CollectiveStep,
    CopyStep,
    InputLeaf,
    Kernel,
    KernelStep,
    Plan,
    Step,
    Variant,
    ViewStep,
    read,
    written,
)
from topo_opt.runtime.strict_json import Json


def from_json(value: Json) -> Plan:
    """A checked plan. Raises `UntrustedError` that names the field."""
    version = value.get("schema") if isinstance(value, Mapping) else None
    if version != SCHEMA:
        raise UntrustedError(
            f"the bundle has plan schema {version!r}, this version reads schema {SCHEMA}",
            hint="compile the model again with this version of topo-opt",
        )
    plan = strict_json.decode(Plan, value, "plan")
    check(plan)
    return plan


def check(plan: Plan) -> None:
    """Checks everything that the types alone don't say. Raises `UntrustedError`."""
    sizes = _mesh_sizes(plan)
    for name, kernel in plan.kernels.items():
        _check_kernel(f"plan.kernels.{name[:80]}", kernel)
        _check_exchange(f"plan.kernels.{name[:80]}.exchange", kernel, sizes)
    if not plan.functions:
        raise UntrustedError("plan.functions is empty: the bundle has nothing to run")
    for name, function in plan.functions.items():
        where = f"plan.functions.{name[:80]}"
        if not name.isidentifier():
            raise UntrustedError(f"{where}: a function name should be an identifier")
        if not function.variants and function.aten_reason is None:
            raise UntrustedError(f"{where} has no variants and no reason for it")
        for i, variant in enumerate(function.variants):
            _VariantCheck(f"{where}.variants[{i}]", variant, plan.kernels, sizes).run()


_MOST_RANKS = 1 << 20


def _mesh_sizes(plan: Plan) -> dict[str, int]:
    sizes = {axis.name: axis.size for axis in plan.mesh}
    _require(len(sizes) == len(plan.mesh), "plan.mesh has an axis twice")
    _require(
        all(1 <= size <= _MOST_RANKS for size in sizes.values()) and plan.ranks <= _MOST_RANKS,
        "plan.mesh has a size that is out of range",
    )
    _require(
        len(plan.devices) in (0, plan.ranks if plan.mesh else 0), "plan.devices are not as many as the ranks"
    )
    return sizes


def _require(good: bool, text: str) -> None:
    if not good:
        raise UntrustedError(text)


def _check_kernel(where: str, k: Kernel) -> None:
    parts = k.file.split("/")
    _require(
        len(parts) == 2
        and parts[0] == "kernels"
        and parts[1].endswith(".py")
        and parts[1][:-3].isidentifier(),
        f"{where}.file should be kernels/<identifier>.py, not {k.file[:80]!r}",
    )
    _require(k.function.isidentifier(), f"{where}.function is not an identifier: {k.function[:80]!r}")
    _require(
        1 <= k.grid[0] < 2**31 and all(1 <= g <= 65535 for g in k.grid[1:]),
        f"{where}.grid {list(k.grid)} is out of range",
    )
    _require(
        k.num_warps in (1, 2, 4, 8, 16, 32),
        f"{where}.num_warps is {k.num_warps}, not a power of two up to 32",
    )
    _require(1 <= k.num_stages <= 64, f"{where}.num_stages is {k.num_stages}, not 1 to 64")
    names = [p.name for p in k.params] + list(k.constexprs)
    _require(len(set(names)) == len(names), f"{where} has a parameter name twice")
    for p in k.params:
        _require(p.name.isidentifier(), f"{where}: parameter name {p.name[:80]!r} is not an identifier")
        _require(p.dtype in BY_TRITON, f"{where}.{p.name}: {p.dtype[:80]!r} is not a Triton element type")
        if d := p.descriptor:
            _require(
                1 <= len(d.shape) <= 5 and len(d.shape) == len(d.strides) == len(d.block),
                f"{where}.{p.name}: shape, strides and block of a descriptor need one rank of 1 to 5",
            )
            _require(
                min(d.shape) >= 1 and min(d.block) >= 1 and min(d.strides) >= 1 and d.strides[-1] == 1,
                f"{where}.{p.name}: a descriptor needs positive sizes and a contiguous last dimension",
            )
            if d.beside is not None:
                pointers = {o.name: o.dtype for o in k.params if o.descriptor is None}
                _require(
                    pointers.get(d.beside) == p.dtype
                    and len(d.shape) > 1
                    and d.shape[0] == d.block[0] == IN_ORDER,
                    f"{where}.{p.name}: a descriptor of two tensors needs a pointer of {p.dtype} as the other one and a dimension for them",
                )
    if k.resources:
        _require(
            k.resources.shared <= MAX_SHARED_BYTES,
            f"{where} needs {k.resources.shared} bytes of shared memory",
        )


_MOST_BOX_BYTES = 1 << 34


def _check_exchange(where: str, kernel: Kernel, axes: Mapping[str, int]) -> None:
    exchange = kernel.exchange
    if exchange is None:
        return
    known = bool(exchange.axes) and len(set(exchange.axes)) == len(exchange.axes)
    _require(known and set(exchange.axes) <= set(axes), f"{where}.axes are not axes of the mesh")
    ranks = math.prod(axes[axis] for axis in exchange.axes)
    _require(exchange.ranks == ranks, f"{where}.ranks is {exchange.ranks}, the axes have {ranks} places")
    _require(0 < exchange.nbytes <= _MOST_BOX_BYTES, f"{where}.nbytes {exchange.nbytes} is out of range")


class _VariantCheck:
    """Checks one variant, keeping the extent in elements of every buffer."""

    def __init__(self, where: str, variant: Variant, kernels: Mapping[str, Kernel], axes: Mapping[str, int]):
        self.where, self.v, self.kernels, self.axes = where, variant, kernels, axes

    def run(self) -> None:
        v = self.v
        for field in ("arena_bytes", "zeroed_bytes"):
            size = getattr(v, field)
            _require(0 <= size < 1 << 48, f"{self.where}.{field} {size} is out of range")
        for i, b in enumerate(v.buffers):
            self.check_buffer(f"{self.where}.buffers[{i}]", b)
        self.views = {i for i, b in enumerate(v.buffers) if b.kind == "view"}
        self.bound: set[int] = set()
        self.base: dict[int, int] = {}
        self.prepared: set[int] = set()
        for i, step in enumerate(v.load_steps):
            self.check_load_step(f"{self.where}.load_steps[{i}]", step)
        unmade = [i for i, b in enumerate(v.buffers) if b.kind == "prepared" and i not in self.prepared]
        _require(not unmade, f"{self.where}: no load step makes the buffers {unmade[:8]}")
        for i, step in enumerate(v.steps):
            self.check_step(f"{self.where}.steps[{i}]", step)
        for i, leaf in enumerate(v.inputs):
            self.check_input(f"{self.where}.inputs[{i}]", leaf)
        for i, out in enumerate(v.outputs):
            if out.kind == "tensor":
                where = f"{self.where}.outputs[{i}]"
                made = self.usable(where, -1 if out.buffer is None else out.buffer)
                _require(out.dtype in BY_TORCH, f"{where}.dtype is not known")
                self.check_parts(where, out.sharding, out.whole, made.shape)

    def check_buffer(self, where: str, b: Buffer) -> None:
        _require(b.dtype in BY_TORCH, f"{where}.dtype {b.dtype[:80]!r} is not known")
        _require(
            all(0 <= s <= MAX_ELEMENTS for s in b.shape), f"{where}.shape {list(b.shape)} is out of range"
        )
        _require(len(b.shape) <= 64 and b.numel <= MAX_ELEMENTS, f"{where} has too many elements")
        if b.kind in ("temp", "zeroed"):
            offset = -1 if b.offset is None else b.offset
            _require(
                offset >= 0 and offset % ALIGNMENT == 0, f"{where}.offset {b.offset} is not a multiple of 256"
            )
            end, field = offset + b.nbytes, "arena_bytes" if b.kind == "temp" else "zeroed_bytes"
            _require(end <= getattr(self.v, field), f"{where} ends at {end}, after {field}")
        else:
            _require(b.offset is None, f"{where}: only a temp or a zeroed scratch has an offset")
        self.check_sharding(where, b)
        if b.kind == "coordinate":
            good = b.dtype == "int64" and b.shape == (len(self.axes),) and bool(self.axes)
            _require(good, f"{where}: coordinates are one int64 an axis of the mesh")
        if b.kind in ("param", "buffer", "prepared"):
            _require(bool(b.name), f"{where}: a {b.kind} needs a name")
        if b.kind in ("boxes", "turns"):
            self.check_boxes(where, b)
        if b.kind == "constant":
            sources = [x for x in (b.name, b.data, b.splat) if x is not None]
            _require(len(sources) == 1, f"{where}: a constant needs exactly one of name, data and splat")
        else:
            _require(b.data is None and b.splat is None, f"{where}: only a constant has data")

    def check_boxes(self, where: str, b: Buffer) -> None:
        kernel = self.kernels.get(b.name or "")
        if kernel is None or kernel.exchange is None:
            raise UntrustedError(f"{where}: {(b.name or '')[:80]!r} is no kernel that exchanges")
        boxes = b.kind == "boxes"
        expected = (2 + kernel.exchange.ranks,) if boxes else (kernel.grid[0],)
        good = b.dtype == ("int64" if boxes else "int32") and b.shape == expected
        _require(good, f"{where}: {b.kind} of {b.name} are {expected[0]} numbers")

    def check_sharding(self, where: str, b: Buffer) -> None:
        if b.sharding is not None:
            good = b.kind in ("param", "buffer", "constant", "input")
            _require(good, f"{where}: a {b.kind} has no sharding")
        self.check_parts(where, b.sharding, b.whole, b.shape)

    def check_parts(
        self,
        where: str,
        sharding: tuple[tuple[str, ...], ...] | None,
        whole: tuple[int, ...] | None,
        shape: tuple[int, ...],
    ) -> None:
        """A part of this shape, of the whole where that does not divide."""
        if sharding is None:
            _require(whole is None, f"{where}.whole is of something that is not split")
            return
        used = [axis for axes in sharding for axis in axes]
        _require(
            len(sharding) == len(shape) and len(set(used)) == len(used) and set(used) <= set(self.axes),
            f"{where}.sharding does not fit the shape or the mesh",
        )
        if whole is not None:
            counts = [math.prod(self.axes[axis] for axis in axes) for axes in sharding]
            fits = len(whole) == len(shape) and all(
                size >= 0 and -(-size // count) == part for size, count, part in zip(whole, counts, shape)
            )
            _require(fits, f"{where}.shape {list(shape)} is no part of {list(whole)}")

    def usable(self, where: str, index: int) -> Buffer:
        _require(0 <= index < len(self.v.buffers), f"{where}: there is no buffer {index}")
        _require(
            index not in self.views or index in self.bound, f"{where}: view {index} is used before its step"
        )
        return self.v.buffers[index]

    def check_load_step(self, where: str, step: Step) -> None:
        """A view, or a kernel that reads weights, constants and prepared buffers and writes the latter."""
        _require(isinstance(step, KernelStep | ViewStep), f"{where} is no kernel and no view")
        self.check_step(where, step, writes=("prepared",))
        if isinstance(step, KernelStep):
            kinds = {self.root(i).kind for i in step.buffers}
            _require(
                kinds <= {"param", "constant", "prepared", "coordinate"},
                f"{where} uses what differs from call to call",
            )
            self.prepared |= set(step.writes)

    def check_step(self, where: str, step: Step, writes: tuple[str, ...] = ()) -> None:
        for i in read(step):
            self.usable(where, i)
        if isinstance(step, ViewStep):
            return self.check_view(where, step)
        for i in written(step):
            b = self.usable(where, i)
            kind = self.root(i).kind
            fixed = kind in ("param", "constant", "prepared", "coordinate", "boxes") and kind not in writes
            _require(not fixed, f"{where} writes {b.kind} {b.name or i}")
        if not isinstance(step, KernelStep):
            # Only a kernel keeps the promise to leave it zero.
            own = ("zeroed", "boxes", "turns")
            used = [i for i in (*read(step), *written(step)) if self.root(i).kind in own]
            _require(not used, f"{where} uses the scratch {used} of kernels")
        if isinstance(step, KernelStep):
            kernel = self.kernels.get(step.kernel)
            if kernel is None:
                raise UntrustedError(f"{where}: there is no kernel {step.kernel[:80]!r}")
            self.check_launch(where, step, kernel)
        elif isinstance(step, CopyStep):
            a, b = self.v.buffers[step.src], self.v.buffers[step.dst]
            _require(a.shape == b.shape, f"{where} copies shape {list(a.shape)} to {list(b.shape)}")
            same = BY_TORCH[a.dtype].itemsize == BY_TORCH[b.dtype].itemsize
            _require(same, f"{where} copies {a.dtype} to {b.dtype}")
        elif isinstance(step, CollectiveStep):
            self.check_collective(where, step)
        elif isinstance(step, AtenStep):
            _require(
                len(step.input_dtypes) == len(step.inputs), f"{where}.input_dtypes should be one an input"
            )
            for i, name in zip(step.inputs, step.input_dtypes):
                size = BY_TORCH[name].itemsize if name in BY_TORCH else 0
                _require(
                    size == BY_TORCH[self.v.buffers[i].dtype].itemsize,
                    f"{where}: buffer {i} is no {name[:80]}",
                )

    def check_collective(self, where: str, step: CollectiveStep) -> None:
        """The shapes on both sides, and that both are dense memory."""
        source, target = self.v.buffers[step.src], self.v.buffers[step.dst]
        _require(
            bool(step.axes) and len(set(step.axes)) == len(step.axes) and set(step.axes) <= set(self.axes),
            f"{where}.axes are not axes of the mesh",
        )
        _require(source.dtype == target.dtype, f"{where} changes the dtype")
        rank = len(source.shape)
        moves = step.kind != "all_reduce"
        _require(not moves or 0 <= step.dim < rank, f"{where}.dim is out of range")
        parts = math.prod(self.axes[axis] for axis in step.axes)
        shape = list(source.shape)
        if step.kind == "all_gather":
            shape[step.dim] *= parts
        elif moves:
            _require(shape[step.dim] % parts == 0, f"{where} cuts {shape[step.dim]} into {parts} parts")
            shape[step.dim] //= parts
        if step.kind == "all_to_all":
            _require(0 <= step.source < rank and step.source != step.dim, f"{where}.source is out of range")
            shape[step.source] *= parts
        _require(
            tuple(shape) == target.shape,
            f"{where} gives the shape {shape}, its result has {list(target.shape)}",
        )
        _require(moves is False or step.src != step.dst, f"{where}: only an all_reduce works in place")

    def check_launch(self, where: str, step: KernelStep, kernel: Kernel) -> None:
        _require(
            len(step.buffers) == len(kernel.params),
            f"{where} gives {len(step.buffers)} buffers, {step.kernel} takes {len(kernel.params)}",
        )
        _require(set(step.writes) <= set(step.buffers), f"{where} writes a buffer that it isn't given")
        for i, p in zip(step.buffers, kernel.params):
            b = self.v.buffers[i]
            own = b.kind not in ("boxes", "turns") or b.name == step.kernel or i not in step.writes
            _require(own, f"{where} writes the {b.kind} of {b.name}")
            size, unit = b.nbytes, BY_TRITON[p.dtype].itemsize
            _require(size % unit == 0, f"{where}: buffer {i} of {size} bytes can't be seen as {p.dtype}")
            if d := p.descriptor:
                together = 1 if d.beside is not None else 0
                last = sum((n - 1) * s for n, s in zip(d.shape[together:], d.strides[together:]))
                seen = {i} | {j for j, o in zip(step.buffers, kernel.params) if o.name == d.beside}
                for j in sorted(seen):
                    _require(
                        (last + 1) * unit <= self.v.buffers[j].nbytes,
                        f"{where}: the descriptor of {p.name} ends after buffer {j}",
                    )

    def check_view(self, where: str, step: ViewStep) -> None:
        base = self.usable(where, step.base)
        _require(
            step.out in self.views and step.out not in self.bound, f"{where}: {step.out} is not a fresh view"
        )
        out = self.v.buffers[step.out]
        _require(base.dtype == out.dtype, f"{where} changes the dtype from {base.dtype} to {out.dtype}")
        _require(len(step.strides) == len(out.shape), f"{where} needs one stride a dimension")
        _require(
            step.offset >= 0 and min(step.strides, default=0) >= 0, f"{where} has a negative offset or stride"
        )
        if out.numel:
            last = step.offset + sum((n - 1) * s for n, s in zip(out.shape, step.strides))
            _require(last < base.numel, f"{where} reaches element {last} of {base.numel}")
        self.bound.add(step.out)
        self.base[step.out] = step.base

    def root(self, index: int) -> Buffer:
        while index in self.base:
            index = self.base[index]
        return self.v.buffers[index]

    def check_input(self, where: str, leaf: InputLeaf) -> None:
        if leaf.kind == "literal":
            return
        _require(leaf.dtype in BY_TORCH and leaf.shape is not None, f"{where} needs a dtype and a shape")
        if leaf.buffer is not None:
            b = self.usable(where, leaf.buffer)
            good = b.kind == "input" and b.dtype == leaf.dtype and b.shape == leaf.shape
            _require(
                good and (b.sharding, b.whole) == (leaf.sharding, leaf.whole),
                f"{where} and buffer {leaf.buffer} differ in kind, dtype, shape or sharding",
            )
