"""Plain data as bytes: how a result travels from an isolated child to its parent.

The container is `TOPO` + version byte, the length of a JSON text, the JSON text, then the byte strings it refers to.
Nothing in it names code, so a child that went astray can hand over wrong data but not behaviour.
"""

import dataclasses
import json
import math
import struct
from collections.abc import Callable
from typing import Any, TypeVar

from topo_opt.errors import InputError, Remark

_MAGIC = b"TOPO\x01"
_LENGTH = struct.Struct("<Q")
_Record = TypeVar("_Record", bound=type)
_RECORDS: dict[str, type] = {}


def record(cls: _Record) -> _Record:
    """Class decorator: lets instances of the dataclass `cls` travel, field by field."""
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is not a dataclass")
    known = _RECORDS.setdefault(cls.__name__, cls)
    if known is not cls and known.__module__ != cls.__module__:
        raise TypeError(f"two record classes are named {cls.__name__}: {known.__module__}, {cls.__module__}")
    _RECORDS[cls.__name__] = cls
    return cls


record(Remark)


def dumps(value: Any) -> bytes:
    """Encodes None, bool, int, float, str, bytes, list, tuple, dict (any of these as keys) and record dataclasses.

    Raises:
        TypeError: the value contains anything else; the message gives the path to it.
    """
    blobs = bytearray()
    text = json.dumps(_encode(value, blobs, "result"), separators=(",", ":")).encode()
    return b"".join([_MAGIC, _LENGTH.pack(len(text)), text, blobs])


def loads(data: bytes | bytearray | memoryview) -> Any:
    """The value `dumps` was given. Raises InputError when `data` is not a whole container."""
    view = memoryview(data)
    start = len(_MAGIC) + _LENGTH.size
    if len(view) < start or view[: len(_MAGIC)] != _MAGIC:
        raise InputError("the result of a child process is not a result container")
    end = start + _LENGTH.unpack(view[len(_MAGIC) : start])[0]
    try:
        return _decode(json.loads(bytes(view[start:end])), view[end:])
    except (ValueError, KeyError, TypeError, IndexError) as exc:
        raise InputError(f"the result of a child process is damaged: {exc}") from exc


def _encode(value: Any, blobs: bytearray, path: str) -> Any:
    if value is None or isinstance(value, bool | str) or (isinstance(value, int) and type(value) is int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, bytes | bytearray | memoryview):
        offset = len(blobs)
        blobs += value
        return {"bytes": [offset, len(blobs) - offset]}
    if isinstance(value, list):
        return [_encode(item, blobs, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [_encode(item, blobs, f"{path}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        items = value.items()
        return {"dict": [[_encode(k, blobs, path), _encode(v, blobs, f"{path}[{k!r}]")] for k, v in items]}
    name = type(value).__name__
    if _RECORDS.get(name) is type(value):
        fields = dataclasses.fields(value)  # type: ignore[arg-type]
        return {name: {f.name: _encode(getattr(value, f.name), blobs, f"{path}.{f.name}") for f in fields}}
    raise TypeError(f"{path} is a {type(value).__module__}.{name}, which cannot leave a child process")


def _decode(node: Any, blobs: memoryview) -> Any:
    if isinstance(node, list):
        return [_decode(item, blobs) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, body),) = node.items()
    if kind in _DECODERS:
        return _DECODERS[kind](body, blobs)
    cls = _RECORDS[kind]
    return cls(**{name: _decode(value, blobs) for name, value in body.items()})


def _decode_bytes(body: Any, blobs: memoryview) -> bytes:
    offset, size = body
    if offset + size > len(blobs):
        raise ValueError("a byte string lies outside the container")
    return bytes(blobs[offset : offset + size])


_DECODERS: dict[str, Callable[[Any, memoryview], Any]] = {
    "float": lambda body, blobs: float(body),
    "bytes": _decode_bytes,
    "tuple": lambda body, blobs: tuple(_decode(item, blobs) for item in body),
    "dict": lambda body, blobs: {_decode(k, blobs): _decode(v, blobs) for k, v in body},
}
