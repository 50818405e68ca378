"""Lines of Python source with fresh names and common-subexpression elimination."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Writer:
    """Collects source lines. Every identifier is made here, none comes from the model.

    `bind(code)` assigns an expression to a fresh name, or returns the name that already holds it in an open scope.
    """

    def __init__(self, indent: int = 0):
        self.lines: list[str] = []
        self._indent = indent
        self._count = 0
        self._scopes: list[dict[str, str]] = [{}]

    def line(self, text: str = "") -> None:
        self.lines.append("    " * self._indent + text if text else "")

    def fresh(self, prefix: str = "v") -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def bind(self, code: str, prefix: str = "v") -> str:
        """A name that holds the value of `code`."""
        for scope in reversed(self._scopes):
            if code in scope:
                return scope[code]
        name = self.fresh(prefix)
        self.line(f"{name} = {code}")
        self._scopes[-1][code] = name
        return name

    @contextmanager
    def block(self, header: str) -> Iterator[None]:
        """An indented block; names bound inside are forgotten after it."""
        self.line(header)
        self._indent += 1
        self._scopes.append({})
        try:
            yield
        finally:
            self._scopes.pop()
            self._indent -= 1

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"
