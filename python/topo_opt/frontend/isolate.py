"""Runs a stage of the compiler in a forked child, so that a native crash becomes a diagnostic.

The MLIR wheel can die on odd input (segmentation fault, failed assertion, endless loop), and a model file comes from
strangers. The child has limits on memory, CPU and wall time; its result comes back as plain data (`wire`), its errors
as the same `TopoError`, its death as `CompilerCrash` with a folder that holds what is needed to reproduce it.
"""

import contextlib
import ctypes
import faulthandler
import os
import platform
import re
import resource
import selectors
import shlex
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from topo_opt.errors import CompilerCrash, TopoError
from topo_opt.frontend import wire

_PR_SET_PDEATHSIG = 1
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What a child may use.

    Args:
        memory_bytes: address space beyond what the child inherits at the fork.
        cpu_seconds: CPU time.
        wall_seconds: time until it is killed.
        output_bytes: how much of the end of its stdout and stderr is kept.
    """

    memory_bytes: int | None = 32 << 30
    cpu_seconds: int | None = 3600
    wall_seconds: float | None = 3600
    output_bytes: int = 64 << 10


def run_isolated(
    fn: Callable[..., Any],
    *args: Any,
    stage: str,
    limits: Limits = Limits(),
    reproducer: Callable[[Path], None] | None = None,
) -> Any:
    """`fn(*args)`, computed in a forked child.

    Args:
        fn: any callable, closures included; its result must be what `wire.dumps` takes.
        stage: the compiler stage, for messages ("import", "lower").
        reproducer: called in the parent after a crash with the crash folder, to write the stage's input into it.

    Raises:
        TopoError: what `fn` raised, as the same class; `captured_output` holds what the child printed.
        CompilerCrash: the child died, ran out of memory or time, or raised something that is not a TopoError.
        KeyboardInterrupt: Ctrl-C in the parent; the child is killed first.
    """
    result_read, result_write = os.pipe()
    output_read, output_write = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()  # what is buffered now must not be printed by both processes
    with warnings.catch_warnings():
        # Python 3.12 warns about threads at a fork; the child starts none and makes torch single-threaded.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(result_read)
        os.close(output_read)
        _child(fn, args, limits, result_write, output_write)
    os.close(result_write)
    os.close(output_write)
    reaped = False
    try:
        data, output, timed_out = _read(result_read, output_read, limits)
        if timed_out:
            _kill(pid)
        status = os.waitpid(pid, 0)[1]
        reaped = True
        output += _drain(output_read)
    finally:
        os.close(result_read)
        os.close(output_read)
        if not reaped:
            _kill(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
    text = bytes(output[-limits.output_bytes :]).decode("utf-8", "replace")
    if timed_out:
        reason = f"did not finish within {limits.wall_seconds:g} s"
        raise _crash(stage, reason, text, None, reproducer)
    reply = _reply(data)
    if reply is None:
        raise _crash(stage, _death(status, limits), text, None, reproducer)
    if reply["kind"] == "value":
        return reply["value"]
    if reply["kind"] == "error":
        raise _revive(reply, text)
    raise _crash(stage, f"failed: {reply['line']}", text, reply["traceback"], reproducer)


def _child(fn: Callable[..., Any], args: tuple, limits: Limits, result_fd: int, output_fd: int) -> NoReturn:
    status = 1
    try:
        os.setpgid(0, 0)  # a Ctrl-C of the terminal goes to the parent, which then kills this group
        _die_with_parent()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        _redirect(output_fd)
        faulthandler.enable(file=2)
        _apply(limits)
        if "torch" in sys.modules:
            _prepare_torch(sys.modules["torch"])
        try:
            payload = wire.dumps({"kind": "value", "value": fn(*args)})
        except TopoError as exc:
            payload = wire.dumps(_error_reply(exc))
        except BaseException as exc:
            payload = wire.dumps(_exception_reply(exc))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        _write_all(result_fd, payload)
        status = 0
    finally:
        os._exit(status)


def _prepare_torch(torch: Any) -> None:
    """What torch must not do in the child."""
    # libgomp's threads do not survive a fork: it would wait for them.
    torch.set_num_threads(1)
    # CUDA survives neither a fork nor a limit on memory. Compiling needs no GPU, and must not depend on there being one.
    torch.cuda.is_available = lambda: False
    torch.cuda.device_count = lambda: 0


def _redirect(output_fd: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for fd in (1, 2):
        os.dup2(output_fd, fd)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _apply(limits: Limits) -> None:
    wanted = {resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: limits.cpu_seconds, resource.RLIMIT_AS: None}
    if limits.memory_bytes is not None:
        wanted[resource.RLIMIT_AS] = limits.memory_bytes + _mapped_bytes()
    for kind, value in wanted.items():
        if value is None:
            continue
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # A soft CPU limit below the hard one makes the kernel send SIGXCPU, which names the cause; SIGKILL would not.
        resource.setrlimit(kind, (value, hard if kind == resource.RLIMIT_CPU else value))


def _mapped_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()


def _error_reply(exc: TopoError) -> dict:
    extra = {
        k: v for k, v in vars(exc).items() if isinstance(v, str | int | float | None | list | tuple | dict)
    }
    names = [c.__name__ for c in type(exc).__mro__ if issubclass(c, TopoError)]
    try:
        wire.dumps(extra)
    except TypeError:
        extra = {"message": exc.message, "hint": exc.hint, "where": exc.where}
    return {"kind": "error", "classes": names, "fields": extra}


def _exception_reply(exc: BaseException) -> dict:
    line = traceback.format_exception_only(exc)[-1].strip().splitlines()
    text = "".join(traceback.format_exception(exc))
    return {"kind": "exception", "line": line[0] if line else type(exc).__name__, "traceback": text}


def _write_all(fd: int, payload: bytes) -> None:
    view = memoryview(payload)
    while view:
        view = view[os.write(fd, view[:_CHUNK_BYTES]) :]


def _read(result_fd: int, output_fd: int, limits: Limits) -> tuple[bytearray, bytearray, bool]:
    """Reads both pipes until the result's end; what was printed is cut to its end as it grows."""
    deadline = None if limits.wall_seconds is None else time.monotonic() + limits.wall_seconds
    result, output = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(result_fd, selectors.EVENT_READ, result)
        selector.register(output_fd, selectors.EVENT_READ, output)
        while result_fd in selector.get_map():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return result, output, True
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, _CHUNK_BYTES)
                key.data.extend(chunk)
                if not chunk:
                    selector.unregister(key.fd)
            if len(output) > 2 * limits.output_bytes:
                del output[: -limits.output_bytes]
    return result, output, False


