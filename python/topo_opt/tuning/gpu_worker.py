"""Checks and times candidates on the GPU. One JSON line in, one out; it owns its CUDA context, which a candidate may ruin.

Requests: {"case": id, "signature": ..., "reference": source} opens a kernel, {"case": id, "source": ..., "careful": bool}
measures a candidate of it.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from topo_opt.runtime.compiled_kernels import compile_options
from topo_opt.runtime.kernel_module import load_function
from topo_opt.tuning.arguments_data import Signature
from topo_opt.tuning.bench import Backend, Bench, Launch
from topo_opt.tuning.compiled import launch_record, ordered_arguments

SHARE_OF_MEMORY = 0.3
"""Of the GPU's free memory, for the buffers of all open kernels."""
_QUICK = (800.0, 5)
"""Microseconds that a graph of launches takes at least, and how often it is replayed."""
_CAREFUL = (2500.0, 15)
_MOST_LAUNCHES = 2000
_HOST_US = 20.0
"""Under this an eager launch may measure the host; the kernel is then taken to be as short as `_SHORT_US`."""
_SHORT_US = 2.5


class CudaLaunch:
    """A compiled kernel with its arguments bound."""

    def __init__(
        self,
        source: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
        known: dict[str, Any],
        shared_limit: int,
    ):
        kernel = launch_record(source)
        if "function" not in known:
            known["function"] = load_function(source["source"], kernel.file, kernel.function)
        function = known["function"]
        self.arguments = ordered_arguments(function, kernel, tensors)
        compiled = function.warmup(*self.arguments, grid=kernel.grid, **compile_options(kernel))
        if hasattr(compiled, "result") and not hasattr(compiled, "metadata"):
            compiled = compiled.result()
        shared = int(compiled.metadata.shared)
        if shared > shared_limit:
            raise RuntimeError(f"it needs {shared} bytes of shared memory, a block can have {shared_limit}")
        self.run = compiled[kernel.grid]

    def __call__(self) -> None:
        self.run(*self.arguments)


class Cuda(Backend):
    """The first GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        self.l2_bytes = int(properties.L2_cache_size)
        self.shared_limit = int(getattr(properties, "shared_memory_per_block_optin", 232448))
        self._source: Mapping[str, Any] | None = None
        self._known: dict[str, Any] = {}

    def prepare(self, source: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> Launch:
        if source is not self._source:
            self._source, self._known = source, {}
        return CudaLaunch(source, tensors, self._known, self.shared_limit)

    def time_us(self, launches: Sequence[Launch], *, careful: bool, give_up_us: float) -> tuple[float, bool]:
        for launch in launches[:2]:
            launch()
        estimate = self._elapsed_us(lambda: [launches[i % len(launches)]() for i in range(8)]) / 8
        # Launched one by one, a short kernel takes as long as the host: only a long one can be given up here.
        if estimate > max(give_up_us, 200.0) and not careful:
            return estimate, False
        length, replays = _CAREFUL if careful else _QUICK
        shortest = _SHORT_US if estimate < _HOST_US else estimate
        count = int(min(max(length / shortest, len(launches), 4), _MOST_LAUNCHES))
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph: it collects garbage first, which takes longer than the measurement.
        graph.capture_begin()
        for i in range(count):
            launches[i % len(launches)]()
        graph.capture_end()
        graph.replay()
        times = [self._elapsed_us(graph.replay) for _ in range(replays)]
        return statistics.median(times) / count, True

    def _elapsed_us(self, work: Any) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end)


class Server:
    """Open kernels by id; the one not used for the longest time is closed when memory is short."""

    def __init__(self, backend: Backend, memory_bytes: int):
        self.backend, self.memory_bytes = backend, memory_bytes
        self.open: dict[str, Bench] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What to send back: {"open": reason or ""}, {"us": time}, {"reason": why it is rejected}, or {"closed": true} for a
        kernel that has to be opened again."""
        case = request["case"]
        if "signature" in request:
            self.open.pop(case, None)
            self._make_room()
            bench = Bench(Signature.of_json(request["signature"]), self.backend)
            self.open[case] = bench
            return {"open": bench.set_reference(request["reference"])}
        if case not in self.open:
            return {"closed": True}
        bench = self.open[case] = self.open.pop(case)
        outcome = bench.measure(request["source"], careful=request["careful"])
        return {"us": outcome.us} if outcome.ok else {"reason": outcome.reason}

    def _make_room(self) -> None:
        while self.open and sum(b.nbytes for b in self.open.values()) > self.memory_bytes // 2:
            del self.open[next(iter(self.open))]


def _present() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "capability": 10 * properties.major + properties.minor,
        "cores": properties.multi_processor_count,
    }


def main() -> None:
    """Answers until standard input ends; ends itself, with a last answer, when the GPU reports an error."""
    answers, sys.stdout = sys.stdout, sys.stderr
    free, _ = torch.cuda.mem_get_info()
    server = Server(Cuda(), int(SHARE_OF_MEMORY * free))
    print(json.dumps(_present()), file=answers, flush=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        for line in sys.stdin:
            try:
                answer = server.answer(json.loads(line))
                torch.cuda.synchronize()
            except Exception as error:
                lines = str(error).strip().splitlines() or [""]
                print(
                    json.dumps({"died": f"{type(error).__name__}: {lines[0][:300]}"}),
                    file=answers,
                    flush=True,
                )
                return
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
