"""Made-up inputs of the declared types, for checks and benchmarks where the user gives none.

Nothing says what an integer input means, so the values are ones that most models accept: an integer vector counts from 0
(positions, which may not repeat), other integers are small (token numbers), and what is named a mask lets everything through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from topo_opt.errors import InputError
from topo_opt.runtime.dtypes import BY_TORCH, name_of, torch_dtype
from topo_opt.runtime.plan import InputLeaf

SMALL = 8


def sample_leaves(
    specs: Sequence[InputLeaf],
    device: torch.device,
    seed: int = 0,
    given: Mapping[str, torch.Tensor] | None = None,
) -> list[Any]:
    """One value for each leaf; tensors in `given` are used by name.

    Raises:
        InputError: a given tensor has another type than its leaf.
    """
    generator = torch.Generator().manual_seed(seed)
    return [
        _leaf(s, generator, (given or {}).get(s.name)).to(device) if s.kind == "tensor" else s.value
        for s in specs
    ]


def _leaf(spec: InputLeaf, generator: torch.Generator, given: torch.Tensor | None) -> torch.Tensor:
    shape, dtype = tuple(spec.shape or ()), torch_dtype(str(spec.dtype))
    if given is not None:
        if tuple(given.shape) != shape or given.dtype != dtype:
            raise InputError(
                f"the input {spec.name} is {name_of(given.dtype)}{list(given.shape)}, it should be {spec.dtype}{list(shape)}"
            )
        return given
    category = BY_TORCH[str(spec.dtype)].category
    if category == "float":
        return torch.randn(shape, generator=generator).to(dtype)
    if category == "complex":
        return torch.randn(shape, generator=generator, dtype=torch.complex64).to(dtype)
    if "mask" in spec.name or category == "bool":
        return torch.ones(shape, dtype=dtype)
    if len(shape) == 1 or "position" in spec.name:
        return (
            torch.arange(shape[-1] if shape else 1).expand(shape).to(dtype).clone()
            if shape
            else torch.zeros((), dtype=dtype)
        )
    return torch.randint(0, SMALL, shape, generator=generator).to(dtype)
