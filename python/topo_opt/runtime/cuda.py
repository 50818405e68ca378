"""The GPU executor: compiled kernels, and the whole variant as one CUDA graph when nothing forbids it.

The first call of a variant compiles its kernels, runs it once step by step (which finds every error while the call can
still fall back), puts the state back as it was, and captures. Later calls copy the inputs, replay, and copy the results.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from topo_opt.errors import InputError, StrictError
from topo_opt.runtime import aten_ops
from topo_opt.runtime.bundle import Bundle
from topo_opt.runtime.executor import KernelSources, VariantStatus, kernel_arguments
from topo_opt.runtime.kernel_module import load_function
from topo_opt.runtime.memory import Memory
from topo_opt.runtime.plan import AtenStep, Kernel, KernelStep, Variant
from topo_opt.runtime.repeated_call import RepeatedCall
from topo_opt.runtime.steps import BoundVariant, StepFailed, bind_variant, plain_tensors

GraphMode = Literal["auto", "off", "require"]


@dataclass
class _Ready:
    """A bound variant and, when it was captured, its graph."""

    bound: BoundVariant
    graph: torch.cuda.CUDAGraph | None = None
    reason: str = ""
    warm: bool = False
    broken: str = ""
    """Why its kernels don't compile: found once, not tried again at every call."""


class CudaExecutor:
    """Runs variants on one GPU. Not thread-safe: the program's lock is held around every call."""

    def __init__(
        self,
        bundle: Bundle,
        memory: Memory,
        *,
        graphs: GraphMode = "auto",
        allow_ops: frozenset[str] = frozenset(),
    ):
        self.allow_ops = allow_ops
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
        # Calls share static memory, and the next one may come on another stream.
        self.last_stream: torch.cuda.Stream | None = None
        variants = [v for f in bundle.plan.functions.values() for v in f.variants]
        with plain_tensors():
            memory.arena(max((v.arena_bytes for v in variants), default=0))
            memory.zeroed(max((v.zeroed_bytes for v in variants), default=0))

    def run(self, variant: Variant, leaves: list[Any]) -> list[Any]:
        with plain_tensors(), torch.cuda.device(self.device):
            ready = self.variants.get(id(variant))
            if ready is None:
                ready = _Ready(self._bind(variant))
                self.variants[id(variant)] = ready
            bound = ready.bound
            if ready.broken:
                raise StepFailed(ready.broken, mutated=False)
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
        return VariantStatus(variant.symbol, ready.warm, ready.graph is not None, ready.reason)

    def repeated(self, variant: Variant, *, own_results: bool) -> RepeatedCall | None:
        ready = self.variants.get(id(variant))
        if ready is None or ready.graph is None:
            return None
        return RepeatedCall(
            variant, ready.bound.tensors, self.device, ready.graph.replay,
            enter=self._enter, leave=self._leave, own_results=own_results,
        )  # fmt: skip

    def _enter(self) -> None:
        """Puts this call after the last one, which may have been made on another stream."""
        stream = torch.cuda.current_stream(self.device)
        if stream != self.last_stream:
            stream.wait_event(self.done)
            self.last_stream = stream

    def _leave(self) -> None:
        self.done.record(self.last_stream)

    def replay_call(self, variant: Variant) -> Callable[[], None]:
        """One execution without copying inputs and results, for benchmarks; the variant must have run before."""
        ready = self.variants[id(variant)]
        return ready.graph.replay if ready.graph is not None else ready.bound.run_steps

    def _run_steps(self, bound: BoundVariant) -> None:
        try:
            bound.run_steps()
        except StepFailed:
            self.memory.clear_zeroed()
            raise

    def _bind(self, variant: Variant) -> BoundVariant:
        self._load_functions({s.kernel for s in variant.steps if isinstance(s, KernelStep)})
        bound = bind_variant(variant, self.kernels, self.memory.bind(variant), self)
        return bound

    def _load_functions(self, names: set[str]) -> None:
        for name in sorted(names - set(self.functions)):
            kernel = self.kernels[name]
            source, file = self.sources.text(kernel)
            self.functions[name] = load_function(source, file, kernel.function)

    def prepare(self, name: str, kernel: Kernel, tensors: list[torch.Tensor]) -> Callable[[], None]:
        """A launch that compiles at its first call and afterwards goes straight to the driver."""
        function = self.functions[name]
        arguments = kernel_arguments(kernel, tensors)
        return _Launch(name, function, kernel, [arguments[n] for n in function.arg_names])

    def _warm_up(self, ready: _Ready, leaves: list[Any]) -> None:
        """Runs the variant once outside a graph, undoes its effect on the state, and captures it.

        Raises `StepFailed` with the state as it was before.
        """
        bound = ready.bound
        try:
            _compile_all([s.run for s in bound.steps if isinstance(s.run, _Launch)], self.device)
        except StepFailed as error:
            ready.broken = error.message
            raise
        state = bound.mutated_tensors()
        saved = [t.clone() for t in state]
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                bound.copy_in(leaves)
                bound.run_steps()
            side.synchronize()
        except StepFailed as error:
            self.memory.clear_zeroed()
            raise StepFailed(error.message, mutated=False) from error
        except RuntimeError as error:
            raise StepFailed(f"the first run failed: {str(error).splitlines()[0]}", mutated=False) from error
        finally:
            torch.cuda.current_stream().wait_stream(side)
            _restore(state, saved)
        ready.reason = self._graph_obstacle(bound.variant)
        if not ready.reason:
            self._capture(ready, side)
        if ready.reason and self.graphs == "require":
            raise StrictError(f"{bound.variant.symbol} can't be captured as one CUDA graph: {ready.reason}")
        ready.warm = True

    def _graph_obstacle(self, variant: Variant) -> str:
        """Why the variant should not be captured, as far as that is known without trying; "" when it should."""
        if self.graphs == "off":
            return "graphs are switched off"
        for step in variant.steps:
            if isinstance(step, AtenStep):
                tags = getattr(aten_ops.resolve(step.op), "tags", ())
                if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
                    return f"{step.op} waits for the GPU to know its result"
        return ""

    def _capture(self, ready: _Ready, stream: torch.cuda.Stream) -> None:
        """Captures; on failure `ready.reason` says why and the variant runs step by step."""
        graph = torch.cuda.CUDAGraph()
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
                ready.bound.run_steps()
        except (RuntimeError, StepFailed) as error:
            text = error.message if isinstance(error, StepFailed) else str(error).splitlines()[0]
            ready.reason = f"the capture failed: {text}"
            torch.cuda.synchronize(self.device)
            return
        ready.graph = graph


