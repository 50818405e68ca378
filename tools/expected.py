"""`--verify-diagnostics`: comments in the input say which diagnostics must come, in MLIR's notation.

// expected-error@+1 {{needs 'q' of rank 4}}
// expected-remark@above {{...}}   expected-note@-2, expected-error@below, expected-error-re@+1 {{rank {{[0-9]+}}}}
// expected-error@unknown {{...}}
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from topo_opt.errors import Remark
from topo_opt.pipeline.diagnostics import Diagnostic

_COMMENT = re.compile(
    r"expected-(?P<severity>error|warning|note|remark)(?P<regex>-re)?\s*(?:@(?P<at>[+-]\d+|above|below|unknown))?\s*\{\{(?P<text>.*?)\}\}(?!\})"
)


@dataclass(frozen=True)
class Expected:
    """A diagnostic that must come at `line` (0: anywhere unknown), written at `written`."""

    severity: str
    line: int
    pattern: re.Pattern[str]
    text: str
    written: int


def expectations(source: str) -> list[Expected]:
    """All expectations of a source text, in order."""
    lines = source.split("\n")
    found = []
    for number, line in enumerate(lines, start=1):
        for match in _COMMENT.finditer(line):
            text = match["text"]
            pattern = _regex(text) if match["regex"] else re.compile(re.escape(text))
            found.append(
                Expected(match["severity"], _target(match["at"], number, lines), pattern, text, number)
            )
    return found


def check(source: str, emitted: Sequence[Diagnostic], name: str) -> list[str]:
    """Complaints about every expected diagnostic that did not come and every one that came unexpected; none when all match."""
    open_expectations, unexpected = expectations(source), []
    for diagnostic in (d for top in emitted for d in (top, *top.notes)):
        match = next((e for e in open_expectations if _matches(e, diagnostic)), None)
        if match:
            open_expectations.remove(match)
        else:
            unexpected.append(diagnostic.in_file(name))
    complaints = [f"{d.where or name}: error: unexpected {d.severity}: {d.message}" for d in unexpected]
    complaints += [
        f'{name}:{e.written}: error: expected {e.severity} "{e.text}" was not produced'
        for e in open_expectations
    ]
    return complaints


def from_remark(remark: Remark) -> Diagnostic:
    """One of our remarks as a diagnostic; its place is read from `file:line[:col]`."""
    match = re.fullmatch(r"(.*?):(\d+)(?::(\d+))?", remark.where or "")
    place = (match[1], int(match[2]), int(match[3] or 1)) if match else ("", 0, 0)
    return Diagnostic("remark", f"{remark.subject}: {remark.reason} [{remark.kind}]", *place)


def _matches(expected: Expected, diagnostic: Diagnostic) -> bool:
    same_place = diagnostic.severity == expected.severity and diagnostic.line == expected.line
    return same_place and expected.pattern.search(diagnostic.message) is not None


def _regex(text: str) -> re.Pattern[str]:
    """`rank {{[0-9]+}}`: literal text with regular expressions in double braces."""
    parts = re.split(r"\{\{(.*?)\}\}", text)
    return re.compile("".join(part if i % 2 else re.escape(part) for i, part in enumerate(parts)))


def _target(at: str | None, number: int, lines: list[str]) -> int:
    if at == "unknown":
        return 0
    if at in ("above", "below"):
        # Other expectations between the comment and its target don't count, so that several may be stacked.
        step = -1 if at == "above" else 1
        number += step
        while 0 < number <= len(lines) and _COMMENT.search(lines[number - 1]):
            number += step
        return number
    return number + int(at or 0)
