"""Eager's internal precision for half tensors made explicit.

Eager computes an f16 or bf16 op in f32 and rounds once, at its end. So a compute op gets its half tensors cast to f32, works in
f32, and its result is narrowed by `topo::demote`, which is no rounding that a consumer in the same kernel must see. Ops that only
move data, compare, or make tensors stay as they are: they round nothing.
"""

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from topo_opt.frontend.graph_builder import Argument, GraphBuilder
from topo_opt.frontend.topo_ops import DEMOTE

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)

# Names of overload packets whose results are copies, comparisons or constants.
_ROUNDS_NOTHING = frozenset(
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
        "bitwise_and",
        "bitwise_not",
        "bitwise_or",
        "bitwise_xor",
        "broadcast_to",
        "cat",
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
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "eq",
        "expand",
        "expand_as",
        "eye",
        "fill",
        "flatten",
        "flip",
        "full",
        "full_like",
        "gather",
        "ge",
        "gt",
        "index",
        "index_copy",
        "index_fill",
        "index_select",
        "isfinite",
        "isinf",
        "isnan",
        "isneginf",
        "isposinf",
        "le",
        "lift_fresh",
        "lift_fresh_copy",
        "logical_and",
        "logical_not",
        "logical_or",
        "logical_xor",
        "lt",
        "masked_fill",
        "masked_scatter",
        "masked_select",
        "meshgrid",
        "movedim",
        "narrow",
        "narrow_copy",
        "ne",
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
        "imag",
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
        "stack",
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
        "where",
        "zero",
        "zeros",
        "zeros_like",
        "channel_shuffle",
        "embedding",
    ]
)
# These move data unless an argument makes them add.
_MOVES_UNLESS = {
    "index_put": lambda args, kwargs: args[3] if len(args) > 3 else kwargs.get("accumulate", False),
    "scatter": lambda args, kwargs: "reduce" in kwargs or len(args) > 4,
}


def computes_in_f32(node: fx.Node) -> bool:
    """Whether eager computes this node in f32 and rounds its result to f16 or bf16, or reads halves to compute."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    name = target._schema.name.split("::")[1]
    if name in _ROUNDS_NOTHING:
        return False
    if name in _MOVES_UNLESS and not _MOVES_UNLESS[name](node.args, node.kwargs):
        return False
    return any(value.dtype in HALF for value in _tensors(node))


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    values = [n.meta["val"] for n in node.all_input_nodes]
    results = node.meta["val"]
    values += results if isinstance(results, list | tuple) else [results]
    return [v for v in values if isinstance(v, torch.Tensor)]


def widen_arguments(
    b: GraphBuilder, node: fx.Node, args: tuple[Argument, ...], kwargs: dict[str, Argument]
) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
    """The arguments with halves cast to f32, and a half `dtype` argument or `half_to_float` adapted to that."""
    target = node.target
    assert isinstance(target, OpOverload)
    mixes = torch.Tag.pointwise in target.tags
    narrow = next((v.dtype for v in _tensors(node)[::-1] if v.dtype in HALF), None)

    def widen(argument: fx.Node) -> Argument:
        value = argument.meta["val"]
        if value.dtype in HALF:
            return b.emit(aten._to_copy.default, argument, dtype=torch.float32)
        if mixes and value.dim() and not value.dtype.is_floating_point and not value.dtype.is_complex:
            return _through_half(b, argument, node, narrow)
        return argument

    args, kwargs = fx.map_arg((tuple(args), dict(kwargs)), widen)
    arguments = list(args)
    for position, parameter in enumerate(target._schema.arguments):
        adapted = _ADAPTED.get(parameter.name)
        if adapted is None:
            continue
        if position < len(arguments):
            arguments[position] = adapted(arguments[position])
        elif parameter.name in kwargs:
            kwargs[parameter.name] = adapted(kwargs[parameter.name])
    return tuple(arguments), kwargs


_ADAPTED = {
    "dtype": lambda dtype: torch.float32 if dtype in HALF else dtype,
    "half_to_float": lambda _: False,  # the input is f32 already
}


def _through_half(b: GraphBuilder, argument: fx.Node, node: fx.Node, narrow: torch.dtype | None) -> Argument:
    """An integer operand mixed with halves: eager rounds it to the common half type before it computes."""
    result = node.meta["val"]
    if (
        argument.meta["val"].dtype == torch.bool
        or not isinstance(result, torch.Tensor)
        or result.dtype != narrow
    ):
        return argument
    half = b.emit(aten._to_copy.default, argument, dtype=narrow)
    return b.emit(aten._to_copy.default, half, dtype=torch.float32)


def narrow_results(b: GraphBuilder, result: Argument, expected: Any) -> Argument:
    """`result` with f32 tensors narrowed to f16 or bf16 where `expected`, the fake result of the node, is of that type."""
    if isinstance(expected, list | tuple):
        return [narrow_results(b, r, e) for r, e in zip(result, expected, strict=True)]
    if not isinstance(expected, torch.Tensor) or result.meta["val"].dtype == expected.dtype:
        return result
    if expected.dtype not in HALF:
        return b.emit(aten._to_copy.default, result, dtype=expected.dtype)
    with b.mode:
        value = torch.empty_like(result.meta["val"], dtype=expected.dtype)
    return b.call(DEMOTE, (result, expected.dtype), {}, value)
