"""The GPU executor: compiled kernels, launched on the caller's tensors or as one CUDA graph, whichever takes less time.

The first call of a variant compiles its kernels and runs it once step by step, which finds every error while the call can
still fall back. A variant for a graph is run on memory of its own; the state is then put back as it was, and the graph is
captured. Later calls copy the inputs, replay, and copy the results; tensors that come again get a graph of their own
(`caller_graphs`). A variant whose copies would take longer than its launches has no graph (`launch_choice`, `direct`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from topo_opt.errors import InputError, StrictError
from topo_opt.runtime import aten_ops
from topo_opt.runtime.addresses import overlaps, span
from topo_opt.runtime.bundle import Bundle
from topo_opt.runtime.caller_graphs import CallerGraphs
from topo_opt.runtime.compiled_kernels import Launch, compile_all
from topo_opt.runtime.direct import DirectVariant, rewritten_inputs
from topo_opt.runtime.dtypes import torch_dtype
from topo_opt.runtime.executor import KernelSources, VariantStatus, kernel_arguments
from topo_opt.runtime.kernel_module import load_function
from topo_opt.runtime.launch_choice import LaunchMode, bytes_per_us, choose
from topo_opt.runtime.memory import Memory
from topo_opt.runtime.plan import AtenStep, CollectiveStep, Kernel, KernelStep, Variant
from topo_opt.runtime.repeated_call import DirectCall, KnownCall, RepeatedCall
from topo_opt.runtime.steps import BoundVariant, StepFailed, bind_variant, plain_tensors

GraphMode = Literal["auto", "off", "require"]


@dataclass
class _Ready:
    """A variant on this GPU: as launches on the caller's tensors, or bound to static memory with a graph where it was captured."""

    bound: BoundVariant
    direct: DirectVariant | None = None
    recorded: DirectVariant | None = None
    """What is captured where ATen makes buffers: its results would be copied into the static memory."""
    graph: torch.cuda.CUDAGraph | None = None
    callers: CallerGraphs | None = None
    reason: str = ""
    warm: bool = False
    broken: str = ""
    """Why its kernels don't compile: found once, not tried again at every call."""
    last_leaves: tuple[Any, ...] = ()
    """What a direct variant was called with last the long way, tensors as weak references; for benchmarks."""

    @property
    def mode(self) -> str:
        if not self.warm:
            return ""
        if self.direct is not None:
            return "direct"
        if self.graph is None:
            return "steps"
        return "graph on the caller's tensors" if self.callers is not None and self.callers.kept else "graph"


