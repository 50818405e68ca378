"""JSON to dataclasses and back, refusing everything that the dataclass does not say.

A bundle may come from anywhere. Unknown keys, missing keys, wrong types, booleans for numbers, NaN, duplicate keys,
deep nesting and oversized files all end as one `UntrustedError` with the path of the field.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar

from topo_opt.errors import UntrustedError

T = TypeVar("T")
MAX_DEPTH = 200
Json = Any
"""Marks a dataclass field as free-form JSON, checked by whoever uses it."""


def parse(text: bytes, what: str) -> Json:
    """JSON text to Python values; `what` names the file in errors."""
    try:
        return json.loads(
            text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite
        )
    except RecursionError:
        raise UntrustedError(f"{what} is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise UntrustedError(f"{what} is not UTF-8 text: {error.reason}") from None
    except ValueError as error:  # JSONDecodeError, over-long integers, and the hooks below
        raise UntrustedError(f"{what} is not valid JSON: {error}") from None


def dumps(value: Json) -> bytes:
    """Deterministic JSON: the same value always gives the same bytes."""
    return json.dumps(value, indent=1, ensure_ascii=True, allow_nan=False).encode() + b"\n"


def encode(value: Any) -> Json:
    """Dataclasses (with their `tag`, if any) to JSON values. Fields at their default None are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        tag = getattr(value, "tag", None)
        out: dict[str, Json] = {"step": tag} if tag else {}
        for f in dataclasses.fields(value):
            item = getattr(value, f.name)
            if not (item is None and f.default is None):
                out[f.name] = encode(item)
        return out
    if isinstance(value, Mapping):
        return {k: encode(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(v) for v in value]
    return value


def decode(cls: type[T], value: Json, where: str) -> T:
    """A JSON value as an instance of the dataclass `cls`; `where` is the path used in errors."""
    return _decode(cls, value, where, 0)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("an object has the same key twice")
    return out


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is beyond the range of numbers")
    return number


@cache
def _fields(cls: type) -> dict[str, tuple[Any, bool]]:
    hints = typing.get_type_hints(cls)
    missing = dataclasses.MISSING
    return {
        f.name: (hints[f.name], f.default is missing and f.default_factory is missing)
        for f in dataclasses.fields(cls)
        if f.init
    }


_SCALARS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _decode(kind: Any, value: Json, where: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise UntrustedError(f"{where} is nested too deeply")
    if kind is Any:
        return value
    if kind in _SCALARS:
        good = type(value) is kind or (kind is float and type(value) is int)
        if not good or (kind is float and not math.isfinite(value)):
            raise UntrustedError(f"{where} should be {_SCALARS[kind]}, not {_show(value)}")
        return value
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _decode_union(args, value, where, depth)
    if origin is Literal:
        if not any(value == a and type(value) is type(a) for a in args):
            raise UntrustedError(f"{where} should be one of {', '.join(map(repr, args))}, not {_show(value)}")
        return value
    if origin is tuple:
        if not isinstance(value, list) or (args[-1] is not Ellipsis and len(value) != len(args)):
            size = "" if args[-1] is Ellipsis else f" of {len(args)}"
            raise UntrustedError(f"{where} should be a list{size}, not {_show(value)}")
        items = (args[0],) * len(value) if args[-1] is Ellipsis else args
        return tuple(_decode(k, v, f"{where}[{i}]", depth + 1) for i, (k, v) in enumerate(zip(items, value)))
    if not isinstance(value, dict):
        raise UntrustedError(f"{where} should be an object, not {_show(value)}")
    if origin in (dict, Mapping):
        return {k: _decode(args[1], v, f"{where}.{k[:80]}", depth + 1) for k, v in value.items()}
    return _decode_object(kind, value, where, depth)


def _decode_object(cls: type, value: dict[str, Json], where: str, depth: int) -> Any:
    known = _fields(cls)
    given = {k: v for k, v in value.items() if not (k == "step" and hasattr(cls, "tag"))}
    if unknown := [k for k in given if k not in known]:
        raise UntrustedError(f"{where} has the unknown field {unknown[0][:80]!r}")
    if absent := [k for k, (_, required) in known.items() if required and k not in given]:
        raise UntrustedError(f"{where} lacks the field {absent[0]!r}")
    return cls(**{k: _decode(known[k][0], v, f"{where}.{k}", depth + 1) for k, v in given.items()})


def _decode_union(args: tuple[Any, ...], value: Json, where: str, depth: int) -> Any:
    if value is None and type(None) in args:
        return None
    choices = [a for a in args if a is not type(None)]
    if len(choices) == 1:
        return _decode(choices[0], value, where, depth)
    tagged = {a.tag: a for a in choices if hasattr(a, "tag")}
    if tagged:
        tag = value.get("step") if isinstance(value, dict) else None
        if not isinstance(tag, str) or tag not in tagged:
            raise UntrustedError(
                f"{where}.step should be one of {', '.join(sorted(tagged))}, not {_show(tag)}"
            )
        return _decode(tagged[tag], value, where, depth)
    for choice in choices:
        if type(value) is choice:
            return value
    raise UntrustedError(f"{where} should be {' or '.join(_SCALARS[c] for c in choices)}, not {_show(value)}")


def _show(value: Json) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
