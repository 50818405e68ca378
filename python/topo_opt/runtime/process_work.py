"""Whether a process gets on with something, as the operating system counts it."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from pathlib import Path

WORKING_S = 0.02
"""Processor time between two signs above which a process gets on with something."""


class ProcessWork:
    """Whether this process, or one that it has started, uses the processor or reads files."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._at, self._last = time.monotonic(), self._counters()

    def got_on(self) -> bool:
        """Since the last time; no before `pause_s` is over."""
        now = time.monotonic()
        if now - self._at < self._pause_s:
            return False
        before, self._last, self._at = self._last, self._counters(), now
        return self._last[0] - before[0] > WORKING_S or self._last[1] > before[1]

    @staticmethod
    def _counters() -> tuple[float, int]:
        """(seconds of processors, blocks and pages read)."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        seconds = usage.ru_utime + usage.ru_stime + sum(os.times()[2:4])
        for children in Path("/proc/self/task").glob("*/children"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                for child in children.read_text().split():
                    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                    seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return seconds, usage.ru_majflt + usage.ru_inblock
