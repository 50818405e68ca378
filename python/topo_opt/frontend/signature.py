"""The inputs and outputs of a normalized program as plain data."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class InputRecord:
    """One argument of the program.

    `kind`: `param`, `buffer`, `constant` (lifted tensor), `input` (tensor of the caller) or `literal` (number, string or None
    of the caller that the program was specialised to; it is no argument of the function and the runtime checks it).
    `name` is unique; `target` is the name in the state dict or constants, for inputs the name of the placeholder.
    `aliases` are further names of the same tensor (tied weights).
    """

    name: str
    kind: str
    target: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    value: Any = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class OutputRecord:
    """One result. `kind`: `output`, `mutation` (new value of the buffer or input `target`), or `literal` with its `value`.

    For outputs `target` is the position among the flattened outputs of the module, as text.
    """

    kind: str
    target: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    value: Any = None


@dataclass(frozen=True)
class DimRecord:
    """A dynamic dim: its name, range, size in the example (None when unknown), and where it shows: ((input, dim, expr) ...)."""

    name: str
    symbol: str
    min: int
    max: int | None
    example: int | None
    uses: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True)
class Signature:
    """What a caller of the program must know. All fields are plain data."""

    inputs: tuple[InputRecord, ...]
    outputs: tuple[OutputRecord, ...]
    in_tree: dict[str, Any]
    out_tree: dict[str, Any]
    dims: tuple[DimRecord, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """As dictionaries and lists."""
        return asdict(self)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def tree_as_json(spec: Any) -> dict[str, Any]:
    """A pytree spec as data: `{"type": "tuple"|"list"|"dict"|"namedtuple"|"object"|"leaf"|"none", "keys", "class", "children"}`.

    `dict` and `object` have `keys` (the fields of a dataclass-like output); `object` and `namedtuple` name their `class`.
    """
    if spec.is_leaf():
        return {"type": "leaf"}
    children = [tree_as_json(child) for child in spec.children()]
    name = getattr(spec.type, "__name__", str(spec.type))
    qualified = f"{getattr(spec.type, '__module__', '')}.{getattr(spec.type, '__qualname__', name)}"
    if name in ("tuple", "list"):
        return {"type": name, "children": children}
    if name in ("dict", "OrderedDict", "defaultdict"):
        return {"type": "dict", "keys": _keys(spec.context), "children": children}
    if name == "namedtuple" or hasattr(spec.type, "_fields"):
        cls: Any = spec.context if isinstance(spec.context, type) else spec.type
        return {"type": "namedtuple", "class": f"{cls.__module__}.{cls.__qualname__}",
                "keys": list(cls._fields), "children": children}  # fmt: skip
    return {"type": "object", "class": qualified, "keys": _keys(spec.context), "children": children}


def _keys(context: Any) -> list[Any] | None:
    """The field names in a pytree context: a list of keys, possibly nested as dataclasses and defaultdicts do."""
    if isinstance(context, Mapping):
        context = list(context)
    if isinstance(context, list | tuple):
        flat = [k for k in context if isinstance(k, str | int)]
        if len(flat) == len(context):
            return flat
        nested = [_keys(k) for k in context if isinstance(k, list | tuple) and k]
        return nested[0] if nested else None
    return None
