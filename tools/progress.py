"""What is going on, on a terminal: the phase while it runs, and how long it took when that was over a second."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_SHOWN_FROM_SECONDS = 1.0


class Progress:
    """Prints on standard error, and only when that is a terminal and nobody asked for quiet."""

    def __init__(self, *, quiet: bool = False):
        self.visible = sys.stderr.isatty() and not quiet

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Shows `name` during the block. No thread draws it: the block may fork."""
        if not self.visible:
            yield
            return
        from rich.console import Console

        console = Console(stderr=True, highlight=False)
        start = time.perf_counter()
        console.print(f"[dim]{name} ...[/dim]", end="\r")
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            # Blanks wipe what the longer line before has left.
            console.print(" " * (len(name) + 4), end="\r")
            if seconds >= _SHOWN_FROM_SECONDS:
                console.print(f"[dim]{name} {seconds:.1f} s[/dim]")
