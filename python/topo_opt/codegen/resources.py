"""Compiles kernels ahead of time for one GPU architecture, without a GPU, to know what they need.

Registers, spilled bytes and shared memory of each kernel go into the bundle. A kernel that needs more shared memory than a
block can have is refused here instead of failing at its first launch. Compiles run in worker processes: the compiler may
crash or be killed, and an interpreter that runs in this process must not meet it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from threading import Lock, Timer

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.errors import CompilerCrash, UnsupportedError
from topo_opt.runtime.plan import MAX_SHARED_BYTES, Resources

TIMEOUT_S = 600
_USAGE = re.compile(r"REG:(\d+)\s+STACK:(\d+)\s+SHARED:(\d+)")


class DoesNotFit(UnsupportedError):
    """Kernels that need more shared memory than a block can have; `symbols` names them all."""

    def __init__(self, found: Mapping[str, Resources]):
        symbol, resources = next(iter(found.items()))
        super().__init__(
            f"kernel {symbol} needs {resources.shared} bytes of shared memory, a block can have {MAX_SHARED_BYTES}",
            hint="choose smaller tiles or fewer stages",
        )
        self.symbols = tuple(found)


def measure(
    sources: Mapping[str, KernelSource],
    *,
    capability: int = 90,
    workers: int | None = None,
    cache: Path | None = None,
) -> dict[str, Resources]:
    """Compiles every kernel and returns what each needs.

    Args:
        sources: kernel symbol -> source.
        capability: compute capability times ten (90 for Hopper).
        workers: processes, by default one for each core.
        cache: folder of earlier results by source hash; default: under the user's cache folder.

    Raises:
        DoesNotFit: kernels need more shared memory than the GPU has.
        CompilerCrash: a kernel does not compile.
    """
    folder = cache or _default_cache()
    folder.mkdir(parents=True, exist_ok=True)
    keys = {symbol: f"{s.digest()}-sm{capability}-{_toolchain()}" for symbol, s in sources.items()}
    found = {symbol: _cached(folder / f"{key}.json") for symbol, key in keys.items()}
    missing = [symbol for symbol in sources if found[symbol] is None]
    # Equal sources under two names are compiled once.
    unique = list({keys[s]: s for s in missing}.values())
    measured = _compile([sources[s] for s in unique], capability, workers or len(os.sched_getaffinity(0)))
    for symbol, result in zip(unique, measured, strict=True):
        _store(folder / f"{keys[symbol]}.json", result)
    out = {symbol: found[symbol] or _cached(folder / f"{keys[symbol]}.json") for symbol in sources}
    known = {symbol: r for symbol, r in out.items() if r is not None}
    if too_large := {symbol: r for symbol, r in known.items() if r.shared > MAX_SHARED_BYTES}:
        raise DoesNotFit(too_large)
    return known


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "topo-opt" / "resources"


def _toolchain() -> str:
    from importlib.metadata import version

    return f"triton{version('triton')}"


def _cached(path: Path) -> Resources | None:
    try:
        return Resources(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _store(path: Path, resources: Resources) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(asdict(resources), file)
    os.replace(file.name, path)


def _compile(sources: Sequence[KernelSource], capability: int, workers: int) -> list[Resources]:
    """What every source needs, in order. Workers take the longest source that is left, so that they end together."""
    if not sources:
        return []
    order = sorted(range(len(sources)), key=lambda i: (-len(sources[i].source), i))
    left, lock = iter(order), Lock()
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    results: dict[int, Resources] = {}
    failed: dict[int, CompilerCrash] = {}

    def work() -> None:
        with _Worker(environment) as worker:
            while not failed:
                with lock:
                    i = next(left, None)
                if i is None:
                    return
                try:
                    results[i] = worker.compile(sources[i], capability)
                except CompilerCrash as crash:
                    failed[i] = crash

    with ThreadPoolExecutor(max(1, min(workers, len(sources)))) as pool:
        for done in [pool.submit(work) for _ in range(max(1, min(workers, len(sources))))]:
            done.result()
    if failed:
        raise failed[min(failed, key=order.index)]
    return [results[i] for i in range(len(sources))]


class _Worker:
    """A process that compiles one kernel after the other; a context manager that ends it."""

    def __init__(self, environment: Mapping[str, str]):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "topo_opt.codegen.resource_worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment,
        )  # fmt: skip

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def compile(self, source: KernelSource, capability: int) -> Resources:
        """What a kernel needs.

        Raises:
            CompilerCrash: it does not compile, the compiler died, or it took longer than `TIMEOUT_S`.
        """
        job = json.dumps({"capability": capability, "kernel": _job(source)}) + "\n"
        timer = Timer(TIMEOUT_S, self._process.kill)
        timer.start()
        try:
            answer = self._ask(job.encode())
        finally:
            late = not timer.is_alive()
            timer.cancel()
        if not answer.endswith(b"\n"):
            raise CompilerCrash(self._death(source, late))
        line = json.loads(answer)
        if "error" in line:
            raise CompilerCrash(f"kernel {source.name} does not compile: {line['error']}")
        return Resources(**line)

    def _ask(self, job: bytes) -> bytes:
        """The answer; what ends too early is no line."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(job)
            self._process.stdin.flush()
        except BrokenPipeError:
            return b""
        return self._process.stdout.readline()

    def _death(self, source: KernelSource, late: bool) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        reason = f"no answer in {TIMEOUT_S} s" if late else last[0]
        return f"the Triton compiler died (exit {code}) on kernel {source.name}: {reason}"


def _job(source: KernelSource) -> dict[str, object]:
    """What a worker needs: the file, and the signature with every pointer aligned to 16 bytes, as the runtime has it."""
    signature: dict[str, str] = {}
    for p in source.params:
        if p.descriptor is None:
            signature[p.name] = f"*{p.dtype}"
        else:
            block = ",".join(str(int(b)) for b in p.descriptor["block"])
            signature[p.name] = f"tensordesc<{p.dtype}[{block}]>"
    return {
        "name": source.name,
        "source": source.source,
        "signature": signature,
        "constexprs": dict(source.constexprs),
        "options": {"num_warps": source.num_warps, "num_stages": source.num_stages, "enable_fp_fusion": True}
        | ({"launch_pdl": True} if source.pdl else {}),
    }


def parse_usage(text: str) -> tuple[int, int, int] | None:
    """Registers, stack bytes and static shared bytes from `cuobjdump -res-usage`."""
    match = _USAGE.search(text)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None
