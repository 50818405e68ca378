"""Checks of JSON data, put together from small ones: each takes a value and raises `Refused` unless it is allowed."""

import json
import keyword
import re
from collections.abc import Callable
from typing import Any

Check = Callable[[Any], None]


class Refused(Exception):
    """A value that is not allowed: the reason, and the path to it, outermost first."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason
        self.path: list[str] = []

    def __str__(self) -> str:
        return f"{''.join(self.path).lstrip('.') or 'the document'} {self.reason}"


# Combinators


def kind(cls: type | tuple[type, ...], name: str) -> Check:
    """A value of the Python type `cls`, called `name` in messages; true and false are no integers."""

    def check(value: Any) -> None:
        if not isinstance(value, cls) or (isinstance(value, bool) and cls is int):
            raise Refused(f"is {shown(value)}, not {name}")

    return check


def optional(inner: Check) -> Check:
    """null, or what `inner` accepts."""
    return lambda value: None if value is None else inner(value)


def list_of(inner: Check) -> Check:
    """A list of what `inner` accepts."""

    def check(value: Any) -> None:
        if not isinstance(value, list):
            raise Refused(f"is {shown(value)}, not a list")
        for index, item in enumerate(value):
            try:
                inner(item)
            except Refused as exc:
                exc.path.insert(0, f"[{index}]")
                raise

    return check


def map_of(key: Check, inner: Check) -> Check:
    """An object with any keys that `key` accepts."""

    def check(value: Any) -> None:
        if not isinstance(value, dict):
            raise Refused(f"is {shown(value)}, not an object")
        for name, item in value.items():
            try:
                key(name)
                inner(item)
            except Refused as exc:
                exc.path.insert(0, f".{name[:60]}")
                raise

    return check


def struct_of(**fields: Check) -> Check:
    """An object with these fields; a trailing underscore marks one that may be missing."""
    table = {name.rstrip("_"): check for name, check in fields.items()}
    needed = [name for name in fields if not name.endswith("_")]

    def check(value: Any) -> None:
        if not isinstance(value, dict):
            raise Refused(f"is {shown(value)}, not an object")
        for name in needed:
            if name not in value:
                raise Refused(f"lacks '{name}'")
        for name, item in value.items():
            if name not in table:
                raise Refused(f"has the unknown field '{name[:60]}'")
            try:
                table[name](item)
            except Refused as exc:
                exc.path.insert(0, f".{name}")
                raise

    return check


def union_of(**cases: Check) -> Check:
    """An object with exactly one of these fields."""

    def check(value: Any) -> None:
        if not isinstance(value, dict) or len(value) != 1:
            raise Refused(f"is {shown(value)}, not an object with one field")
        ((name, item),) = value.items()
        if name not in cases:
            raise Refused(f"is of the unknown kind '{name[:60]}'")
        try:
            cases[name](item)
        except Refused as exc:
            exc.path.insert(0, f".{name}")
            raise

    return check


def forbidden(reason: str) -> Check:
    """Nothing."""

    def check(value: Any) -> None:
        raise Refused(reason)

    return check


def shown(value: Any) -> str:
    """The value as messages quote it."""
    return f"{json.dumps(value)[:60]}"


# Strings


def text(pattern: str, name: str) -> Check:
    """A string that the whole `pattern` matches."""
    compiled = re.compile(pattern)

    def check(value: Any) -> None:
        if not isinstance(value, str) or not compiled.fullmatch(value):
            raise Refused(f"is {shown(value)}, not {name}")

    return check


def identifier(value: Any) -> None:
    """A name that can stand in generated Python source."""
    if (
        not isinstance(value, str)
        or not (value.isascii() and value.isidentifier())
        or keyword.iskeyword(value)
    ):
        raise Refused(f"is {shown(value)}, not an identifier")


def integer_64(value: Any) -> None:
    """An integer that fits 64 bits."""
    INT(value)
    if abs(value) >= 1 << 64:
        raise Refused("is out of range")


INT = kind(int, "an integer")
BOOL = kind(bool, "true or false")
STRING = kind(str, "a string")
NUMBER = kind((int, float), "a number")
NAME = identifier
OPTIONAL_NAME = text(r"|[A-Za-z_][A-Za-z0-9_]*", "a name")
# Names of parameters and modules: no quotes or control characters, since they come to stand in source and file names.
QUALIFIED_NAME = text(r"[^\"'\\\x00-\x1f\x7f{}]{0,1024}", "the name of a parameter or module")


def number(value: Any) -> None:
    """A number, infinities and NaN as the strings torch writes for them."""
    if isinstance(value, str) and value in ("Infinity", "-Infinity", "NaN"):
        return
    NUMBER(value)


def numbers(value: Any) -> None:
    """A list of numbers."""
    list_of(number)(value)
