"""The caller's arguments to a flat list of leaves, and a flat list of results back to the caller's structure.

Trees are JSON: `{"type": "tuple"|"list"|"dict"|"namedtuple"|"object"|"leaf"|"none", "keys", "class", "children"}`. A class
that the calling process has imported is made again (the output class of a transformers model, say); one that is not there
becomes `Outputs`, a dictionary whose keys can also be read as attributes. Nothing is ever imported by name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from topo_opt.errors import InputError, UntrustedError

CONTAINERS = ("tuple", "list", "dict", "namedtuple", "object")
KINDS = (*CONTAINERS, "leaf", "none")
MAX_DEPTH = 64


class Outputs(dict):
    """Results with names: `out["logits"]`, `out.logits` and `out[0]` are the same."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"there is no output {name!r}, there are {', '.join(map(str, self))}")

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int | slice) and key not in _keys_of(self):
            return tuple(self.values())[key]
        return super().__getitem__(key)

    def to_tuple(self) -> tuple[Any, ...]:
        """All results in order."""
        return tuple(self.values())


def check_tree(tree: Any, where: str, depth: int = 0) -> None:
    """Raises `UntrustedError` when `tree` is not a tree."""
    if depth > MAX_DEPTH:
        raise UntrustedError(f"{where} is nested too deeply")
    if not isinstance(tree, dict) or tree.get("type") not in KINDS:
        raise UntrustedError(f"{where} is not a tree")
    children, keys = tree.get("children", []), tree.get("keys")
    if not isinstance(children, list) or (children and tree["type"] not in CONTAINERS):
        raise UntrustedError(f"{where}.children should be a list")
    if keys is not None and (
        not isinstance(keys, list)
        or len(keys) != len(children)
        or not all(type(k) in (str, int) for k in keys)
    ):
        raise UntrustedError(f"{where}.keys should be one name a child")
    if keys is None and tree["type"] in ("dict", "namedtuple"):
        raise UntrustedError(f"{where}.keys is missing")
    if not isinstance(tree.get("class", ""), str):
        raise UntrustedError(f"{where}.class should be text")
    for i, child in enumerate(children):
        check_tree(child, f"{where}.children[{i}]", depth + 1)


def count_leaves(tree: Any) -> int:
    """Number of leaves under `tree`."""
    if tree["type"] == "leaf":
        return 1
    return sum(count_leaves(c) for c in tree.get("children", ()))


def flatten(tree: Any, value: Any, where: str) -> list[Any]:
    """The leaves of `value` in the order of `tree`; raises `InputError` where the structure differs."""
    kind = tree["type"]
    if kind == "leaf":
        return [value]
    if kind == "none":
        if value is not None:
            raise InputError(
                f"{where} was None when the model was exported, it is a {type(value).__name__} now"
            )
        return []
    children = _children(tree, value, where)
    out: list[Any] = []
    for i, (child, item) in enumerate(zip(tree["children"], children)):
        out += flatten(child, item, _name(tree, where, i))
    return out


def _children(tree: Any, value: Any, where: str) -> list[Any]:
    kind, count, keys = tree["type"], len(tree["children"]), tree.get("keys")
    if kind in ("tuple", "list", "namedtuple"):
        if not isinstance(value, (tuple, list)) or len(value) != count:
            raise InputError(f"{where} should be a {kind} of {count}, not {_shape_of(value)}")
        return list(value)
    if isinstance(value, Mapping):
        if keys is None or set(value) != set(keys):
            raise InputError(f"{where} should have the keys {_listed(keys)}, not {_listed(list(value))}")
        return [value[k] for k in keys]
    if kind == "object" and keys is not None and all(isinstance(k, str) and hasattr(value, k) for k in keys):
        return [getattr(value, k) for k in keys]
    if kind == "object":
        return _registered_children(tree, value, where)
    raise InputError(f"{where} should be a {kind}, not {_shape_of(value)}")


def _registered_children(tree: Any, value: Any, where: str) -> list[Any]:
    from torch.utils import _pytree

    name = f"{type(value).__module__}.{type(value).__qualname__}"
    node = _pytree.SUPPORTED_NODES.get(type(value))
    if node is None or name != tree.get("class"):
        raise InputError(f"{where} should be a {tree.get('class')}, not a {name}")
    children, _ = node.flatten_fn(value)
    if len(list(children)) != len(tree["children"]):
        raise InputError(
            f"{where} has {len(list(children))} parts, it had {len(tree['children'])} when exported"
        )
    return list(children)


