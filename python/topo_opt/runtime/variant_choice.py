"""Which variant a call can use: the one that was compiled for exactly its shapes, dtypes and literals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from topo_opt.runtime.dtypes import name_of, torch_dtype
from topo_opt.runtime.plan import InputLeaf, Variant


def fits(variant: Variant, leaves: Sequence[Any]) -> bool:
    """Whether the variant was compiled for exactly these leaves."""
    if len(leaves) != len(variant.inputs):
        return False
    for spec, leaf in zip(variant.inputs, leaves):
        if spec.kind == "literal":
            if type(leaf) is not type(spec.value) or leaf != spec.value:
                return False
        elif (
            not isinstance(leaf, torch.Tensor)
            or tuple(leaf.shape) != spec.shape
            or leaf.dtype != torch_dtype(str(spec.dtype))
        ):
            return False
    return True


def differences(variant: Variant, leaves: Sequence[Any]) -> list[str]:
    """A sentence for every leaf that the variant was not compiled for."""
    if len(leaves) != len(variant.inputs):
        return [f"it takes {len(variant.inputs)} inputs, got {len(leaves)}"]
    out = []
    for spec, leaf in zip(variant.inputs, leaves):
        if spec.kind == "literal":
            if type(leaf) is not type(spec.value) or leaf != spec.value:
                out.append(f"{spec.name} is {leaf!r:.60}, it was compiled for {spec.value!r}")
        elif not isinstance(leaf, torch.Tensor):
            out.append(f"{spec.name} is a {type(leaf).__name__}, it was compiled for {_described(spec)}")
        elif tuple(leaf.shape) != spec.shape or leaf.dtype != torch_dtype(str(spec.dtype)):
            got = f"{name_of(leaf.dtype)}{list(leaf.shape)}"
            out.append(f"{spec.name} is {got}, it was compiled for {_described(spec)}")
    return out


def _described(spec: InputLeaf) -> str:
    return f"{spec.dtype}{list(spec.shape or ())}"
