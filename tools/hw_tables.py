"""Tables on standard output, whole also where it is no terminal."""

from dataclasses import dataclass

_PIPE_WIDTH = 4000


@dataclass(frozen=True)
class Table:
    """Column heads, rows of text, and the columns whose text stands to the right or in the middle."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()
    centre: frozenset[int] = frozenset()


def print_table(table: Table, *, whole: bool = False) -> None:
    """Prints it; with `whole` no cell is cut, whatever the width of the terminal."""
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(highlight=False)
    if whole or not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_WIDTH, soft_wrap=True)
    rich = RichTable(box=None, pad_edge=False, header_style="bold")
    for i, head in enumerate(table.heads):
        justify = "right" if i in table.right else "center" if i in table.centre else "left"
        rich.add_column(head, justify=justify, no_wrap=i < len(table.heads) - 1)  # type: ignore[arg-type]
    for row in table.rows:
        rich.add_row(*row)
    with console.capture() as text:
        console.print(rich)
    print("\n".join(line.rstrip() for line in text.get().splitlines()))
