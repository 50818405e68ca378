"""Work in a forked child that shares the terminal, so that a crash of the native library is an error and not a dead command."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType


def run_supervised(work: Callable[[], int], subject: str) -> int:
    """The exit code of `work()`, run in a child; 1 after one line on standard error when the child is killed by a signal.

    Args:
        work: reports its own errors; what it raises all the same is printed with its traceback.
        subject: what is being worked on, for the message.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _run(work)

    def forward(number: int, frame: FrameType | None) -> None:
        os.kill(child, number)

    before = signal.signal(signal.SIGTERM, forward)
    try:
        status = _wait(child)
    finally:
        signal.signal(signal.SIGTERM, before)
    if os.WIFEXITED(status):
        return os.WEXITSTATUS(status)
    name = signal.Signals(os.WTERMSIG(status)).name
    print(
        f"error: {subject}: MLIR died with {name} (--mlir-pass-pipeline-crash-reproducer=FILE keeps what it was working on)",
        file=sys.stderr,
    )
    return 1


def _run(work: Callable[[], int]) -> None:
    code = 1
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _wait(child: int) -> int:
    while True:
        try:
            return os.waitpid(child, 0)[1]
        except KeyboardInterrupt:
            continue  # the terminal has interrupted the child too; it says so
