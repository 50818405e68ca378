"""Matching a function's arguments and results with a model's state, user inputs and outputs, by their attributes."""

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch_mlir import ir

from topo_opt.errors import InputError

_STATE_KINDS = ("param", "buffer", "constant")


def _attributes(func: ir.Operation, which: str, count: int) -> list[dict[str, str]]:
    if which not in func.attributes:
        return [{} for _ in range(count)]
    found = []
    for entry in ir.ArrayAttr(func.attributes[which]):
        table = ir.DictAttr(entry)
        keys = [k for k in ("topo.kind", "topo.name", "topo.dtype") if k in table]
        found.append({k.removeprefix("topo."): ir.StringAttr(table[k]).value for k in keys})
    return found


def argument_attributes(func: ir.Operation) -> list[dict[str, str]]:
    """Per argument: `kind`, `name` and `dtype`, as far as given."""
    return _attributes(func, "arg_attrs", len(_type(func).inputs))


def result_attributes(func: ir.Operation) -> list[dict[str, str]]:
    """Per result: `kind`, `name` and `dtype`, as far as given."""
    return _attributes(func, "res_attrs", len(_type(func).results))


def _type(func: ir.Operation) -> ir.FunctionType:
    return ir.FunctionType(ir.TypeAttr(func.attributes["function_type"]).value)


def find_function(module: ir.Module, symbol: str) -> ir.Operation:
    """The `func.func` of this name.

    Raises:
        InputError: there is none.
    """
    for view in module.body.operations:
        op = view.operation
        if op.name == "func.func" and ir.StringAttr(op.attributes["sym_name"]).value == symbol:
            return op
    raise InputError(f"the module has no function @{symbol}")


def bind_inputs(
    module: ir.Module, symbol: str, state: Mapping[str, Tensor], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """The arguments of a structured function, in its order.

    Args:
        state: parameters, buffers and lifted constants by `topo.name`.
        inputs: the user's tensors in the order of the `input` arguments.

    Raises:
        InputError: a missing tensor, or a number of inputs that does not match.
    """
    remaining = list(inputs)
    arguments = []
    for i, attributes in enumerate(argument_attributes(find_function(module, symbol))):
        kind, name = attributes.get("kind", "input"), attributes.get("name", str(i))
        if kind in _STATE_KINDS:
            if name not in state:
                raise InputError(f"@{symbol} needs the {kind} {name!r}, which the state does not have")
            arguments.append(state[name])
        elif not remaining:
            raise InputError(f"@{symbol} needs more inputs than the {len(inputs)} given")
        else:
            arguments.append(remaining.pop(0))
    if remaining:
        raise InputError(f"@{symbol} takes {len(inputs) - len(remaining)} inputs, {len(inputs)} were given")
    return arguments


def split_results(
    module: ir.Module, symbol: str, results: Sequence[Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """(outputs in order, new values of mutated buffers and inputs by name)."""
    outputs, mutations = [], {}
    for result, attributes in zip(results, result_attributes(find_function(module, symbol)), strict=True):
        if attributes.get("kind") == "mutation":
            mutations[attributes["name"]] = result
        else:
            outputs.append(result)
    return outputs, mutations
