"""Which operators a model file or a bundle may name. Imports nothing, so that a scan can use it before torch is loaded.

An operator is written `namespace.name.overload` (looked up under `torch.ops`), `higher_order.name`, or `module.function`
for the Python functions that `torch.export` emits on sizes.
"""

import re

NAMESPACES = frozenset(
    {
        "aten",
        "prims",
        "prim",
        "quantized_decomposed",
        "rngprims",
        "torchvision",
        "transformers",
        "transformers_msa",
    }
)

# Operators of these namespaces that reach files or raw memory, or trust what they are told about it.
DENIED = frozenset(
    {
        "aten.from_file",
        "aten.set",
        "aten.set_",
        "aten.record_stream",
        "aten._nested_view_from_buffer",
        "aten._nested_view_from_buffer_copy",
        "aten._nested_view_from_jagged",
        "aten._nested_view_from_jagged_copy",
        "aten._sparse_bsc_tensor_unsafe",
        "aten._sparse_bsr_tensor_unsafe",
        "aten._sparse_compressed_tensor_unsafe",
        "aten._sparse_coo_tensor_unsafe",
        "aten._sparse_csc_tensor_unsafe",
        "aten._sparse_csr_tensor_unsafe",
        "aten._print",
    }
)

HIGHER_ORDER = frozenset(
    {
        "associative_scan",
        "auto_functionalized",
        "auto_functionalized_v2",
        "cond",
        "flex_attention",
        "foreach_map",
        "hints_wrapper",
        "invoke_subgraph",
        "map_impl",
        "out_dtype",
        "run_const_graph",
        "scan",
        "strict_mode",
        "tag_activation_checkpoint",
        "while_loop",
        "wrap",
        "wrap_activation_checkpoint",
        "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
    }
)

_OPERATOR = """abs add and_ eq floordiv ge getitem gt index inv invert le lshift lt mod mul ne neg not_ or_ pos pow
rshift sub truediv xor"""
_MATH = "acos asin atan ceil cos cosh exp floor log log2 pow sin sinh sqrt tan tanh trunc"
_TORCH = """sym_float sym_fresh_size sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum _sym_acos _sym_asin
_sym_atan _sym_cos _sym_cosh _sym_exp _sym_log2 _sym_sin _sym_sinh _sym_sqrt _sym_tan _sym_tanh tensor"""
_BUILTINS = "abs bool float int max min round"

PYTHON_FUNCTIONS = frozenset(
    f"{module}.{name}"
    for module, names in {
        "operator": _OPERATOR,
        "math": _MATH,
        "torch": _TORCH,
        "builtins": _BUILTINS,
    }.items()
    for name in names.split()
)

_PART = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Operators whose own name has the form of a Python attribute.
_DUNDER = re.compile(r"__i?(and|or|xor|lshift|rshift)__")


def refusal(op: str, extra_namespaces: frozenset[str] = frozenset()) -> str | None:
    """Why the operator `op` is not to be called, or None when it is on the list."""
    parts = op.split(".")
    if not all(_PART.fullmatch(part) and (part[:2] != "__" or _DUNDER.fullmatch(part)) for part in parts):
        return "is not an operator name"
    if op in PYTHON_FUNCTIONS:
        return None
    if parts[0] == "higher_order":
        if len(parts) == 2 and parts[1] in HIGHER_ORDER:
            return None
        return "is not on the list of higher-order operators"
    if len(parts) != 3:
        return "is not an operator name"
    if parts[0] not in NAMESPACES and parts[0] not in extra_namespaces:
        return f"is of namespace '{parts[0]}', which is not on the list"
    if f"{parts[0]}.{parts[1]}" in DENIED:
        return "reaches files or raw memory"
    return None
