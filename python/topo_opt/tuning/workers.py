"""Processes that answer one JSON line with one JSON line, and are started again when they die."""

from __future__ import annotations

import json
import os
import queue
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO


class WorkerDied(Exception):
    """The process ended, or did not answer in time; the message says which."""


class LineProcess:
    """One worker: `python -m MODULE ARGUMENTS...`. Not thread-safe."""

    def __init__(self, module: str, arguments: Sequence[str] = (), *, greets: bool = False):
        """`greets`: whether it sends a line when it is ready."""
        self.command = [sys.executable, "-m", module, *arguments]
        self.greets = greets
        self.greeting: Mapping[str, Any] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self._errors: BinaryIO | None = None
        self._waiting = False
        self._buffer = b""

    def start(self) -> None:
        """Starts it if it does not run; does not wait until it is ready."""
        if self.process is not None:
            return
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment
        )
        self._waiting, self._buffer = self.greets, b""

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            WorkerDied: there is none; the next request starts a new process.
        """
        self.start()
        assert self.process is not None and self.process.stdin is not None
        self.ready(timeout_s)
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise WorkerDied(self._last_words()) from None
        return self._line(timeout_s)

    def ready(self, timeout_s: float) -> Mapping[str, Any]:
        """Waits for the greeting of a process that sends one, and returns it. Raises `WorkerDied`."""
        self.start()
        if self._waiting:
            self.greeting = self._line(timeout_s)
            self._waiting = False
        return self.greeting

    def close(self) -> None:
        """Ends the process at once: what it computes is not needed any more."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout, self._errors):
                if stream is not None:
                    stream.close()
        self.process = None

    def _line(self, timeout_s: float) -> dict[str, Any]:
        assert self.process is not None and self.process.stdout is not None
        end = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = end - time.monotonic()
                if left <= 0 or not selector.select(left):
                    self.close()
                    raise WorkerDied(f"no answer in {timeout_s:.0f} s")
                chunk = os.read(self.process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise WorkerDied(self._last_words())
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        if "died" in answer:
            self.close()
            raise WorkerDied(answer["died"])
        return answer

    def _last_words(self) -> str:
        assert self.process is not None and self._errors is not None
        code = self.process.wait()
        self._errors.seek(0)
        lines = self._errors.read()[-4000:].decode(errors="replace").strip().splitlines() or ["no message"]
        self.close()
        return f"the process ended with code {code}: {lines[-1][:200]}"


class Pool:
    """Several equal workers; requests are answered in any order."""

    def __init__(self, count: int, module: str, arguments: Sequence[str] = (), *, timeout_s: float = 120.0):
        self.workers = [LineProcess(module, arguments) for _ in range(count)]
        self.timeout_s = timeout_s
        self._idle: queue.SimpleQueue[LineProcess] = queue.SimpleQueue()
        for worker in self.workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(count)

    def submit(self, request: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """The answer to come; a worker that dies gives {"error": why}."""
        return self._threads.submit(self._ask, request)

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        worker = self._idle.get()
        try:
            return worker.ask(request, self.timeout_s)
        except WorkerDied as death:
            return {"error": str(death)}
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Drops what waits and ends the workers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self.workers:
            worker.close()
        self._threads.shutdown(wait=True)
