"""MLIR's diagnostics as plain data: collected per context, printed as `file:line:col: error: text` with the source line."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch_mlir import ir

from topo_opt.errors import TopoError


@dataclass(frozen=True)
class Diagnostic:
    """One message; `severity` is error, warning, note or remark, `line` and `col` count from 1, or are 0 when unknown."""

    severity: str
    message: str
    file: str = ""
    line: int = 0
    col: int = 0
    notes: tuple["Diagnostic", ...] = ()

    @property
    def where(self) -> str | None:
        """`file:line:col`, or None when the place is unknown."""
        return f"{self.file}:{self.line}:{self.col}" if self.line else None

    def in_file(self, name: str) -> "Diagnostic":
        """The same with the name of the file in place of MLIR's "-", which stands for text that was parsed from memory."""
        notes = tuple(note.in_file(name) for note in self.notes)
        return replace(self, file=name if self.file == "-" else self.file, notes=notes)

    def render(self, sources: Mapping[str, str] | None = None) -> str:
        """The text for a terminal, with the source line and a caret when `sources` has the file."""
        head = f"{self.where}: " if self.where else ""
        lines = [f"{head}{self.severity}: {self.message}"]
        source = (sources or {}).get(self.file, "").split("\n")
        if 0 < self.line <= len(source) and source[self.line - 1].strip():
            lines += [source[self.line - 1], " " * (self.col - 1) + "^"]
        return "\n".join([*lines, *(note.render(sources) for note in self.notes)])


class DiagnosedError(TopoError):
    """IR that does not parse, verify or pass; `diagnostics` has at least one error."""

    def __init__(self, diagnostics: tuple[Diagnostic, ...]):
        first = next((d for d in diagnostics if d.severity == "error"), diagnostics[0])
        super().__init__(first.message, where=first.where)
        self.diagnostics = diagnostics


def place_of(location: ir.Location) -> tuple[str, int, int]:
    """File, line and column of a location; of the first part that has one when it is nested, ("", 0, 0) when none has."""
    if isinstance(location, ir.FileLineColLoc):
        return location.filename, location.start_line, location.start_col
    if isinstance(location, ir.NameLoc):
        return place_of(location.child_loc)
    if isinstance(location, ir.CallSiteLoc):
        return place_of(location.callee)
    if isinstance(location, ir.FusedLoc):
        return next((place for part in location.locations if (place := place_of(part))[1]), ("", 0, 0))
    return "", 0, 0


def from_mlir(diagnostic: Any) -> Diagnostic:
    """A diagnostic handed to a handler or found in `MLIRError.error_diagnostics`, with its notes."""
    severity = str(diagnostic.severity).rpartition(".")[2].lower()
    notes = tuple(from_mlir(note) for note in diagnostic.notes)
    return Diagnostic(severity, diagnostic.message, *place_of(diagnostic.location), notes)


@contextmanager
def collect(context: ir.Context) -> Iterator[list[Diagnostic]]:
    """Collects every diagnostic of the context, instead of printing it; also those of a parse, verify or pass run."""
    collected: list[Diagnostic] = []

    def handle(diagnostic: Any) -> bool:
        collected.append(from_mlir(diagnostic))
        return True

    before = context.emit_error_diagnostics
    context.emit_error_diagnostics = True
    handler = context.attach_diagnostic_handler(handle)
    try:
        yield collected
    finally:
        handler.detach()
        context.emit_error_diagnostics = before
