"""What a program may be called with: what its export left open, and nothing else.

An exported program is only right for the dtypes, sizes and literals that it was exported with, apart from dims that were
dynamic and their ranges: code that depended on the rest was specialised away. So its ATen program, which answers calls that no
compiled variant fits, is not a substitute for the module either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from topo_opt.errors import InputError
from topo_opt.runtime.aten_program import Input
from topo_opt.runtime.dtypes import BY_TORCH, name_of


def check_exported(function: str, inputs: Sequence[Input], leaves: Sequence[Any]) -> None:
    """Checks the caller's leaves against the inputs of the exported program.

    Raises:
        InputError: names the input, what it was exported for and what was given.
    """
    if len(leaves) != len(inputs):
        raise InputError(f"{function} takes {len(inputs)} inputs, got {len(leaves)}")
    sizes: dict[str, tuple[int, str]] = {}
    for spec, leaf in zip(inputs, leaves):
        if spec.literal:
            check_literal(function, spec.target, spec.value, leaf)
        elif spec.dtype in BY_TORCH:
            _check_tensor(function, spec, leaf, sizes)


def check_literal(function: str, name: str, value: Any, given: Any) -> None:
    """A literal that the export specialised to must be given again.

    Raises:
        InputError: another value or another type.
    """
    if type(given) is not type(value) or given != value:
        raise InputError(
            f"{function}: {name} was {value!r:.80} when the model was exported, got {given!r:.80}",
            hint="the exported program holds that value; export the model again for another",
        )


def _check_tensor(function: str, spec: Input, leaf: Any, sizes: dict[str, tuple[int, str]]) -> None:
    if not isinstance(leaf, torch.Tensor):
        raise InputError(f"{function}: {spec.target} should be a tensor, not {type(leaf).__name__}")
    shape = spec.shape if spec.shape is not None else tuple(leaf.shape)
    fits = len(shape) == leaf.dim() and all(e is None or e == s for e, s in zip(shape, leaf.shape))
    if not fits or name_of(leaf.dtype) != spec.dtype:
        static = [d for d, size in enumerate(shape) if size is not None]
        hint = "pass the dtype it was exported with"
        if not fits:
            hint = (
                f"export it with dynamic_shapes for dims of {static}"
                if static
                else "pass a tensor of that rank"
            )
        raise InputError(
            f"{function}: {spec.target} is {name_of(leaf.dtype)}{list(leaf.shape)}, the model was exported for {_described(spec)}",
            hint=hint,
        )
    for place, (dim, size) in enumerate(zip(spec.dims, leaf.shape)):
        if dim is None:
            continue
        if size < dim.low or (dim.high is not None and size > dim.high):
            high = "any size" if dim.high is None else dim.high
            raise InputError(
                f"{function}: dim {place} of {spec.target} is {size}, the model was exported for {dim.low} to {high}"
            )
        known, other = sizes.setdefault(dim.symbol, (size, f"dim {place} of {spec.target}"))
        if known != size:
            raise InputError(
                f"{function}: dim {place} of {spec.target} is {size} and {other} is {known}; the model was exported with them equal"
            )


def _described(spec: Input) -> str:
    shape = ", ".join("any" if size is None else str(size) for size in spec.shape or ())
    return f"{spec.dtype}[{shape}]"


def check_separate(function: str, names: Sequence[str], leaves: Sequence[Any], mutated: set[str]) -> None:
    """Inputs that the function rewrites must not share memory with other inputs.

    Raises:
        InputError: names the two inputs.
    """
    spans = [
        (name, *_span(leaf))
        for name, leaf in zip(names, leaves)
        if isinstance(leaf, torch.Tensor) and leaf.numel()
    ]
    for name, start, end in spans:
        if name not in mutated:
            continue
        for other, first, last in spans:
            if other != name and start < last and first < end:
                raise InputError(
                    f"{function}: {name} is rewritten and shares memory with {other}",
                    hint="pass a clone of one of them",
                )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one past the last byte that a tensor can touch."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.element_size()
