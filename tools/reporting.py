"""How the tools end: an exit code, and one diagnostic for every error."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from topo_opt.errors import TopoError

INTERRUPTED = 130
"""As shells report a process that SIGINT has ended, which Python does by itself where the interrupt came in code that a library ran."""
COMPILER = "torch_mlir"
"""The package that a machine which only runs bundles may lack."""


def reported(
    work: Callable[[], int], arguments: argparse.Namespace, tool: str, destination: str | None = None
) -> int:
    """The exit code of `work()`; every error becomes one line on standard error, unless `arguments.traceback` is set.

    Args:
        tool: the name of the command, for faults of its own.
        destination: what was being written when an error of the system names no file; None: standard output.
    """
    try:
        code = work()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        text, code = "error: interrupted", INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return 1
    except Exception as error:
        if arguments.traceback:
            raise
        text, code = _line(error, tool, destination), getattr(error, "exit_code", 1)
        if isinstance(error, OSError):
            _drop_output()
    print(text, file=sys.stderr)
    return code


def add_traceback(parser: argparse.ArgumentParser) -> None:
    """The option that `reported` looks at."""
    parser.add_argument("--traceback", action="store_true", help="show where in topo-opt an error comes from")


def _drop_output() -> None:
    """What standard output would not take goes nowhere: the interpreter must not fail on it once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _line(error: Exception, tool: str, destination: str | None) -> str:
    if isinstance(error, TopoError):
        return error.render()
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == COMPILER:
        return (
            f"error: {tool} needs {COMPILER} for this, and it is not installed here "
            "(compile where topo-opt is installed whole; topo-run and topo-hw need no compiler)"
        )
    if isinstance(error, OSError):
        return f"error: {error.filename or destination or 'standard output'}: {error.strerror or first_line(error)}"
    return f"error: {tool} broke: {type(error).__name__}: {first_line(error)} (a fault of topo-opt; --traceback shows where)"


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
