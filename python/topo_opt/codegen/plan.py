"""Kernel IR and kernel sources to the plan: buffers, steps in order, memory.

%1 = call @k_norm(%x, %w)           -->  temp 7 at arena offset 0; kernel k_norm(input 0, param 1, temp 7)
%2 = tensor.collapse_shape %1       -->  view 8 of temp 7
%3 = call @k_update(%cache, %2, %i) -->  kernel k_update(buffer 2, view 8, input 3), writing buffer 2
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from topo_opt.codegen import dense
from topo_opt.codegen.kernel_source import BOXES, TURNS, KernelSource, Param
from topo_opt.codegen.memory_plan import Lifetime, align, place
from topo_opt.codegen.plan_graph import Node, PlanGraph, contiguous_strides, read_plan_function
from topo_opt.codegen.plan_inplace import AvoidedRewrite, share_storage
from topo_opt.errors import CompilerCrash, InputError
from topo_opt.runtime import plan as rt
from topo_opt.runtime.dtypes import from_triton_name
from topo_opt.runtime.plan_check import check
from topo_opt.sharding.annotate import read_mesh


@dataclass(frozen=True)
class VariantRequest:
    """One variant to plan: a plan function of the module, and what the caller passes and gets.

    `inputs` and `outputs` are records with `kind`, `name`/`target`, `dtype`, `shape`, `value` as in
    `frontend.signature`; None takes them from the attributes of the plan function.
    """

    function: str
    symbol: str | None
    bucket: Mapping[str, int] = field(default_factory=dict)
    inputs: Sequence[Any] | None = None
    outputs: Sequence[Any] | None = None
    in_tree: Any = None
    out_tree: Any = None
    reason: str | None = None
    """Why there is no symbol."""


@dataclass
class BuiltPlan:
    """The plan, its inline constants by name, and the copies that could not be avoided, by function symbol."""

    plan: rt.Plan
    constants: dict[str, np.ndarray]
    copies: dict[str, list[AvoidedRewrite]]


def build_plan(
    module: Any,
    sources: Mapping[str, KernelSource],
    requests: Sequence[VariantRequest] | None = None,
    *,
    resources: Mapping[str, rt.Resources] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> BuiltPlan:
    """The plan for the kernel IR `module`.

    Args:
        module: `ir.Module` at the kernel level.
        sources: kernel symbol -> source.
        requests: variants in the order of the plan; None: every public function with a `topo.function` attribute.
        resources: kernel symbol -> what the ahead-of-time compile measured.

    Raises:
        UnsupportedError: the module is not at the kernel level.
        CompilerCrash: a kernel source that can't be launched as the IR says.
    """
    symbols = {op.operation.attributes["sym_name"].value: op for op in module.body.operations if _is_func(op)}
    if requests is None:
        requests = [_request_of(op) for op in symbols.values() if "topo.function" in op.operation.attributes]
    constants: dict[str, np.ndarray] = {}
    functions: dict[str, rt.Function] = {}
    copies, used = {}, set()
    for request in requests:
        known = functions.get(request.function) or rt.Function((), request.in_tree, request.out_tree)
        variants, reason = known.variants, known.aten_reason
        if request.symbol is None:
            reason = request.reason or "it could not be lowered"
        else:
            if request.symbol not in symbols:
                raise InputError(f"the module has no function @{request.symbol}")
            graph = read_plan_function(symbols[request.symbol], symbols)
            planner = _VariantPlanner(graph, request, sources, constants)
            variants = (*variants, planner.plan())
            used |= planner.launched
            copies[request.symbol] = planner.sharing.copies
        functions[request.function] = rt.Function(variants, known.in_tree, known.out_tree, reason)
    kernels = {s: _kernel(s, sources[s], (resources or {}).get(s)) for s in sorted(used)}
    avoided = [
        {"function": symbol, "kernel": c.kernel, "tensor": f"{c.dtype}{list(c.shape)}", "reason": c.reason}
        for symbol, found in copies.items()
        for c in found
    ]
    mesh = read_mesh(module.operation)
    # One place is no mesh: the program is loaded without other processes.
    mesh = mesh if mesh is not None and len(mesh.devices) > 1 else None
    axes = tuple(rt.MeshAxis(name, size) for name, size in mesh.axes) if mesh is not None else ()
    devices = mesh.devices if mesh is not None else ()
    plan = rt.Plan(
        rt.SCHEMA, kernels, functions, dict(meta or {}) | {"copies": avoided}, mesh=axes, devices=devices
    )
    check(plan)
    return BuiltPlan(plan, constants, copies)


def _is_func(op: Any) -> bool:
    return op.operation.name == "func.func"


def _request_of(func: Any) -> VariantRequest:
    attributes = func.operation.attributes
    bucket = {a.name: a.attr.value for a in attributes["topo.bucket"]} if "topo.bucket" in attributes else {}
    return VariantRequest(attributes["topo.function"].value, attributes["sym_name"].value, bucket)


def _kernel(symbol: str, source: KernelSource, resources: rt.Resources | None) -> rt.Kernel:
    if problems := source.problems():
        raise CompilerCrash(f"kernel {symbol}: " + "; ".join(problems))
    return rt.Kernel(
        file=f"kernels/{symbol}.py",
        function=source.name,
        family=source.family,
        params=tuple(rt.KernelParam(p.name, p.dtype, _descriptor(p)) for p in source.params),
        grid=source.grid,
        num_warps=source.num_warps,
        num_stages=source.num_stages,
        constexprs=dict(source.constexprs),
        pdl=source.pdl,
        resources=resources,
        exchange=source.exchange,
    )


def _descriptor(param: Param) -> rt.Descriptor | None:
    return None if param.descriptor is None else rt.Descriptor.of(param.descriptor)


class _VariantPlanner:
    """Builds one variant. Buffer numbers: storages first, in order of appearance, then views and scratch as needed."""

    def __init__(
        self,
        graph: PlanGraph,
        request: VariantRequest,
        sources: Mapping[str, KernelSource],
        constants: dict[str, np.ndarray],
    ):
        self.graph, self.request, self.sources, self.constants = graph, request, sources, constants
        self.sharing = share_storage(graph)
        self.buffers: list[rt.Buffer] = []
        self.steps: list[rt.Step] = []
        self.load_steps: tuple[rt.Step, ...] = ()
        self.of_value: dict[tuple[int, tuple[int, ...], int, tuple[int, ...]], int] = {}
        self.of_storage: dict[int, int] = {}
        self.of_kernel: dict[tuple[str, str], int] = {}
        self.launched: set[str] = set()
        self.zeroed_bytes = 0
        self.outputs = self.output_storages()

    def plan(self) -> rt.Variant:
        for a in self.graph.arguments:
            value = self.graph.values[a.value]
            buffer = rt.Buffer(a.kind, value.dtype, value.shape, name=a.name, sharding=a.dims, whole=a.whole)  # type: ignore[arg-type]
            self.of_storage[a.value] = self.new(buffer)
        for node in self.graph.load_nodes:
            self.kernel(node)
        # Views that these use are made with them, and are there afterwards too.
        self.load_steps, self.steps = tuple(self.steps), []
        for node in self.sharing.order:
            _STEPS[node.kind](self, node)
        outputs = self.output_leaves()
        arena, naive = self.place_temps()
        return rt.Variant(
            symbol=self.graph.symbol,
            bucket=dict(self.request.bucket),
            inputs=self.input_leaves(),
            outputs=outputs,
            buffers=tuple(self.buffers),
            steps=tuple(self.steps),
            arena_bytes=arena,
            naive_bytes=naive,
            zeroed_bytes=self.zeroed_bytes,
            load_steps=self.load_steps,
        )

    def output_storages(self) -> set[int]:
        """Temporaries that are returned whole: they get memory of their own instead of a place in the arena."""
        fixed = {a.value for a in self.graph.arguments} | set(self.graph.constants)
        out = set()
        for r in self.graph.results:
            storage = self.memory(r.value)
            if r.kind == "output" and storage not in fixed and self.graph.covers_root(r.value):
                out.add(storage)
        return out

    def memory(self, value: int) -> int:
        root = self.graph.values[value].root
        return self.sharing.storage.get(root, root)

    def new(self, buffer: rt.Buffer) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def storage(self, root: int) -> int:
        """The buffer of a root value that owns its memory."""
        if root not in self.of_storage:
            value = self.graph.values[root]
            if root in self.graph.constants:
                buffer = self.constant(self.graph.constants[root], value.dtype, value.shape)
            else:
                kind = "output" if root in self.outputs else "temp"
                buffer = rt.Buffer(kind, value.dtype, value.shape, offset=0 if kind == "temp" else None)  # type: ignore[arg-type]
            self.of_storage[root] = self.new(buffer)
        return self.of_storage[root]

    def constant(self, data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> rt.Buffer:
        splat = dense.splat_scalar(data, dtype)
        if splat is not None:
            return rt.Buffer("constant", dtype, shape, splat=splat)
        packed = np.ascontiguousarray(data)
        name = f"{dtype}_{hashlib.sha256(packed.tobytes()).hexdigest()[:16]}"
        self.constants[name] = packed
        return rt.Buffer("constant", dtype, shape, data=name)

    def buffer(self, index: int) -> int:
        """The buffer that holds a value: a storage, or a view of one."""
        value = self.graph.values[index]
        storage = self.storage(self.memory(index))
        owner = self.buffers[storage]
        strides = value.strides
        if value.shape == owner.shape and value.offset == 0 and strides == contiguous_strides(value.shape):
            return storage
        key = (storage, value.shape, value.offset, strides)
        if key not in self.of_value:
            self.of_value[key] = self.new(rt.Buffer("view", owner.dtype, value.shape))
            self.steps.append(rt.ViewStep(self.of_value[key], storage, value.offset, strides))
        return self.of_value[key]

    def kernel(self, node: Node) -> None:
        if all(self.graph.values[v].numel == 0 for v in node.outputs):
            for v in node.outputs:
                self.buffer(v)
            return
        source = self.sources.get(node.kernel)
        if source is None:
            raise CompilerCrash(f"kernel @{node.kernel} of @{self.graph.symbol} has no generated source")
        if source.scratch and node in self.graph.load_nodes:
            raise CompilerCrash(f"kernel {node.kernel} runs at load time and asks for scratch")
        scratch = self.scratch(source, node)
        table = {"arg": node.inputs, "result": node.outputs}
        given = []
        for p in source.params:
            count = len(scratch) if p.kind == "scratch" else len(table[p.kind])
            if not 0 <= p.index < count:
                raise CompilerCrash(
                    f"kernel {node.kernel}: parameter {p.name} asks for {p.kind} {p.index}, there are {count}"
                )
            given.append(scratch[p.index] if p.kind == "scratch" else self.buffer(table[p.kind][p.index]))
        # Who gives a result only reads what belongs to the kernel that takes it.
        kept = (BOXES,) if source.exchange else (BOXES, TURNS)
        written = [b for b, s in zip(scratch, source.scratch, strict=True) if s.role not in kept]
        changed = [*(self.buffer(v) for v in node.outputs), *written]
        writes = tuple(b for b in dict.fromkeys(changed) if b in given)
        missing = [
            i
            for i, v in enumerate(node.outputs)
            if self.buffer(v) not in given and self.graph.values[v].numel
        ]
        if missing:
            raise CompilerCrash(f"kernel {node.kernel} has no parameter for its result {missing[0]}")
        self.steps.append(rt.KernelStep(node.kernel, tuple(given), writes))
        self.launched.add(node.kernel)

    def scratch(self, source: KernelSource, node: Node) -> list[int]:
        """Buffers for the scratch of one launch. Every launch starts at the beginning of the zeroed memory."""
        taker = (
            source if source.exchange else self.taker(node) if any(s.role for s in source.scratch) else None
        )
        found, end = [], 0
        for s in source.scratch:
            dtype = from_triton_name(s.dtype).torch_name
            if s.role and taker is not None:
                numel = next(t.numel for t in taker.scratch if t.role == s.role)
                found.append(self.own(rt.Buffer(s.role, dtype, (numel,), name=taker.name)))
                continue
            buffer = rt.Buffer("temp", dtype, (s.numel,), offset=0)
            if s.zeroed:
                buffer = replace(buffer, kind="zeroed", offset=end)
                end = align(end + buffer.nbytes)
            found.append(self.new(buffer))
        self.zeroed_bytes = max(self.zeroed_bytes, end)
        return found

    def taker(self, node: Node) -> KernelSource:
        """The kernel that adds up over devices what a launch makes, before any other sum uses the same boxes."""
        order = self.sharing.order
        for reader in order[order.index(node) + 1 :]:
            source = self.sources.get(reader.kernel)
            if source is not None and source.taken is not None:
                if reader.inputs[source.taken] in node.outputs:
                    return source
                break
        raise CompilerCrash(
            f"kernel {node.kernel} gives a result to other ranks that the next sum does not take"
        )

    def own(self, buffer: rt.Buffer) -> int:
        """The buffer of a kernel that all of its launches use."""
        key = (buffer.kind, buffer.name or "")
        if key not in self.of_kernel:
            self.of_kernel[key] = self.new(buffer)
        return self.of_kernel[key]

    def aten(self, node: Node) -> None:
        inputs = tuple(self.buffer(v) for v in node.inputs)
        outputs = tuple(self.buffer(v) for v in node.outputs)
        self.steps.append(rt.AtenStep(node.op, node.call, inputs, outputs, node.input_dtypes, node.reason))

    def copy(self, node: Node) -> None:
        if self.graph.values[node.inputs[0]].numel:
            self.steps.append(rt.CopyStep(self.buffer(node.inputs[0]), self.buffer(node.outputs[0])))

    def collective(self, node: Node) -> None:
        said, (source,), (target,) = node.collective, node.inputs, node.outputs
        if self.graph.values[target].numel:
            self.steps.append(
                rt.CollectiveStep(
                    said["kind"], said["axes"], self.buffer(source), self.buffer(target),
                    said["dim"], said["source"], said["combiner"],
                )
            )  # fmt: skip

    def input_leaves(self) -> tuple[rt.InputLeaf, ...]:
        arguments = {a.name: a for a in self.graph.arguments if a.kind == "input"}
        mutated = {r.name for r in self.graph.results if r.kind == "mutation"}
        records = self.request.inputs
        if records is None:
            return tuple(self.tensor_leaf(a.name, a.value, mutated) for a in arguments.values())
        leaves = []
        for r in records:
            if r.kind == "literal":
                leaves.append(rt.InputLeaf("literal", r.target or r.name, value=r.value))
            elif r.kind == "input" and (a := arguments.get(r.target) or arguments.get(r.name)):
                leaves.append(self.tensor_leaf(a.name, a.value, mutated))
            elif r.kind == "input":
                leaves.append(rt.InputLeaf("tensor", r.target or r.name, r.dtype, tuple(r.shape)))
        return tuple(leaves)

    def tensor_leaf(self, name: str, value: int, mutated: set[str]) -> rt.InputLeaf:
        v = self.graph.values[value]
        buffer = self.of_storage[value]
        dims, whole = self.buffers[buffer].sharding, self.buffers[buffer].whole
        return rt.InputLeaf(
            "tensor", name, v.dtype, v.shape, buffer, mutated=name in mutated, sharding=dims, whole=whole
        )

    def output_leaves(self) -> tuple[rt.OutputLeaf, ...]:
        results = [r for r in self.graph.results if r.kind == "output"]
        tensors = {
            r.name: rt.OutputLeaf("tensor", self.buffer(r.value), r.dtype, sharding=r.dims, whole=r.whole)
            for r in results
        }
        records = self.request.outputs
        if records is None:
            return tuple(tensors.values())
        leaves = []
        for r in records:
            if r.kind == "literal":
                leaves.append(rt.OutputLeaf("literal", value=r.value))
            elif r.kind == "output":
                if r.target not in tensors:
                    raise InputError(
                        f"@{self.graph.symbol} has no output {r.target!r}, it has {', '.join(tensors)}"
                    )
                leaves.append(tensors[r.target])
        return tuple(leaves)

    def place_temps(self) -> tuple[int, int]:
        """Sets the arena offsets of all temps; returns peak and naive bytes."""
        base = {s.out: s.base for s in (*self.load_steps, *self.steps) if isinstance(s, rt.ViewStep)}
        spans: dict[int, list[int]] = {}
        for i, step in enumerate(self.steps):
            for b in (*rt.read(step), *rt.written(step)):
                spans.setdefault(base.get(b, b), [i, i])[1] = i
        for r in self.graph.results:
            storage = self.of_storage.get(self.memory(r.value), -1)
            if storage in spans:
                spans[storage][1] = len(self.steps)
        temps = [i for i, buffer in enumerate(self.buffers) if buffer.kind == "temp"]
        lifetimes = [
            Lifetime(self.buffers[i].nbytes if i in spans else 0, *spans.get(i, (0, 0))) for i in temps
        ]
        placement = place(lifetimes)
        for i, offset in zip(temps, placement.offsets):
            old = self.buffers[i]
            shape = (0,) if i not in spans and old.numel else old.shape
            self.buffers[i] = rt.Buffer("temp", old.dtype, shape, offset=offset)
        return placement.peak, placement.naive


_STEPS = {
    "kernel": _VariantPlanner.kernel,
    "aten": _VariantPlanner.aten,
    "copy": _VariantPlanner.copy,
    "collective": _VariantPlanner.collective,
}
