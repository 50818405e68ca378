"""Eager's promotion of operands and its internal precision, made explicit.

Operands of different types are cast to the type eager computes in. Eager computes an f16 or bf16 op in f32 and rounds once, at
its end: a compute op gets its half tensors cast to f32, works in f32, and its result is narrowed by `topo::demote`, which is no
rounding that a consumer in the same kernel must see. Bytes are computed in int32, because integers of the IR have no sign and
torch-mlir takes uint8 as signed and refuses or crashes on some byte arithmetic. Ops that only move data or make tensors stay as they are.
"""

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from topo_opt.frontend.casts import cast
from topo_opt.frontend.graph_builder import Argument, GraphBuilder
from topo_opt.frontend.topo_ops import DEMOTE

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
}

_BYTES = {torch.uint8, torch.int8}

# Names of overload packets whose results are copies of operands or constants, with no operand promoted.
_MOVES = frozenset(
    [
        "_conj",
        "_local_scalar_dense",
        "_to_copy",
        "_to_dense",
        "_unsafe_index",
        "_unsafe_index_put",
        "_unsafe_view",
        "alias",
        "as_strided",
        "as_strided_scatter",
        "broadcast_to",
        "channel_shuffle",
        "chunk",
        "clone",
        "complex",
        "constant_pad_nd",
        "contiguous",
        "copy",
        "detach",
        "diag",
        "diag_embed",
        "diagonal",
        "diagonal_scatter",
        "embedding",
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "expand",
        "expand_as",
        "eye",
        "fill",
        "flatten",
        "flip",
        "full",
        "full_like",
        "gather",
        "imag",
        "index",
        "index_copy",
        "index_fill",
        "index_select",
        "lift_fresh",
        "lift_fresh_copy",
        "masked_fill",
        "masked_scatter",
        "masked_select",
        "meshgrid",
        "movedim",
        "narrow",
        "narrow_copy",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones",
        "ones_like",
        "pad",
        "permute",
        "pixel_shuffle",
        "pixel_unshuffle",
        "real",
        "reflection_pad1d",
        "reflection_pad2d",
        "reflection_pad3d",
        "repeat",
        "repeat_interleave",
        "replication_pad1d",
        "replication_pad2d",
        "replication_pad3d",
        "reshape",
        "resize",
        "roll",
        "rot90",
        "scalar_tensor",
        "select",
        "select_scatter",
        "slice",
        "slice_scatter",
        "split",
        "split_with_sizes",
        "split_with_sizes_copy",
        "squeeze",
        "t",
        "tile",
        "transpose",
        "tril",
        "triu",
        "unbind",
        "unfold",
        "unsqueeze",
        "view",
        "view_as_complex",
        "view_as_real",
        "view_copy",
        "zero",
        "zeros",
        "zeros_like",
    ]
)
# These move data unless an argument makes them combine it.
_MOVES_UNLESS = {
    "index_put": lambda node: node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False),
    "scatter": lambda node: "reduce" in node.kwargs or len(node.args) > 4,
}
# These promote their operands but round nothing: halves of one type stay.
_SELECTS = frozenset(
    [
        "cat",
        "eq",
        "fmax",
        "fmin",
        "ge",
        "gt",
        "isfinite",
        "isinf",
        "isnan",
        "le",
        "lt",
        "ne",
        "stack",
        "where",
    ]
)
_SELECTS |= frozenset(
    [
        "bitwise_and",
        "bitwise_not",
        "bitwise_or",
        "bitwise_xor",
        "logical_and",
        "logical_not",
        "logical_or",
        "logical_xor",
    ]
)
# Positions of operands that have no part in the promotion.
_APART = {"where": (0,)}
_PROMOTING_LISTS = ("cat", "stack")


def adapts(node: fx.Node) -> bool:
    """Whether operands of this node must be cast before it is lowered."""
    if moves(node):
        return False
    dtypes = [v.dtype for v in _operands(node)]
    if _name(node) in _SELECTS:
        return len(set(dtypes)) > 1 or bool(_BYTES & set(dtypes))
    mixed = len(set(dtypes)) > 1 and _promotes(node)
    return mixed or any(v.dtype in WIDE for v in (*_operands(node), *_results(node)))


