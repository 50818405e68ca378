"""ATen ops written with other ATen ops, where torch-mlir's own lowering gives another value than eager."""

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

# Op -> rule(builder, *args, **kwargs): the result as a node, or None where the op is right as it is.
# Half tensors among the arguments are f32 already.
REWRITES: dict[Any, Callable[..., Any]] = {}