def compile_options(kernel: Kernel) -> dict[str, Any]:
    """What Triton is told: everything that decides the machine code is explicit, since defaults change with versions."""
    options: dict[str, Any] = {
        "num_warps": kernel.num_warps,
        "num_stages": kernel.num_stages,
        "enable_fp_fusion": True,
    }
    return options | ({"launch_pdl": True} if kernel.pdl else {})


class _Launch:
    """One kernel launch with all arguments bound."""

    def __init__(self, name: str, function: Any, kernel: Kernel, arguments: list[Any]):
        self.name, self.function, self.kernel, self.arguments = name, function, kernel, arguments
        self.call: Callable[..., None] | None = None

    def compile(self) -> None:
        """Compiles for these arguments (their alignment matters); cheap when Triton has it in its cache."""
        if self.call is not None:
            return
        k = self.kernel
        compiled = self.function.warmup(*self.arguments, grid=k.grid, **compile_options(k))
        if hasattr(compiled, "result") and not hasattr(compiled, "metadata"):
            compiled = compiled.result()
        self.call = compiled[k.grid]

    def __call__(self) -> None:
        if self.call is None:
            self.compile()
        assert self.call is not None
        self.call(*self.arguments)


def _compile_all(launches: list[_Launch], device: torch.device) -> None:
    """Compiles each kernel once, several at a time: Triton leaves the interpreter lock while LLVM and ptxas work."""
    first = list({launch.name: launch for launch in launches if launch.call is None}.values())
    if len(first) > 1:
        import triton

        triton.runtime.driver.active.get_current_target()  # the driver is set up once, not by every thread

        def compile_one(launch: _Launch) -> None:
            torch.cuda.set_device(device)
            launch.compile()

        with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for launch, future in [(launch, pool.submit(compile_one, launch)) for launch in first]:
                _named(launch, future.result)
    for launch in launches:
        _named(launch, launch.compile)


def _named(launch: _Launch, compile_it: Callable[[], None]) -> None:
    try:
        compile_it()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise StepFailed(
            f"kernel {launch.name} does not compile: {type(error).__name__}: {lines[-1][:300]}", mutated=False
        ) from error


def _restore(tensors: list[torch.Tensor], saved: list[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, saved):
        tensor.copy_(value)
