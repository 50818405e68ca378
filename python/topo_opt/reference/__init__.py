"""The reference executor: evaluates structured and kernel IR on the CPU with torch.

It is how every pass is checked, so it favours being right: each op is one evaluator, loop nests of any kind are evaluated
through their maps, and reads outside a tensor are errors. Half-precision arithmetic inside one op's body is done in f32 and
rounded where the body yields. It needs MLIR and is not part of the runtime.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch_mlir import ir

from topo_opt.errors import InputError
from topo_opt.reference import (  # each fills EVALUATORS
    calls,  # noqa: F401
    expert_ops,  # noqa: F401
    loop_nest,  # noqa: F401
    tm_tensor,  # noqa: F401
    topo_ops,  # noqa: F401
    views,  # noqa: F401
)
from topo_opt.reference.binding import (
    argument_attributes,
    bind_inputs,
    find_function,
    result_attributes,
    split_results,
)
from topo_opt.reference.element_types import as_dtype, as_signless, element_dtype
from topo_opt.reference.program import Program, Trace
from topo_opt.reference.ranks import run_ranks
from topo_opt.runtime.dtypes import torch_dtype

__all__ = ["Trace", "bind_inputs", "run", "run_ranks", "split_results"]


def run(
    module: ir.Module,
    symbol: str,
    inputs: Sequence[Tensor],
    *,
    dtypes: Sequence[torch.dtype] | None = None,
    trace: Trace | None = None,
) -> list[Tensor]:
    """Evaluates one function.

    Args:
        module: structured or kernel IR with static shapes.
        symbol: the function's name.
        inputs: one tensor per argument (see `bind_inputs`), of the argument's shape and dtype; never modified.
        dtypes: torch dtypes of the results, for functions whose results have no `topo.dtype`.
        trace: called with each op and its results, also inside called functions.

    Returns:
        One contiguous tensor per result; mutated buffers are results like any other (see `split_results`).

    Raises:
        InputError: inputs that do not fit, an index out of range, a failed check of the model.
        UnsupportedError: an op or type without a rule.
    """
    func = find_function(module, symbol)
    given = _checked_inputs(func, symbol, inputs)
    with torch.no_grad():
        results = Program(module, trace).function(symbol)(given)
        wanted = list(dtypes) if dtypes is not None else [_named_dtype(a) for a in result_attributes(func)]
        return [_finished(r, d) for r, d in zip(results, wanted, strict=True)]


def _named_dtype(attributes: dict[str, str]) -> torch.dtype | None:
    return torch_dtype(attributes["dtype"]) if "dtype" in attributes else None


def _finished(result: Tensor, dtype: torch.dtype | None) -> Tensor:
    result = result if dtype is None else as_dtype(result, dtype)
    return result.clone(memory_format=torch.contiguous_format)


def _checked_inputs(func: ir.Operation, symbol: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    types = ir.FunctionType(ir.TypeAttr(func.attributes["function_type"]).value).inputs
    if len(types) != len(inputs):
        raise InputError(f"@{symbol} has {len(types)} arguments, {len(inputs)} tensors were given")
    checked = []
    for i, (type_, tensor, attributes) in enumerate(
        zip(types, inputs, argument_attributes(func), strict=True)
    ):
        tensor = as_signless(tensor.detach())
        if isinstance(type_, ir.RankedTensorType):
            wanted, shape = element_dtype(type_.element_type), list(type_.shape)
            if tensor.dtype != wanted or list(tensor.shape) != shape:
                name = attributes.get("name", str(i))
                raise InputError(
                    f"argument {name!r} of @{symbol} is {type_}, a {tensor.dtype} tensor of shape {list(tensor.shape)} was given"
                )
        checked.append(tensor)
    return checked
