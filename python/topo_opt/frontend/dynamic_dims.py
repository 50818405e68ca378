"""Dynamic dims of an exported program, and the sizes a bucket gives them."""

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram

from topo_opt.errors import InputError
from topo_opt.frontend.signature import DimRecord

# Sizes above this stand for "no upper bound" in torch's range constraints.
_UNBOUNDED = 2**62


def dynamic_dims(ep: ExportedProgram, given: Mapping[str, str] | None = None) -> tuple[DimRecord, ...]:
    """The dynamic dims of the user's inputs, in the order in which they first appear.

    Args:
        given: symbol -> name, for dims whose name the program has lost.
    """
    uses: dict[sympy.Symbol, list[tuple[str, int, str]]] = {}
    names: dict[sympy.Symbol, str] = {}
    examples: dict[sympy.Symbol, int | None] = {}
    for node in ep.graph.find_nodes(op="placeholder"):
        for position, size in enumerate(_sizes(node.meta.get("val"))):
            if not isinstance(size, torch.SymInt):
                continue
            expr = size.node.expr
            for symbol in sorted(expr.free_symbols, key=str):
                uses.setdefault(symbol, []).append((node.name, position, str(expr)))
                names.setdefault(symbol, _given_name(size.node.shape_env, symbol) or str(symbol))
                examples.setdefault(symbol, _example(size.node.shape_env, symbol))
    return tuple(
        DimRecord((given or {}).get(str(s), names[s]), str(s), *_range(ep, s), examples[s], tuple(use))
        for s, use in uses.items()
    )


def solve_sizes(dims: tuple[DimRecord, ...], bucket: Mapping[str, int] | None) -> dict[str, int]:
    """Symbol -> size for `bucket`, whose keys are dim names, symbols, or places such as `input_ids[1]`.

    A dim the bucket does not name has the size of the example.

    Raises:
        InputError: an unknown key, a size out of range, or a dim with no known size.
    """
    sizes = {d.symbol: d.example for d in dims}
    keys = {place: d for d in dims for place in places(d)}
    keys |= {d.symbol: d for d in dims} | {d.name: d for d in dims}
    for key, size in (bucket or {}).items():
        if key not in keys:
            known = ", ".join(sorted({d.name for d in dims})) or "none"
            raise InputError(f"bucket names '{key}', which is no dynamic dim", hint=f"dynamic dims: {known}")
        dim = keys[key]
        if size < dim.min or (dim.max is not None and size > dim.max):
            raise InputError(
                f"bucket has {key} = {size}, but it was exported for {dim.min} to {dim.max or 'any size'}",
                hint="export with a wider range or choose a bucket inside it",
            )
        sizes[dim.symbol] = size
    for dim in dims:
        if sizes[dim.symbol] is None:
            raise InputError(f"the size of dynamic dim '{dim.name}' is not known", hint="name it in a bucket")
    return {symbol: size for symbol, size in sizes.items() if size is not None}


def concrete(size: Any, sizes: Mapping[str, int]) -> int:
    """A size or stride of the exported graph as a number.

    Raises:
        InputError: the sizes do not make it a whole number.
    """
    if isinstance(size, int):
        return size
    value = size.node.expr.subs({s: sizes[str(s)] for s in size.node.expr.free_symbols if str(s) in sizes})
    if not value.is_Integer:
        raise InputError(
            f"dim {size.node.expr} is {value} for sizes {dict(sizes)}", hint="choose another bucket"
        )
    return int(value)


def places(dim: DimRecord) -> list[str]:
    """Where the dim itself (not an expression of it) is a size: `input_ids[1]`."""
    return [f"{name}[{position}]" for name, position, expr in dim.uses if expr == dim.symbol]


def _sizes(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return (value,) if isinstance(value, torch.SymInt) else ()


def _range(ep: ExportedProgram, symbol: sympy.Symbol) -> tuple[int, int | None]:
    limits = ep.range_constraints.get(symbol)
    if limits is None:
        return 0, None
    upper = limits.upper
    bounded = upper.is_number and upper.is_finite and upper < _UNBOUNDED
    return int(limits.lower), int(upper) if bounded else None


def _given_name(shape_env: Any, symbol: sympy.Symbol) -> str | None:
    """The name of the user's `Dim`; programs read from a file have lost it."""
    given = getattr(shape_env, "source_name_to_debug_name", {})
    for source in getattr(shape_env, "var_to_sources", {}).get(symbol, ()):
        name = given.get(getattr(source, "name", None)) or given.get(_called(source))
        if name and name.isidentifier():
            return name
    return None


def _called(source: Any) -> Any:
    # `Source.name` was a method before torch 2.10 and is a property since.
    name = getattr(source, "name", None)
    return name() if callable(name) else name


def _example(shape_env: Any, symbol: sympy.Symbol) -> int | None:
    known = getattr(shape_env, "backed_var_to_val", None) or getattr(shape_env, "var_to_val", {})
    value = known.get(symbol)
    return None if value is None else int(value)