def _drain(fd: int) -> bytes:
    # A grandchild may hold the pipe open, so only what is there already is read.
    os.set_blocking(fd, False)
    chunks = []
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(fd, _CHUNK_BYTES):
            chunks.append(chunk)
    return b"".join(chunks)


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _reply(data: bytearray) -> dict | None:
    try:
        reply = wire.loads(data)
    except TopoError:
        return None  # the child died before or while writing; its status tells how
    return reply if isinstance(reply, dict) and "kind" in reply else None


_DEATHS = {
    signal.SIGSEGV: "invalid memory access",
    signal.SIGABRT: "a failed assertion or an allocation that failed",
    signal.SIGBUS: "a file that shrank while it was mapped, or no space",
    signal.SIGKILL: "killed, usually by the system for lack of memory",
    signal.SIGXCPU: "the CPU time limit",
}


def _death(status: int, limits: Limits) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name, cause = signal.Signals(number).name, _DEATHS.get(signal.Signals(number), "a signal")
        except ValueError:
            name, cause = f"signal {number}", "a signal"
        if number == signal.SIGXCPU:
            cause += f" of {limits.cpu_seconds} s"
        return f"died with {name} ({cause})"
    return f"ended with status {os.waitstatus_to_exitcode(status)} and no result"


def _known_errors(cls: type[TopoError] = TopoError) -> Iterator[type[TopoError]]:
    yield cls
    for sub in cls.__subclasses__():
        yield from _known_errors(sub)


def _revive(reply: dict, output: str) -> TopoError:
    known = {cls.__name__: cls for cls in _known_errors()}
    cls = next((known[name] for name in reply["classes"] if name in known), TopoError)
    fields = reply["fields"]
    error = cls.__new__(cls)
    TopoError.__init__(error, fields["message"], hint=fields.get("hint"), where=fields.get("where"))
    error.__dict__.update(fields, captured_output=output)
    return error


def _crash(
    stage: str, reason: str, output: str, trace: str | None, reproducer: Callable[[Path], None] | None
) -> CompilerCrash:
    try:
        folder = _crash_folder(stage)
        (folder / "report.txt").write_text(_report(stage, reason, output, trace), errors="replace")
        if reproducer is not None:
            reproducer(folder)
        hint = f"to report it, send {folder}"
    except (OSError, TopoError) as exc:
        hint = f"no reproducer could be written: {exc}"
    error = CompilerCrash(f"the {stage} stage {reason}", hint=hint)
    error.__dict__.update(captured_output=output, child_traceback=trace)
    return error


def _crash_folder(stage: str) -> Path:
    base = Path(os.environ.get("TOPO_OPT_CRASH_DIR") or tempfile.gettempdir())
    base.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"topo-opt-{re.sub(r'[^A-Za-z0-9]+', '-', stage)}-", dir=base))


def _report(stage: str, reason: str, output: str, trace: str | None) -> str:
    loaded = {n: getattr(sys.modules.get(n), "__version__", None) for n in ("torch", "triton", "topo_opt")}
    versions = ", ".join(f"{name} {version}" for name, version in loaded.items() if version)
    lines = [
        f"stage: {stage}",
        f"reason: {reason}",
        f"command: {shlex.join(sys.argv)}",
        f"python {platform.python_version()} on {platform.platform()}; {versions}",
    ]
    if trace:
        lines += ["", trace.rstrip()]
    if output:
        lines += ["", "output of the child:", output.rstrip()]
    return "\n".join(lines) + "\n"
