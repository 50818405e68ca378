"""Tables: drawn on a terminal where rich is installed, else plain columns. Bundles run without rich."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints one table; numbers are right-aligned, None is a dash."""
    cells = [[_text(c) for c in row] for row in rows]
    numeric = [all(_is_number(row[i]) for row in rows) for i in range(len(columns))]
    if sys.stdout.isatty() and find_spec("rich") is not None:
        _draw(title, columns, cells, numeric)
    else:
        _plain(title, columns, cells, numeric)


def _draw(title: str, columns: Sequence[str], cells: list[list[str]], numeric: list[bool]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name, right in zip(columns, numeric):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in cells:
        table.add_row(*row)
    Console(markup=False).print(table)


def _plain(title: str, columns: Sequence[str], cells: list[list[str]], numeric: list[bool]) -> None:
    widths = [max(len(row[i]) for row in [list(columns), *cells]) for i in range(len(columns))]
    print(title)
    for row in [list(columns), *cells]:
        parts = [c.rjust(w) if right else c.ljust(w) for c, w, right in zip(row, widths, numeric)]
        print("  " + "  ".join(parts).rstrip())


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (int, float))
