"""Where in the user's files a graph node comes from."""

import re

from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def source_line(node: fx.Node) -> str | None:
    """`file:line` of the innermost frame that the exporter recorded for `node`, or None."""
    place = frame(node.meta.get("stack_trace"))
    return f"{place[0]}:{place[1]}" if place else None


def frame(stack_trace: str | None) -> tuple[str, int] | None:
    """(file, line) of the innermost frame of an exporter's stack trace, or None."""
    found = _FRAME.findall(stack_trace or "")
    return (found[-1][0], int(found[-1][1])) if found else None