class CudaExecutor:
    """Runs variants on one GPU. Not thread-safe: the program's lock is held around every call."""

    def __init__(
        self,
        bundle: Bundle,
        memory: Memory,
        *,
        graphs: GraphMode = "auto",
        launch: LaunchMode = "auto",
        allow_ops: frozenset[str] = frozenset(),
    ):
        self.allow_ops, self.launch, self.ranks = allow_ops, launch, memory.ranks
        if not torch.cuda.is_available():
            raise InputError("device 'cuda' was asked for, but torch sees no GPU", hint="use device='cpu'")
        if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
            raise InputError(
                "TRITON_INTERPRET is set, so kernels can't be compiled for the GPU", hint="unset it"
            )
        self.kernels, self.memory, self.graphs = bundle.plan.kernels, memory, graphs
        self.sources = KernelSources(bundle)
        self.functions: dict[str, Any] = {}
        self.variants: dict[int, _Ready] = {}
        self.pool: Any = None
        self.device = memory.device
        with torch.cuda.device(self.device):
            self.done = torch.cuda.Event()
        if self.ranks is not None:
            self.ranks.watch.look_at(self.done)
        # Calls share static memory, and the next one may come on another stream.
        self.last_stream: torch.cuda.Stream | None = None
        self.last_raw = -1
        variants = [v for f in bundle.plan.functions.values() for v in f.variants]
        with plain_tensors():
            memory.arena(max((v.arena_bytes for v in variants), default=0))
            memory.zeroed(max((v.zeroed_bytes for v in variants), default=0))

    def run(self, variant: Variant, leaves: list[Any]) -> list[Any]:
        with plain_tensors(), torch.cuda.device(self.device):
            ready = self.variants.get(id(variant))
            if ready is None:
                ready = self._ready(variant)
                self.variants[id(variant)] = ready
            if ready.broken:
                raise StepFailed(ready.broken, mutated=False)
            if ready.direct is not None:
                ready.last_leaves = tuple(
                    weakref.ref(v) if isinstance(v, torch.Tensor) else v for v in leaves
                )
                return self._run_directly(ready, leaves) if ready.warm else self._first_direct(ready, leaves)
            bound = ready.bound
            self._enter()
            if not ready.warm:
                self._warm_up(ready, leaves)
            bound.copy_in(leaves)
            if ready.graph is not None:
                ready.graph.replay()
            else:
                self._run_steps(bound)
            results = bound.copy_out(leaves)
            self._leave()
            return results

    def status(self, variant: Variant) -> VariantStatus:
        ready = self.variants.get(id(variant))
        if ready is None:
            return VariantStatus(variant.symbol, False, False, "it has not run yet")
        return VariantStatus(variant.symbol, ready.warm, ready.graph is not None, ready.reason, ready.mode)

    def repeated(self, variant: Variant, *, own_results: bool) -> KnownCall | None:
        ready = self.variants.get(id(variant))
        if ready is None or not ready.warm:
            return None
        if ready.direct is not None:
            return DirectCall(variant, self.device, partial(self._run_directly, ready, accepted=True))
        if ready.graph is None:
            return None
        return RepeatedCall(
            variant, ready.bound.tensors, self.device, ready.graph.replay,
            enter=self._enter, leave=self._leave, own_results=own_results, callers=ready.callers,
        )  # fmt: skip

    def _enter(self) -> None:
        """Puts this call after the last one, which may have been made on another stream."""
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        if raw != self.last_raw or self.last_stream is None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self.done)
            self.last_stream, self.last_raw = stream, raw

    def _leave(self) -> None:
        self.done.record(self.last_stream)

    def replay_call(self, variant: Variant) -> Callable[[], object]:
        """One execution without copying inputs and results, for benchmarks; the variant must have run before."""
        ready = self.variants[id(variant)]
        if ready.direct is None:
            return ready.graph.replay if ready.graph is not None else ready.bound.run_steps
        leaves = [v() if isinstance(v, weakref.ref) else v for v in ready.last_leaves]
        for i, leaf in enumerate(variant.inputs):
            if leaf.kind == "tensor" and leaves[i] is None:
                dtype = torch_dtype(str(leaf.dtype))
                leaves[i] = torch.zeros(leaf.shape or (), dtype=dtype, device=self.device)
        return partial(self._run_directly, ready, leaves, accepted=True)

    def _run_directly(self, ready: _Ready, leaves: Sequence[Any], *, accepted: bool = False) -> list[Any]:
        """Results of one call; `accepted`: the leaves are plain tensors on this device."""
        direct = ready.direct
        assert direct is not None
        if torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self._run_directly(ready, leaves, accepted=accepted)
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        run = direct.run_accepted if accepted else direct.run
        if not direct.uses_shared_memory and self.ranks is None:
            return run(leaves, raw)
        self._enter()
        try:
            results = run(leaves, raw)
        except StepFailed:
            self.memory.clear_zeroed()
            raise
        self._leave()
        return results

    def _first_direct(self, ready: _Ready, leaves: list[Any]) -> list[Any]:
        """The first call of a direct variant: compiles, and waits for the kernels so that their errors are this call's.

        Raises `StepFailed` with the state as it was before; inputs that the program rewrites may have changed.
        """
        self._compile(ready)
        assert ready.direct is not None
        state = ready.bound.mutated_tensors()
        saved = [t.clone() for t in state]
        try:
            results = self._run_directly(ready, leaves)
            self._synchronize(torch.cuda.current_stream())
        except (StepFailed, RuntimeError) as error:
            text = error.message if isinstance(error, StepFailed) else str(error).splitlines()[0]
            _restore(state, saved)
            rewrites = any(leaf.mutated for leaf in ready.bound.variant.inputs)
            mutated = rewrites and (not isinstance(error, StepFailed) or error.mutated)
            raise StepFailed(f"the first run failed: {text}", mutated=mutated) from error
        ready.warm = True
        return results

    def _ready(self, variant: Variant) -> _Ready:
        """Decides how a variant runs, and binds it."""
        steps = (*variant.load_steps, *variant.steps)
        self._load_functions({s.kernel for s in steps if isinstance(s, KernelStep)})
        obstacle = self._graph_obstacle(variant)
        if obstacle and (self.graphs == "require" or self.launch == "graph"):
            raise StrictError(f"{variant.symbol} can't be captured as one CUDA graph: {obstacle}")
        if not obstacle and self.launch == "direct":
            obstacle = "direct launches were asked for"
        if not obstacle and self.launch == "auto" and choose(variant, bytes_per_us(self.device)) == "direct":
            obstacle = "launching its kernels takes less time than copying its inputs and results"
        if obstacle:
            direct = DirectVariant(variant, self.kernels, self.memory, self)
            self._load(direct.bound)
            return _Ready(direct.bound, direct, reason=obstacle)
        bound = bind_variant(variant, self.kernels, self.memory.bind(variant), self)
        self._load(bound)
        return _Ready(bound, recorded=self._recorded(variant))

    def _recorded(self, variant: Variant) -> DirectVariant | None:
        if not any(isinstance(s, AtenStep) for s in variant.steps):
            return None
        direct = DirectVariant(variant, self.kernels, self.memory, self)
        return direct if direct.made else None

    def _execution(self, ready: _Ready, bound: BoundVariant) -> Callable[[], None]:
        """One execution on the memory of `bound`, to be captured."""
        recorded = ready.recorded
        if recorded is None:
            return bound.run_steps
        index = self.device.index
        return lambda: recorded.run_on(bound.tensors, torch._C._cuda_getCurrentRawStream(index))

    def _load(self, bound: BoundVariant) -> None:
        """Prepares the weights, for calls on any stream."""
        if bound.load(self.memory.load_time):
            torch.cuda.current_stream().synchronize()

    def refresh(self) -> None:
        with plain_tensors(), torch.cuda.device(self.device):
            # Calls on other streams may still read what is there.
            torch.cuda.synchronize()
            self.memory.load_time.run_again()
            torch.cuda.current_stream().synchronize()

    def _compile(self, ready: _Ready) -> None:
        """Compiles the kernels of a variant; what does not compile is remembered."""
        failure = None
        try:
            steps = (ready.recorded or ready).bound.steps
            compile_all([s.run for s in steps if isinstance(s.run, Launch)], self.device)
        except StepFailed as error:
            ready.broken, failure = error.message, error
        if self.ranks is not None:
            # Some take longer than a collective waits, and one that fails will not come.
            self.ranks.agree(failure, "compiling its kernels")
        if failure is not None:
            raise failure

    def _synchronize(self, stream: torch.cuda.Stream) -> None:
        """Waits for what runs on a stream, which may be a collective for which another rank is missing."""
        with nullcontext() if self.ranks is None else self.ranks.watch.waiting():
            stream.synchronize()

    def close(self) -> None:
        """Frees graphs and bindings, after all calls have ended."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            for ready in self.variants.values():
                if ready.graph is not None:
                    ready.graph.reset()
            self.variants.clear()

    def _run_steps(self, bound: BoundVariant) -> None:
        try:
            bound.run_steps()
        except StepFailed:
            self.memory.clear_zeroed()
            raise

    def _load_functions(self, names: set[str]) -> None:
        for name in sorted(names - set(self.functions)):
            kernel = self.kernels[name]
            source, file = self.sources.text(kernel)
            self.functions[name] = load_function(source, file, kernel.function)

    def prepare(self, name: str, kernel: Kernel, tensors: list[torch.Tensor]) -> Callable[[], None]:
        """A launch that compiles at its first call and afterwards goes straight to the driver."""
        function = self.functions[name]
        arguments = kernel_arguments(kernel, tensors)
        return Launch(name, function, kernel, [arguments[n] for n in function.arg_names])

    def _warm_up(self, ready: _Ready, leaves: list[Any]) -> None:
        """Runs the variant once outside a graph, undoes its effect on the state, and captures it.

        Raises `StepFailed` with the state as it was before.
        """
        bound = ready.bound
        execute = self._execution(ready, bound)
        self._compile(ready)
        state = bound.mutated_tensors()
        saved = [t.clone() for t in state]
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                bound.copy_in(leaves)
                execute()
            self._synchronize(side)
        except StepFailed as error:
            self.memory.clear_zeroed()
            raise StepFailed(error.message, mutated=False) from error
        except RuntimeError as error:
            raise StepFailed(f"the first run failed: {str(error).splitlines()[0]}", mutated=False) from error
        finally:
            torch.cuda.current_stream().wait_stream(side)
            _restore(state, saved)
        ready.graph, ready.reason = self._captured(execute, side)
        if ready.reason and (self.graphs == "require" or self.launch == "graph"):
            raise StrictError(f"{bound.variant.symbol} can't be captured as one CUDA graph: {ready.reason}")
        if ready.graph is not None:
            ready.callers = self._caller_graphs(ready)
        ready.warm = True

    def _caller_graphs(self, ready: _Ready) -> CallerGraphs | None:
        """Graphs on the caller's tensors; None where there is nothing to gain, or inputs are written."""
        variant = ready.bound.variant
        places = [i for i, leaf in enumerate(variant.inputs) if leaf.buffer is not None]
        # Ranks must not differ in what they run.
        if not places or rewritten_inputs(variant) or self.ranks is not None:
            return None
        return CallerGraphs(places, self.device, partial(self._capture_on_callers, ready))

    def _capture_on_callers(self, ready: _Ready, leaves: Sequence[Any]) -> Callable[[], None] | None:
        """A graph that reads these leaves and writes the static results; None when it can't be captured."""
        variant, tensors = ready.bound.variant, list(ready.bound.tensors)
        outputs = [tensors[i] for i, b in enumerate(variant.buffers) if b.kind == "output"]
        written = [span(t) for t in (*outputs, *ready.bound.mutated_tensors())]
        for leaf, value in zip(variant.inputs, leaves):
            if leaf.buffer is not None:
                # A result of an earlier call, or state, would change while it is read.
                if overlaps(value, written):
                    return None
                tensors[leaf.buffer] = value
        with plain_tensors(), torch.cuda.device(self.device):
            bound = bind_variant(variant, self.kernels, tensors, self)
            if ready.recorded is None:
                compile_all([s.run for s in bound.steps if isinstance(s.run, Launch)], self.device)
            execute = self._execution(ready, bound)
            graph, reason = self._captured(execute, torch.cuda.Stream(self.device))
        return None if graph is None or reason else graph.replay

    def _graph_obstacle(self, variant: Variant) -> str:
        """Why the variant should not be captured, as far as that is known without trying; "" when it should."""
        if self.graphs == "off":
            return "graphs are switched off"
        for step in variant.steps:
            if isinstance(step, CollectiveStep) and self.ranks is not None and self.ranks.shares_gpu:
                return "ranks share a GPU, so that collectives go through host memory"
            if isinstance(step, AtenStep):
                tags = getattr(aten_ops.resolve(step.op), "tags", ())
                if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
                    return f"{step.op} waits for the GPU to know its result"
        return ""

    def _captured(
        self, execute: Callable[[], None], stream: torch.cuda.Stream
    ) -> tuple[torch.cuda.CUDAGraph | None, str]:
        """The steps as one graph, or why they can't be captured."""
        graph = torch.cuda.CUDAGraph()
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
                execute()
        except (RuntimeError, StepFailed) as error:
            text = error.message if isinstance(error, StepFailed) else str(error).splitlines()[0]
            torch.cuda.synchronize(self.device)
            return None, f"the capture failed: {text}"
        return graph, ""


def _restore(tensors: list[torch.Tensor], saved: list[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, saved):
        tensor.copy_(value)
