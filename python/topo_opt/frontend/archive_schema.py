"""The JSON of a `.pt2` as a table: what each field may hold. Follows torch.export's schema, major version 8.

torch turns many of these strings into code: node, argument and graph names go into generated Python source, `target` is
resolved by attribute access, tree specs import modules by name. So each string has the narrowest form that torch writes.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from topo_opt.aten_allowlist import PYTHON_FUNCTIONS, refusal
from topo_opt.frontend.archive_checks import (
    BOOL,
    INT,
    NAME,
    OPTIONAL_NAME,
    QUALIFIED_NAME,
    STRING,
    Check,
    Refused,
    forbidden,
    integer_64,
    list_of,
    map_of,
    number,
    numbers,
    optional,
    shown,
    struct_of,
    text,
    union_of,
)
from topo_opt.frontend.archive_expr import BadExpression, check_expression, check_guard
from topo_opt.frontend.archive_trees import argument_spec, tree_spec

# Namespaces of operators the caller trusts beyond the list, while a program is checked.
_EXTRA: ContextVar[frozenset[str]] = ContextVar("extra_namespaces", default=frozenset())


def operator_target(value: Any) -> None:
    """`torch.ops.<namespace>.<name>.<overload>`, `torch.ops.higher_order.<name>` or a Python function on sizes."""
    if not isinstance(value, str):
        raise Refused(f"is {shown(value)}, not an operator")
    name = value.removeprefix("torch.ops.")
    if name == value:
        name = value.removeprefix("_") if value.startswith("_operator.") else value
        reason = None if name in PYTHON_FUNCTIONS else "is not on the list of functions"
    else:
        reason = refusal(name, _EXTRA.get())
    if reason is not None:
        raise Refused(f"is {shown(value)}, which {reason}")


def _expression(checker: Callable[[str], None]) -> Check:
    def check(value: Any) -> None:
        if not isinstance(value, str):
            raise Refused(f"is {shown(value)}, not an expression")
        try:
            checker(value)
        except BadExpression as exc:
            raise Refused(f"is {shown(value)}, which {exc}") from None

    return check


def _later(name: str) -> Check:
    """A reference to a check that is defined further down (graphs hold graphs)."""
    return lambda value: _NAMED[name](value)


# The schema

_DEVICE = struct_of(type=text(r"[a-z0-9_]{1,32}", "a device type"), index_=optional(INT))
_HINT = union_of(as_int=integer_64, as_bool=BOOL, as_float=number)
_SYM_EXPR = struct_of(expr_str=_expression(check_expression), hint_=optional(_HINT))
_SYM_INT = union_of(as_expr=_SYM_EXPR, as_int=integer_64)
_SYM_FLOAT = union_of(as_expr=_SYM_EXPR, as_float=number)
_SYM_BOOL = union_of(as_expr=_SYM_EXPR, as_bool=BOOL)
_TENSOR_META = struct_of(
    dtype=INT,
    sizes=list_of(_SYM_INT),
    requires_grad=BOOL,
    device=_DEVICE,
    strides=list_of(_SYM_INT),
    storage_offset=_SYM_INT,
    layout=INT,
)
_SYM_INT_ARGUMENT = union_of(as_name=NAME, as_int=integer_64)
_SYM_FLOAT_ARGUMENT = union_of(as_name=NAME, as_float=number)
_SYM_BOOL_ARGUMENT = union_of(as_name=NAME, as_bool=BOOL)
_TENSOR = struct_of(name=OPTIONAL_NAME)
_TOKEN = struct_of(name=OPTIONAL_NAME)
_OPTIONAL_TENSOR = union_of(as_tensor=_TENSOR, as_none=BOOL)
_CUSTOM_OBJECT = forbidden("is a custom object, which is stored as a pickle")
_ARGUMENT = union_of(
    as_none=BOOL,
    as_tensor=_TENSOR,
    as_tensors=list_of(_TENSOR),
    as_int=integer_64,
    as_ints=list_of(integer_64),
    as_float=number,
    as_floats=numbers,
    as_string=STRING,
    as_strings=list_of(STRING),
    as_sym_int=_SYM_INT_ARGUMENT,
    as_sym_ints=list_of(_SYM_INT_ARGUMENT),
    as_scalar_type=INT,
    as_memory_format=INT,
    as_layout=INT,
    as_device=_DEVICE,
    as_bool=BOOL,
    as_bools=list_of(BOOL),
    as_sym_bool=_SYM_BOOL_ARGUMENT,
    as_sym_bools=list_of(_SYM_BOOL_ARGUMENT),
    as_graph=struct_of(name=NAME, graph=_later("Graph")),
    as_optional_tensors=list_of(_OPTIONAL_TENSOR),
    as_custom_obj=_CUSTOM_OBJECT,
    as_operator=operator_target,
    as_sym_float=_SYM_FLOAT_ARGUMENT,
    as_sym_floats=list_of(_SYM_FLOAT_ARGUMENT),
    as_optional_tensor=_OPTIONAL_TENSOR,
    as_complex=struct_of(real=number, imag=number),
    as_nested_tensors=list_of(list_of(_TENSOR)),
    as_int_lists=list_of(list_of(integer_64)),
    as_string_to_argument=map_of(NAME, _later("Argument")),
    as_float_lists=list_of(numbers),
)
_NODE = struct_of(
    target=operator_target,
    inputs=list_of(struct_of(name=OPTIONAL_NAME, arg=_ARGUMENT, kind_=optional(INT))),
    outputs=list_of(_ARGUMENT),
    metadata=map_of(STRING, STRING),
    is_hop_single_tensor_return_=optional(BOOL),
    name_=optional(NAME),
)
_GRAPH = struct_of(
    inputs=list_of(_ARGUMENT),
    outputs=list_of(_ARGUMENT),
    nodes=list_of(_NODE),
    tensor_values=map_of(OPTIONAL_NAME, _TENSOR_META),
    sym_int_values=map_of(NAME, _SYM_INT),
    sym_bool_values=map_of(NAME, _SYM_BOOL),
    is_single_tensor_return_=BOOL,
    custom_obj_values_=map_of(NAME, _CUSTOM_OBJECT),
    sym_float_values_=map_of(NAME, _SYM_FLOAT),
)
_CONSTANT = union_of(as_none=BOOL, as_int=integer_64, as_float=number, as_string=STRING, as_bool=BOOL)
_INPUT_SPEC = union_of(
    user_input=struct_of(arg=_ARGUMENT),
    parameter=struct_of(arg=_TENSOR, parameter_name=QUALIFIED_NAME),
    buffer=struct_of(arg=_TENSOR, buffer_name=QUALIFIED_NAME, persistent=BOOL),
    tensor_constant=struct_of(arg=_TENSOR, tensor_constant_name=QUALIFIED_NAME),
    custom_obj=_CUSTOM_OBJECT,
    token=struct_of(arg=_TOKEN),
    constant_input=struct_of(name=NAME, value=_CONSTANT),
)
_OUTPUT_SPEC = union_of(
    user_output=struct_of(arg=_ARGUMENT),
    loss_output=struct_of(arg=_TENSOR),
    buffer_mutation=struct_of(arg=_TENSOR, buffer_name=QUALIFIED_NAME),
    gradient_to_parameter=struct_of(arg=_TENSOR, parameter_name=QUALIFIED_NAME),
    gradient_to_user_input=struct_of(arg=_TENSOR, user_input_name=NAME),
    user_input_mutation=struct_of(arg=_TENSOR, user_input_name=NAME),
    token=struct_of(arg=_TOKEN),
    parameter_mutation=struct_of(arg=_TENSOR, parameter_name=QUALIFIED_NAME),
)
_CALL_SIGNATURE = struct_of(
    inputs=list_of(_ARGUMENT),
    outputs=list_of(_ARGUMENT),
    in_spec=argument_spec,
    out_spec=tree_spec,
    forward_arg_names_=optional(list_of(NAME)),
)
_GRAPH_MODULE = struct_of(
    graph=_GRAPH,
    signature=struct_of(input_specs=list_of(_INPUT_SPEC), output_specs=list_of(_OUTPUT_SPEC)),
    module_call_graph=list_of(struct_of(fqn=QUALIFIED_NAME, signature_=optional(_CALL_SIGNATURE))),
    metadata_=map_of(STRING, STRING),
    treespec_namedtuple_fields_=map_of(QUALIFIED_NAME, struct_of(field_names=list_of(NAME))),
)
_PROGRAM = struct_of(
    graph_module=_GRAPH_MODULE,
    opset_version=map_of(NAME, INT),
    range_constraints=map_of(
        _expression(check_expression), struct_of(min_val_=optional(integer_64), max_val_=optional(integer_64))
    ),
    schema_version=struct_of(major=INT, minor=INT),
    verifiers_=list_of(text(r"[A-Za-z_]{0,32}", "a verifier")),
    torch_version_=text(r"[A-Za-z0-9_.+<=\-]{0,64}", "a version"),
    guards_code_=list_of(_expression(check_guard)),
)
_PAYLOADS = struct_of(
    config=map_of(
        QUALIFIED_NAME,
        struct_of(
            path_name=text(r"[A-Za-z0-9_.\-]{1,255}", "the name of an entry"),
            is_param=BOOL,
            use_pickle=BOOL,
            tensor_meta=optional(_TENSOR_META),
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
