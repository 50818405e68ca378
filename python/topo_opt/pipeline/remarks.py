"""What did not take effect, collected while passes run.

MLIR's Python bindings can emit errors only, so remarks have a channel of their own:

    with remarks.collect() as collected:
        run(pipeline, module)
    collected  # list[Remark]

Outside a `collect` block an emitted remark is dropped: nobody asked.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from topo_opt.errors import Remark

CHOSEN = "plan"
"""The kind of a remark on what was left to the planner: nothing that was asked for is missing."""

_collectors: ContextVar[tuple[list[Remark], ...]] = ContextVar("collectors", default=())


def emit(kind: str, subject: str, reason: str, where: str | None = None) -> None:
    """Adds a remark to every open collector; see `Remark` for the fields. A remark is kept once."""
    remark = Remark(kind, subject, reason, where)
    for collected in _collectors.get():
        if remark not in collected:
            collected.append(remark)


@contextmanager
def collect() -> Iterator[list[Remark]]:
    """Collects the remarks emitted inside the block, in order."""
    collected: list[Remark] = []
    token = _collectors.set((*_collectors.get(), collected))
    try:
        yield collected
    finally:
        _collectors.reset(token)