def moves(node: fx.Node) -> bool:
    """Whether the node only moves data or makes a constant."""
    name = _name(node)
    return name in _MOVES or (name in _MOVES_UNLESS and not _MOVES_UNLESS[name](node))


def adapt_arguments(
    b: GraphBuilder, node: fx.Node, args: tuple[Argument, ...], kwargs: dict[str, Argument]
) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
    """The arguments promoted and widened, and a half `dtype` argument or `half_to_float` adapted to that."""
    target = node.target
    assert isinstance(target, OpOverload)
    common = _common_dtype(node)
    keeps_half = _name(node) in _SELECTS

    def adapt(argument: fx.Node) -> Argument:
        value = argument.meta["val"]
        # A tensor without dims does not decide the type, and eager does not round it to half either.
        promoted = value.dtype if common is None or (value.dim() == 0 and common in HALF) else common
        dtype = promoted if keeps_half and promoted in HALF else WIDE.get(promoted, promoted)
        if common in HALF and value.dim() == 0 and not keeps_half:
            dtype = torch.float32
        if promoted != value.dtype and promoted in HALF and dtype not in HALF:
            argument = cast(b, argument, promoted)
        return cast(b, argument, dtype)

    apart = _APART.get(_name(node), ())
    arguments = [a if i in apart else fx.map_arg(a, adapt) for i, a in enumerate(args)]
    keywords = {key: fx.map_arg(a, adapt) for key, a in kwargs.items()}
    wraps = common == torch.uint8
    for position, parameter in enumerate(target._schema.arguments):
        adapted = _wrapped if wraps and parameter.name == "other" else _ADAPTED.get(parameter.name)
        if adapted is None:
            continue
        if position < len(arguments):
            arguments[position] = adapted(arguments[position])
        elif parameter.name in keywords:
            keywords[parameter.name] = adapted(keywords[parameter.name])
    return tuple(arguments), keywords


_ADAPTED = {
    "dtype": lambda dtype: WIDE.get(dtype, dtype),
    "half_to_float": lambda _: False,  # the input is f32 already
}


def _wrapped(number: Argument) -> Argument:
    """A whole number as eager makes it a byte."""
    return number % 256 if type(number) is int else number


def _common_dtype(node: fx.Node) -> torch.dtype | None:
    """The type eager promotes the tensor operands to, or None when the op does not promote."""
    operands = _operands(node)
    if not _promotes(node) or not operands:
        return None
    kind = ELEMENTWISE_TYPE_PROMOTION_KIND.NO_OPMATH
    return elementwise_dtypes(*operands, type_promotion_kind=kind)[1]


def _promotes(node: fx.Node) -> bool:
    target = node.target
    assert isinstance(target, OpOverload)
    return torch.Tag.pointwise in target.tags or _name(node) in _PROMOTING_LISTS


def _name(node: fx.Node) -> str:
    target = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, OpOverload) else ""


def _operands(node: fx.Node) -> list[torch.Tensor]:
    """The tensors of the node that take part in promotion."""
    apart = _APART.get(_name(node), ())
    found: list[fx.Node] = []
    fx.map_arg([a for i, a in enumerate(node.args) if i not in apart], found.append)
    fx.map_arg(dict(node.kwargs), found.append)
    return [n.meta["val"] for n in found if isinstance(n.meta["val"], torch.Tensor)]


def _results(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta["val"]
    return [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, torch.Tensor)]


def narrow_results(b: GraphBuilder, result: Argument, expected: Any) -> Argument:
    """`result` cast to the types of `expected`, the fake result of the node: f32 to half by `topo::demote`."""
    if isinstance(expected, list | tuple):
        return [narrow_results(b, r, e) for r, e in zip(result, expected, strict=True)]
    if not isinstance(expected, torch.Tensor) or result.meta["val"].dtype == expected.dtype:
        return result
    if expected.dtype not in HALF or result.meta["val"].dtype != torch.float32:
        return cast(b, result, expected.dtype)
    with b.mode:
        value = torch.empty_like(result.meta["val"], dtype=expected.dtype)
    return b.call(DEMOTE, (result, expected.dtype), {}, value)
