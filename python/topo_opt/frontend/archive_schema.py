"""The JSON of a `.pt2` as a table: what each field may hold. Follows torch.export's schema, major version 8.

torch turns many of these strings into code: node, argument and graph names go into generated Python source, `target` is
resolved by attribute access, tree specs import modules by name. So each string has the narrowest form that torch writes.
"""

import json
import keyword
import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from topo_opt.aten_allowlist import PYTHON_FUNCTIONS, refusal
from topo_opt.frontend.archive_expr import BadExpression, check_expression, check_guard

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


def _kind(cls: type | tuple[type, ...], name: str) -> Check:
    def check(value: Any) -> None:
        if not isinstance(value, cls) or (isinstance(value, bool) and cls is int):
            raise Refused(f"is {_shown(value)}, not {name}")

    return check


def _optional(inner: Check) -> Check:
    return lambda value: None if value is None else inner(value)


def _list(inner: Check) -> Check:
    def check(value: Any) -> None:
        if not isinstance(value, list):
            raise Refused(f"is {_shown(value)}, not a list")
        for index, item in enumerate(value):
            try:
                inner(item)
            except Refused as exc:
                exc.path.insert(0, f"[{index}]")
                raise

    return check


def _map(key: Check, inner: Check) -> Check:
    def check(value: Any) -> None:
        if not isinstance(value, dict):
            raise Refused(f"is {_shown(value)}, not an object")
        for name, item in value.items():
            try:
                key(name)
                inner(item)
            except Refused as exc:
                exc.path.insert(0, f".{name[:60]}")
                raise

    return check


def _struct(**fields: Check) -> Check:
    """An object with these fields; a trailing underscore marks one that may be missing."""
    table = {name.rstrip("_"): check for name, check in fields.items()}
    needed = [name for name in fields if not name.endswith("_")]

    def check(value: Any) -> None:
        if not isinstance(value, dict):
            raise Refused(f"is {_shown(value)}, not an object")
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


def _union(**cases: Check) -> Check:
    def check(value: Any) -> None:
        if not isinstance(value, dict) or len(value) != 1:
            raise Refused(f"is {_shown(value)}, not an object with one field")
        ((name, item),) = value.items()
        if name not in cases:
            raise Refused(f"is of the unknown kind '{name[:60]}'")
        try:
            cases[name](item)
        except Refused as exc:
            exc.path.insert(0, f".{name}")
            raise

    return check


def _later(name: str) -> Check:
    """A reference to a check that is defined further down (graphs hold graphs)."""
    return lambda value: _NAMED[name](value)


def _forbidden(reason: str) -> Check:
    def check(value: Any) -> None:
        raise Refused(reason)

    return check


def _shown(value: Any) -> str:
    return f"{json.dumps(value)[:60]}"


# Strings


def _text(pattern: str, name: str) -> Check:
    compiled = re.compile(pattern)

    def check(value: Any) -> None:
        if not isinstance(value, str) or not compiled.fullmatch(value):
            raise Refused(f"is {_shown(value)}, not {name}")

    return check


def identifier(value: Any) -> None:
    """A name that can stand in generated Python source."""
    if (
        not isinstance(value, str)
        or not (value.isascii() and value.isidentifier())
        or keyword.iskeyword(value)
    ):
        raise Refused(f"is {_shown(value)}, not an identifier")


# Namespaces of operators the caller trusts beyond the list, while a program is checked.
_EXTRA: ContextVar[frozenset[str]] = ContextVar("extra_namespaces", default=frozenset())


def operator_target(value: Any) -> None:
    """`torch.ops.<namespace>.<name>.<overload>`, `torch.ops.higher_order.<name>` or a Python function on sizes."""
    if not isinstance(value, str):
        raise Refused(f"is {_shown(value)}, not an operator")
    name = value.removeprefix("torch.ops.")
    if name == value:
        name = value.removeprefix("_") if value.startswith("_operator.") else value
        reason = None if name in PYTHON_FUNCTIONS else "is not on the list of functions"
    else:
        reason = refusal(name, _EXTRA.get())
    if reason is not None:
        raise Refused(f"is {_shown(value)}, which {reason}")


def _expression(checker: Callable[[str], None]) -> Check:
    def check(value: Any) -> None:
        if not isinstance(value, str):
            raise Refused(f"is {_shown(value)}, not an expression")
        try:
            checker(value)
        except BadExpression as exc:
            raise Refused(f"is {_shown(value)}, which {exc}") from None

    return check


