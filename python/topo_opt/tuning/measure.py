"""Measures candidates: machine code from many processes, checks and times from the one that owns the GPU."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.tuning.arguments_data import Signature
from topo_opt.tuning.records import Tile
from topo_opt.tuning.workers import LineProcess, Pool, WorkerDied

START_S = 120.0
ANSWER_S = 30.0
_AHEAD = 3  # compiles a worker that wait beyond the one it does


@dataclass(frozen=True)
class Case:
    """A kernel whose candidates are compared: its arguments, and the source whose results are the right ones."""

    id: str
    signature: Signature
    reference: KernelSource


@dataclass(frozen=True)
class Job:
    """One candidate to measure."""

    case: Case
    tile: Tile
    source: KernelSource
    careful: bool = False


@dataclass(frozen=True)
class Outcome:
    """A time in microseconds, or why there is none; `tried` is False when time ran out before."""

    us: float = 0.0
    reason: str = ""
    tried: bool = True


class Measurer(Protocol):
    """What a search asks for times."""

    def run(self, jobs: Iterable[Job], deadline: float) -> Iterator[tuple[Job, Outcome]]:
        """Outcomes in the order of the jobs; after `deadline` (of `time.monotonic`) nothing is tried any more."""

    def close(self) -> None:
        """Ends what was started for measuring."""


class GpuMeasurer:
    """Measures on the GPU of this machine. `shared_limit`: bytes of shared memory that a block can have."""

    def __init__(
        self, capability: int, shared_limit: int, *, workers: int | None = None, warp_size: int = 32
    ):
        self.count = workers or max(1, len(os.sched_getaffinity(0)) - 1)
        self.pool = Pool(
            self.count, "topo_opt.tuning.compile_worker", ("cuda", str(capability), str(warp_size))
        )
        self.gpu = LineProcess("topo_opt.tuning.gpu_worker", greets=True)
        self.gpu.start()  # its imports take as long as the first compiles
        self.shared_limit = shared_limit
        self.opened: set[str] = set()

    def device(self) -> dict[str, Any]:
        """Name, capability times ten and cores of the GPU. Raises `WorkerDied` when it cannot be used."""
        return dict(self.gpu.ready(START_S))

    def run(self, jobs: Iterable[Job], deadline: float) -> Iterator[tuple[Job, Outcome]]:
        waiting: deque[tuple[Job, Future[dict[str, Any]] | None]] = deque()
        for job in jobs:
            late = time.monotonic() >= deadline
            waiting.append((job, None if late else self.pool.submit(asdict(job.source))))
            if len(waiting) > _AHEAD * self.count:
                yield self._finish(*waiting.popleft(), deadline)
        while waiting:
            yield self._finish(*waiting.popleft(), deadline)

    def _finish(
        self, job: Job, compiled: Future[dict[str, Any]] | None, deadline: float
    ) -> tuple[Job, Outcome]:
        if compiled is None or time.monotonic() >= deadline:
            if compiled is not None:
                compiled.cancel()
            return job, Outcome(reason="not tried: time ran out", tried=False)
        answer = compiled.result()
        if "error" in answer:
            return job, Outcome(reason=f"it does not compile: {answer['error']}")
        if answer["shared"] > self.shared_limit:
            return job, Outcome(
                reason=f"it needs {answer['shared']} bytes of shared memory, a block can have {self.shared_limit}"
            )
        try:
            return job, self._measure(job)
        except WorkerDied as death:
            self.opened.clear()
            return job, Outcome(reason=f"it breaks the process that runs it: {death}")

    def _measure(self, job: Job) -> Outcome:
        request = {"case": job.case.id, "source": asdict(job.source), "careful": job.careful}
        for _ in range(2):
            if job.case.id not in self.opened and (fault := self._open(job.case)):
                return Outcome(reason=f"the default tile does not run, so nothing can be compared: {fault}")
            answer = self.gpu.ask(request, ANSWER_S)
            if not answer.get("closed"):
                break
            self.opened.discard(job.case.id)
        return Outcome(answer["us"]) if "us" in answer else Outcome(reason=answer.get("reason", "no answer"))

    def _open(self, case: Case) -> str:
        request = {
            "case": case.id,
            "signature": case.signature.as_json(),
            "reference": asdict(case.reference),
        }
        fault: str = self.gpu.ask(request, START_S)["open"]
        if not fault:
            self.opened.add(case.id)
        return fault

    def close(self) -> None:
        """Ends all processes."""
        self.gpu.close()
        self.pool.close()
