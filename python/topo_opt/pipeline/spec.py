"""Textual pass pipelines that mix our passes with the C++ ones.

    builtin.module(topo-form-kernels{fuse=cheap}, func.func(cse, canonicalize{max-iterations=2}))

`parse` gives a tree whose leaves are `Pass` objects (ours) or `UpstreamPass` (C++, options kept as text), `str()` gives the
text back, and `parse(str(parse(t))) == parse(t)`. Names that are not ours are looked up in MLIR when the pipeline is built
(`pipeline.run`), because that needs a context.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from topo_opt.errors import PipelineError, TopoError
from topo_opt.passes import PASSES, pass_class
from topo_opt.passes.base import Pass


class PipelineSyntaxError(PipelineError):
    """A fault at one place of a textual pipeline; prints the line with a caret under it.

    Args:
        message: what is wrong.
        text: the whole pipeline.
        at: offset of the fault in `text`.
    """

    def __init__(self, message: str, text: str, at: int, *, hint: str | None = None):
        line = text.count("\n", 0, at) + 1
        col = at - (text.rfind("\n", 0, at) + 1) + 1
        super().__init__(message, hint=hint, where=f"pipeline:{line}:{col}")
        self.source, self.col = text.split("\n")[line - 1], col

    def render(self) -> str:
        return f"{super().render()}\n{self.source}\n{' ' * (self.col - 1)}^"


@dataclass(frozen=True)
class UpstreamPass:
    """A C++ pass, by name, with its options as they were written."""

    name: str
    options: str = ""

    def __str__(self) -> str:
        return f"{self.name}{{{self.options}}}" if self.options else self.name


@dataclass(frozen=True)
class Leaf:
    """One pass of a pipeline; `at` is its offset in the text it was parsed from."""

    content: Pass | UpstreamPass
    at: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return str(self.content)


@dataclass(frozen=True)
class Group:
    """Passes that run on every op named `anchor` inside the ops of the group around it."""

    anchor: str
    items: tuple["Leaf | Group", ...] = ()
    at: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.anchor}({','.join(map(str, self.items))})"

    def leaves(self, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Leaf]]:
        """Every pass in order, with the anchors below the root that lead to it."""
        for item in self.items:
            if isinstance(item, Group):
                yield from item.leaves((*path, item.anchor))
            else:
                yield path, item


ROOT = "builtin.module"


def parse(text: str) -> Group:
    """The tree of a textual pipeline.

    Text without the `builtin.module(...)` around it is taken as its content, so `cse,topo-fold-views` is a pipeline too.

    Raises:
        PipelineSyntaxError: with line, column and caret.
    """
    items, _ = _parse_items(text, 0, closing=False)
    if len(items) == 1 and isinstance(items[0], Group) and items[0].anchor == ROOT:
        return items[0]
    return Group(ROOT, items)


_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_SPACE = re.compile(r"\s*")


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _parse_items(text: str, at: int, *, closing: bool) -> tuple[tuple[Leaf | Group, ...], int]:
    """Items up to the end of the text, or up to the ')' that closes a group; returns them and the offset behind."""
    items: list[Leaf | Group] = []
    at = _skip(text, at)
    if text[at : at + 1] == ")" and closing:
        return (), at + 1
    if at == len(text) and not closing:
        return (), at
    while True:
        item, at = _parse_item(text, _skip(text, at))
        items.append(item)
        at = _skip(text, at)
        separator = text[at : at + 1]
        if separator == ")" and closing:
            return tuple(items), at + 1
        if separator == "" and not closing:
            return tuple(items), at
        if separator != ",":
            expected = (
                "missing ')'" if separator == "" else f"expected ',' {'or )' if closing else 'or the end'}"
            )
            raise PipelineSyntaxError(expected, text, at)
        at += 1


def _parse_item(text: str, at: int) -> tuple[Leaf | Group, int]:
    match = _NAME.match(text, at)
    if not match:
        raise PipelineSyntaxError("expected the name of a pass or of an op to nest on", text, at)
    name, end = match.group(), match.end()
    if text[end : end + 1] == "(":
        items, end = _parse_items(text, end + 1, closing=True)
        return Group(name, items, at), end
    options, start = "", end
    if text[end : end + 1] == "{":
        start, end = end + 1, _closing_brace(text, end)
        options = text[start : end - 1]
    if name not in PASSES:
        return Leaf(UpstreamPass(name, options.strip()), at), end
    try:
        return Leaf(pass_class(name).from_options(_parse_options(text, start, end - 1)), at), end
    except PipelineSyntaxError:
        raise
    except TopoError as error:
        raise PipelineSyntaxError(error.message, text, at, hint=error.hint) from None


def _closing_brace(text: str, at: int) -> int:
    """The offset behind the '}' that closes the '{' at `at`; quotes hide braces."""
    depth, quote, i = 0, "", at
    while i < len(text):
        char = text[i]
        if quote:
            i += char == "\\"
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "{}":
            depth += 1 if char == "{" else -1
            if depth == 0:
                return i + 1
        i += 1
    raise PipelineSyntaxError("missing '}' behind the options", text, at)


_OPTION = re.compile(
    r"""(?P<key>[\w-]+)\s*=\s*(?:"(?P<double>(?:\\.|[^"\\])*)"|'(?P<single>[^']*)'|(?P<bare>[^\s"']*))"""
)


def _parse_options(text: str, at: int, end: int) -> dict[str, str]:
    """`a=1 b="x y"` between two offsets -> {"a": "1", "b": "x y"}."""
    options: dict[str, str] = {}
    while (at := _skip(text, at)) < end:
        match = _OPTION.match(text, at, end)
        if not match:
            raise PipelineSyntaxError("expected an option as key=value", text, at)
        key = match["key"]
        if key in options:
            raise PipelineSyntaxError(f"option '{key}' is given twice", text, at)
        double = match["double"]
        options[key] = (
            re.sub(r"\\(.)", r"\1", double) if double is not None else match["single"] or match["bare"] or ""
        )
        at = match.end()
    return options