def _range(value: Any) -> None:
    _INT(value)
    if abs(value) >= 1 << 64:
        raise Refused("is out of range")


_INT = _kind(int, "an integer")
_BOOL = _kind(bool, "true or false")
_STRING = _kind(str, "a string")
_NUMBER = _kind((int, float), "a number")
_NAME = identifier
_OPTIONAL_NAME = _text(r"|[A-Za-z_][A-Za-z0-9_]*", "a name")
# Names of parameters and modules: no quotes or control characters, since they come to stand in source and file names.
QUALIFIED_NAME = _text(r"[^\"'\\\x00-\x1f\x7f{}]{0,1024}", "the name of a parameter or module")


def _float(value: Any) -> None:
    if isinstance(value, str) and value in ("Infinity", "-Infinity", "NaN"):
        return
    _NUMBER(value)


def _floats(value: Any) -> None:
    _list(_float)(value)


# Tree specs: JSON inside a string

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
    _STRING(value)
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
            raise Refused(f"has the type {_shown(kind)}")
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
        raise Refused(f"has a defaultdict with the factory {_shown(context.get('default_factory_name'))}")
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


# The schema

_DEVICE = _struct(type=_text(r"[a-z0-9_]{1,32}", "a device type"), index_=_optional(_INT))
_HINT = _union(as_int=_range, as_bool=_BOOL, as_float=_float)
_SYM_EXPR = _struct(expr_str=_expression(check_expression), hint_=_optional(_HINT))
_SYM_INT = _union(as_expr=_SYM_EXPR, as_int=_range)
_SYM_FLOAT = _union(as_expr=_SYM_EXPR, as_float=_float)
_SYM_BOOL = _union(as_expr=_SYM_EXPR, as_bool=_BOOL)
_TENSOR_META = _struct(
    dtype=_INT,
    sizes=_list(_SYM_INT),
    requires_grad=_BOOL,
    device=_DEVICE,
    strides=_list(_SYM_INT),
    storage_offset=_SYM_INT,
    layout=_INT,
)
_SYM_INT_ARGUMENT = _union(as_name=_NAME, as_int=_range)
_SYM_FLOAT_ARGUMENT = _union(as_name=_NAME, as_float=_float)
_SYM_BOOL_ARGUMENT = _union(as_name=_NAME, as_bool=_BOOL)
_TENSOR = _struct(name=_OPTIONAL_NAME)
_TOKEN = _struct(name=_OPTIONAL_NAME)
_OPTIONAL_TENSOR = _union(as_tensor=_TENSOR, as_none=_BOOL)
_CUSTOM_OBJECT = _forbidden("is a custom object, which is stored as a pickle")
_ARGUMENT = _union(
    as_none=_BOOL,
    as_tensor=_TENSOR,
    as_tensors=_list(_TENSOR),
    as_int=_range,
    as_ints=_list(_range),
    as_float=_float,
    as_floats=_floats,
    as_string=_STRING,
    as_strings=_list(_STRING),
    as_sym_int=_SYM_INT_ARGUMENT,
    as_sym_ints=_list(_SYM_INT_ARGUMENT),
    as_scalar_type=_INT,
    as_memory_format=_INT,
    as_layout=_INT,
    as_device=_DEVICE,
    as_bool=_BOOL,
    as_bools=_list(_BOOL),
    as_sym_bool=_SYM_BOOL_ARGUMENT,
    as_sym_bools=_list(_SYM_BOOL_ARGUMENT),
    as_graph=_struct(name=_NAME, graph=_later("Graph")),
    as_optional_tensors=_list(_OPTIONAL_TENSOR),
    as_custom_obj=_CUSTOM_OBJECT,
    as_operator=operator_target,
    as_sym_float=_SYM_FLOAT_ARGUMENT,
    as_sym_floats=_list(_SYM_FLOAT_ARGUMENT),
    as_optional_tensor=_OPTIONAL_TENSOR,
    as_complex=_struct(real=_float, imag=_float),
    as_nested_tensors=_list(_list(_TENSOR)),
    as_int_lists=_list(_list(_range)),
    as_string_to_argument=_map(_NAME, _later("Argument")),
    as_float_lists=_list(_floats),
)
_NODE = _struct(
    target=operator_target,
    inputs=_list(_struct(name=_OPTIONAL_NAME, arg=_ARGUMENT, kind_=_optional(_INT))),
    outputs=_list(_ARGUMENT),
    metadata=_map(_STRING, _STRING),
    is_hop_single_tensor_return_=_optional(_BOOL),
    name_=_optional(_NAME),
)
_GRAPH = _struct(
    inputs=_list(_ARGUMENT),
    outputs=_list(_ARGUMENT),
    nodes=_list(_NODE),
    tensor_values=_map(_OPTIONAL_NAME, _TENSOR_META),
    sym_int_values=_map(_NAME, _SYM_INT),
    sym_bool_values=_map(_NAME, _SYM_BOOL),
    is_single_tensor_return_=_BOOL,
    custom_obj_values_=_map(_NAME, _CUSTOM_OBJECT),
    sym_float_values_=_map(_NAME, _SYM_FLOAT),
)
_CONSTANT = _union(as_none=_BOOL, as_int=_range, as_float=_float, as_string=_STRING, as_bool=_BOOL)
_INPUT_SPEC = _union(
    user_input=_struct(arg=_ARGUMENT),
    parameter=_struct(arg=_TENSOR, parameter_name=QUALIFIED_NAME),
    buffer=_struct(arg=_TENSOR, buffer_name=QUALIFIED_NAME, persistent=_BOOL),
    tensor_constant=_struct(arg=_TENSOR, tensor_constant_name=QUALIFIED_NAME),
    custom_obj=_CUSTOM_OBJECT,
    token=_struct(arg=_TOKEN),
    constant_input=_struct(name=_NAME, value=_CONSTANT),
)
_OUTPUT_SPEC = _union(
    user_output=_struct(arg=_ARGUMENT),
    loss_output=_struct(arg=_TENSOR),
    buffer_mutation=_struct(arg=_TENSOR, buffer_name=QUALIFIED_NAME),
    gradient_to_parameter=_struct(arg=_TENSOR, parameter_name=QUALIFIED_NAME),
    gradient_to_user_input=_struct(arg=_TENSOR, user_input_name=_NAME),
    user_input_mutation=_struct(arg=_TENSOR, user_input_name=_NAME),
    token=_struct(arg=_TOKEN),
    parameter_mutation=_struct(arg=_TENSOR, parameter_name=QUALIFIED_NAME),
)
_CALL_SIGNATURE = _struct(
    inputs=_list(_ARGUMENT),
    outputs=_list(_ARGUMENT),
    in_spec=argument_spec,
    out_spec=tree_spec,
    forward_arg_names_=_optional(_list(_NAME)),
)
_GRAPH_MODULE = _struct(
    graph=_GRAPH,
    signature=_struct(input_specs=_list(_INPUT_SPEC), output_specs=_list(_OUTPUT_SPEC)),
    module_call_graph=_list(_struct(fqn=QUALIFIED_NAME, signature_=_optional(_CALL_SIGNATURE))),
    metadata_=_map(_STRING, _STRING),
    treespec_namedtuple_fields_=_map(QUALIFIED_NAME, _struct(field_names=_list(_NAME))),
)
_PROGRAM = _struct(
    graph_module=_GRAPH_MODULE,
    opset_version=_map(_NAME, _INT),
    range_constraints=_map(
        _expression(check_expression), _struct(min_val_=_optional(_range), max_val_=_optional(_range))
    ),
    schema_version=_struct(major=_INT, minor=_INT),
    verifiers_=_list(_text(r"[A-Za-z_]{0,32}", "a verifier")),
    torch_version_=_text(r"[A-Za-z0-9_.+<=\-]{0,64}", "a version"),
    guards_code_=_list(_expression(check_guard)),
)
_PAYLOADS = _struct(
    config=_map(
        QUALIFIED_NAME,
        _struct(
            path_name=_text(r"[A-Za-z0-9_.\-]{1,255}", "the name of an entry"),
            is_param=_BOOL,
            use_pickle=_BOOL,
            tensor_meta=_optional(_TENSOR_META),
        ),
    )
)

_NAMED: dict[str, Check] = {"Graph": _GRAPH, "Argument": _ARGUMENT}


def check_program(document: Any, extra_namespaces: frozenset[str] = frozenset()) -> None:
    """Raises Refused unless `document` is an exported program that only names what is on the lists."""
    token = _EXTRA.set(extra_namespaces)
    try:
        _PROGRAM(document)
    finally:
        _EXTRA.reset(token)


def check_payloads(document: Any) -> None:
    """Raises Refused unless `document` is a weights or constants configuration."""
    _PAYLOADS(document)
