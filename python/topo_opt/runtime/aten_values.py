"""Arguments of ATen calls: from the JSON encoding of docs/architecture.md, section 6, to values at a device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from topo_opt.errors import InputError

MAX_DEPTH = 64


@dataclass(frozen=True)
class Ref:
    """The value in slot `slot` of the environment."""

    slot: int


@dataclass(frozen=True)
class Item:
    """Output `index` of the multi-output value in slot `slot`."""

    slot: int
    index: int


@dataclass(frozen=True)
class Device:
    """The device of the run, or only its type (a string) for autocast."""

    type_only: bool = False


@dataclass(frozen=True)
class Many:
    """A list, or a tuple, with at least one member that is known only at the run."""

    members: tuple[Any, ...]
    kind: type = list


@dataclass(frozen=True)
class Named:
    """A dictionary with string keys."""

    members: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Slice:
    """A Python slice whose bounds may be sizes."""

    parts: tuple[Any, Any, Any]


@dataclass(frozen=True)
class Body:
    """The body of a higher-order operator; `program` is an AtenProgram."""

    program: Any


@dataclass(frozen=True)
class Permuted:
    """A tensor with its dims in another order, a view: dim `i` is dim `order[i]` of `member`."""

    member: Any
    order: tuple[int, ...]


DYNAMIC = (Ref, Item, Device, Many, Named, Slice, Body, Permuted)


@dataclass(frozen=True)
class Scope:
    """What names mean while arguments are decoded: `slot_of(name)` and `body_of(json, path)`, `op_of(name, path)`."""

    slot_of: Callable[[Any, str], int]
    body_of: Callable[[Any, str], Any]
    op_of: Callable[[Any, str], Any]


def decode(value: Any, scope: Scope, path: str, depth: int = 0) -> Any:
    """The argument `value` with names resolved. Raises InputError with the JSON path of what is wrong."""
    if depth > MAX_DEPTH:
        raise InputError(f"{path}: nested deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        members = [decode(item, scope, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
        return _sequence(members, list)
    if not isinstance(value, dict) or len(value) != 1:
        raise InputError(f"{path}: expected an object with one key")
    ((kind, body),) = value.items()
    if kind not in _DECODERS:
        raise InputError(f"{path}: '{kind}' is not an argument kind")
    try:
        return _DECODERS[kind](body, scope, path, depth + 1)
    except (TypeError, ValueError, KeyError, AttributeError) as exc:
        raise InputError(f"{path}: {body!r:.80} is not a valid {kind}") from exc


def _sequence(members: list[Any], kind: type) -> Any:
    return Many(tuple(members), kind) if any(isinstance(m, DYNAMIC) for m in members) else kind(members)


def _tuple(body: Any, scope: Scope, path: str, depth: int) -> Any:
    if not isinstance(body, list):
        raise TypeError("not a list")
    return _sequence([decode(item, scope, f"{path}[{i}]", depth) for i, item in enumerate(body)], tuple)


def _torch_member(cls: type) -> Callable[[Any, Scope, str, int], Any]:
    def lookup(name: Any, scope: Scope, path: str, depth: int) -> Any:
        member = getattr(torch, name)
        if not isinstance(member, cls):
            raise ValueError(name)
        return member

    return lookup


def _flag(marker: Any) -> Callable[[Any, Scope, str, int], Any]:
    def check(body: Any, scope: Scope, path: str, depth: int) -> Any:
        if body is not True:
            raise ValueError(body)
        return marker

    return check


def _item(body: Any, scope: Scope, path: str, depth: int) -> Item:
    name, index = body
    if type(index) is not int:
        raise ValueError(index)
    return Item(scope.slot_of(name, path), index)


def _slice(body: Any, scope: Scope, path: str, depth: int) -> Slice:
    start, stop, step = (decode(part, scope, path, depth) for part in body)
    return Slice((start, stop, step))


def order_of(body: Any) -> tuple[int, ...]:
    """An order of dims from JSON. Raises ValueError when it does not name every dim once."""
    order = tuple(body)
    if any(type(d) is not int for d in order) or sorted(order) != list(range(len(order))):
        raise ValueError(f"{body!r:.80} is not an order of dims")
    return order


def _permuted(body: Any, scope: Scope, path: str, depth: int) -> Permuted:
    member, order = body
    return Permuted(decode(member, scope, path, depth), order_of(order))


def _complex(body: Any, scope: Scope, path: str, depth: int) -> complex:
    real, imaginary = (decode(part, scope, path, depth) for part in body)
    return complex(real, imaginary)


_DECODERS: dict[str, Callable[[Any, Scope, str, int], Any]] = {
    "ref": lambda body, scope, path, depth: Ref(scope.slot_of(body, path)),
    "operand": lambda body, scope, path, depth: Ref(scope.slot_of(body, path)),
    "item": _item,
    "dtype": _torch_member(torch.dtype),
    "layout": _torch_member(torch.layout),
    "memory_format": _torch_member(torch.memory_format),
    "device": _flag(Device()),
    "device_type": _flag(Device(type_only=True)),
    "float": lambda body, scope, path, depth: {
        "inf": float("inf"),
        "-inf": float("-inf"),
        "nan": float("nan"),
    }[body],
    "complex": _complex,
    "slice": _slice,
    "tuple": _tuple,
    "dict": lambda body, scope, path, depth: Named(
        tuple((str(k), decode(v, scope, f"{path}.{k}", depth)) for k, v in body.items())
    ),
    "graph": lambda body, scope, path, depth: Body(scope.body_of(body, path)),
    "op": lambda body, scope, path, depth: scope.op_of(body, path),
    "permuted": _permuted,
}


def evaluate(value: Any, env: list[Any], device: torch.device) -> Any:
    """The decoded argument `value` with slots read from `env` and devices set to `device`."""
    kind = type(value)
    if kind is Ref:
        return env[value.slot]
    if kind is Item:
        return env[value.slot][value.index]
    if kind is Many:
        return value.kind([evaluate(member, env, device) for member in value.members])
    if kind is Device:
        return device.type if value.type_only else device
    if kind is Permuted:
        return evaluate(value.member, env, device).permute(value.order)
    if kind is Body:
        return value.program.bound(device)
    if kind is Named:
        return {name: evaluate(member, env, device) for name, member in value.members}
    if kind is Slice:
        return slice(*(evaluate(part, env, device) for part in value.parts))
    return value


def slots(value: Any) -> set[int]:
    """The slots a decoded argument reads."""
    if isinstance(value, Ref | Item):
        return {value.slot}
    if isinstance(value, Permuted):
        return slots(value.member)
    if isinstance(value, Many):
        return set().union(*map(slots, value.members))
    if isinstance(value, Named):
        return set().union(*(slots(member) for _, member in value.members))
    if isinstance(value, Slice):
        return set().union(*map(slots, value.parts))
    return set()