def flatten_call(tree: Any, names: Sequence[str], args: tuple, kwargs: Mapping[str, Any]) -> list[Any]:
    """The leaves of a call. `tree` is that of `(args, kwargs)`, `names` one name a leaf.

    An argument may be given by position or by name, whichever way the model was exported.
    """
    if tree is None:
        return _by_name(names, args, kwargs)
    positional, named = tree["children"]
    slots = [(f"argument {i}", c) for i, c in enumerate(positional["children"])]
    slots += [(str(k), c) for k, c in zip(named.get("keys") or (), named["children"])]
    labels = _slot_names(slots, names)
    if len(args) > len(slots):
        raise InputError(f"the function takes {len(slots)} arguments ({', '.join(labels)}), got {len(args)}")
    given = dict(zip(labels, args))
    for key, value in kwargs.items():
        if key in given or key not in labels:
            what = "twice" if key in given else "but it has no such argument"
            raise InputError(f"the function was given {key!r} {what}; it takes {', '.join(labels)}")
        given[key] = value
    out: list[Any] = []
    for label, (_, child) in zip(labels, slots):
        if label not in given and count_leaves(child) == 0:
            continue
        if label not in given:
            raise InputError(f"the argument {label!r} is missing; the function takes {', '.join(labels)}")
        out += flatten(child, given[label], label)
    return out


def argument_names(tree: Any, names: Sequence[str]) -> list[str]:
    """One name an argument of a call with the tree `tree` (not None) and one name a leaf, as `flatten_call` takes them."""
    positional, named = tree["children"]
    slots = [(f"argument {i}", c) for i, c in enumerate(positional["children"])]
    slots += [(str(k), c) for k, c in zip(named.get("keys") or (), named["children"])]
    return _slot_names(slots, names)


def _slot_names(slots: Sequence[tuple[str, Any]], names: Sequence[str]) -> list[str]:
    """A name for every argument: the keyword, or the name of its leaf."""
    out, at = [], 0
    for label, child in slots:
        single = child["type"] == "leaf" and label.startswith("argument ") and at < len(names)
        out.append(names[at] if single else label)
        at += count_leaves(child)
    return out


def _by_name(names: Sequence[str], args: tuple, kwargs: Mapping[str, Any]) -> list[Any]:
    given = dict(zip(names, args))
    if len(args) > len(names) or (set(kwargs) - set(names)) or (set(kwargs) & set(given)):
        raise InputError(f"the function takes {len(names)} arguments: {', '.join(names)}")
    given.update(kwargs)
    if missing := [n for n in names if n not in given]:
        raise InputError(f"the argument {missing[0]!r} is missing; the function takes {', '.join(names)}")
    return [given[n] for n in names]


def unflatten(tree: Any, leaves: Sequence[Any]) -> Any:
    """The value of `tree` with these leaves."""
    remaining = iter(leaves)
    return _build(tree, remaining)


def _build(tree: Any, leaves: Any) -> Any:
    kind = tree["type"]
    if kind == "leaf":
        return next(leaves)
    if kind == "none":
        return None
    children, keys = [_build(c, leaves) for c in tree["children"]], tree.get("keys")
    if kind == "tuple":
        return tuple(children)
    if kind == "list":
        return children
    if kind == "dict":
        return dict(zip(keys, children))
    return _make(tree.get("class", ""), kind, keys, children)


def _make(name: str, kind: str, keys: list[Any] | None, children: list[Any]) -> Any:
    """The caller's own class, when it is already imported and is one that torch knows how to take apart."""
    from torch.utils import _pytree

    module, _, qualname = name.rpartition(".")
    cls = getattr(sys.modules.get(module), qualname, None)
    named = keys is not None and all(isinstance(k, str) for k in keys)
    known = isinstance(cls, type) and (
        cls in _pytree.SUPPORTED_NODES or (kind == "namedtuple" and issubclass(cls, tuple))
    )
    if known and named and cls is not None:
        return cls(**dict(zip(keys or (), children)))
    if keys is not None:
        return Outputs(zip(keys, children))
    return tuple(children)


def _keys_of(mapping: Mapping[Any, Any]) -> Any:
    return mapping.keys()


def _name(tree: Any, where: str, index: int) -> str:
    keys = tree.get("keys")
    return f"{where}[{keys[index]!r}]" if keys else f"{where}[{index}]"


def _shape_of(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"{type(value).__name__}{size}"


def _listed(keys: list[Any] | None) -> str:
    return ", ".join(map(str, keys or ())) or "(none)"
