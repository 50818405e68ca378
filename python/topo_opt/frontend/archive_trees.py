"""Tree specs of a model file: JSON inside a string, from which torch imports modules by name."""

import json
import re
from typing import Any

from topo_opt.frontend.archive_checks import QUALIFIED_NAME, STRING, Refused, identifier, shown

_FACTORIES = frozenset(["list", "dict", "int", "float", "set", "str", "tuple", "bool"])
_TYPE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


def tree_types(text: str) -> set[str]:
    """The types a tree spec names, for loading the libraries that register them. `text` has passed `tree_spec`."""
    found: set[str] = set()
    pending = [json.loads(text)[1]]
    while pending:
        node = pending.pop()
        if node["type"] is not None:
            found.add(node["type"])
        pending += node["children_spec"]
    return found


def tree_spec(value: Any) -> None:
    """A pytree spec of plain containers and registered types; no enums and no factories, which name modules to import."""
    STRING(value)
    try:
        document = json.loads(value)
    except (ValueError, RecursionError):
        raise Refused("is not a tree spec") from None
    if not isinstance(document, list) or len(document) != 2 or document[0] != 1:
        raise Refused("is not a tree spec of version 1")
    _tree_node(document[1], 0)


def argument_spec(value: Any) -> None:
    """The tree spec of the inputs: a tuple of arguments and a dictionary whose keys become names in generated source."""
    tree_spec(value)
    root = json.loads(value)[1]
    children = root["children_spec"]
    if root["type"] == "builtins.tuple" and len(children) == 2 and children[1]["type"] == "builtins.dict":
        for key in json.loads(children[1]["context"]):
            identifier(key)


def _tree_node(node: Any, depth: int) -> None:
    if depth > 64:
        raise Refused("is nested deeper than 64")
    if not isinstance(node, dict) or set(node) != {"type", "context", "children_spec"}:
        raise Refused("has a node that is not type, context and children_spec")
    kind, context, children = node["type"], node["context"], node["children_spec"]
    if not isinstance(children, list):
        raise Refused("has children that are not a list")
    if kind is not None:
        if not isinstance(kind, str) or not _TYPE_NAME.fullmatch(kind):
            raise Refused(f"has the type {shown(kind)}")
        if kind == "collections.defaultdict":
            _default_dict(context)
        else:
            _context(context)
    elif context is not None or children:
        raise Refused("has a leaf with contents")
    for child in children:
        _tree_node(child, depth + 1)


def _default_dict(context: Any) -> None:
    if not isinstance(context, dict) or context.get("default_factory_module") != "builtins":
        raise Refused("has a defaultdict with a factory that is not a builtin")
    if context.get("default_factory_name") not in _FACTORIES:
        raise Refused(f"has a defaultdict with the factory {shown(context.get('default_factory_name'))}")
    _context_value(context.get("dict_context"), 0)


def _context(context: Any) -> None:
    try:
        value = json.loads(context) if isinstance(context, str) else context
    except (ValueError, RecursionError):
        value = context  # a registered type with a format of its own
    _context_value(value, 0)


def _context_value(value: Any, depth: int) -> None:
    if depth > 32:
        raise Refused("has a context nested deeper than 32")
    if isinstance(value, str):
        QUALIFIED_NAME(value)
    elif isinstance(value, list):
        for item in value:
            _context_value(item, depth + 1)
    elif isinstance(value, dict):
        if "__enum__" in value:
            raise Refused("has an enum, which would import a module by name")
        for name, item in value.items():
            _context_value(name, depth + 1)
            _context_value(item, depth + 1)
